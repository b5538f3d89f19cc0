"""Training objectives: picklable descriptions of the loss of one optimizer step, applicable to any part of its batch.

- Policy: policy loss + kl_loss_coef x KL to the reference + distillation_coef x KL to the teacher - entropy_loss_coef x
  entropy, each aggregated in the same way, with the normalisers of the whole batch.
- Value model: squared error. Supervised fine-tuning: cross-entropy.

Contributions of disjoint rows add up to the whole batch's value, gradient and metrics. Losses see all response tokens,
so a sequence ratio covers the whole sequence. Aggregation, also of the entropy bonus, covers the trained tokens only:
those in the loss mask that no rejection removed. The metric ``entropy`` is over all response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossNormalizers, aggregate, checked_mask, checked_shape, keep
from roll.algorithms.correction import Correction, correct
from roll.algorithms.kl import KL_ESTIMATORS, token_kl
from roll.algorithms.losses.base import LossRequirements, OldPolicy, PolicyInputs, PolicyLoss, make_policy_loss
from roll.algorithms.metrics import PartMetrics, lag_buckets, policy_metrics, supervised_metrics, value_metrics


@dataclass
class PolicyObjective:
    """Training objective of a policy. Construction raises `ConfigError` or ``ValueError`` for invalid settings."""

    max_response_length: int
    """Constant divisor of `seq-mean-token-sum-norm`, in tokens."""
    pg_variant: str = "ppo"
    pg_variant_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_estimator: str = "k3"
    closed_form_kl: bool = False
    """True if the model gives the KL divergence to the reference itself, as ``reference_kl``, so that nothing is
    estimated."""
    entropy_loss_coef: float = 0.0
    distillation_coef: float = 0.0
    """Coefficient of the reverse KL divergence to the teacher in the loss; 0: no distillation."""
    old_policy: OldPolicy = "behaviour"
    """The log-probabilities that form the denominator of the ratio."""
    corrected: bool = False
    """True if each token's policy loss is multiplied by its ``correction_weights``."""
    weighted: bool = False
    """True if a sample's whole loss is multiplied by its ``sample_weights``. Normalisers are not affected."""
    by_episode: bool = False
    """True if batches have ``episode_shares``: several samples may form one episode, which counts as one sequence."""
    max_lag: int | None = None
    """Largest lag with separate metrics, counted from 0; None: no metrics per lag."""
    lags_capped: bool = False
    """True if larger lags than ``max_lag`` may occur. They are counted as ``max_lag``."""
    monitored: bool = False
    """True to measure the mismatch between trainer and engine, over the tokens marked ``same_weights``. Valid only
    before an update, and if the engine recorded log-probabilities of the full (not truncated) distribution."""
    one_pass: bool = False
    """True to take the proximal log-probabilities, and compute the correction, from the training forward pass itself
    instead of a separate pass before it. Valid for the first update on a batch only."""
    correction: Correction | None = None
    """Correction to compute in that pass; used with `one_pass` only. Tokens that it rejects are not trained on."""
    policy_loss: PolicyLoss = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.policy_loss = make_policy_loss(self.pg_variant, self.pg_variant_args)
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode {self.loss_agg_mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")
        if self.kl_estimator not in KL_ESTIMATORS:
            raise ValueError(f"unknown kl_estimator {self.kl_estimator!r}; valid: {', '.join(KL_ESTIMATORS)}")
        if self.max_response_length < 1:
            raise ValueError(f"max_response_length must be at least 1, not {self.max_response_length}")

    @property
    def requirements(self) -> LossRequirements:
        """The requirements of the policy loss."""
        return self.policy_loss.requirements

    @property
    def token_fields(self) -> tuple[str, ...]:
        """Names of the per-token fields that a batch needs besides its tokens and response mask."""
        wanted = {
            "behaviour_logprobs": True,
            "advantages": True,
            "proximal_logprobs": self.requirements.reads_proximal(self.old_policy) and not self.one_pass,
            "reference_logprobs": self.use_kl_loss and not self.closed_form_kl,
            "teacher_logprobs": self.distillation_coef != 0,
            "correction_weights": self.corrected and not self.one_pass,
            "lags": self.max_lag is not None,
            "same_weights": self.monitored,
            "selected_tokens": self.requirements.select is not None,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Names of the per-sample fields that a batch needs."""
        wanted = {
            "scores": self.requirements.needs_scores,
            "sample_weights": self.weighted,
            "episode_shares": self.by_episode,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def needs_entropy_gradient(self) -> bool:
        """True if the entropy is part of the loss, not only a metric."""
        return self.entropy_loss_coef != 0

    def normalizers(self, response_lengths: Sequence[int], shares: Sequence[float] | None = None) -> LossNormalizers:
        """Return the divisors of the loss. ``response_lengths``: trained tokens of each sample of the whole batch."""
        return LossNormalizers.of(response_lengths, self.max_response_length, shares)

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        response_mask: Tensor,
        normalizers: LossNormalizers,
        fields: Mapping[str, Tensor],
        loss_mask: Tensor | None = None,
    ) -> tuple[Tensor, PartMetrics]:
        """Return these rows' contribution to the loss of the whole batch (0-d, with gradient) and to its metrics.

        ``logprobs``, ``entropy`` and the `token_fields` are ``[batch, seq]``, the `sample_fields` ``[batch]``; entries
        outside the response mask are never read. ``loss_mask`` (bool, a subset of the response mask; default: all of
        it) marks the tokens to train on. ``ValueError`` names missing fields.
        """
        given = ("reference_kl",) if self.use_kl_loss and self.closed_form_kl else ()
        missing = [name for name in (*self.token_fields, *self.sample_fields, *given) if name not in fields]
        if missing:
            raise ValueError(f"{self.pg_variant} lacks {', '.join(missing)}; there is {', '.join(sorted(fields))}")
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        if self.one_pass:
            fields, trained = self._corrected(logprobs.detach(), response_mask, fields, trained)
        # A token that is not trained on counts in its response's ratio, but gets no gradient.
        inputs = PolicyInputs(
            logprobs=torch.where(trained, logprobs, logprobs.detach()),
            behaviour_logprobs=fields["behaviour_logprobs"],
            advantages=fields["advantages"],
            response_mask=response_mask,
            proximal_logprobs=fields.get("proximal_logprobs"),
            scores=fields.get("scores"),
            selected=fields.get("selected_tokens"),
            old_policy=self.old_policy,
        )
        token_losses, token_metrics = self.policy_loss(inputs)
        if self.corrected:
            token_losses = token_losses * keep(fields["correction_weights"], response_mask)
        entropy = keep(entropy, response_mask)
        weights = fields["sample_weights"][:, None].to(token_losses.dtype) if self.weighted else None
        shares = fields["episode_shares"] if self.by_episode else None

        def total(values: Tensor) -> Tensor:
            weighted = values if weights is None else weights * values
            return aggregate(weighted, trained, self.loss_agg_mode, normalizers, shares)

        loss = policy_loss = total(token_losses)
        totals = {"pg_loss": policy_loss}
        if self.use_kl_loss:
            reference_kl = self._reference_kl(inputs, fields)
            token_metrics["reference_kl"] = reference_kl.detach()
            totals["kl_loss"] = total(reference_kl)
            loss = loss + self.kl_loss_coef * totals["kl_loss"]
        if self.distillation_coef:
            totals["distillation_loss"] = total(self._teacher_kl(inputs, fields))
            loss = loss + self.distillation_coef * totals["distillation_loss"]
        if self.needs_entropy_gradient:
            loss = loss - self.entropy_loss_coef * total(entropy)
        token_metrics |= {"entropy": entropy.detach(), "trained_share": trained.to(entropy.dtype)}
        metrics = policy_metrics(
            {"loss": loss, **totals},
            token_metrics,
            inputs.logprobs,
            inputs.behaviour_logprobs,
            lag_buckets(response_mask, fields.get("lags"), self.max_lag, self.lags_capped),
            fields["same_weights"].bool() if self.monitored else None,
            trained,
            shares,
        )
        return loss, metrics

    def _reference_kl(self, inputs: PolicyInputs, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the KL divergence to the reference at each token, ``[batch, seq]``, with gradient."""
        if self.closed_form_kl:
            return keep(fields["reference_kl"], inputs.response_mask)
        return token_kl(inputs.logprobs, fields["reference_logprobs"], inputs.response_mask, self.kl_estimator)

    def _teacher_kl(self, inputs: PolicyInputs, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the reverse KL divergence to the teacher at each token, ``[batch, seq]``, with gradient.

        Off-policy tokens are importance-weighted: by the correction if there is one, else by min(current / behaviour,
        1).
        """
        divergence = token_kl(inputs.logprobs, fields["teacher_logprobs"], inputs.response_mask, "k3_straight_through")
        if self.corrected:
            return divergence * keep(fields["correction_weights"], inputs.response_mask)
        return divergence * (inputs.logprobs.detach() - inputs.behaviour_logprobs).exp().clamp(max=1)

    def _corrected(
        self, proximal: Tensor, response_mask: Tensor, fields: Mapping[str, Tensor], trained: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Add ``proximal_logprobs`` and the correction's weights to the fields. Return them and the trained tokens."""
        fields = {**fields, "proximal_logprobs": proximal}
        if self.correction is None:
            return fields, trained
        result = correct(
            proximal,
            fields["behaviour_logprobs"],
            response_mask,
            self.correction,
            advantages=fields["advantages"],
            trained=trained,
        )
        return {**fields, "correction_weights": result.weights}, trained & result.kept


@dataclass(frozen=True)
class SupervisedObjective:
    """Objective of supervised fine-tuning: cross-entropy. Construction raises ``ValueError`` for invalid settings."""

    max_response_length: int
    """Constant divisor of `seq-mean-token-sum-norm`, in tokens."""
    loss_agg_mode: str = "token-mean"
    token_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the per-token fields that a batch needs besides its tokens and response mask: none."""
    sample_fields: ClassVar[tuple[str, ...]] = ()
    """Names of the per-sample fields that a batch needs: none."""

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode {self.loss_agg_mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")

    def normalizers(self, response_lengths: Sequence[int], shares: Sequence[float] | None = None) -> LossNormalizers:
        """Return the divisors of the loss; see `PolicyObjective.normalizers`."""
        return LossNormalizers.of(response_lengths, self.max_response_length, shares)

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor,
        response_mask: Tensor,
        normalizers: LossNormalizers,
        fields: Mapping[str, Tensor],
        loss_mask: Tensor | None = None,
    ) -> tuple[Tensor, PartMetrics]:
        """Return these rows' contribution to the loss of the whole batch (0-d, with gradient) and to its metrics.

        ``logprobs`` and ``entropy`` are ``[batch, seq]``; entries outside the response mask are never read.
        ``loss_mask`` is that of `PolicyObjective.__call__`. ``fields`` is ignored.
        """
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        loss = aggregate(-logprobs, trained, self.loss_agg_mode, normalizers)
        return loss, supervised_metrics(loss, logprobs, entropy, trained)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of each value, (v - R)^2 / 2, and per-token metrics; all ``[batch, seq]``.

    With ``clip`` c, the loss is the larger of the errors of v and of v clipped to old_value +- c, so a value that has
    moved more than c towards its return gets no gradient (from the code published with PPO, not its paper; Engstrom et
    al., arXiv 2005.12729). Only ``values`` carry a gradient; ``old_values`` are those before the first update on the
    batch. Losses and metrics are 0 outside ``response_mask`` (bool), whatever the inputs hold there. Returns float32,
    or float64 if the values are. ``clip_fraction``: 1 where the gradient is clipped to 0. ``ValueError`` unless
    ``clip`` is above 0, and for a wrong shape or dtype.
    """
    checked_mask(response_mask)
    for name, tensor in (("values", values), ("old_values", old_values), ("returns", returns)):
        checked_shape(name, tensor, tuple(response_mask.shape), floating=True)
    if clip is not None and not clip > 0:
        raise ValueError(f"the clip of a value loss must be above 0, not {clip}")
    dtype = torch.promote_types(values.dtype, torch.float32)
    values, old_values, returns = (
        keep(tensor.to(dtype), response_mask) for tensor in (values, old_values.detach(), returns.detach())
    )
    losses = (values - returns).square() / 2
    cut = torch.zeros_like(response_mask)
    if clip is not None:
        clipped = (torch.clamp(values, old_values - clip, old_values + clip) - returns).square() / 2
        cut = clipped > losses
        losses = torch.where(cut, clipped, losses)
    return losses, {"clip_fraction": cut.to(dtype)}


@dataclass(frozen=True)
class ValueObjective:
    """Training objective of a critic. Construction raises ``ValueError`` for invalid settings."""

    max_response_length: int
    """Constant divisor of `seq-mean-token-sum-norm`, in tokens."""
    loss_agg_mode: str = "token-mean"
    clip: float | None = None
    """Clip range of values around the old ones (`value_loss`); None: no clipping."""
    by_episode: bool = False
    """See `PolicyObjective.by_episode`."""
    token_fields: ClassVar[tuple[str, ...]] = ("old_values", "returns")
    """Names of the per-token fields that a batch needs besides its tokens and response mask."""

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode {self.loss_agg_mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"the clip of a value loss must be above 0, not {self.clip}")

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Names of the per-sample fields that a batch needs."""
        return ("episode_shares",) if self.by_episode else ()

    def normalizers(self, response_lengths: Sequence[int], shares: Sequence[float] | None = None) -> LossNormalizers:
        """Return the divisors of the loss; see `PolicyObjective.normalizers`."""
        return LossNormalizers.of(response_lengths, self.max_response_length, shares)

    def __call__(
        self,
        values: Tensor,
        response_mask: Tensor,
        normalizers: LossNormalizers,
        fields: Mapping[str, Tensor],
        loss_mask: Tensor | None = None,
    ) -> tuple[Tensor, PartMetrics]:
        """Return these rows' contribution to the loss of the whole batch (0-d, with gradient) and to its metrics.

        ``values`` and the `token_fields` are ``[batch, seq]``; entries outside the response mask are never read.
        ``loss_mask`` is that of `PolicyObjective.__call__`. ``ValueError`` names missing fields.
        """
        missing = [name for name in (*self.token_fields, *self.sample_fields) if name not in fields]
        if missing:
            raise ValueError(f"the critic lacks {', '.join(missing)}; there is {', '.join(sorted(fields))}")
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        losses, token_metrics = value_loss(values, fields["old_values"], fields["returns"], trained, self.clip)
        shares = fields["episode_shares"] if self.by_episode else None
        loss = aggregate(losses, trained, self.loss_agg_mode, normalizers, shares)
        return loss, value_metrics(loss, values, fields["returns"], token_metrics["clip_fraction"], trained, shares)

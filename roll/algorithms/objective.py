"""The loss of one optimizer step, as a picklable description that a trainer can apply to any part of the batch.

For given responses it is their cross-entropy. For a policy it is policy loss + kl_loss_coef x KL to the reference +
distillation_coef x KL to the teacher - entropy_loss_coef x entropy, each aggregated the same way with the normalisers
of the whole batch. For a value model it is the squared error. Contributions of disjoint rows add up to the whole, in
value, gradient and metrics. Losses see all response tokens, so that a sequence ratio covers the whole sequence. The
aggregates, that of the entropy bonus too, count the tokens of the loss mask: the response tokens that remain after
rejection and masks. The metric ``entropy`` is over all response tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from roll.algorithms.aggregation import (
    LOSS_AGG_MODES,
    LossNormalizers,
    aggregate,
    checked_mask,
    checked_shape,
    keep,
)
from roll.algorithms.correction import Correction, correct
from roll.algorithms.kl import KL_ESTIMATORS, token_kl
from roll.algorithms.losses.base import LossRequirements, OldPolicy, PolicyInputs, PolicyLoss, make_policy_loss
from roll.algorithms.metrics import PartMetrics, lag_buckets, policy_metrics, supervised_metrics, value_metrics


@dataclass
class PolicyObjective:
    """The training objective of a policy. Raises `ConfigError` or ``ValueError`` at once if a value cannot work."""

    max_response_length: int
    """Tokens; the constant of `seq-mean-token-sum-norm`."""
    pg_variant: str = "ppo"
    pg_variant_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_estimator: str = "k3"
    entropy_loss_coef: float = 0.0
    distillation_coef: float = 0.0
    """Weight of the reverse KL divergence from the teacher as a term of the loss; 0: there is none."""
    old_policy: OldPolicy = "behaviour"
    """The policy in the denominator of the ratio."""
    corrected: bool = False
    """True if batches carry ``correction_weights``, which multiply the policy loss of each token."""
    weighted: bool = False
    """True if batches carry ``sample_weights``, which multiply the whole loss of a sample and no normaliser."""
    by_episode: bool = False
    """True if batches carry ``episode_shares``: an episode of several samples is one sequence of the aggregation."""
    max_lag: int | None = None
    """The largest lag with metrics of its own, from 0; None: no metrics per lag."""
    lags_capped: bool = False
    """True if lags above ``max_lag`` occur; they are counted as ``max_lag``."""
    monitored: bool = False
    """True if the mismatch with the engine is measured, over the tokens marked ``same_weights``. Meaningful only before
    an update, and only if the engine recorded log-probabilities of the whole distribution."""
    one_pass: bool = False
    """True if batches carry no ``proximal_logprobs`` and no ``correction_weights``: they follow from the forward pass
    that the gradient is taken of. Right for the first update on a batch only."""
    correction: Correction | None = None
    """The correction, if it is computed in that pass. Tokens that it rejects leave the loss."""
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
        """Requirements and properties of the policy loss."""
        return self.policy_loss.requirements

    @property
    def token_fields(self) -> tuple[str, ...]:
        """Per-token fields that a batch must carry besides its tokens and response mask."""
        wanted = {
            "behaviour_logprobs": True,
            "advantages": True,
            "proximal_logprobs": self.requirements.reads_proximal(self.old_policy) and not self.one_pass,
            "reference_logprobs": self.use_kl_loss,
            "teacher_logprobs": self.distillation_coef != 0,
            "correction_weights": self.corrected and not self.one_pass,
            "lags": self.max_lag is not None,
            "same_weights": self.monitored,
            "selected_tokens": self.requirements.select is not None,
        }
        return tuple(name for name, is_wanted in wanted.items() if is_wanted)

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Per-sample fields that a batch must carry."""
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
        """Return normalisers from the number of loss-mask tokens in every sample of the whole batch."""
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
        """Return the contribution of some rows to the loss of the whole batch (0-d, with gradient) and to its metrics.

        ``logprobs``, ``entropy`` and the token fields are ``[batch, seq]``, the sample fields ``[batch]``; entries
        outside the response mask are never read. ``loss_mask`` (bool, a subset of the response mask; default: all of
        it) marks the tokens that are trained on. ``ValueError`` names the fields that are missing.
        """
        missing = [name for name in (*self.token_fields, *self.sample_fields) if name not in fields]
        if missing:
            raise ValueError(f"{self.pg_variant} lacks {', '.join(missing)}; there is {', '.join(sorted(fields))}")
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        if self.one_pass:
            fields, trained = self._corrected(logprobs.detach(), response_mask, fields, trained)
        # A token that is not trained on counts in the ratio of its response, but gets no gradient from it.
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
            reference_kl = token_kl(inputs.logprobs, fields["reference_logprobs"], response_mask, self.kl_estimator)
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

    def _teacher_kl(self, inputs: PolicyInputs, fields: Mapping[str, Tensor]) -> Tensor:
        """Return the reverse KL divergence from the teacher at each token, ``[batch, seq]``, with its gradient.

        Tokens of other weights count as often as they would be sampled now, but never more than once: they are weighted
        by the correction if there is one, else by min(current / behaviour, 1).
        """
        divergence = token_kl(inputs.logprobs, fields["teacher_logprobs"], inputs.response_mask, "k3_straight_through")
        if self.corrected:
            return divergence * keep(fields["correction_weights"], inputs.response_mask)
        return divergence * (inputs.logprobs.detach() - inputs.behaviour_logprobs).exp().clamp(max=1)

    def _corrected(
        self, proximal: Tensor, response_mask: Tensor, fields: Mapping[str, Tensor], trained: Tensor
    ) -> tuple[Mapping[str, Tensor], Tensor]:
        """Return the fields with what follows from the log-probabilities before the update, and the trained tokens."""
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
    """The cross-entropy of given responses. Raises ``ValueError`` at once if a setting cannot work."""

    max_response_length: int
    """Tokens; the constant of `seq-mean-token-sum-norm`."""
    loss_agg_mode: str = "token-mean"
    token_fields: ClassVar[tuple[str, ...]] = ()
    """Per-token fields that a batch must carry besides its tokens and response mask: none."""
    sample_fields: ClassVar[tuple[str, ...]] = ()
    """Per-sample fields that a batch must carry: none."""

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode {self.loss_agg_mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")

    def normalizers(self, response_lengths: Sequence[int], shares: Sequence[float] | None = None) -> LossNormalizers:
        """Return normalisers from the number of trained tokens in every sample of the whole batch."""
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
        """Return the contribution of some rows to the loss of the whole batch (0-d, with gradient) and to its metrics.

        ``logprobs`` and ``entropy`` are ``[batch, seq]``; entries outside the response mask are never read.
        ``loss_mask`` is that of `PolicyObjective`. There are no ``fields``.
        """
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        loss = aggregate(-logprobs, trained, self.loss_agg_mode, normalizers)
        return loss, supervised_metrics(loss, logprobs, entropy, trained)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, response_mask: Tensor, clip: float | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return half the squared error of each value, (v - R)^2 / 2, and token metrics; all ``[batch, seq]``.

    With ``clip`` c: the maximum of the errors of v and of v clipped to old_value +- c, so that a value that has moved
    more than c towards its return gets no gradient (from the code published with PPO, not from its paper; Engstrom et
    al., arXiv 2005.12729). ``values`` carry the gradient; ``old_values`` (before the first update on the batch) and
    ``returns`` are targets and carry none. ``response_mask`` is bool; losses and metrics are 0 outside it, whatever the
    inputs held there. float32, or float64 if the values are. ``clip_fraction``: 1 where the gradient is cut.
    ``ValueError`` unless ``clip`` is above 0, and for a wrong shape or type.
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
    """The training objective of a critic. Raises ``ValueError`` at once if a setting cannot work."""

    max_response_length: int
    """Tokens; the constant of `seq-mean-token-sum-norm`."""
    loss_agg_mode: str = "token-mean"
    clip: float | None = None
    """Largest change of a value since before the first update on the batch with which it still gets a gradient."""
    by_episode: bool = False
    """That of `PolicyObjective`."""
    token_fields: ClassVar[tuple[str, ...]] = ("old_values", "returns")
    """Per-token fields that a batch must carry besides its tokens and response mask."""

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode {self.loss_agg_mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"the clip of a value loss must be above 0, not {self.clip}")

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Per-sample fields that a batch must carry."""
        return ("episode_shares",) if self.by_episode else ()

    def normalizers(self, response_lengths: Sequence[int], shares: Sequence[float] | None = None) -> LossNormalizers:
        """Return normalisers from the number of trained tokens in every sample of the whole batch."""
        return LossNormalizers.of(response_lengths, self.max_response_length, shares)

    def __call__(
        self,
        values: Tensor,
        response_mask: Tensor,
        normalizers: LossNormalizers,
        fields: Mapping[str, Tensor],
        loss_mask: Tensor | None = None,
    ) -> tuple[Tensor, PartMetrics]:
        """Return the contribution of some rows to the loss of the whole batch (0-d, with gradient) and to its metrics.

        ``values`` and the token fields are ``[batch, seq]``; entries outside the response mask are never read.
        ``loss_mask`` is that of `PolicyObjective`. ``ValueError`` names the fields that are missing.
        """
        missing = [name for name in (*self.token_fields, *self.sample_fields) if name not in fields]
        if missing:
            raise ValueError(f"the critic lacks {', '.join(missing)}; there is {', '.join(sorted(fields))}")
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        losses, token_metrics = value_loss(values, fields["old_values"], fields["returns"], trained, self.clip)
        shares = fields["episode_shares"] if self.by_episode else None
        loss = aggregate(losses, trained, self.loss_agg_mode, normalizers, shares)
        return loss, value_metrics(loss, values, fields["returns"], token_metrics["clip_fraction"], trained, shares)

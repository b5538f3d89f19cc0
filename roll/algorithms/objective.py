"""The loss of one optimizer step, as a picklable description that a trainer can apply to any part of the batch.

loss = policy loss + kl_loss_coef x KL to the reference - entropy_loss_coef x entropy, each aggregated the same way with
the normalisers of the whole batch. Contributions of disjoint rows add up to the whole, in value, gradient and metrics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossNormalizers, aggregate
from roll.algorithms.kl import KL_ESTIMATORS, token_kl
from roll.algorithms.masking import keep
from roll.algorithms.metrics import LossMetrics
from roll.algorithms.policy_losses import PolicyInputs, PolicyLoss, make_policy_loss


@dataclass
class PolicyObjective:
    """What a policy is trained on. Raises ``KnobError`` or ``ValueError`` at once if a value cannot work."""

    max_response_length: int
    """Tokens; the constant of `seq-mean-token-sum-norm`."""
    pg_variant: str = "ppo"
    pg_variant_args: dict[str, Any] = field(default_factory=dict)
    loss_agg_mode: str = "token-mean"
    use_kl_loss: bool = False
    kl_loss_coef: float = 0.001
    kl_estimator: str = "k3"
    entropy_loss_coef: float = 0.0
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
    def needs_reference(self) -> bool:
        """Whether batches must carry ``reference_logprobs``."""
        return self.use_kl_loss

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy is trained on, or a metric only."""
        return self.entropy_loss_coef != 0

    def normalizers(self, response_lengths: Sequence[int]) -> LossNormalizers:
        """Normalisers from the response tokens of every sequence of the whole batch."""
        return LossNormalizers.of(response_lengths, self.max_response_length)

    def __call__(
        self,
        inputs: PolicyInputs,
        entropy: Tensor,
        normalizers: LossNormalizers,
        reference_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, LossMetrics]:
        """The contribution of some rows to the loss of the whole batch (0-d, with gradient), and to its metrics.

        All tensors ``[batch, seq]``; what lies outside the response mask is never read. ``ValueError`` if a KL loss has
        no reference log-probabilities.
        """
        if self.needs_reference and reference_logprobs is None:
            raise ValueError("use_kl_loss needs the log-probabilities of the reference")
        mask = inputs.response_mask
        inputs, entropy = inputs.masked(), keep(entropy, mask)
        token_losses, token_metrics = self.policy_loss(inputs)
        policy_loss = self._aggregate(token_losses, mask, normalizers)
        totals = {"pg_loss": policy_loss}
        loss = policy_loss
        if reference_logprobs is not None:
            reference_kl = token_kl(inputs.logprobs, reference_logprobs, mask, self.kl_estimator)
            token_metrics["reference_kl"] = reference_kl
        if self.use_kl_loss:
            totals["kl_loss"] = self._aggregate(reference_kl, mask, normalizers)
            loss = loss + self.kl_loss_coef * totals["kl_loss"]
        if self.needs_entropy_gradient:
            loss = loss - self.entropy_loss_coef * self._aggregate(entropy, mask, normalizers)
        return loss, _metrics({"loss": loss, **totals}, token_metrics | {"entropy": entropy}, inputs)

    def _aggregate(self, values: Tensor, mask: Tensor, normalizers: LossNormalizers) -> Tensor:
        return aggregate(values, mask, self.loss_agg_mode, normalizers)


@torch.no_grad()
def _metrics(totals: dict[str, Tensor], token_metrics: dict[str, Tensor], inputs: PolicyInputs) -> LossMetrics:
    """The metrics of masked inputs. ``kl`` is KL(behaviour || current), estimated by k3 on the behaviour's samples."""
    mask = inputs.response_mask
    ratio = keep(inputs.ratio().double(), mask)
    token_values = token_metrics | {
        "kl": token_kl(inputs.behaviour_logprobs, inputs.logprobs, mask, "k3"),
        "ratio_mean": ratio,
        "ratio_squared": ratio.square(),
        "tokens": mask,
    }
    return LossMetrics(
        totals={name: value.detach() for name, value in totals.items()},
        token_sums={name: value.double().sum() for name, value in token_values.items()},
        maxima={"ratio_max": ratio.amax()},
    )

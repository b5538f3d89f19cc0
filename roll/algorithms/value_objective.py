"""The loss of a value model, as a description that a trainer can apply to any part of the batch.

The same contract as `PolicyObjective`, so that every trainer that trains a policy also trains a critic: contributions
of disjoint rows add up to the whole, in value, gradient and metrics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.aggregation import LOSS_AGG_MODES, LossNormalizers, aggregate
from roll.algorithms.value_loss import value_loss
from roll.algorithms.value_metrics import ValueMetrics, value_metrics


@dataclass(frozen=True)
class ValueObjective:
    """What a critic is trained on. Raises ``ValueError`` at once if a setting cannot work."""

    max_response_length: int
    """Tokens; the constant of `seq-mean-token-sum-norm`."""
    loss_agg_mode: str = "token-mean"
    clip: float | None = None
    """How far a value may move from the one before the first update on the batch and still learn."""

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode {self.loss_agg_mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"the clip of a value loss must be above 0, not {self.clip}")

    @property
    def token_fields(self) -> tuple[str, ...]:
        """Per-token fields that a batch must carry beside its tokens and response mask."""
        return ("old_values", "returns")

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """None."""
        return ()

    def normalizers(self, response_lengths: Sequence[int]) -> LossNormalizers:
        """Normalisers from the trained tokens of every sequence of the whole batch."""
        return LossNormalizers.of(response_lengths, self.max_response_length)

    def __call__(
        self,
        values: Tensor,
        response_mask: Tensor,
        normalizers: LossNormalizers,
        fields: Mapping[str, Tensor],
        loss_mask: Tensor | None = None,
    ) -> tuple[Tensor, ValueMetrics]:
        """The contribution of some rows to the loss of the whole batch (0-d, with gradient), and to its metrics.

        ``values`` and the token fields ``[batch, seq]``; what lies outside the response mask is never read.
        ``loss_mask`` as for `PolicyObjective`. ``ValueError`` names the fields that are missing.
        """
        missing = [name for name in self.token_fields if name not in fields]
        if missing:
            raise ValueError(f"the critic lacks {', '.join(missing)}; there is {', '.join(sorted(fields))}")
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        losses, token_metrics = value_loss(values, fields["old_values"], fields["returns"], trained, self.clip)
        loss = aggregate(losses, trained, self.loss_agg_mode, normalizers)
        return loss, value_metrics(loss, values, fields["returns"], token_metrics["clip_fraction"], trained)

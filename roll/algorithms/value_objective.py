"""The loss of a value model, as a description that a trainer can apply to any part of the batch.

It has the contract of `PolicyObjective`, so that every trainer of a policy can also train a critic: contributions of
disjoint rows add up to the whole, in value, gradient and metrics.
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
    """The training objective of a critic. Raises ``ValueError`` at once if a setting cannot work."""

    max_response_length: int
    """Tokens; the constant of `seq-mean-token-sum-norm`."""
    loss_agg_mode: str = "token-mean"
    clip: float | None = None
    """Largest change of a value since before the first update on the batch with which it still gets a gradient."""

    def __post_init__(self) -> None:
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"unknown loss_agg_mode {self.loss_agg_mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"the clip of a value loss must be above 0, not {self.clip}")

    @property
    def token_fields(self) -> tuple[str, ...]:
        """Per-token fields that a batch must carry besides its tokens and response mask."""
        return ("old_values", "returns")

    @property
    def sample_fields(self) -> tuple[str, ...]:
        """Per-sample fields that a batch must carry: none."""
        return ()

    def normalizers(self, response_lengths: Sequence[int]) -> LossNormalizers:
        """Return normalisers from the number of trained tokens in every sequence of the whole batch."""
        return LossNormalizers.of(response_lengths, self.max_response_length)

    def __call__(
        self,
        values: Tensor,
        response_mask: Tensor,
        normalizers: LossNormalizers,
        fields: Mapping[str, Tensor],
        loss_mask: Tensor | None = None,
    ) -> tuple[Tensor, ValueMetrics]:
        """Return the contribution of some rows to the loss of the whole batch (0-d, with gradient) and to its metrics.

        ``values`` and the token fields are ``[batch, seq]``; entries outside the response mask are never read.
        ``loss_mask`` is that of `PolicyObjective`. ``ValueError`` names the fields that are missing.
        """
        missing = [name for name in self.token_fields if name not in fields]
        if missing:
            raise ValueError(f"the critic lacks {', '.join(missing)}; there is {', '.join(sorted(fields))}")
        trained = response_mask if loss_mask is None else loss_mask & response_mask
        losses, token_metrics = value_loss(values, fields["old_values"], fields["returns"], trained, self.clip)
        loss = aggregate(losses, trained, self.loss_agg_mode, normalizers)
        return loss, value_metrics(loss, values, fields["returns"], token_metrics["clip_fraction"], trained)

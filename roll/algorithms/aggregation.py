"""Aggregation of per-token losses into one number, and the reading of values under a mask.

The normalisers are counted once over the whole optimizer batch and passed in, so the values of micro-batches and ranks
add up to the value of the whole. The mask is applied once, to numerator and denominator alike. Sequences without
response tokens do not count; without any token at all the result is 0. A sequence is a response or an episode, also
where it comes as several rows: then each row has its share of it.

Multiplying by a mask is not enough: ``0 * nan`` is ``nan``, in values and in gradients. `keep` replaces what is
outside.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class LossNormalizers:
    """The divisors of the losses of a whole optimizer batch."""

    tokens: int
    """Response tokens of the batch."""
    sequences: float
    """Sequences with at least one response token; of one in several rows, the shares of these rows."""
    max_response_length: int | None = None
    """The constant of `seq-mean-token-sum-norm`, in tokens; it does not depend on the batch. Other modes need none."""

    @classmethod
    def unknown(cls, max_response_length: int | None) -> LossNormalizers:
        """Return divisors of 1, for a batch whose totals are not known yet: its sums are divided at the end."""
        return cls(1, 1, max_response_length)

    @classmethod
    def of(
        cls,
        response_lengths: Sequence[int],
        max_response_length: int | None = None,
        shares: Sequence[float] | None = None,
    ) -> LossNormalizers:
        """Count the response tokens of every row of the whole batch. ``shares``: those of `aggregate`."""
        lengths = [int(length) for length in response_lengths]
        of_rows = [1.0] * len(lengths) if shares is None else shares
        sequences = math.fsum(share for share, length in zip(of_rows, lengths, strict=True) if length > 0)
        return cls(sum(lengths), sequences, max_response_length)


def aggregate(
    values: Tensor,
    response_mask: Tensor,
    mode: str = "token-mean",
    normalizers: LossNormalizers | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Return the contribution of these rows to the aggregate over the whole batch, a 0-d tensor.

    ``values`` and ``response_mask`` (bool) are ``[batch, seq]``. ``shares`` ``[batch]``: the part of its sequence's
    response tokens that a row has; None: a row holds its whole sequence. ``normalizers`` are those of the whole batch;
    None: these rows are all of it. Contributions of disjoint rows add up. The weight of a token is, for ``token-mean``:
    1 / tokens (DAPO, arXiv 2503.14476); ``seq-mean-token-mean``: 1 / (sequences x own length) (GRPO, arXiv 2402.03300);
    ``seq-mean-token-sum``: 1 / sequences; ``seq-mean-token-sum-norm``: 1 / (sequences x longest possible response) (Dr.
    GRPO, arXiv 2503.20783). ``ValueError`` for an unknown mode, a wrong shape, or a constant that the mode needs and is
    not given.
    """
    checked_mask(response_mask)
    checked_shape("values", values, tuple(response_mask.shape))
    if normalizers is None:
        of_rows = None if shares is None else shares.tolist()
        normalizers = LossNormalizers.of(response_mask.sum(-1).tolist(), shares=of_rows)
    lengths = response_mask.sum(-1, keepdim=True).clamp(min=1).to(torch.promote_types(values.dtype, torch.float32))
    sequences = normalizers.sequences or 1
    if mode == "token-mean":
        weights = torch.full_like(lengths, 1.0 / max(1, normalizers.tokens))
    elif mode == "seq-mean-token-mean":
        weights = 1.0 / (lengths * sequences)
        if shares is not None:
            weights = weights * shares[:, None].to(weights.dtype)
    elif mode == "seq-mean-token-sum":
        weights = torch.full_like(lengths, 1.0 / sequences)
    elif mode == "seq-mean-token-sum-norm":
        if normalizers.max_response_length is None:
            raise ValueError(f"{mode} divides by `max_response_length`: give `normalizers` that have it")
        weights = torch.full_like(lengths, 1.0 / (sequences * normalizers.max_response_length))
    else:
        raise ValueError(f"unknown loss_agg_mode {mode!r}; valid: {', '.join(LOSS_AGG_MODES)}")
    return (keep(values, response_mask) * weights).sum()


def checked_mask(response_mask: Tensor) -> None:
    """Raise ``ValueError`` unless a mask is a bool tensor ``[batch, seq]``."""
    _check_tensor("response_mask", response_mask)
    if response_mask.dtype != torch.bool:
        raise ValueError(f"response_mask must be bool, not {response_mask.dtype}: write `mask.bool()`")
    if response_mask.ndim != 2:
        raise ValueError(f"response_mask must be [batch, seq], not {list(response_mask.shape)}")


def checked_shape(name: str, value: Tensor, shape: tuple[int, ...], *, floating: bool = False) -> None:
    """Raise ``ValueError`` unless this is a tensor of a shape, and if ``floating`` of floating-point numbers.

    Nothing is broadcast, since that would hide mistakes.
    """
    _check_tensor(name, value)
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have the shape {list(shape)}, not {list(value.shape)}")
    if floating and not value.is_floating_point():
        raise ValueError(f"{name} must be floating-point numbers, not {value.dtype}: write `{name}.float()`")


def _check_tensor(name: str, value: object) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a tensor, not {type(value).__name__}")


def keep(values: Tensor, mask: Tensor) -> Tensor:
    """Return ``values`` where ``mask`` (bool, same shape) is true, else 0. The gradient outside is exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


Value = TypeVar("Value")


def needed(value: Value | None, name: str) -> Value:
    """Return the value. ``ValueError`` with the field's name if it is None."""
    if value is None:
        raise ValueError(f"{name} are needed here, and none were given; declare the need in its requirements")
    return value

"""Aggregation of per-token losses into a scalar, and masking of values.

The normalisers (divisors) are counted once over the whole optimizer batch and passed in, so the results of
micro-batches and ranks add up to that of the whole batch. The mask is applied to numerator and denominator alike.
Sequences without response tokens do not count; without any token the result is 0. A sequence is a response or an
episode. An episode may be split over several rows, each of which then has a share of it.

Multiplying by a mask is not enough, because ``0 * nan`` is ``nan``, in values and in gradients. `keep` therefore
replaces values outside the mask.
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
    """Divisors of the aggregated loss, counted over a whole optimizer batch."""

    tokens: int
    """Number of response tokens in the batch."""
    sequences: float
    """Number of sequences with at least one response token. Rows of a sequence in several rows count by their share."""
    max_response_length: int | None = None
    """Constant divisor of `seq-mean-token-sum-norm`, in tokens; None for the other modes."""

    @classmethod
    def unknown(cls, max_response_length: int | None) -> LossNormalizers:
        """Return divisors of 1, for a batch whose totals are not known yet. Its sums are divided later."""
        return cls(1, 1, max_response_length)

    @classmethod
    def of(
        cls,
        response_lengths: Sequence[int],
        max_response_length: int | None = None,
        shares: Sequence[float] | None = None,
    ) -> LossNormalizers:
        """Return the divisors of a batch, given each row's number of response tokens. ``shares``: see `aggregate`."""
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
    """Return these rows' contribution to the aggregate over the whole batch, a 0-d tensor. Contributions add up.

    ``values`` and ``response_mask`` (bool) are ``[batch, seq]``. ``normalizers`` are those of the whole batch; None:
    these rows are the whole batch. ``shares`` ``[batch]``: the fraction of its sequence's response tokens that a row
    holds; None: each row is a whole sequence. The weight of a token is, for

    - ``token-mean``: 1 / tokens (DAPO, arXiv 2503.14476);
    - ``seq-mean-token-mean``: 1 / (sequences x length of its sequence) (GRPO, arXiv 2402.03300);
    - ``seq-mean-token-sum``: 1 / sequences;
    - ``seq-mean-token-sum-norm``: 1 / (sequences x maximum response length) (Dr. GRPO, arXiv 2503.20783).

    ``ValueError`` for an unknown mode, a wrong shape, or a missing ``max_response_length``.
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
    """Raise ``ValueError`` unless ``response_mask`` is a bool tensor ``[batch, seq]``."""
    _check_tensor("response_mask", response_mask)
    if response_mask.dtype != torch.bool:
        raise ValueError(f"response_mask must be bool, not {response_mask.dtype}: write `mask.bool()`")
    if response_mask.ndim != 2:
        raise ValueError(f"response_mask must be [batch, seq], not {list(response_mask.shape)}")


def checked_shape(name: str, value: Tensor, shape: tuple[int, ...], *, floating: bool = False) -> None:
    """Raise ``ValueError`` unless ``value`` is a tensor of this shape and, if ``floating``, of a floating-point dtype.

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
    """Return ``values`` where ``mask`` (bool, same shape) is true, else 0. Outside, the gradient is exactly 0."""
    return torch.where(mask, values, torch.zeros((), dtype=values.dtype, device=values.device))


def wide(values: Tensor) -> Tensor:
    """Return the values in float32, or in their own dtype if that is wider."""
    return values.to(torch.promote_types(values.dtype, torch.float32))


Value = TypeVar("Value")


def needed(value: Value | None, name: str) -> Value:
    """Return ``value``, or raise ``ValueError`` with the field's ``name`` if it is None."""
    if value is None:
        raise ValueError(f"{name} are needed here, and none were given; declare the need in its requirements")
    return value

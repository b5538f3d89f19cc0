"""Whitening and clipping of estimated advantages."""

from __future__ import annotations

import torch
from torch import Tensor

from roll.algorithms.aggregation import keep


def whiten(advantages: Tensor, response_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Give advantages ``[batch, seq]`` mean 0 and deviation 1 over the response tokens of the whole batch.

    Uses population moments. Equal values (or a single token, or none) give exactly 0. Returns the type of
    ``advantages``.
    """
    tokens = advantages[response_mask].double()
    if not len(tokens):
        return torch.zeros_like(advantages)
    mean = tokens.mean().clamp(tokens.min(), tokens.max())
    deviation = (tokens - mean).square().mean().sqrt()
    centred = keep(advantages, response_mask).double() - mean
    return keep(centred / (deviation + eps), response_mask).to(advantages.dtype)


def clip_advantages(advantages: Tensor, limit: float) -> Tensor:
    """Clip advantages (any shape) to [-limit, limit]. ``ValueError`` unless ``limit`` is above 0."""
    if not limit > 0:
        raise ValueError(f"advantages are clipped to a limit above 0, not {limit}")
    return advantages.clamp(-limit, limit)

"""Denoising steps of a flow-matching model as actions of a Gaussian policy: moments, log-probabilities, KL divergences.

With noise level s from 1 (noise) to 0 (image), x_s = (1 - s) x_0 + s e, and the model predicts the velocity v =
E[e - x_0 | x_s]. A deterministic (ODE) step from s to s' is x + v dt with dt = s' - s < 0. A stochastic (SDE) step
draws the next latent from N(mean, std^2 I), so it has a log-probability, like a text token. Computation is float32
(float64 if an input is) and independent per row; inputs are not modified.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from roll.algorithms.aggregation import wide

Reduce = Literal["mean", "sum"]
PerRow = float | Tensor
"""One number for all rows, or a tensor ``[batch]``."""
Moments = tuple[Tensor, Tensor]
"""Mean ``[batch, ...]`` of the next latent, and its standard deviation per dimension, ``[batch, 1, ...]``."""


def flow_sde(x: Tensor, v: Tensor, s: Tensor, to: Tensor, noise: Tensor, first_level: float) -> Moments:
    """Return the moments of Flow-GRPO's SDE (arXiv 2505.05470).

    g = noise sqrt(s / (1 - s)), where at s = 1 ``first_level`` replaces s in the denominator;
    mean = x (1 + g^2 dt / (2 s)) + v (1 + g^2 (1 - s) / (2 s)) dt; std = g sqrt(-dt).
    For small steps the marginals are those of the ODE.
    """
    dt = to - s
    g = noise * (s / (1 - torch.where(s < 1, s, first_level))).sqrt()
    pull = g.square() / (2 * s)
    return x * (1 + pull * dt) + v * (1 + pull * (1 - s)) * dt, g * (-dt).sqrt()


def cps(x: Tensor, v: Tensor, s: Tensor, to: Tensor, noise: Tensor, first_level: float) -> Moments:
    """Return the moments of coefficients-preserving sampling (arXiv 2509.05952).

    std = s' sin(noise pi / 2); mean = x_0 (1 - s') + e sqrt(s'^2 - std^2), with the predictions x_0 = x - s v and e =
    x + (1 - s) v. Old and new noise together have exactly level s' for any step size; the last step has no noise. The
    variance of x_0 given x is ignored, so the marginals equal the ODE's only if x determines x_0.
    """
    angle = noise * (math.pi / 2)
    return (x - s * v) * (1 - to) + (x + (1 - s) * v) * (to * angle.cos()), to * angle.sin()


def dance(x: Tensor, v: Tensor, s: Tensor, to: Tensor, noise: Tensor, first_level: float) -> Moments:
    """Return the moments of DanceGRPO's SDE (arXiv 2505.07818), with the same noise strength at each level.

    score = -(x - (1 - s) x_0) / s^2 with x_0 = x - s v; mean = x + v dt - noise^2 score dt / 2; std = noise sqrt(-dt).
    For small steps the marginals are those of the ODE; close to s = 0 the steps must be smaller than s.
    """
    dt = to - s
    score = -(x + (1 - s) * v) / s
    return x + (v - noise.square() * score / 2) * dt, noise * (-dt).sqrt()


KINDS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, float], Moments]] = {
    "flow_sde": flow_sde,
    "cps": cps,
    "dance": dance,
}
"""Name -> function of (latent, velocity, level, next level, noise, first level below 1). Tensors have the latent's
number of dimensions."""


def step_moments(
    kind: str, latent: Tensor, velocity: Tensor, level: PerRow, next_level: PerRow, noise: PerRow, first_level: float
) -> Moments:
    """Return mean ``[batch, ...]`` and standard deviation ``[batch]`` of the next latent.

    ``latent`` and ``velocity`` are ``[batch, ...]``; ``0 <= next_level < level <= 1``. ``noise`` is the noise strength
    of the ``kind``, at least 0, and for `cps` at most 1; with 0 the mean is the ODE step x + v dt and the deviation 0.
    ``first_level`` is the level after 1. ``ValueError`` for an unknown kind.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of sampling {kind!r}; valid: {', '.join(KINDS)}")
    x, v = wide(latent), wide(velocity)
    s, to, strength = (per_row(value, x) for value in (level, next_level, noise))
    mean, std = KINDS[kind](x, v, s, to, strength, first_level)
    return mean, std.flatten().expand(len(x))


def log_prob(sample: Tensor, mean: Tensor, std: Tensor, reduce: Reduce = "mean") -> Tensor:
    """Return the log-density ``[batch]`` of ``sample`` under N(mean, std^2 I), in nats.

    ``sample`` and ``mean`` are ``[batch, ...]``, ``std`` is ``[batch]``. With ``reduce="mean"`` the log-density is
    divided by the number of dimensions, as in Flow-GRPO: ratios then stay near 1, and clip ranges are of the order of
    1e-4. With ``"sum"`` it is not divided, and clip ranges are of the order of 0.2. For a row with deviation 0 (a
    deterministic step), value and gradient are 0; exclude it with the response mask.
    """
    sure, width = _width(std, mean)
    squares = ((wide(sample) - wide(mean)) / width).square()
    density = -squares / 2 - width.log() - math.log(2 * math.pi) / 2
    return _reduced(density.masked_fill(sure, 0), reduce)


def guarded_log_prob(sample: Tensor, mean: Tensor, old_mean: Tensor, std: Tensor, weight: PerRow = 1.0) -> Tensor:
    """Return log p_old(sample) plus the normalised log-ratio of GRPO-Guard ``[batch]`` (arXiv 2510.22319, RatioNorm).

    Let r be the ratio of the densities of ``sample`` under N(mean, std^2 I) and N(old_mean, std^2 I), with ``mean``
    reduction. Its logarithm is negative on average, and spreads with 1 / std, so a clip range means something else at
    each step. The normalised one, std (log r + |mean - old_mean|^2 / (2 std^2)), is the mean over dimensions of
    (sample - old_mean) (mean - old_mean) / std: 0 on average, and spread alike at all steps.

    Shapes and rows with deviation 0 are as in `log_prob`. The gradient is multiplied by ``weight`` (number or
    ``[batch]``); GRPO-Guard divides the loss of a step by its length in noise levels.
    """
    _, width = _width(std, mean)
    drift = _reduced((wide(sample) - wide(old_mean)) / width * (wide(mean) - wide(old_mean)), "mean")
    drift = drift.masked_fill(std == 0, 0)
    weighed = drift.detach() + (drift - drift.detach()) * weight
    return log_prob(sample, old_mean, std) + weighed


def kl(mean: Tensor, mean_ref: Tensor, std: Tensor, reduce: Reduce = "mean") -> Tensor:
    """Return KL(N(mean, std^2 I) || N(mean_ref, std^2 I)) ``[batch]`` = |mean - mean_ref|^2 / (2 std^2), in nats.

    Shapes, ``reduce`` and rows with deviation 0 are as in `log_prob`. Both distributions have the same deviation,
    because it depends on the noise level only.
    """
    sure, width = _width(std, mean)
    squares = ((wide(mean) - wide(mean_ref)) / width).square()
    return _reduced((squares / 2).masked_fill(sure, 0), reduce)


def window(steps: int, size: int, within: int, seed: int | Sequence[int]) -> range:
    """Return the indices of the stochastic steps: ``size`` consecutive ones among the first ``within`` of ``steps``.

    Their position is random, determined by ``seed`` (one integer or several); with ``within = size`` they are the first
    steps. Flow-GRPO-Fast uses one or two steps in the first half. ``ValueError`` unless ``1 <= size <= within <=
    steps``.
    """
    if not 1 <= size <= within <= steps:
        raise ValueError(f"a window of {size} within the first {within} of {steps} steps does not fit")
    start = int(np.random.default_rng(seed).integers(within - size + 1))
    return range(start, start + size)


def per_row(value: PerRow, like: Tensor) -> Tensor:
    """Reshape a number, or a tensor ``[batch]``, so that it broadcasts over ``like`` ``[batch, ...]``."""
    numbers = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def _width(std: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of the rows with deviation 0, and the deviations with these replaced by 1."""
    deviation = per_row(std, wide(like))
    sure = deviation == 0
    return sure, deviation.masked_fill(sure, 1)


def _reduced(values: Tensor, reduce: Reduce) -> Tensor:
    flat = values.flatten(1)
    return flat.mean(-1) if reduce == "mean" else flat.sum(-1)

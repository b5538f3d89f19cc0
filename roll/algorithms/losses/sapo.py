"""SAPO: a smooth gate instead of clipping. A token's gradient decays smoothly as its ratio moves away from 1."""

from __future__ import annotations

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.losses.base import PolicyInputs, TokenMetrics, nothing_clipped, policy_loss

FLAT_LOG_RATIO = 60.0
"""Log ratio above which the slope of the gate is 0 in any precision."""


@policy_loss(
    formula="−f(ρ)·A, f(ρ) = (4/τ)·sigmoid(τ·(ρ−1)), τ = tau_positive where A > 0, else tau_negative",
    source="Soft adaptive policy optimization, arXiv 2511.20347",
    use="In the place of `ppo` when hard clipping is brittle: mixture-of-experts models, several updates per batch.",
)
def sapo(
    inputs: PolicyInputs,
    *,
    tau_positive: Annotated[float, Field(gt=0, description="How fast tokens with a positive advantage fade.")] = 1.0,
    tau_negative: Annotated[
        float, Field(gt=0, description="How fast the others fade; more than `tau_positive` is steadier, by the paper.")
    ] = 1.05,
) -> tuple[Tensor, TokenMetrics]:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, ``[batch, seq]`` (arXiv 2511.20347). Clips nothing.

    The slope of the gate is 1 at r = 1 for every tau.
    """
    positive = inputs.advantages > 0
    temperature = torch.full_like(inputs.logprobs, tau_negative).masked_fill(positive, tau_positive)
    # Far above 1 the gate is flat. The clamp gives a ratio that would overflow the gradient 0 instead of 0 x inf.
    ratio = inputs.log_ratio().clamp(max=FLAT_LOG_RATIO).exp()
    gate = 4 / temperature * torch.sigmoid(temperature * (ratio - 1))
    return -gate * inputs.advantages, nothing_clipped(gate)

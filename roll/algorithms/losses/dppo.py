"""Divergence PPO: a trust region on the divergence between policies instead of the ratio.

A ratio of 100 means little for a token of probability 1e-5, and a ratio of 0.8 very much for one of 0.99. A token's
gradient is therefore removed not by its ratio, but by the divergence of the binary distribution {this token, any
other}. It is all that can be computed from the token's log-probability, and a lower bound of the full divergence.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from roll.algorithms.losses.base import PolicyInputs, TokenMetrics, clip_fraction, policy_loss

PAPER_THRESHOLDS = {"tv": 0.15, "kl": 0.05}
"""Default threshold of each divergence; ``kl`` in nats."""


def _check_thresholds(divergence: str, threshold: float | None, threshold_high: float | None, **others: Any) -> None:
    for name, value in (("threshold", threshold), ("threshold_high", threshold_high)):
        if divergence == "tv" and value is not None and value >= 1:
            raise ValueError(f"{name} must be below 1, the largest total variation, not {value}")


@policy_loss(
    formula="−M·ρ·A, M = 0 where D > threshold and (A > 0 and ρ > 1, or A < 0 and ρ < 1), else 1; "
    "D = |μ−π| or the KL divergence of (μ, 1−μ) from (π, 1−π); threshold_high where A > 0",
    source="Divergence PPO, Qi et al., arXiv 2602.04879",
    use="In the place of `ppo` for large vocabularies and tokens of another engine or version: rare tokens are free to "
    "move, likely ones are held. The paper finds that the old policy must be the behaviour policy.",
    check=_check_thresholds,
)
def dppo(
    inputs: PolicyInputs,
    *,
    divergence: Annotated[
        Literal["tv", "kl"],
        Field(
            description="Total variation, or KL divergence (nats) from the old policy to the current one, of {token, "
            "any other}."
        ),
    ] = "tv",
    threshold: Annotated[
        float | None,
        Field(gt=0, description="Largest divergence. Default: 0.15 for `tv`, 0.05 for `kl`, as in the paper."),
    ] = None,
    threshold_high: Annotated[
        float | None,
        Field(
            gt=0,
            description="Largest divergence of tokens with A > 0, as verl and prime-rl have it. Default: `threshold`, "
            "as in the paper.",
        ),
    ] = None,
    ratio_cap: Annotated[
        float | None,
        Field(gt=1, description="Largest ratio that weighs a token. Off by default, as in the paper; others use 20."),
    ] = None,
) -> tuple[Tensor, TokenMetrics]:
    """Return -M r A, ``[batch, seq]`` (arXiv 2602.04879, equations 12 to 14), with r the ratio to the old policy.

    M is 0 where the divergence exceeds the threshold and the gradient would increase it further, else 1. With
    ``ratio_cap`` c, r is at most c in the value and the gradient. ``clip_fraction``: fraction of tokens with M = 0 or a
    capped ratio.
    """
    logprobs, advantages = inputs.logprobs, inputs.advantages
    largest = PAPER_THRESHOLDS[divergence] if threshold is None else threshold
    above = largest if threshold_high is None else threshold_high
    ratio = inputs.ratio().detach()
    moved = BINARY_DIVERGENCES[divergence](inputs.old_logprobs().detach(), logprobs.detach())
    cut = ((advantages > 0) & (ratio > 1) & (moved > above)) | ((advantages < 0) & (ratio < 1) & (moved > largest))
    weights = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    weights = torch.where(cut, 0.0, weights)
    # The last factor has the value 1 and carries the gradient of the ratio, even if the ratio is capped.
    losses = -weights * advantages * (logprobs - logprobs.detach()).exp()
    return losses, clip_fraction(weights != ratio, losses)


def binary_total_variation(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return the total variation distance of {token, any other} between two policies, from the token's log-probs."""
    return (old_logprobs.exp() - logprobs.exp()).abs()


def binary_kl(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Return KL(old || current) of {token, any other} in nats, with the shape of the log-probabilities.

    Log-probabilities are clamped to at most -eps of their dtype. Otherwise rounding could leave no probability for the
    other tokens, and the divergence would be infinite.
    """
    finest = -torch.finfo(logprobs.dtype).eps
    old, current = old_logprobs.clamp(max=finest), logprobs.clamp(max=finest)
    old_rest, current_rest = -torch.expm1(old), -torch.expm1(current)
    return old.exp() * (old - current) + old_rest * (old_rest.log() - current_rest.log())


BINARY_DIVERGENCES = {"tv": binary_total_variation, "kl": binary_kl}

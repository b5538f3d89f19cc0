"""Losses with one ratio per response: its geometric mean over the tokens.

A reward belongs to a whole response, so the ratio does too, normalised by the length. It covers all response tokens,
before any rejection. Rows are whole sequences, so a split between rows is harmless.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs, PolicyLossTraits, TokenMetrics, clip_fraction
from roll.algorithms.losses.clipped import clipped_surrogate
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class GSPOKnobs:
    """Arguments of `gspo`."""

    clip_low: float = knob(
        3e-4, help="The ratio of the response is clipped from below at 1 − `clip_low`.", at_least=0, at_most=1
    )
    clip_high: float = knob(
        4e-4, help="The ratio of the response is clipped from above at 1 + `clip_high`.", at_least=0
    )


@POLICY_LOSSES.register(
    "gspo",
    GSPOKnobs,
    formula="−min(sA, clip(s, 1−clip_low, 1+clip_high)·A), s = sg(exp(meanₜ log ρₜ))·π/sg(π)",
    source="Group sequence policy optimization, Zheng et al., arXiv 2507.18071",
    use="Mixture-of-experts models and long responses, where single-token ratios are noise. The paper aggregates with "
    "`seq-mean-token-mean`. Its bounds are tight: with tokens of another engine or version, widen them.",
    traits=PolicyLossTraits(),
)
def gspo_loss(inputs: PolicyInputs, knobs: GSPOKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return `clipped_surrogate` of s, ``[batch, seq]``: the token form of GSPO (arXiv 2507.18071).

    Each token has the ratio s of its row as its value, and its own log-probability gives the gradient.
    ``clip_fraction``: share of tokens with a cut gradient; tokens of a row with one advantage are cut together.
    """
    logprobs = inputs.logprobs
    log_ratio = inputs.sequence_log_ratio(mean=True).detach() + (logprobs - logprobs.detach())
    losses, cut = clipped_surrogate(log_ratio, inputs.advantages, knobs.clip_low, knobs.clip_high)
    return losses, clip_fraction(cut, losses)


@dataclass(frozen=True)
class GMPOKnobs:
    """Arguments of `gmpo`: bounds of the logarithm of the ratio."""

    clip_low: float = knob(0.4, help="Where A < 0, the log ratio of a token is at least −`clip_low`.", at_least=0)
    clip_high: float = knob(0.4, help="Where A > 0, the log ratio of a token is at most `clip_high`.", at_least=0)


@POLICY_LOSSES.register(
    "gmpo",
    GMPOKnobs,
    formula="−A·exp(meanₜ cₜ), cₜ = min(log ρₜ, clip_high) where A > 0, max(log ρₜ, −clip_low) where A < 0",
    source="Geometric-mean policy optimization, Zhao et al., arXiv 2507.20673",
    use="When outliers among the token ratios make `ppo` unstable: the geometric mean hardly sees them, and the range "
    "can be wide. Defined for one advantage per response and the aggregation `seq-mean-token-mean`.",
    traits=PolicyLossTraits(sequence_valued=True),
)
def gmpo_loss(inputs: PolicyInputs, knobs: GMPOKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return -A times the geometric mean of the clipped ratios of the row, ``[batch, seq]`` (arXiv 2507.20673).

    The mean carries the gradient, so the loss of a token moves all tokens of its row. ``clip_fraction``: share of
    tokens whose own ratio is clipped and has no gradient.
    """
    log_ratio, advantages = inputs.log_ratio(), inputs.advantages
    above = (advantages > 0) & (log_ratio > knobs.clip_high)
    below = (advantages < 0) & (log_ratio < -knobs.clip_low)
    clipped = log_ratio.masked_fill(above, knobs.clip_high).masked_fill(below, -knobs.clip_low)
    mean = clipped.sum(-1, keepdim=True) / inputs.response_lengths()
    losses = -advantages * mean.exp()
    return losses, clip_fraction(above | below, losses)

"""GSPO: one ratio per response, the geometric mean over its tokens.

A reward belongs to a whole response, so the ratio does too, normalised by the length. It covers all response tokens,
before any rejection. Rows are whole sequences, so a split between rows is harmless.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor

from roll.algorithms.advantages.shared import segment_means
from roll.algorithms.losses.base import PolicyInputs, TokenMetrics, clip_fraction, policy_loss
from roll.algorithms.losses.ppo import ClipHigh, ClipLow, clipped_surrogate


@policy_loss(
    formula="−min(sA, clip(s, 1−clip_low, 1+clip_high)·A), s = sg(exp(meanₜ log ρₜ))·π/sg(π)",
    source="Group sequence policy optimization, Zheng et al., arXiv 2507.18071",
    use="Mixture-of-experts models and long responses, where single-token ratios are noise. The paper aggregates with "
    "`seq-mean-token-mean`. Its bounds are tight: with tokens of another engine or version, widen them.",
)
def gspo(
    inputs: PolicyInputs,
    *,
    clip_low: Annotated[
        ClipLow, Field(description="The ratio of the response is clipped from below at 1 − `clip_low`.")
    ] = 3e-4,
    clip_high: Annotated[
        ClipHigh, Field(description="The ratio of the response is clipped from above at 1 + `clip_high`.")
    ] = 4e-4,
    level: Annotated[
        Literal["sequence", "segment"],
        Field(
            description="The ratio of the whole response, as in the paper, or of each unbroken run of response tokens: "
            "for episodes, of a turn."
        ),
    ] = "sequence",
) -> tuple[Tensor, TokenMetrics]:
    """Return `clipped_surrogate` of the row's ratio s, ``[batch, seq]``, in the token form of GSPO (arXiv 2507.18071).

    The ratio s of a row is the geometric mean of current / old over its tokens. All tokens of a row have the value s
    as their ratio, and each has the gradient of its own log-probability. With the level ``segment`` the same holds for
    each run of response tokens. ``clip_fraction``: share of tokens with a cut gradient; tokens of a row (a run) with
    equal advantages are cut together.
    """
    logprobs = inputs.logprobs
    if level == "sequence":
        mean = inputs.sequence_log_ratio(mean=True)
    else:
        mean = segment_means(inputs.log_ratio().detach(), inputs.response_mask)
    log_ratio = mean.detach() + (logprobs - logprobs.detach())
    losses, cut = clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)
    return losses, clip_fraction(cut, losses)

"""GSPO: one ratio per response, the geometric mean of its token ratios.

The reward is given for the whole response, so the ratio is computed for the whole response too, normalised by length.
It covers all response tokens, before any rejection. Each row is a whole sequence, so micro-batches do not change it.
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
    """Return `clipped_surrogate` of the sequence ratio, ``[batch, seq]``, in GSPO's token form (arXiv 2507.18071).

    The sequence ratio is the geometric mean of current / old over the row's response tokens. Each token has this ratio
    as its value, and the gradient of its own log-probability. With level ``segment``, the mean is over each unbroken
    run of response tokens. ``clip_fraction``: fraction of tokens with a clipped gradient; tokens of a row (or segment)
    with equal advantages are clipped together.
    """
    logprobs = inputs.logprobs
    if level == "sequence":
        mean = inputs.sequence_log_ratio(mean=True)
    else:
        mean = segment_means(inputs.log_ratio().detach(), inputs.response_mask)
    log_ratio = mean.detach() + (logprobs - logprobs.detach())
    losses, cut = clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high)
    return losses, clip_fraction(cut, losses)

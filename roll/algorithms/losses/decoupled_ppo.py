"""Decoupled PPO: importance weights correct for the behaviour policy; the trust region is around the proximal policy.

Tokens were sampled by the behaviour policy, so the expectation needs the weight proximal / behaviour. The trust region
is around the proximal policy, so stale tokens do not start training with their clipping range used up. The weight is
part of the definition; no setting turns it off.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from torch import Tensor

from roll.algorithms.aggregation import needed
from roll.algorithms.losses.base import LossRequirements, PolicyInputs, TokenMetrics, clip_fraction, policy_loss
from roll.algorithms.losses.ppo import ClipHigh, ClipLow, DualClip, clipped_surrogate


@policy_loss(
    formula="−sg(min(π_prox/μ, cap))·min(rA, clip(r, 1−clip_low, 1+clip_high)·A), r = π/π_prox",
    source="Hilton et al., arXiv 2110.00641; AReaL, Fu et al., arXiv 2505.24298",
    use="Stale tokens and several updates per batch, with `old_logprobs: recompute`: the trust region follows the "
    "policy at the start of the step. A cap (5, say) bounds the variance; AReaL leaves out the tokens above its cap.",
    requirements=LossRequirements(needs_proximal=True),
)
def decoupled_ppo(
    inputs: PolicyInputs,
    *,
    clip_low: Annotated[
        ClipLow, Field(description="The ratio to the proximal policy is clipped from below at 1 − `clip_low`.")
    ] = 0.2,
    clip_high: Annotated[
        ClipHigh, Field(description="The ratio to the proximal policy is clipped from above at 1 + `clip_high`.")
    ] = 0.2,
    dual_clip: DualClip = None,
    behaviour_weight_cap: Annotated[
        float | None,
        Field(
            gt=0, description="Largest weight proximal / behaviour; larger ones are truncated. Untruncated by default."
        ),
    ] = None,
) -> tuple[Tensor, TokenMetrics]:
    """Return proximal / behaviour (without gradient) times `clipped_surrogate` of current / proximal, ``[batch, seq]``.

    Ignores ``inputs.old_policy``. ``clip_fraction``: fraction of tokens with a clipped gradient or a truncated weight.
    """
    proximal = needed(inputs.proximal_logprobs, "proximal_logprobs")
    ratio = (proximal - inputs.behaviour_logprobs).detach().exp()
    weights = ratio if behaviour_weight_cap is None else ratio.clamp(max=behaviour_weight_cap)
    log_ratio = inputs.logprobs - proximal.detach()
    losses, cut = clipped_surrogate(log_ratio, inputs.advantages, clip_low, clip_high, dual_clip)
    return weights * losses, clip_fraction(cut | (weights != ratio), losses)

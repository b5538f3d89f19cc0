"""Decoupled PPO: corrects for one policy and stays close to another.

The behaviour policy sampled the tokens, so the expectation needs the weight proximal / behaviour. The trust region lies
around the proximal policy, so stale tokens do not use up their clipping range before training starts. The weight is
part of the definition; no argument turns it off.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.aggregation import needed
from roll.algorithms.losses.base import POLICY_LOSSES, PolicyInputs, PolicyLossTraits, TokenMetrics, clip_fraction
from roll.algorithms.losses.clipped import clipped_surrogate
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class DecoupledPPOKnobs:
    """Arguments of `decoupled_ppo`."""

    clip_low: float = knob(
        0.2, help="The ratio to the proximal policy is clipped from below at 1 − `clip_low`.", at_least=0, at_most=1
    )
    clip_high: float = knob(
        0.2, help="The ratio to the proximal policy is clipped from above at 1 + `clip_high`.", at_least=0
    )
    dual_clip: float | None = knob(
        None, help="Largest ratio that multiplies a negative advantage; off by default.", above=1
    )
    behaviour_weight_cap: float | None = knob(
        None, help="Largest weight proximal / behaviour; larger ones are truncated. Untruncated by default.", above=0
    )


@POLICY_LOSSES.register(
    "decoupled_ppo",
    DecoupledPPOKnobs,
    formula="−sg(min(π_prox/μ, cap))·min(rA, clip(r, 1−clip_low, 1+clip_high)·A), r = π/π_prox",
    source="Hilton et al., arXiv 2110.00641; AReaL, Fu et al., arXiv 2505.24298",
    use="Stale tokens and several updates per batch, with `old_logprobs: recompute`: the trust region follows the "
    "policy at the start of the step. A cap (5, say) bounds the variance; AReaL leaves out the tokens above its cap.",
    traits=PolicyLossTraits(needs_proximal=True),
)
def decoupled_ppo_loss(inputs: PolicyInputs, knobs: DecoupledPPOKnobs) -> tuple[Tensor, TokenMetrics]:
    """Return `clipped_surrogate` of current / proximal times the constant proximal / behaviour, ``[batch, seq]``.

    The anchor of the inputs does not matter. ``clip_fraction``: share of tokens with a cut gradient or a truncated
    weight.
    """
    proximal = needed(inputs.proximal_logprobs, "proximal_logprobs")
    ratio = (proximal - inputs.behaviour_logprobs).detach().exp()
    weights = ratio if knobs.behaviour_weight_cap is None else ratio.clamp(max=knobs.behaviour_weight_cap)
    losses, cut = clipped_surrogate(
        inputs.logprobs - proximal.detach(),
        inputs.advantages,
        knobs.clip_low,
        knobs.clip_high,
        knobs.dual_clip,
    )
    return weights * losses, clip_fraction(cut | (weights != ratio), losses)

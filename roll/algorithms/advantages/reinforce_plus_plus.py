"""REINFORCE++: returns or group-centred rewards, normalised over all response tokens of the batch.

The deviation is that of the whole batch, so a sample hardly influences its own divisor, unlike in a small group.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from roll.algorithms.advantages.estimator import ADVANTAGE_ESTIMATORS, AdvantageInputs, AdvantageTraits
from roll.algorithms.advantages.group_relative import compared
from roll.algorithms.advantages.moments import group_mean
from roll.algorithms.advantages.returns import token_returns
from roll.algorithms.advantages.whitening import whiten
from roll.algorithms.registry import knob


@dataclass(frozen=True)
class ReinforcePlusPlusKnobs:
    """Arguments of `reinforce_plus_plus`."""

    gamma: float = knob(1.0, help="Discount per response token.", at_least=0, at_most=1)
    eps: float = knob(1e-8, help="Added to the deviation of the batch, in units of the return.", above=0)


@ADVANTAGE_ESTIMATORS.register(
    "reinforce_plus_plus",
    ReinforcePlusPlusKnobs,
    formula="A[t] = (G[t] − mean(G)) / (std(G) + eps), G[t] = Σ over k ≥ t of gamma^(k − t) · r[k], moments over all "
    "response tokens of the batch",
    source="REINFORCE++, arXiv 2501.03262",
    use="One sample a prompt is enough. The paper has the KL penalty (k1) in the token rewards: "
    "`add_token_level_kl: true`.",
    traits=lambda knobs: AdvantageTraits(
        whitens=True,
        returns_to_go=True,
        shifts_cancel="batch" if knobs.gamma == 1 else "none",
        scales_cancel="batch",
    ),
)
def reinforce_plus_plus_advantages(inputs: AdvantageInputs, knobs: ReinforcePlusPlusKnobs) -> Tensor:
    """Return discounted returns of the token rewards, whitened over the batch, ``[batch, seq]`` (arXiv 2501.03262)."""
    returns = token_returns(inputs.token_rewards, inputs.response_mask, knobs.gamma)
    return whiten(returns, inputs.response_mask, knobs.eps)


@dataclass(frozen=True)
class ReinforcePlusPlusBaselineKnobs:
    """Arguments of `reinforce_plus_plus_baseline`."""

    eps: float = knob(1e-8, help="Added to the deviation of the batch, in units of the reward.", above=0)


@ADVANTAGE_ESTIMATORS.register(
    "reinforce_plus_plus_baseline",
    ReinforcePlusPlusBaselineKnobs,
    formula="A = (B − mean(B)) / (std(B) + eps), B = R − mean(R of the group), moments over all response tokens of the "
    "batch",
    source="REINFORCE++ with baseline, arXiv 2501.03262",
    use="Several samples a prompt whose rewards have different scales per prompt: the group gives the mean, the batch "
    "the deviation. The paper adds the KL (k2) to the loss: `use_kl_loss: true`.",
    traits=AdvantageTraits(group_relative=True, whitens=True, shifts_cancel="group", scales_cancel="batch"),
)
def reinforce_plus_plus_baseline_advantages(inputs: AdvantageInputs, knobs: ReinforcePlusPlusBaselineKnobs) -> Tensor:
    """Return group-centred rewards, whitened over the tokens of the batch, ``[batch, seq]`` (arXiv 2501.03262).

    Every token has the same weight, so the mean that whitening subtracts need not be 0 if lengths differ.
    """
    centred = compared(inputs, lambda rewards, groups, _: rewards - group_mean(rewards, groups))
    return whiten(centred, inputs.response_mask, knobs.eps)

"""Advantage estimators by name, and what happens to advantages afterwards.

One file per family; the modules imported here register their estimators.
"""

from roll.algorithms.advantages.estimate import estimate_advantages, shape_advantages
from roll.algorithms.advantages.estimator import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    AdvantageInputs,
    AdvantageTraits,
    make_advantage_estimator,
)
from roll.algorithms.advantages.gae import GAEKnobs, gae_advantages, generalised_advantages
from roll.algorithms.advantages.gigpo import GiGPOKnobs, gigpo_advantages
from roll.algorithms.advantages.group_relative import (
    GRPOKnobs,
    group_normalised,
    grpo_advantages,
    opo_advantages,
    rloo_advantages,
)
from roll.algorithms.advantages.reinforce_plus_plus import (
    ReinforcePlusPlusBaselineKnobs,
    ReinforcePlusPlusKnobs,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from roll.algorithms.advantages.remax import remax_advantages
from roll.algorithms.advantages.returns import ReinforceKnobs, reinforce_advantages, token_returns
from roll.algorithms.advantages.turns import (
    AgenticReinforceKnobs,
    StepReinforceKnobs,
    agentic_reinforce_advantages,
    response_segments,
    step_reinforce_advantages,
)
from roll.algorithms.advantages.whitening import clip_advantages, whiten
from roll.algorithms.moments import Groups

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "AdvantageInputs",
    "AdvantageTraits",
    "AgenticReinforceKnobs",
    "GAEKnobs",
    "GRPOKnobs",
    "GiGPOKnobs",
    "Groups",
    "ReinforceKnobs",
    "ReinforcePlusPlusBaselineKnobs",
    "ReinforcePlusPlusKnobs",
    "StepReinforceKnobs",
    "agentic_reinforce_advantages",
    "clip_advantages",
    "estimate_advantages",
    "gae_advantages",
    "generalised_advantages",
    "gigpo_advantages",
    "group_normalised",
    "grpo_advantages",
    "make_advantage_estimator",
    "opo_advantages",
    "reinforce_advantages",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "response_segments",
    "rloo_advantages",
    "step_reinforce_advantages",
    "token_returns",
    "whiten",
    "shape_advantages",
]

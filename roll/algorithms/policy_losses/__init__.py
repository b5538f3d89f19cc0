"""Policy-gradient losses per token, by name.

Ratios are anchored on the log-probabilities recorded when the tokens were sampled, unless a run asks for recomputed
ones, so every correction sees the real distance between the policy that acted and the one that learns. The modules
imported here register their losses: a new family is a new file and one line below.
"""

from roll.algorithms.policy_losses import (
    clipped,
    decoupled,
    divergence,
    regularised,
    sequence,
    soft,
    tapered,
    vanilla,
    weighted,
)
from roll.algorithms.policy_losses.base import (
    POLICY_LOSSES,
    Anchor,
    PolicyInputs,
    PolicyLoss,
    PolicyLossTraits,
    TokenMetrics,
    make_policy_loss,
)

__all__ = [
    "POLICY_LOSSES",
    "Anchor",
    "PolicyInputs",
    "PolicyLoss",
    "PolicyLossTraits",
    "TokenMetrics",
    "clipped",
    "decoupled",
    "divergence",
    "make_policy_loss",
    "regularised",
    "sequence",
    "soft",
    "tapered",
    "vanilla",
    "weighted",
]

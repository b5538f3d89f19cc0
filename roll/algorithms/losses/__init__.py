"""Policy-gradient losses per token, by name.

The old policy of a ratio is the one that sampled the tokens, with the log-probabilities recorded then, unless a run
asks for recomputed ones. Every correction therefore sees the real distance between the sampling policy and the trained
policy. The modules imported here register their losses: a new family is a new file and one name below.
"""

from roll.algorithms.losses import (
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

__all__ = [
    "clipped",
    "decoupled",
    "divergence",
    "regularised",
    "sequence",
    "soft",
    "tapered",
    "vanilla",
    "weighted",
]

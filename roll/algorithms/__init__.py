"""Tensor mathematics of reinforcement learning, as pure functions on ``[batch, seq]`` tensors with a response mask.

Masked positions influence no value and no gradient, inputs are never changed, and nothing depends on how a batch is
split. The modules imported here register their variants: a new family of losses or estimators is a new file and one
line below.
"""

from roll.algorithms import advantages, losses

__all__ = ["advantages", "losses"]

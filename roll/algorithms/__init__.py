"""Tensor mathematics of reinforcement learning, as pure functions on ``[batch, seq]`` tensors with a response mask.

Masked positions influence no value and no gradient, inputs are never changed, and nothing depends on how a batch is
split.
"""

"""The definition of an advantage estimator: a named function of masked inputs, with its arguments and requirements.

Rewards come per token (a sequence's reward sits on its last response token, KL penalties on their own tokens) and are
never changed in place. Tokens that the policy did not choose have no advantage and do not cut a return: a reward after
a tool's answer still reaches the tokens before that answer. Groups and batch statistics need the whole batch, so an
estimator is called once per batch and never per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from roll.algorithms.advantages.moments import Groups, group_tensor
from roll.algorithms.aggregation import keep
from roll.algorithms.registry import Registry

ADVANTAGE_ESTIMATORS = Registry("advantage estimator")


@dataclass(frozen=True)
class AdvantageTraits:
    """Requirements and properties of an advantage estimator, for its callers."""

    group_relative: bool = False
    """True if it compares the samples of a group; a group of one sample then teaches nothing."""
    needs_greedy_baseline: bool = False
    """True if it needs ``baseline_rewards``."""
    needs_values: bool = False
    """True if it needs ``values``."""
    needs_turns: bool = False
    """True if it needs ``turns``."""
    needs_states: bool = False
    """True if it needs ``states``."""
    for_episodes: bool = False
    """True if it differs from other estimators only for episodes of several turns."""
    returns_to_go: bool = False
    """True if tokens of one response can have different advantages, given a discount or token rewards."""
    shifts_cancel: Literal["none", "batch", "group"] = "none"
    """Shifts of the rewards that have no effect: one amount for the whole batch, or one per group."""
    scales_cancel: Literal["none", "batch", "group"] = "none"
    """Scalings of the rewards that have no effect: one factor for the whole batch, or one per group."""
    whitens: bool = False
    """True if it already gives the batch mean 0 and deviation 1, so that whitening again does nothing."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator. Floating-point tensors are float64 and 0 outside the mask."""

    token_rewards: Tensor
    """``[batch, seq]``."""
    response_mask: Tensor
    """bool ``[batch, seq]``."""
    groups: Tensor
    """int64 ``[batch]``."""
    values: Tensor | None = None
    """``[batch, seq]``: the critic's estimate, made before each response token, of the return from that token on."""
    baseline_rewards: Tensor | None = None
    """``[batch]``: the reward of the greedy response to the sample's prompt."""
    turns: Tensor | None = None
    """int64 ``[batch, seq]``: the turn of each response token, counted from 0; -1 outside the mask."""
    states: Tensor | None = None
    """int64 ``[batch, turns]``: the id of the state in which each turn acted; -1 for none."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """A named estimator with its arguments filled in."""

    name: str
    function: Callable[[AdvantageInputs, Any], Tensor]
    knobs: Any
    traits: AdvantageTraits = AdvantageTraits()

    def __call__(
        self,
        token_rewards: Tensor,
        response_mask: Tensor,
        groups: Groups,
        *,
        values: Tensor | None = None,
        baseline_rewards: Tensor | None = None,
        turns: Tensor | None = None,
        states: Tensor | None = None,
    ) -> Tensor:
        """Return the advantages ``[batch, seq]`` of a whole batch, without gradient.

        They are 0 outside the mask, whatever the inputs held there. Computed in float64; returned as float64 if the
        rewards are float64, else float32. Shapes are those of `AdvantageInputs`. ``ValueError`` names a field that is
        needed and missing, or that has the wrong shape.
        """
        given = {"values": values, "baseline_rewards": baseline_rewards, "turns": turns, "states": states}
        self._check(given, response_mask)
        inputs = AdvantageInputs(
            token_rewards=keep(token_rewards.detach(), response_mask).double(),
            response_mask=response_mask,
            groups=group_tensor(groups, token_rewards),
            values=None if values is None else keep(values.detach(), response_mask).double(),
            baseline_rewards=None if baseline_rewards is None else baseline_rewards.detach().double(),
            turns=None if turns is None else torch.where(response_mask, turns.long(), -1),
            states=states,
        )
        advantages = keep(self.function(inputs, self.knobs), response_mask)
        return advantages.to(result_dtype(token_rewards))

    def _check(self, given: Mapping[str, Tensor | None], response_mask: Tensor) -> None:
        needed = {
            "values": self.traits.needs_values,
            "baseline_rewards": self.traits.needs_greedy_baseline,
            "turns": self.traits.needs_turns,
            "states": self.traits.needs_states,
        }
        missing = [name for name, is_needed in needed.items() if is_needed and given[name] is None]
        if missing:
            raise ValueError(f"the advantage estimator {self.name!r} needs {', '.join(missing)}")
        batch, width = response_mask.shape
        shapes = {"values": (batch, width), "baseline_rewards": (batch,), "turns": (batch, width)}
        for name, shape in shapes.items():
            found = given[name]
            if found is not None and tuple(found.shape) != shape:
                raise ValueError(f"{name} must have the shape {list(shape)}, not {list(found.shape)}")


def make_advantage_estimator(name: str, args: Mapping[str, Any] | None = None) -> AdvantageEstimator:
    """Return the estimator ``name`` with the arguments ``args``.

    Raises ``KnobError`` (a ``ValueError``) that lists every wrong name, type and range.
    """
    function, knobs = ADVANTAGE_ESTIMATORS.build(name, args or {})
    return AdvantageEstimator(name, function, knobs, ADVANTAGE_ESTIMATORS.traits(name, knobs))


def result_dtype(rewards: Tensor) -> torch.dtype:
    """Return float64 for float64 rewards, else float32."""
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32

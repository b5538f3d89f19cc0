"""What an advantage estimator is: a named function of masked inputs, with its knobs and what it needs.

Rewards come per token (a sequence's reward sits on its last response token, KL penalties on their own tokens) and are
never changed in place. Tokens the policy did not choose carry no advantage and end no return: a reward after a tool's
answer reaches the tokens before it. Groups and batch statistics need the whole batch, so an estimator is called once
per batch and never per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from roll.algorithms.masking import keep
from roll.algorithms.moments import Groups, group_tensor
from roll.algorithms.registry import Registry

ADVANTAGE_ESTIMATORS = Registry("advantage estimator")


@dataclass(frozen=True)
class AdvantageTraits:
    """What the surroundings must know about an estimator."""

    group_relative: bool = False
    """It compares the samples of a group: one sample a group leaves it nothing to learn from."""
    needs_greedy_baseline: bool = False
    """It needs ``baseline_rewards``."""
    needs_values: bool = False
    """It needs ``values``."""
    needs_turns: bool = False
    """It needs ``turns``."""
    needs_states: bool = False
    """It needs ``states``."""
    for_episodes: bool = False
    """It differs from others only where an episode has several turns."""
    returns_to_go: bool = False
    """Tokens of one response differ, if there is a discount or rewards of tokens."""
    shifts_cancel: Literal["none", "batch", "group"] = "none"
    """Whether rewards may be shifted without effect: all by one amount, or each group by its own."""
    scales_cancel: Literal["none", "batch", "group"] = "none"
    """Whether rewards may be scaled without effect: all by one factor, or each group by its own."""
    whitens: bool = False
    """It gives the batch mean 0 and deviation 1 itself, so whitening once more does nothing."""


@dataclass(frozen=True)
class AdvantageInputs:
    """What an estimator may look at: float64, 0 outside the mask."""

    token_rewards: Tensor
    """``[batch, seq]``."""
    response_mask: Tensor
    """bool ``[batch, seq]``."""
    groups: Tensor
    """int64 ``[batch]``."""
    values: Tensor | None = None
    """``[batch, seq]``: the critic's estimate of the return from each response token on, before that token."""
    baseline_rewards: Tensor | None = None
    """``[batch]``: reward of the greedy response to the sample's prompt."""
    turns: Tensor | None = None
    """int64 ``[batch, seq]``: turn that a response token belongs to, counted from 0; -1 outside the mask."""
    states: Tensor | None = None
    """int64 ``[batch, turns]``: id of the state that each turn acted in; -1: none."""


@dataclass(frozen=True)
class AdvantageEstimator:
    """A named estimator with its knobs filled in."""

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
        """Advantages ``[batch, seq]`` of a whole batch, without gradient and 0 outside the mask, whatever stood there.

        Computed in float64; returned as float64 if the rewards are, else float32. Shapes are those of
        `AdvantageInputs`. ``ValueError`` names a field that is needed and missing, or has another shape.
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
    """The estimator ``name`` with the knobs ``args``.

    Raises ``KnobError`` (a ``ValueError``) that lists every wrong name, type and range.
    """
    function, knobs = ADVANTAGE_ESTIMATORS.build(name, args or {})
    return AdvantageEstimator(name, function, knobs, ADVANTAGE_ESTIMATORS.traits(name, knobs))


def result_dtype(rewards: Tensor) -> torch.dtype:
    """float64 for float64 rewards, else float32."""
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32

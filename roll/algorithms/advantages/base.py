"""Base of the advantage estimators: inputs, requirements, lookup by name, and whitening and clipping of advantages.

Rewards are given per token: a sequence's reward is on its last response token, KL penalties are on each token. They are
never modified in place. Tokens that the policy did not generate have no advantage, but do not interrupt a return: a
reward after a tool's answer still reaches the tokens before that answer. An estimator is called with whole groups, and
with the whole batch unless it declares that it looks at one group only; never per micro-batch. To add an estimator, add
a file; the keyword arguments of its function are its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from roll.algorithms.advantages.shared import Groups, group_tensor, result_dtype
from roll.algorithms.aggregation import checked_mask, checked_shape, keep
from roll.algorithms.kl import kl_penalised_token_rewards, sequence_token_rewards
from roll.algorithms.registry import ADVANTAGE_ESTIMATORS, About, built

advantage_estimator = About
"""Decorator that describes an estimator. It can be omitted if the default `AdvantageRequirements` apply."""


@dataclass(frozen=True)
class AdvantageRequirements:
    """Requirements and properties of an advantage estimator, for its callers and for configuration checks."""

    by_group: bool = False
    """True if a group's advantages depend on this group only. A large batch is then estimated in slices, in less
    memory."""
    group_relative: bool = False
    """True if it compares the samples of a group."""
    least_samples: int = 2
    """Minimum group size for advantages other than 0, if it is group-relative."""
    needs_greedy_baseline: bool = False
    """True if it needs ``baseline_rewards``."""
    needs_values: bool = False
    """True if it needs a critic's ``values``."""
    needs_parts: bool = False
    """True if it handles each named reward of a sample separately. It then ignores ``token_rewards``."""
    needs_turns: bool = False
    """True if it needs ``turns``."""
    needs_states: bool = False
    """True if it needs ``states``."""
    for_episodes: bool = False
    """True if it is meant for multi-turn episodes. On single-turn responses it equals a simpler estimator."""
    returns_to_go: bool = False
    """True if tokens of one response can have different advantages, because of a discount or per-token rewards."""
    shifts_cancel: Literal["none", "batch", "group"] = "none"
    """Invariance to reward shifts: ``batch``, adding one constant to the whole batch changes nothing; ``group``, adding
    one constant per group changes nothing."""
    scales_cancel: Literal["none", "batch", "group"] = "none"
    """Invariance to multiplying rewards by a factor: one for the whole batch, or one per group."""
    whitens: bool = False
    """True if its advantages already have mean 0 and standard deviation 1 over the batch."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an advantage estimator.

    On construction, floating-point tensors are converted to float64 without gradient, and per-token ones are set to 0
    outside the mask. ``ValueError`` for a field of the wrong shape.
    """

    token_rewards: Tensor
    """``[batch, seq]``: reward of each token."""
    response_mask: Tensor
    """bool ``[batch, seq]``: tokens that the policy generated."""
    groups: Tensor
    """int64 ``[batch]``: group id of each sample."""
    values: Tensor | None = None
    """``[batch, seq]``: the critic's value of the state before each response token."""
    baseline_rewards: Tensor | None = None
    """``[batch]``: reward of the greedy response to the sample's prompt."""
    parts: Tensor | None = None
    """``[batch, names]``: named rewards of each sample; 0 where a sample lacks the name."""
    part_weights: Tensor | None = None
    """``[batch, names]``: weight of each named reward in the sample's reward; 0 where a sample lacks the name."""
    turns: Tensor | None = None
    """int64 ``[batch, seq]``: turn number of each response token, from 0; -1 outside the mask."""
    states: Tensor | None = None
    """int64 ``[batch, turns]``: id of the environment state in which each turn acted; -1: none."""

    def __post_init__(self) -> None:
        checked_mask(self.response_mask)
        batch, width = self.response_mask.shape
        names = 0 if self.parts is None else self.parts.shape[-1]
        shapes = {
            "token_rewards": (batch, width),
            "values": (batch, width),
            "baseline_rewards": (batch,),
            "parts": (batch, names),
            "part_weights": (batch, names),
            "turns": (batch, width),
        }
        for name, shape in shapes.items():
            found = getattr(self, name)
            if found is not None:
                checked_shape(name, found, shape)
        for name in ("token_rewards", "values"):
            self._set(name, lambda value: keep(value.detach(), self.response_mask).double())
        for name in ("baseline_rewards", "parts", "part_weights"):
            self._set(name, lambda value: value.detach().double())
        self._set("turns", lambda value: torch.where(self.response_mask, value.long(), -1))

    def _set(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        value = getattr(self, name)
        if value is not None:
            object.__setattr__(self, name, change(value))


@dataclass(frozen=True)
class AdvantageEstimator:
    """An advantage estimator with its settings bound."""

    name: str
    function: Callable[..., Tensor]
    arguments: Mapping[str, Any]
    requirements: AdvantageRequirements = AdvantageRequirements()

    def __call__(
        self, token_rewards: Tensor, response_mask: Tensor, groups: Groups | None = None, **fields: Tensor | None
    ) -> Tensor:
        """Return the advantages ``[batch, seq]`` of whole groups, without gradient.

        They are 0 outside the mask, whatever the inputs hold there. Computed in float64; returned as float64 if the
        rewards are float64, else as float32. ``groups`` ``[batch]`` are group ids; without them each sample is a group
        of its own. ``fields`` are the other fields of `AdvantageInputs`. ``ValueError`` names a required field that is
        missing, or a field of the wrong shape.
        """
        needs = self.requirements
        needed = {
            "groups": needs.group_relative,
            "values": needs.needs_values,
            "baseline_rewards": needs.needs_greedy_baseline,
            "parts": needs.needs_parts,
            "part_weights": needs.needs_parts,
            "turns": needs.needs_turns,
            "states": needs.needs_states,
        }
        given = {"groups": groups, **fields}
        missing = [name for name, is_needed in needed.items() if is_needed and given.get(name) is None]
        if missing:
            raise ValueError(f"the advantage estimator {self.name!r} needs {', '.join(missing)}")
        numbers = group_tensor(range(len(token_rewards)) if groups is None else groups, token_rewards)
        inputs = AdvantageInputs(token_rewards, response_mask, numbers, **fields)
        return keep(self.function(inputs, **self.arguments), response_mask).to(result_dtype(token_rewards))


def make_advantage_estimator(name: str, args: Mapping[str, Any] | None = None) -> AdvantageEstimator:
    """Return an estimator with its settings bound. Raises `ConfigError` listing every wrong name, type and range."""
    paths = ("adv_estimator", "adv_estimator_args")
    return AdvantageEstimator(name, *built(ADVANTAGE_ESTIMATORS, name, args or {}, paths, AdvantageRequirements()))


def estimate_advantages(
    estimator: AdvantageEstimator,
    rewards: Tensor,
    response_mask: Tensor,
    groups: Groups,
    *,
    logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
    kl_estimator: str = "k3",
    token_rewards: Tensor | None = None,
    **fields: Tensor | None,
) -> Tensor:
    """Compute per-token advantages ``[batch, seq]`` from per-sample rewards ``[batch]``, for whole groups.

    The reward of a sample is placed on its last response token. With ``logprobs`` and ``reference_logprobs`` (both or
    neither, else ``ValueError``), a KL penalty weighted by ``kl_coef`` is added to each token's reward. Optional
    ``token_rewards`` ``[batch, seq]`` are added as well. ``fields`` are those of `AdvantageEstimator.__call__`. Returns
    float64 if the rewards are float64, else float32.
    """
    if logprobs is not None and reference_logprobs is not None:
        all_rewards = kl_penalised_token_rewards(
            rewards, logprobs, reference_logprobs, response_mask, kl_coef, kl_estimator
        )
    elif logprobs is None and reference_logprobs is None:
        all_rewards = sequence_token_rewards(rewards, response_mask)
    else:
        raise ValueError("a KL penalty needs the log-probabilities of both the policy and the reference")
    if token_rewards is not None:
        all_rewards = all_rewards + keep(token_rewards, response_mask).to(all_rewards.dtype)
    return estimator(all_rewards, response_mask, groups, **fields)


def shape_advantages(
    advantages: Tensor,
    response_mask: Tensor,
    whitened: bool,
    clip: float | None,
    weight: float = 1.0,
    others: Tensor | None = None,
) -> Tensor:
    """Return clip(weight x whiten(advantages) + others, -clip, clip); all ``[batch, seq]``.

    Advantages are whitened over the batch only if ``whitened``. ``others`` are further advantages, 0 outside the
    response mask; None: 0. ``clip`` None: no clipping. ``ValueError`` unless ``clip`` is above 0, and for a wrong
    shape.
    """
    checked_mask(response_mask)
    for name, tensor in (("advantages", advantages), ("others", others)):
        if tensor is not None:
            checked_shape(name, tensor, tuple(response_mask.shape), floating=True)
    if whitened:
        advantages = whiten(advantages, response_mask)
    if weight != 1:
        advantages = weight * advantages
    if others is not None:
        advantages = advantages + others
    if clip is None:
        return advantages
    if not clip > 0:
        raise ValueError(f"advantages are clipped to a limit above 0, not {clip}")
    return advantages.clamp(-clip, clip)


def whiten(advantages: Tensor, response_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Normalise advantages ``[batch, seq]`` to mean 0 and standard deviation 1 over the batch's response tokens.

    The deviation is unbiased (n - 1); ``eps`` is added to it. If all values are equal the result is exactly 0. Returns
    the dtype of ``advantages``. ``ValueError`` for a wrong shape or dtype.
    """
    checked_mask(response_mask)
    checked_shape("advantages", advantages, tuple(response_mask.shape), floating=True)
    tokens = advantages[response_mask].double()
    if not len(tokens):
        return torch.zeros_like(advantages)
    mean = tokens.mean().clamp(tokens.min(), tokens.max())
    deviation = ((tokens - mean).square().sum() / max(1, len(tokens) - 1)).sqrt()
    centred = keep(advantages, response_mask).double() - mean
    return keep(centred / (deviation + eps), response_mask).to(advantages.dtype)

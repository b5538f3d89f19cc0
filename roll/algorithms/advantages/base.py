"""Advantage estimators: their inputs, how one is found by its name, and how advantages are shaped afterwards.

Rewards come per token (a sequence's reward sits on its last response token, KL penalties on their own tokens) and are
never changed in place. Tokens that the policy did not choose have no advantage and do not cut a return: a reward after
a tool's answer still reaches the tokens before that answer. Groups and batch statistics need the whole batch, so an
estimator is called once per batch and never per micro-batch. A new estimator is a file; the keyword
arguments of its function are its settings.
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
"""Decorator that describes an estimator; one with the default `AdvantageRequirements` works without it."""


@dataclass(frozen=True)
class AdvantageRequirements:
    """Requirements and properties of an advantage estimator, for its callers."""

    group_relative: bool = False
    """True if it compares the samples of a group."""
    least_samples: int = 2
    """Samples of a group with which it teaches something, if it compares them."""
    needs_greedy_baseline: bool = False
    """True if it needs ``baseline_rewards``."""
    needs_values: bool = False
    needs_parts: bool = False
    """True if it compares the named rewards of a sample each by itself; it then reads no ``token_rewards``."""
    needs_turns: bool = False
    needs_states: bool = False
    for_episodes: bool = False
    """True if it differs from other estimators only for episodes of several turns."""
    returns_to_go: bool = False
    """True if tokens of one response can have different advantages, given a discount or token rewards."""
    shifts_cancel: Literal["none", "batch", "group"] = "none"
    """Shifts of the rewards that have no effect: one amount for the whole batch, or one per group."""
    scales_cancel: Literal["none", "batch", "group"] = "none"
    """Scalings of the rewards that have no effect: one factor for the whole batch, or one per group."""
    whitens: bool = False
    """True if it already gives the batch mean 0 and deviation 1, so that whitening again is pointless."""


@dataclass(frozen=True)
class AdvantageInputs:
    """Inputs of an estimator. Once this is made, floating-point tensors are float64, without gradient and 0 outside the
    mask, whatever they held there. ``ValueError`` for a field of the wrong shape."""

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
    parts: Tensor | None = None
    """``[batch, names]``: the named rewards of each sample; 0 for a name that it does not have."""
    part_weights: Tensor | None = None
    """``[batch, names]``: the weight of each in the sample's reward; 0 for a name that it does not have."""
    turns: Tensor | None = None
    """int64 ``[batch, seq]``: the turn of each response token, counted from 0; -1 outside the mask."""
    states: Tensor | None = None
    """int64 ``[batch, turns]``: the id of the state in which each turn acted; -1 for none."""

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
    """A named estimator with its arguments filled in."""

    name: str
    function: Callable[..., Tensor]
    arguments: Mapping[str, Any]
    requirements: AdvantageRequirements = AdvantageRequirements()

    def __call__(
        self, token_rewards: Tensor, response_mask: Tensor, groups: Groups | None = None, **fields: Tensor | None
    ) -> Tensor:
        """Return the advantages ``[batch, seq]`` of a whole batch, without gradient.

        They are 0 outside the mask, whatever the inputs held there. Computed in float64; returned as float64 if the
        rewards are float64, else float32. Without ``groups``, which only estimators that compare need, each sample is a
        group of its own. ``fields`` are the other fields of `AdvantageInputs`. ``ValueError`` names a field that is
        needed and missing, or that has the wrong shape.
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
    """Return an estimator with its arguments. Raises `ConfigError` that lists every wrong name, type and range."""
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
    """Turn the rewards of samples ``[batch]`` into the advantages of tokens ``[batch, seq]``, for a whole batch.

    Return float64 if the rewards are float64, else float32. With ``logprobs`` and ``reference_logprobs`` the token
    rewards include the KL penalty; give both or neither, else ``ValueError``. ``token_rewards`` ``[batch, seq]`` are
    added to them. ``fields`` are those of `AdvantageEstimator.__call__`.
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
    """Whiten advantages over the batch if ``whitened``, multiply them by ``weight``, add ``others``, and clip the sum
    to [-clip, clip]; all ``[batch, seq]``.

    ``others`` are 0 outside the response mask. ``ValueError`` unless ``clip`` is above 0, and for a wrong shape.
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
    """Give advantages ``[batch, seq]`` mean 0 and deviation 1 over the response tokens of the whole batch.

    The deviation is unbiased (n - 1). Equal values (or a single token, or none) give exactly 0. Returns the type of
    ``advantages``. ``ValueError`` for a wrong shape or type.
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

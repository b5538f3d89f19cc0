"""What an advantage estimator is, how one is found by its name, and what happens to advantages afterwards.

Rewards come per token (a sequence's reward sits on its last response token, KL penalties on their own tokens) and are
never changed in place. Tokens that the policy did not choose have no advantage and do not cut a return: a reward after
a tool's answer still reaches the tokens before that answer. Groups and batch statistics need the whole batch, so an
estimator is called once per batch and never per micro-batch. A new estimator is a file and a line in
`ADVANTAGE_ESTIMATORS`; its keyword arguments are its settings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from roll.algorithms.about import About, about, built
from roll.algorithms.advantages.moments import Groups, group_tensor
from roll.algorithms.aggregation import keep
from roll.algorithms.kl import kl_penalised_token_rewards, sequence_token_rewards
from roll.configs.plugins import Kind, PlugIn

ADVANTAGE_ESTIMATORS = Kind(
    "advantage estimator",
    "roll.advantage_estimators",
    {
        "agentic_reinforce": PlugIn("roll.algorithms.advantages.agentic_reinforce:agentic_reinforce"),
        "gae": PlugIn("roll.algorithms.advantages.gae:gae"),
        "gigpo": PlugIn("roll.algorithms.advantages.gigpo:gigpo"),
        "grpo": PlugIn("roll.algorithms.advantages.grpo:grpo"),
        "opo": PlugIn("roll.algorithms.advantages.opo:opo"),
        "reinforce": PlugIn("roll.algorithms.advantages.reinforce:reinforce"),
        "reinforce_plus_plus": PlugIn("roll.algorithms.advantages.reinforce_plus_plus:reinforce_plus_plus"),
        "reinforce_plus_plus_baseline": PlugIn(
            "roll.algorithms.advantages.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline"
        ),
        "remax": PlugIn("roll.algorithms.advantages.remax:remax"),
        "rloo": PlugIn("roll.algorithms.advantages.rloo:rloo"),
        "step_reinforce": PlugIn("roll.algorithms.advantages.step_reinforce:step_reinforce"),
    },
    PlugIn,
)


@dataclass(frozen=True)
class AdvantageRequirements:
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


EstimatorFunction = Callable[..., Tensor]


def advantage_estimator(
    formula: str = "",
    source: str = "",
    use: str = "",
    requirements: AdvantageRequirements | Callable[..., AdvantageRequirements] = AdvantageRequirements(),
) -> Callable[[EstimatorFunction], EstimatorFunction]:
    """Return a decorator that describes an estimator; one with the default requirements works without it. See
    `About`."""
    return about(About(formula, source, use, requirements))


@dataclass(frozen=True)
class AdvantageEstimator:
    """A named estimator with its arguments filled in."""

    name: str
    function: EstimatorFunction
    arguments: Mapping[str, Any]
    requirements: AdvantageRequirements = AdvantageRequirements()

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
        advantages = keep(self.function(inputs, **self.arguments), response_mask)
        return advantages.to(result_dtype(token_rewards))

    def _check(self, given: Mapping[str, Tensor | None], response_mask: Tensor) -> None:
        needed = {
            "values": self.requirements.needs_values,
            "baseline_rewards": self.requirements.needs_greedy_baseline,
            "turns": self.requirements.needs_turns,
            "states": self.requirements.needs_states,
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


def make_advantage_estimator(
    name: str, args: Mapping[str, Any] | None = None, paths: tuple[str, str] = ("adv_estimator", "adv_estimator_args")
) -> AdvantageEstimator:
    """Return the estimator ``name`` (see `ADVANTAGE_ESTIMATORS`) with the arguments ``args``.

    Raises `ConfigError` that lists every wrong name, type and range; ``paths`` are those of the name and of the
    arguments.
    """
    function, arguments, requirements = built(ADVANTAGE_ESTIMATORS, name, args or {}, paths, AdvantageRequirements())
    return AdvantageEstimator(name, function, arguments, requirements)


def result_dtype(rewards: Tensor) -> torch.dtype:
    """Return float64 for float64 rewards, else float32."""
    return torch.float64 if rewards.dtype == torch.float64 else torch.float32


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
    whitened: bool = False,
    clip: float | None = None,
    values: Tensor | None = None,
    baseline_rewards: Tensor | None = None,
    turn_rewards: Tensor | None = None,
    turns: Tensor | None = None,
    states: Tensor | None = None,
) -> Tensor:
    """Turn the rewards of samples ``[batch]`` into the advantages of tokens ``[batch, seq]``, for a whole batch.

    Return float64 if the rewards are float64, else float32. With ``logprobs`` and ``reference_logprobs`` the token
    rewards include the KL penalty; give both or neither, else ``ValueError``. ``turn_rewards`` ``[batch, seq]`` are
    added to the token rewards. Whitening comes after the estimator, clipping to [-clip, clip] last. The other arguments
    are the fields of `AdvantageInputs`; ``ValueError`` names one that the estimator needs and lacks.
    """
    if logprobs is not None and reference_logprobs is not None:
        token_rewards = kl_penalised_token_rewards(
            rewards, logprobs, reference_logprobs, response_mask, kl_coef, kl_estimator
        )
    elif logprobs is None and reference_logprobs is None:
        token_rewards = sequence_token_rewards(rewards, response_mask)
    else:
        raise ValueError("a KL penalty needs the log-probabilities of both the policy and the reference")
    if turn_rewards is not None:
        token_rewards = token_rewards + keep(turn_rewards, response_mask).to(token_rewards.dtype)
    advantages = estimator(
        token_rewards,
        response_mask,
        groups,
        values=values,
        baseline_rewards=baseline_rewards,
        turns=turns,
        states=states,
    )
    return shape_advantages(advantages, response_mask, whitened, clip)


def shape_advantages(advantages: Tensor, response_mask: Tensor, whitened: bool, clip: float | None) -> Tensor:
    """Whiten advantages over the batch if ``whitened``, then clip them to [-clip, clip]; all ``[batch, seq]``."""
    if whitened:
        advantages = whiten(advantages, response_mask)
    return advantages if clip is None else clip_advantages(advantages, clip)


def whiten(advantages: Tensor, response_mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Give advantages ``[batch, seq]`` mean 0 and deviation 1 over the response tokens of the whole batch.

    Uses population moments. Equal values (or a single token, or none) give exactly 0. Returns the type of
    ``advantages``.
    """
    tokens = advantages[response_mask].double()
    if not len(tokens):
        return torch.zeros_like(advantages)
    mean = tokens.mean().clamp(tokens.min(), tokens.max())
    deviation = (tokens - mean).square().mean().sqrt()
    centred = keep(advantages, response_mask).double() - mean
    return keep(centred / (deviation + eps), response_mask).to(advantages.dtype)


def clip_advantages(advantages: Tensor, limit: float) -> Tensor:
    """Clip advantages (any shape) to [-limit, limit]. ``ValueError`` unless ``limit`` is above 0."""
    if not limit > 0:
        raise ValueError(f"advantages are clipped to a limit above 0, not {limit}")
    return advantages.clamp(-limit, limit)

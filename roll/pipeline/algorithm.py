"""The algorithms of a run, built from its configuration, and their application to the batch of a training step.

A combination is rejected here, with the reason, if part of it would have no effect, would act twice, or would train on
stale tokens as if they were fresh. What a loss or an estimator needs is read from its registered requirements, never
from its name.

The stages fill in a batch as it passes through them: scores become rewards, and rewards become advantages. Before the
first update, the correction weights or rejects tokens by the ratio between the trainer's policy at that moment
(proximal) and the policy that sampled them (behaviour).
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from roll.algorithms.advantages.base import (
    AdvantageEstimator,
    AdvantageRequirements,
    estimate_advantages,
    make_advantage_estimator,
    shape_advantages,
)
from roll.algorithms.correction import Correction, correct, parse_correction
from roll.algorithms.kl import AdaptiveKLController, KLController, token_kl
from roll.algorithms.losses.base import LossRequirements
from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.algorithms.rewards import LengthPenalty, RepetitionPenalty, RewardShaping, RunningMoments, shape_rewards
from roll.algorithms.routing import RoutingShape
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem, Problems
from roll.configs.fields import changes
from roll.configs.roles import ROLL_ARGUMENTS
from roll.configs.run import AgenticConfig, DistillationConfig, ImageConfig, PipelineConfig, PromptConfig
from roll.data.records import Group, Sample, SampleBatch, derive_seed
from roll.pipeline.streaming import obstacles
from roll.rewards.registry import route_domains
from roll.trainers.step import PROMPT_PICTURES

if TYPE_CHECKING:  # it imports Ray, which would delay the report of a wrong configuration
    from roll.weights.verify import CanaryScores

logger = logging.getLogger(__name__)

MOST_LAGS_REPORTED = 8
"""Highest lag that has its own metric, which also includes all greater lags."""
SLICE_TOKENS = 2**20
"""Maximum number of padded tokens whose advantages are estimated at once, in 40 (`grpo`) to 180 (`gae`) bytes each."""
SHAPING_KEYS = ("reward_clip", "norm_mean_type", "norm_std_type", "length_penalty", "repetition_penalty")
"""Configuration keys that shape the reward of a response or an episode."""
FAR = 0.01
"""Ratios of mean per-step log-probabilities of images differ from 1 by less than this, usually by 1e-5 to 1e-3."""
_FROM_ONE = ("clip_low", "clip_high", "epsilon_low", "epsilon_high", "threshold", "second_moment")
"""Bounds given as the distance of a ratio from 1, or of its logarithm from 0."""
_AROUND_ONE = ("lower", "upper", "dual_clip", "behaviour_weight_cap")
"""Bounds given as ratios."""
_NO_BOUND = {"clip_low": 1, "epsilon_low": 1, "lower": 0}
"""Values that disable a bound, for bounds where infinity does not."""


@dataclass(frozen=True)
class AdvantageSettings:
    """Settings of the advantage estimation. KL controller and reward moments keep state between batches."""

    estimator: AdvantageEstimator
    shaping: RewardShaping
    reward_moments: RunningMoments
    whitened: bool
    advantage_clip: float | None
    kl_controller: KLController | None
    """Controller of the coefficient of the KL penalty in token rewards; None: no penalty."""
    kl_estimator: str
    episode_weight: float = 1.0
    """Weight of the shaped reward of an episode (or a response), which is credited to its last token."""
    turn_weight: float = 0.0
    """Weight of turn rewards, which are credited to the last token of each turn."""
    part_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Domain -> name of a reward component -> its weight in the score."""
    sample_weight: str | None = None
    """Name of the metric that weights an episode (or a response) in the loss; None: all weigh the same."""
    by_episode: bool = False
    """True if an episode counts once in the loss, however many samples it is (`PolicyObjective.by_episode`)."""
    distillation: DistillationConfig | None = None
    """How the divergence from the teacher is used; None: there is no teacher."""
    in_slices: bool = True
    """False to estimate all groups of a batch together, to compare with the advantages of its parts."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        controller = {} if self.kl_controller is None else self.kl_controller.state_dict()
        return {"reward_moments": self.reward_moments.state_dict(), "kl_controller": controller}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. Missing keys leave the current state unchanged."""
        if "reward_moments" in state:
            self.reward_moments.load_state_dict(state["reward_moments"])
        if self.kl_controller is not None and state.get("kl_controller"):
            self.kl_controller.load_state_dict(state["kl_controller"])


def add_advantages(batch: TrainingBatch, settings: AdvantageSettings) -> dict[str, float]:
    """Shape the rewards, and add ``advantages`` (float32 ``[total_tokens]``) to the batch.

    Samples that reward shaping excludes are also removed from the loss mask. Returns metrics over the sampled tokens.
    Raises `ValueError` if turn rewards have a weight but the samples record no turns.
    """
    metrics = _shape(batch, settings)
    if settings.sample_weight is not None:
        batch.data.per_sample["sample_weights"] = _sample_weights(batch, settings.sample_weight)
    if settings.by_episode:
        batch.share_episodes()
    slices = [_estimated(part, settings) for part in _slices(batch, settings)]
    found = {name: np.concatenate([each[name] for each in slices]) for name in slices[0]}
    tokens = batch.data.tokens
    tokens["advantages"] = found["advantages"]
    if "returns" in found:
        tokens["returns"], tokens["old_values"] = found["returns"], tokens["values"]
    sampled = found["advantages"][tokens["response_mask"]]
    if "reverse_kl" in found:
        metrics["distillation/reverse_kl"] = float(found["reverse_kl"].sum() / max(1, len(sampled)))
    if (penalty := settings.kl_controller) is not None:
        divergence = float(found["divergence"].mean())
        metrics |= {"kl_penalty/coef": penalty.coef, "kl_penalty/nats_per_response": divergence}
        penalty.update(divergence, len(found["divergence"]))
    return metrics | _spread("advantage", sampled) if sampled.size else metrics


@dataclass(frozen=True)
class _Slice:
    """Groups of a batch whose advantages are computed together."""

    groups: list[Group]
    data: SampleBatch
    """Each episode is one sample, as estimators need it; for the trainer it may be several."""
    group_of_episode: np.ndarray
    """int64 ``[episodes]``: number of each episode's group."""


def _slices(batch: TrainingBatch, settings: AdvantageSettings) -> Iterator[_Slice]:
    """Yield the slices of a batch: a single one, unless a group's advantages depend on this group only."""
    parts, numbers = [len(samples) for samples in batch.episodes], batch.group_of_episode
    data = batch.data.joined(parts)
    ends = [len(batch.groups)]
    if settings.in_slices and settings.estimator.requirements.by_group and not settings.whitened:
        ends = list(_ends(np.bincount(numbers).tolist(), data.lengths.tolist()))
    begins = [0, *ends[:-1]]
    cuts = np.searchsorted(numbers, [0, *ends]).tolist()
    split = data.split([end - begin for begin, end in pairwise(cuts)])
    for begin, end, own, (first, last) in zip(begins, ends, split, pairwise(cuts), strict=True):
        yield _Slice(batch.groups[begin:end], own, numbers[first:last])


def _ends(sizes: Sequence[int], lengths: Sequence[int]) -> Iterator[int]:
    """Yield the number of groups before the end of each slice, given the episodes of each group and the tokens of each
    episode."""
    episodes = width = first = 0
    for group, size in enumerate(sizes):
        widest = max(lengths[first : first + size], default=0)
        if episodes and (episodes + size) * max(width, widest) > SLICE_TOKENS:
            yield group
            episodes = width = 0
        episodes, width, first = episodes + size, max(width, widest), first + size
    yield len(sizes)


def _estimated(part: _Slice, settings: AdvantageSettings) -> dict[str, np.ndarray]:
    """Estimate the advantages of some groups.

    Returns ``advantages`` and, with values, ``returns`` (float32 ``[tokens]``); with a KL penalty, ``divergence``
    (float32 ``[episodes]``); with a teacher, ``reverse_kl`` (float64 ``[episodes]``).
    """
    data, found = part.data, {}

    def padded(name: str, fill: float = 0.0) -> torch.Tensor:
        return torch.from_numpy(data.padded(name, fill=fill))

    mask, penalty = padded("response_mask", fill=False), settings.kl_controller
    logprobs = padded("behaviour_logprobs") if penalty else None
    reference = padded("reference_logprobs") if penalty else None
    values = padded("values") if settings.estimator.requirements.needs_values else None
    baselines = [group.baseline_score for group in part.groups for _ in group.episodes]
    turns = padded("turns", fill=-1) if "turns" in data.tokens else None
    if settings.turn_weight and turns is None:
        raise ValueError(
            "the samples record no turns, so rewards of turns cannot be credited: let the environment manager fill "
            "`turns` and `turn_rewards`, or set `step_reward_weight: 0` and `episode_reward_weight: 1`"
        )
    token_rewards = padded("turn_rewards") * settings.turn_weight if settings.turn_weight else None
    reward_weight = advantage_weight = 1.0
    taught = None
    if (teaching := settings.distillation) is not None:
        # As in the KL penalty, the policy's log-probabilities are those recorded at sampling.
        reverse_kl = token_kl(padded("behaviour_logprobs"), padded("teacher_logprobs"), mask, "k1")
        found["reverse_kl"] = reverse_kl.double().sum(-1).numpy()
        if teaching.use == "rewards":
            reward_weight = teaching.reward_coef
            of_turns = 0.0 if token_rewards is None else reward_weight * token_rewards
            token_rewards = of_turns - teaching.coef * reverse_kl
        else:
            advantage_weight = teaching.reward_coef
            taught = -teaching.coef * reverse_kl if teaching.use == "advantages" else None
    estimated = estimate_advantages(
        settings.estimator,
        reward_weight * settings.episode_weight * torch.from_numpy(data.per_sample["rewards"]),
        mask,
        part.group_of_episode,
        logprobs=logprobs,
        reference_logprobs=reference,
        kl_coef=penalty.coef if penalty else 0.0,
        kl_estimator=settings.kl_estimator,
        values=values,
        baseline_rewards=None if None in baselines else reward_weight * torch.tensor(baselines, dtype=torch.float32),
        token_rewards=token_rewards,
        **(_parts(part.groups, settings.part_weights) if settings.estimator.requirements.needs_parts else {}),
        turns=turns,
        states=None if turns is None else _states(turns, padded("turn_states", fill=-1)),
    )
    clip = settings.advantage_clip
    shaped = shape_advantages(estimated, mask, settings.whitened, clip, advantage_weight, taught).numpy()
    if logprobs is not None and reference is not None:
        found["divergence"] = token_kl(logprobs, reference, mask, settings.kl_estimator).sum(-1).numpy()
    inside = np.arange(shaped.shape[1])[None, :] < data.lengths[:, None]
    found["advantages"] = np.ascontiguousarray(shaped[inside], dtype=np.float32)
    if values is not None:
        returns = torch.where(mask, estimated + values, 0.0).numpy()
        found["returns"] = np.ascontiguousarray(returns[inside], dtype=np.float32)
    return found


def with_own_advantages(part: TrainingBatch, settings: AdvantageSettings) -> TrainingBatch:
    """Return a copy of a part of a batch, with the advantages that its groups will have in the batch."""
    controller = settings.kl_controller
    untouched = replace(
        settings,
        reward_moments=RunningMoments(),
        kl_controller=None if controller is None else KLController(controller.coef),
    )
    data = replace(part.data, tokens=dict(part.data.tokens), per_sample=dict(part.data.per_sample))
    # Copies, because reward shaping writes into the samples.
    groups = [replace(group, samples=[replace(sample) for sample in group.samples]) for group in part.groups]
    copy = replace(part, groups=groups, data=data)
    add_advantages(copy, untouched)
    return copy


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    spread = {"mean": values.mean(), "std": values.std(), "min": values.min(), "max": values.max()}
    return {f"{name}/{measure}": float(value) for measure, value in spread.items()}


def _shape(batch: TrainingBatch, settings: AdvantageSettings) -> dict[str, float]:
    """Turn scores (and the penalties of turns) into rewards. Excluded episodes are removed from the loss mask."""
    data, episodes = batch.data, batch.episodes
    parts = [len(samples) for samples in episodes]
    shaped = shape_rewards(
        torch.tensor([samples[0].score for samples in episodes], dtype=torch.float32),
        torch.from_numpy(batch.group_of_episode),
        torch.tensor([sum(sample.response_tokens for sample in samples) for samples in episodes]),
        torch.tensor([any(sample.finish_reason == "length" for sample in samples) for samples in episodes]),
        settings.shaping,
        settings.reward_moments,
        tags=torch.from_numpy(batch.tag_of_episode),
        penalties=torch.tensor([samples[0].reward - samples[0].score for samples in episodes], dtype=torch.float32),
        responses=[
            np.concatenate([sample.token_ids[sample.response_mask] for sample in samples]) for samples in episodes
        ]
        if settings.shaping.repetition_penalty is not None
        else None,
    )
    data.per_sample["rewards"] = np.repeat(shaped.rewards.float().numpy(), parts)
    for samples, reward in zip(episodes, shaped.rewards.tolist(), strict=True):
        for sample in samples:
            sample.reward = reward
    if not shaped.keep.all():
        batch.leave_out(np.repeat(np.repeat(shaped.keep.numpy(), parts), data.lengths))
    return {f"reward/{name}": value for name, value in shaped.metrics.items()}


def _sample_weights(batch: TrainingBatch, name: str) -> np.ndarray:
    """Return the weight of each sample, float32 ``[samples]``. Raises `ValueError` for a missing or negative one."""
    weights: list[float] = []
    for group in batch.groups:
        for episode in group.episodes:
            weight = episode[0].metrics.get(name, math.nan)
            if not 0 <= weight < math.inf:
                raise ValueError(
                    f"sample_weight: a sample of prompt {group.prompt.prompt_id} has no number `{name}` of at least 0, "
                    "neither from its verifier or environment nor in the row of its prompt"
                )
            weights += [weight] * len(episode)
    return np.array(weights, dtype=np.float32)


def _parts(groups: Sequence[Group], weights: Mapping[str, Mapping[str, float]]) -> dict[str, torch.Tensor]:
    """Return each episode's reward components and weights, ``[episodes, names]``. `ValueError` if one is missing."""
    names = sorted({name for own in weights.values() for name in own})
    parts, part_weights = [], []
    for group in groups:
        own = weights.get(group.prompt.domain, {})
        for episode in group.episodes:
            missing = [name for name in own if name not in episode[0].metrics]
            if missing:
                raise ValueError(f"a sample of the domain {group.prompt.domain!r} has no reward {', '.join(missing)}")
            parts.append([episode[0].metrics[name] if name in own else 0.0 for name in names])
            part_weights.append([own.get(name, 0.0) for name in names])
    return {"parts": torch.tensor(parts), "part_weights": torch.tensor(part_weights)}


def _states(turns: torch.Tensor, token_states: torch.Tensor) -> torch.Tensor:
    """Return the state id of each turn, int64 ``[batch, turns]``, from those of tokens ``[batch, seq]``; -1: none."""
    number = int(turns.max()) + 1 if turns.numel() else 0
    states = token_states.new_full((len(turns), number + 1), -1)
    return states.scatter(1, torch.where(turns < 0, number, turns).long(), token_states)[:, :number]


@dataclass(frozen=True)
class Algorithms:
    """The objectives, the correction and the advantage settings of a run."""

    objective: PolicyObjective
    value_objective: ValueObjective
    correction: Correction | None
    advantages: AdvantageSettings
    streams: bool = False
    """True if the trainer adds up gradients group by group while the batch is still being generated."""
    not_streamed: str | None = None
    """Reason why `stream_groups: auto` does not stream."""


def build_algorithms(config: PipelineConfig) -> Algorithms:
    """Build the algorithms of a run.

    Raises `ConfigError` with every wrong name and argument or, if there is none, with every invalid combination.
    """
    problems = Problems()
    settings = config.train_infer_correction
    correction = problems.attempt(parse_correction, settings) if settings else None
    objective = problems.attempt(_objective, config, correction)
    estimator = problems.attempt(make_advantage_estimator, config.adv_estimator, config.adv_estimator_args)
    if objective is not None and not problems.found:
        problems.found += _policy_problems(config, objective, correction)
        if isinstance(config, ImageConfig) and config.sampling.log_prob != "sum":
            problems.found += _idle_bounds(objective, correction, config.sampling.log_prob)
    if estimator is not None:
        problems.found += _estimator_problems(config, estimator, objective)
        reasons = (
            []
            if config.actor_train.stream_groups is False
            else list(obstacles(config, estimator, correction, objective))
        )
        if config.actor_train.stream_groups is True:
            problems.found += [
                ConfigProblem("actor_train.stream_groups", f"true: {reason}", f"{remedy}, or set `auto` or `false`")
                for reason, remedy in reasons
            ]
    if problems.found or objective is None or estimator is None:
        raise ConfigError(problems.found)
    value_objective = ValueObjective(
        derived.max_new_tokens(config), config.loss_agg_mode, config.value_clip, _by_episode(config)
    )
    streams = config.actor_train.stream_groups is not False and not reasons
    needs_proximal = correction is not None or "proximal_logprobs" in objective.token_fields
    problems.found += _role_problems(config, needs_proximal, streams)
    if needs_proximal and isinstance(config, ImageConfig) and config.sampling.log_prob == "guard":
        message = "guard: it normalises ratios to the recorded log-probabilities, and this run needs recomputed ones"
        remedy = (
            "remove `train_infer_correction`, `old_logprobs: recompute` or the loss that needs them, or write `mean`"
        )
        problems.found.append(ConfigProblem("sampling.log_prob", message, remedy))
    problems.raise_any()
    if streams and needs_proximal:
        objective = replace(objective, one_pass=True, correction=correction)
    return Algorithms(
        objective,
        value_objective,
        correction,
        replace(_advantages(config, estimator), in_slices=not streams),
        streams,
        "; ".join(reason for reason, _ in reasons) or None,
    )


def _objective(config: PipelineConfig, correction: Correction | None) -> PolicyObjective:
    """Return the policy objective. Its `ConfigError` refers to the keys that the user wrote."""
    actor, oldest = config.actor_train, derived.resolved_max_staleness(config)
    try:
        return PolicyObjective(
            max_response_length=derived.max_new_tokens(config),
            pg_variant=actor.pg_variant,
            pg_variant_args=derived.pg_variant_args(config),
            loss_agg_mode=config.loss_agg_mode,
            use_kl_loss=config.use_kl_loss,
            kl_loss_coef=config.kl_loss_coef,
            kl_estimator=config.kl_estimator,
            closed_form_kl=derived.picture_sampling(config) is not None,
            entropy_loss_coef=config.entropy_loss_coef,
            old_policy="proximal" if config.old_logprobs == "recompute" else "behaviour",
            corrected=correction is not None and correction.weight is not None,
            weighted=config.sample_weight is not None,
            by_episode=_by_episode(config),
            max_lag=min(oldest, MOST_LAGS_REPORTED) if oldest else None,
            lags_capped=oldest > MOST_LAGS_REPORTED,
            monitored=not derived.truncates_sampling(config),
            distillation_coef=config.distillation.coef
            if config.distillation is not None and config.distillation.use == "loss"
            else 0.0,
        )
    except ConfigError as error:
        written = {
            f"pg_variant_args.{argument}": name
            for name, (_, argument) in ROLL_ARGUMENTS.items()
            if vars(actor)[name] is not None
        }
        raise ConfigError(
            [replace(each, path=f"actor_train.{written.get(each.path, each.path)}") for each in error.problems]
        ) from None


def _by_episode(config: PipelineConfig) -> bool:
    """Return True if episodes may be split into several samples and `loss_agg_mode` averages over sequences."""
    if not isinstance(config, AgenticConfig) or config.loss_agg_mode == "token-mean":
        return False
    return any(env.env_manager_cls != "trajectory" for env in config.custom_envs.values())


def _advantages(config: PipelineConfig, estimator: AdvantageEstimator) -> AdvantageSettings:
    controller: KLController | None = None
    length_penalty = difficulty = None
    if config.add_token_level_kl and config.kl_controller == "adaptive":
        controller = AdaptiveKLController(config.init_kl_coef, config.target_kl, config.kl_horizon)
    elif config.add_token_level_kl:
        controller = KLController(config.init_kl_coef)
    if config.length_penalty is not None:
        longest, penalty = derived.max_new_tokens(config), config.length_penalty
        buffer = penalty.buffer or max(1, longest // 8)
        length_penalty = LengthPenalty(penalty.kind, penalty.weight, longest, buffer, penalty.correct_above)
    if config.difficulty_mask:
        difficulty = (config.difficulty_low_threshold, config.difficulty_high_threshold)
    episode_weight, turn_weight = derived.reward_weights(config, estimator.requirements.for_episodes)
    return AdvantageSettings(
        estimator=estimator,
        shaping=RewardShaping(
            clip=config.reward_clip,
            mean=config.norm_mean_type,
            std=config.norm_std_type,
            length_penalty=length_penalty,
            repetition_penalty=None
            if config.repetition_penalty is None
            else RepetitionPenalty(config.repetition_penalty.ngram_size, config.repetition_penalty.weight),
            drop_truncated=config.max_len_mask,
            drop_zero_variance=config.zero_variance_mask,
            difficulty=difficulty,
        ),
        reward_moments=RunningMoments(),
        whitened=config.whiten_advantages,
        advantage_clip=config.advantage_clip,
        kl_controller=controller,
        kl_estimator=config.kl_estimator,
        episode_weight=episode_weight,
        turn_weight=turn_weight,
        part_weights={domain: config.rewards[name].weights for domain, name in route_domains(config.rewards).items()}
        if isinstance(config, PromptConfig)
        else {},
        sample_weight=config.sample_weight,
        by_episode=_by_episode(config),
        distillation=config.distillation,
    )


def _policy_problems(
    config: PipelineConfig, objective: PolicyObjective, correction: Correction | None
) -> Iterator[ConfigProblem]:
    """Yield problems of off-policy corrections: missing ones, ones applied twice, and ones without an effect."""
    needs, name = objective.requirements, config.actor_train.pg_variant
    recomputed = config.old_logprobs == "recompute"
    if needs.needs_proximal and not recomputed:
        message = f"behaviour, but {name} is defined on recomputed log-probabilities"
        yield ConfigProblem("old_logprobs", message, "set `old_logprobs: recompute`")
        return
    weight = None if correction is None else correction.weight
    if weight is not None and needs.importance_weighted and (not recomputed or needs.needs_proximal):
        reason = "has its own behaviour weight" if needs.needs_proximal else "has a ratio to the behaviour policy"
        message = f"the distance to the policy that sampled would count twice: {name} {reason}"
        remedy = "remove the weight" + ("" if needs.needs_proximal else ", or set `old_logprobs: recompute`")
        yield ConfigProblem("train_infer_correction.weight", message, remedy)
    elif weight is not None and needs.sequence_valued and weight.level == "token":
        message = f"{name} gives a response one loss, so weights of its tokens would act as their mean"
        remedy = "set `level: sequence` or `level: geometric`"
        yield ConfigProblem("train_infer_correction.weight.level", message, remedy)
    why = _why_uncorrected(config, needs, weight is not None)
    if why:
        hidden = needs.corrects and recomputed
        choice = "leave out `old_logprobs: recompute`" if hidden else "choose a loss that corrects, such as `ppo`"
        remedy = (
            f"{choice}, add `train_infer_correction.weight`, train once on fresh samples (`async_generation_ratio: 0` "
            "and one optimizer step a batch), or set `allow_uncorrected_off_policy: true` to experiment"
        )
        path = "old_logprobs" if hidden else "actor_train.pg_variant"
        if not config.allow_uncorrected_off_policy:
            yield ConfigProblem(path, f"{name} would train on samples as if fresh: {why}", remedy)
    elif config.allow_uncorrected_off_policy:
        message = "true has no effect: nothing stale goes uncorrected here"
        yield ConfigProblem("allow_uncorrected_off_policy", message, "remove the key")
    elif recomputed and not needs.uses_old_policy:
        message = f"recompute has no effect: {name} has no ratio"
        yield ConfigProblem("old_logprobs", message, "remove the key, or choose a `pg_variant` with a ratio")
    elif (
        needs.ratio_one == "noise"
        and _optimizer_steps(config) == 1
        and (recomputed or not derived.may_be_stale(config))
    ):
        message = f"{name}: with one optimizer step a batch the ratio is 1, and its penalty follows rounding errors"
        remedy = "take several optimizer steps, or choose `pg_variant: clip_cov` or `vanilla`"
        yield ConfigProblem("actor_train.pg_variant", message, remedy)
    elif recomputed and needs.ratio_one and not needs.needs_proximal and _optimizer_steps(config) == 1:
        chosen = any(changes(config.actor_train, "pg_variant", "pg_variant_args"))
        if weight is None or chosen:  # with a correction weight, the default loss may well reduce to vanilla
            message = f"recompute: with one optimizer step a batch the ratio is exactly 1, and {name} is just vanilla"
            remedy = "set `old_logprobs: behaviour`, take several optimizer steps, or choose `pg_variant: vanilla`"
            yield ConfigProblem("old_logprobs", message, remedy)


def _idle_bounds(objective: PolicyObjective, correction: Correction | None, log_prob: str) -> Iterator[ConfigProblem]:
    """Yield the bounds, including defaults, that ratios of mean log-probabilities of images never reach."""
    bounds = {f"actor_train.pg_variant_args.{name}": value for name, value in objective.policy_loss.arguments.items()}
    if correction is not None:
        parts = {f"reject[{index}]": part for index, part in enumerate(correction.reject)} | {
            "weight": correction.weight
        }
        for part, settings in parts.items():
            named = {} if settings is None else vars(settings)
            bounds |= {f"train_infer_correction.{part}.{name}": value for name, value in named.items()}
    for path, value in bounds.items():
        name = path.rpartition(".")[2]
        absent = value is None or value == _NO_BOUND.get(name, math.inf)
        if absent or not (name in _FROM_ONE and value >= FAR or name in _AROUND_ONE and abs(value - 1) >= FAR):
            continue
        example = "1.0e-4" if name in _FROM_ONE else "0.999" if value < 1 else "1.001"
        message = f"{value:g} never acts: with `sampling.log_prob: {log_prob}` the ratio of a step is far closer to 1"
        yield ConfigProblem(path, message, f"write for example {example}, or set `sampling.log_prob: sum`")


def _role_problems(config: PipelineConfig, needs_proximal: bool, streams: bool) -> Iterator[ConfigProblem]:
    """Yield a problem if no part of the run uses the log-probabilities of `actor_logp`."""
    if config.actor_logp is None:
        return
    if not needs_proximal:
        message = "has no effect: nothing needs log-probabilities before the update"
        remedy = "set `old_logprobs: recompute` or `train_infer_correction`, or remove this section"
        yield ConfigProblem("actor_logp", message, remedy)
    elif streams and not derived.logp_is_trainer(config):
        message = "has no effect: with `stream_groups` these log-probabilities are those of the pass that trains"
        yield ConfigProblem("actor_logp", message, "remove this section, or set `actor_train.stream_groups: false`")


def _optimizer_steps(config: PipelineConfig) -> int:
    return derived.optimizer_steps_per_step(config, config.actor_train)


def _why_uncorrected(config: PipelineConfig, needs: LossRequirements, weighted: bool) -> str | None:
    """Return why the loss would treat stale samples as fresh; None if it would not, or if no sample is stale."""
    if not needs.uses_old_policy and _optimizer_steps(config) > 1:
        return f"it has no ratio, and {_optimizer_steps(config)} optimizer steps are taken on each batch"
    corrected = needs.corrects and (config.old_logprobs != "recompute" or needs.needs_proximal)
    if corrected or weighted or not derived.may_be_stale(config):
        return None
    staleness = derived.resolved_max_staleness(config)
    reason = "its ratio is taken against recomputed log-probabilities" if needs.uses_old_policy else "it has no ratio"
    return f"{reason}, and tokens are up to {staleness} versions old"


def _estimator_problems(
    config: PipelineConfig, estimator: AdvantageEstimator, objective: PolicyObjective | None
) -> Iterator[ConfigProblem]:
    """Yield problems of an estimator: inputs that this pipeline lacks, settings that would have no effect."""
    needs, name = estimator.requirements, config.adv_estimator
    shaping = [key for key in SHAPING_KEYS if vars(config)[key] not in (None, "none")]
    if needs.needs_values and config.critic is None:
        remedy = "add `critic: {device_mapping: ...}`, or use an estimator without values, for example grpo or rloo"
        yield ConfigProblem("adv_estimator", f"{name} needs a value model, and there is no `critic`", remedy)
    elif not needs.needs_values and config.critic is not None:
        message = f"has no effect: `adv_estimator: {name}` reads no values"
        yield ConfigProblem("critic", message, "set `adv_estimator: gae`, or remove this section")
    if isinstance(config, AgenticConfig):
        yield from _episode_problems(config, needs, shaping)
    elif needs.for_episodes:
        message = f"{name} is defined on episodes of several turns, and `{config.pipeline}` has one"
        yield ConfigProblem("adv_estimator", message, "use reinforce, grpo, rloo or another one of single responses")
    size, least = derived.group_size(config), needs.least_samples
    teaching = config.distillation
    penalised = config.add_token_level_kl or (teaching is not None and teaching.use == "rewards")
    if needs.group_relative and size < least and (penalised or derived.learns_from_rewards(config)):
        message = f"{size}: {name} compares the samples of a group, so all advantages would be 0"
        remedy = f"set at least {least}, or `adv_estimator: reinforce`"
        yield ConfigProblem(derived.group_size_key(config), message, remedy)
    if needs.whitens and config.whiten_advantages:
        message = f"true has no effect: {name} gives advantages mean 0 and deviation 1 itself"
        yield ConfigProblem("whiten_advantages", message, "remove the key")
    if needs.needs_greedy_baseline:
        for key in shaping:
            message = f"{name} compares with the plain score of a greedy response; this would change one side only"
            yield ConfigProblem(key, message, "remove the key, or choose another `adv_estimator`")
    if needs.needs_parts:
        yield from _part_problems(config, shaping)
    in_turns = derived.reward_weights(config, needs.for_episodes)[1] > 0
    # With a KL penalty or turn rewards, the relative scale of the rewards matters.
    scales_cancel = "none" if penalised or in_turns else needs.scales_cancel
    cancelled = {"none": (), "batch": ("batch", "running"), "group": ("batch", "running", "tag", "group")}
    for key, shared in (("norm_mean_type", needs.shifts_cancel), ("norm_std_type", scales_cancel)):
        if vars(config)[key] in cancelled[shared]:
            message = f"{vars(config)[key]} has no effect: {name} takes it out again"
            yield ConfigProblem(key, message, "remove the key, or use `adv_estimator: reinforce`")
    varies = needs.for_episodes or (needs.returns_to_go and (estimator.arguments["gamma"] < 1 or penalised or in_turns))
    if objective is None:
        return
    if objective.requirements.needs_scores and not derived.is_scored(config):
        message = f"{objective.pg_variant} looks at the scores, and there are no `rewards`"
        yield ConfigProblem("actor_train.pg_variant", message, "add `rewards`, or use another `pg_variant`")
    if teaching is not None and teaching.use == "advantages" and objective.requirements.sequence_valued:
        message = f"advantages: tokens get advantages of their own, and {objective.pg_variant} assumes one a response"
        yield ConfigProblem("distillation.use", message, "use `loss`, or another `pg_variant`")
    if varies and objective.requirements.sequence_valued:
        message = f"{name} gives the tokens of a response different advantages, and {objective.pg_variant} assumes one"
        yield ConfigProblem("adv_estimator", message, "use grpo or rloo, or another `pg_variant`")


def _part_problems(config: PipelineConfig, shaping: Sequence[str]) -> Iterator[ConfigProblem]:
    """Yield problems of an estimator of several rewards: rewards of one number, keys that change the score."""
    name = config.adv_estimator
    if not isinstance(config, PromptConfig):
        message = f"{name} compares several rewards by name, and an episode has one score"
        yield ConfigProblem("adv_estimator", message, "use grpo, rloo, gigpo or step_reinforce")
        return
    for reward, section in config.rewards.items():
        if not section.weights:
            message = f"{name} compares several rewards by name, and this one returns a score"
            remedy = "give the names of the verifier's numbers and their weights, or set `adv_estimator: grpo`"
            yield ConfigProblem(f"rewards.{reward}.weights", message, remedy)
    in_rewards = config.distillation is not None and config.distillation.use == "rewards"
    penalties = {"add_token_level_kl": config.add_token_level_kl, "distillation.use": in_rewards}
    for key in (*shaping, *(key for key, is_set in penalties.items() if is_set)):
        message = f"has no effect: {name} reads the rewards by name, and this changes their sum"
        yield ConfigProblem(key, message, "remove the key, or choose another `adv_estimator`")


def _episode_problems(
    config: AgenticConfig, needs: AdvantageRequirements, shaping: Sequence[str]
) -> Iterator[ConfigProblem]:
    """Yield problems specific to episodes: greedy baselines, rewards of weight zero, and shaping of such rewards."""
    name = config.adv_estimator
    if needs.needs_greedy_baseline:
        message = f"{name} compares with a greedy response, which episodes do not have"
        yield ConfigProblem("adv_estimator", message, "use grpo, rloo, gigpo or step_reinforce")
    if needs.needs_states and derived.only_agents(config, config.train_env_manager):
        message = f"{name} compares turns by the state that they act in, and agents tell no states"
        yield ConfigProblem("adv_estimator", message, "use grpo, rloo or step_reinforce")
    if config.length_penalty is not None and config.length_penalty.kind == "overlong":
        message = "overlong counts up to the longest response, and an episode has no such number of sampled tokens"
        yield ConfigProblem("length_penalty.kind", message, "set `kind: relative`, or remove the section")
    episode, step = derived.reward_weights(config, needs.for_episodes)
    if episode == step == 0:
        message = "0, and so is `step_reward_weight`: there would be nothing to learn from"
        yield ConfigProblem("episode_reward_weight", message, "set one of the two above 0")
    elif episode == 0:
        for key in shaping:
            message = f"has no effect: it shapes the episode's reward, whose weight is 0 (adv_estimator {name})"
            yield ConfigProblem(key, message, "set `episode_reward_weight` above 0, or remove the key")


def replayed_routing(config: PipelineConfig) -> RoutingShape | None:
    """Return the sizes of the policy's routing with router replay, otherwise None."""
    if not derived.replays_routing(config):
        return None
    from transformers import AutoConfig

    path, trusted = derived.model_path(config, config.actor_train), config.actor_train.model_args.trust_remote_code
    return RoutingShape.of(AutoConfig.from_pretrained(path, trust_remote_code=trusted))


def _check_experts(groups: Sequence[Group], routing: RoutingShape) -> None:
    """Raise `ValueError` for the first sample without a valid record of experts."""
    for group in groups:
        for number, sample in enumerate(group.samples):
            experts = sample.routed_experts
            fault = "missing" if experts is None else routing.fault(experts, len(sample.token_ids))
            if fault is not None:
                where = f"group {group.group_id} ({group.prompt.prompt_id}), sample {number}"
                raise ValueError(
                    f"{where}: `routed_experts` are {fault}. "
                    "With `actor_train.router_replay` they are those of the engine (docs/trainers.md, Router replay)"
                )


class StalenessViolation(AssertionError):
    """A token older than `max_staleness` versions reached a batch: a bug in the scheduler. Stops the run."""


@dataclass
class TrainingBatch:
    """The groups of one training step, or a part of them.

    ``step`` counts from 0. Training on it turns policy version ``step`` into version ``step + 1``.
    """

    step: int
    groups: list[Group]
    data: SampleBatch
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step, shared by all parts of a batch."""
    complete: bool = True
    """False if other parts of the batch follow this one."""
    untrained: TrainingBatch | None = None
    """The last part of a streamed batch: the part that the trainer has not yet trained on."""
    gathered: bool = False
    """True if the trainer has copied the new weights into a weight buffer."""
    canaries: CanaryScores | None = None
    """The trainer's log-probabilities of the canary sequences at the new weights, if this weight update is checked."""
    advantage_state: dict[str, Any] = field(default_factory=dict)
    """State of the advantage estimation after this batch, for the checkpoint."""

    @classmethod
    def from_groups(cls, step: int, groups: list[Group], routing: RoutingShape | None = None) -> TrainingBatch:
        """Build the batch of training step ``step`` (from 0).

        The lag of a token is ``step`` minus the version that sampled it. ``routing``: that of the model, with router
        replay. Raises `ValueError` naming a sample whose experts are not those of such a model.
        """
        if routing is not None:
            _check_experts(groups, routing)
        data = SampleBatch.from_samples([sample for group in groups for sample in group.samples])
        mask, versions = data.tokens["response_mask"], data.tokens["versions"]
        lags = data.tokens["lags"] = np.where(mask, step - versions, 0).astype(np.int32, copy=False)
        # If weights changed during a response, its later tokens have this version but were sampled with an older cache.
        fresh = np.maximum.reduceat(lags, data.offsets[:-1]) == 0
        data.tokens["same_weights"] = np.repeat(fresh, data.lengths)
        if "latents" in data.per_sample:
            texts = [group.prompt.text for group in groups for _ in group.samples]
            data.per_sample["prompts"] = np.array(texts)
        if any(group.prompt.pictures for group in groups):
            pictures = [tuple(group.prompt.pictures) for group in groups for _ in group.samples]
            data.per_sample[PROMPT_PICTURES] = np.empty(len(pictures), dtype=object)
            data.per_sample[PROMPT_PICTURES][:] = pictures
        return cls(step, groups, data)

    @property
    def samples(self) -> list[Sample]:
        """All samples, group by group. Their order is that of the rows of ``data``."""
        return [sample for group in self.groups for sample in group.samples]

    @property
    def episodes(self) -> list[list[Sample]]:
        """The samples of each episode, group by group."""
        return [episode for group in self.groups for episode in group.episodes]

    @property
    def group_of_episode(self) -> np.ndarray:
        """int64 ``[episodes]``: index into ``groups`` of each episode's group."""
        return np.repeat(np.arange(len(self.groups)), [len(group.episodes) for group in self.groups])

    @property
    def tag_of_episode(self) -> np.ndarray:
        """int64 ``[episodes]``: index of the domain of each episode's prompt."""
        names, tags = np.unique([group.prompt.domain for group in self.groups], return_inverse=True)
        return tags[self.group_of_episode]

    @property
    def lags(self) -> np.ndarray:
        """int32 ``[sampled tokens]``: training step minus version."""
        return self.data.tokens["lags"][self.data.tokens["response_mask"]]

    def leave_out(self, kept: np.ndarray) -> None:
        """Remove tokens from the loss mask where ``kept`` (bool ``[total_tokens]``) is false."""
        trained = self.data.tokens.get("loss_mask", self.data.tokens["response_mask"])
        self.data.tokens["loss_mask"] = trained & kept

    def share_episodes(self) -> None:
        """Fill in ``episode_shares`` (float64 ``[samples]``): each sample's share of its episode's trained tokens. Each
        episode must have a sample here."""
        data = self.data
        trained = data.tokens.get("loss_mask", data.tokens["response_mask"])
        tokens = np.add.reduceat(np.append(trained, False), data.offsets[:-1], dtype=np.float64)
        tokens[data.lengths == 0] = 0
        parts = np.array([len(samples) for samples in self.episodes], dtype=np.int64)
        whole = np.repeat(np.add.reduceat(tokens, np.cumsum(parts) - parts), parts)
        data.per_sample["episode_shares"] = np.divide(tokens, whole, out=np.zeros_like(tokens), where=whole > 0)

    def beside(self) -> TrainingBatch:
        """Return a snapshot of the batch for a stage that runs in parallel to the next ones. Metrics stay shared."""
        data = replace(self.data, tokens=dict(self.data.tokens), per_sample=dict(self.data.per_sample))
        return replace(self, data=data)

    def note_time(self, stage: str, seconds: float) -> None:
        """Add to the time that a stage has spent on this batch, in seconds, without waiting."""
        self.metrics[f"time/{stage}"] = self.metrics.get(f"time/{stage}", 0.0) + seconds

    def check_staleness(self, bound: int) -> None:
        """Raise `StalenessViolation` if a sampled token is older than ``bound`` versions, or newer than the policy."""
        lags = self.data.tokens["lags"]  # 0 where nothing was sampled
        if lags.size and (lags.max() > bound or lags.min() < 0):
            culprit = min(self.groups, key=self._oldest_version)
            raise StalenessViolation(
                f"training step {self.step}: lags from {lags.min()} to {lags.max()}, allowed 0 to {bound}; "
                f"oldest tokens in group {culprit.group_id}"
            )

    def _oldest_version(self, group: Group) -> int:
        return min((sample.oldest_version for sample in group.samples if sample.response_tokens), default=self.step)

    def describe_rollouts(self, detail: str = "reward", scored: bool = True) -> None:
        """Add the metrics of the rollouts: rewards (if they are ``scored``), lengths and lags.

        ``detail`` is the prefix for metrics of samples; ``{domain}`` in it is replaced by the sample's domain.
        """
        episodes = self.episodes
        scores = np.array([parts[0].score for parts in episodes], dtype=np.float32)
        lengths = np.array([sum(part.response_tokens for part in parts) for parts in episodes], dtype=np.float64)
        lags = self.lags
        per_group = [group.scores for group in self.groups]
        truncated = [any(part.finish_reason == "length" for part in parts) for parts in episodes]
        if scored:
            self.metrics |= _spread("reward", scores)
            self.metrics["reward/zero_variance_groups"] = float(np.mean([np.ptp(values) == 0 for values in per_group]))
        self.metrics |= {
            "response/length_mean": float(lengths.mean()),
            "response/length_max": float(lengths.max()),
            "response/tokens": float(lengths.sum()),
            "response/truncated_share": float(np.mean(truncated)),
            "lag/mean": float(lags.mean()) if lags.size else 0.0,
            "lag/max": float(lags.max()) if lags.size else 0.0,
        }
        scores_of: dict[str, list[np.ndarray]] = defaultdict(list)
        details: dict[str, list[float]] = defaultdict(list)
        succeeding = {
            group.prompt.domain
            for group in self.groups
            if any("success" in sample.metrics and sample.episode is not None for sample in group.samples)
        }
        for group, values in zip(self.groups, per_group, strict=True):
            domain = group.prompt.domain
            scores_of[domain].append(values)
            if domain in succeeding:  # all episodes of the others were cut before they reported a success
                for parts in group.episodes:
                    parts[0].metrics.setdefault("success", 0.0)
            for sample in group.samples:
                for name, value in sample.metrics.items():
                    details[f"{detail.format(domain=domain)}/{name}"].append(value)
        for domain in sorted(scores_of) if scored else ():
            self.metrics[f"reward/{domain}/mean"] = float(np.mean(np.concatenate(scores_of[domain])))
        for name in sorted(details.keys() - self.metrics.keys()):  # `reward/mean` stays the mean of the scores
            self.metrics[name] = float(np.mean(details[name]))


def add_correction(batch: TrainingBatch, correction: Correction, objective: PolicyObjective) -> dict[str, float]:
    """Add ``correction_weights`` (float32 ``[total_tokens]``) to the batch. Rejected tokens leave the loss mask.

    The batch must have ``proximal_logprobs``. Returns the metrics of the correction, also by lag, for the lags that the
    objective reports.
    """
    data, sequences = batch.data, None  # without groups, the episodes of the rows are unknown
    mask = torch.from_numpy(data.padded("response_mask", fill=False))
    if objective.loss_agg_mode == "seq-mean-token-mean" and batch.groups:
        sequences = torch.repeat_interleave(torch.tensor([len(samples) for samples in batch.episodes]))
    result = correct(
        torch.from_numpy(data.padded("proximal_logprobs")),
        torch.from_numpy(data.padded("behaviour_logprobs")),
        mask,
        correction,
        advantages=torch.from_numpy(data.padded("advantages")) if "advantages" in data.tokens else None,
        trained=torch.from_numpy(data.padded("loss_mask", fill=False)) if "loss_mask" in data.tokens else None,
        sequences=sequences,
        lags=torch.from_numpy(data.padded("lags")),
        max_lag=objective.max_lag,
        capped=objective.lags_capped,
    )
    inside = np.arange(mask.shape[1])[None, :] < data.lengths[:, None]
    if correction.weight is not None:
        data.tokens["correction_weights"] = result.weights.float().numpy()[inside]
    if correction.reject:
        batch.leave_out(result.kept.numpy()[inside])
        if objective.by_episode and batch.groups:
            batch.share_episodes()
    return result.metrics


def select_tokens(batch: TrainingBatch, objective: PolicyObjective, seed: int) -> None:
    """Add ``selected_tokens`` (bool ``[total_tokens]``) to the batch, if the policy loss trains on a selection.

    ``seed`` is the run seed. The selection also depends on the step.
    """
    if objective.requirements.select is None:
        return
    data = batch.data
    old = "proximal_logprobs" if objective.old_policy == "proximal" else "behaviour_logprobs"
    trained = data.padded("loss_mask" if "loss_mask" in data.tokens else "response_mask", fill=False)
    selected = objective.policy_loss.select(
        torch.from_numpy(data.padded(old)).double(),
        torch.from_numpy(data.padded("advantages")).double(),
        torch.from_numpy(trained),
        torch.Generator().manual_seed(derive_seed(seed, "selected tokens", batch.step)),
    )
    inside = np.arange(trained.shape[1])[None, :] < data.lengths[:, None]
    data.tokens["selected_tokens"] = selected.numpy()[inside]


class MismatchTooLarge(RuntimeError):
    """Trainer and engine disagree about log-probabilities of tokens that were sampled with the trainer's weights."""


def check_mismatch(config: PipelineConfig, step: int, metrics: Mapping[str, float]) -> None:
    """Compare a step's mean train/inference mismatch (nats per token) with `mismatch_alarm`. ``step`` counts from 1.

    NaN exceeds every limit. If no token was sampled with the trainer's version, there is nothing to compare; only the
    parity check of the weight update remains. Logs a warning, or raises `MismatchTooLarge` if the alarm stops the run.
    """
    limit, value = config.mismatch_alarm, metrics.get("mismatch/abs_mean")
    if limit is None or value is None or value <= limit:
        return
    text = (
        f"step {step}: log-probabilities of trainer and engine differ by {value:.3g} nats per token on average "
        f"over {metrics['mismatch/tokens']:.0f} tokens sampled with the trainer's weights (at most "
        f"{metrics['mismatch/max']:.3g}); mismatch_alarm allows {limit:g}"
    )
    if config.mismatch_action == "stop":
        raise MismatchTooLarge(text)
    logger.warning(text)

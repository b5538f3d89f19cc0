"""The algorithms of a run, built from its configuration: policy loss, correction, reward shaping, advantages.

A combination is refused here, with the reason, if a part of it would have no effect, act twice, or train on stale
tokens as if they were fresh. The needs and effects of a variant are read from its registered requirements (`traits`),
not from its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from roll.algorithms.advantages import AdvantageEstimator, AdvantageTraits, make_advantage_estimator
from roll.algorithms.correction import Correction, parse_correction
from roll.algorithms.kl import make_kl_controller
from roll.algorithms.moments import RunningMoments
from roll.algorithms.objective import PolicyObjective
from roll.algorithms.policy_losses import PolicyLossTraits
from roll.algorithms.registry import KnobError
from roll.algorithms.reward_shaping import LengthPenalty, RewardShaping
from roll.algorithms.value_objective import ValueObjective
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.rules_keys import differs_from_default
from roll.configs.schema import ROLL_KNOBS, AgenticConfig, PipelineConfig
from roll.pipeline.advantages import AdvantageSettings

MOST_LAGS_REPORTED = 8
"""Highest lag with a metric of its own; that metric includes all older tokens."""

Built = TypeVar("Built")


@dataclass(frozen=True)
class Algorithms:
    """The losses, the correction and the advantage settings of a run."""

    objective: PolicyObjective
    value_objective: ValueObjective
    correction: Correction | None
    advantages: AdvantageSettings


def build_algorithms(config: PipelineConfig) -> Algorithms:
    """Build the algorithms of a run.

    Raises `ConfigError` with every wrong name and argument, or else with every invalid combination.
    """
    problems: list[ConfigProblem] = []
    correction = _attempt(
        problems, lambda: _correction(config), ("train_infer_correction", "train_infer_correction", {})
    )
    objective = _attempt(problems, lambda: _objective(config, correction), _policy_paths(config))
    estimator = _attempt(
        problems,
        lambda: make_advantage_estimator(config.adv_estimator, config.adv_estimator_args),
        ("adv_estimator", "adv_estimator_args", {}),
    )
    if objective is not None and not problems:
        problems += _policy_problems(config, objective, correction)
    if estimator is not None:
        problems += _estimator_problems(config, estimator, objective)
    if problems or objective is None or estimator is None:
        raise ConfigError(problems)
    return Algorithms(objective, _value_objective(config), correction, _advantages(config, estimator))


def _attempt(
    problems: list[ConfigProblem], build: Callable[[], Built], paths: tuple[str, str, dict[str, str]]
) -> Built | None:
    """Return what ``build`` returns, or None after noting its problems.

    The path of a problem is that of the name, of an argument, or of a key elsewhere that sets the argument.
    """
    name_path, args_path, elsewhere = paths
    try:
        return build()
    except KnobError as error:
        problems += [
            ConfigProblem(
                name_path if found.knob is None else elsewhere.get(found.knob, f"{args_path}.{found.knob}"),
                found.message,
                found.remedy,
            )
            for found in error.problems
        ]
        return None


def _policy_paths(config: PipelineConfig) -> tuple[str, str, dict[str, str]]:
    actor = config.actor_train
    given = {knob: f"actor_train.{name}" for name, (_, knob) in ROLL_KNOBS.items() if vars(actor)[name] is not None}
    return "actor_train.pg_variant", "actor_train.pg_variant_args", given


def _objective(config: PipelineConfig, correction: Correction | None) -> PolicyObjective:
    oldest = derived.resolved_max_staleness(config)
    return PolicyObjective(
        max_response_length=derived.max_new_tokens(config),
        pg_variant=config.actor_train.pg_variant,
        pg_variant_args=derived.pg_variant_args(config),
        loss_agg_mode=config.loss_agg_mode,
        use_kl_loss=config.use_kl_loss,
        kl_loss_coef=config.kl_loss_coef,
        kl_estimator=config.kl_estimator,
        entropy_loss_coef=config.entropy_loss_coef,
        anchor="proximal" if config.old_logprobs == "recompute" else "behaviour",
        corrected=correction is not None and correction.weight is not None,
        max_lag=min(oldest, MOST_LAGS_REPORTED) if oldest else None,
        lags_capped=oldest > MOST_LAGS_REPORTED,
        monitored=not derived.truncates_sampling(config),
    )


def _value_objective(config: PipelineConfig) -> ValueObjective:
    return ValueObjective(derived.max_new_tokens(config), config.loss_agg_mode, config.value_clip)


def _correction(config: PipelineConfig) -> Correction | None:
    return parse_correction(config.train_infer_correction) if config.train_infer_correction else None


def _advantages(config: PipelineConfig, estimator: AdvantageEstimator) -> AdvantageSettings:
    controller = None
    if config.add_token_level_kl:
        controller = make_kl_controller(config.kl_controller, config.init_kl_coef, config.target_kl, config.kl_horizon)
    episode_weight, turn_weight = _reward_weights(config, estimator.traits)
    return AdvantageSettings(
        estimator=estimator,
        shaping=_shaping(config),
        reward_moments=RunningMoments(),
        whitened=config.whiten_advantages,
        advantage_clip=config.advantage_clip,
        kl_controller=controller,
        kl_estimator=config.kl_estimator,
        episode_weight=episode_weight,
        turn_weight=turn_weight,
    )


def _reward_weights(config: PipelineConfig, traits: AdvantageTraits) -> tuple[float, float]:
    """Return the weights of the episode's reward and of the turn rewards. In RLVR a response is its own episode."""
    return derived.reward_weights(config, traits.for_episodes) if isinstance(config, AgenticConfig) else (1.0, 0.0)


def _shaping(config: PipelineConfig) -> RewardShaping:
    longest = derived.max_new_tokens(config)
    penalty = config.length_penalty
    return RewardShaping(
        clip=config.reward_clip,
        mean=config.norm_mean_type,
        std=config.norm_std_type,
        length_penalty=None
        if penalty is None
        else LengthPenalty(
            kind=penalty.kind,
            weight=penalty.weight,
            max_length=longest,
            buffer=penalty.buffer or max(1, longest // 8),
            correct_above=penalty.correct_above,
        ),
        drop_truncated=config.max_len_mask,
        drop_zero_variance=config.zero_variance_mask,
        difficulty=(config.difficulty_low_threshold, config.difficulty_high_threshold)
        if config.difficulty_mask
        else None,
    )


def _policy_problems(
    config: PipelineConfig, objective: PolicyObjective, correction: Correction | None
) -> Iterator[ConfigProblem]:
    """Yield the problems of corrections that are missing, act twice, or act on nothing."""
    traits, name = objective.traits, config.actor_train.pg_variant
    if traits.needs_proximal and config.old_logprobs != "recompute":
        message = f"behaviour, but {name} is defined on recomputed log-probabilities"
        yield ConfigProblem("old_logprobs", message, "set `old_logprobs: recompute`")
        return
    yield from _weight_problems(config, traits, correction)
    weighted = correction is not None and correction.weight is not None
    why = _why_uncorrected(config, traits, weighted)
    if why and not config.allow_uncorrected_off_policy:
        recomputed = traits.corrects and config.old_logprobs == "recompute"
        choice = "leave out `old_logprobs: recompute`" if recomputed else "choose a loss that corrects, such as `ppo`"
        remedy = (
            f"{choice}, add `train_infer_correction.weight`, train once on fresh samples (`async_generation_ratio: 0` "
            "and one optimizer step a batch), or set `allow_uncorrected_off_policy: true` to experiment"
        )
        path = "old_logprobs" if recomputed else "actor_train.pg_variant"
        yield ConfigProblem(path, f"{name} would train on samples as if fresh: {why}", remedy)
    elif not why and config.allow_uncorrected_off_policy:
        message = "true has no effect: nothing stale goes uncorrected here"
        yield ConfigProblem("allow_uncorrected_off_policy", message, "remove the key")
    elif not why:
        yield from _anchor_problems(config, traits, weighted)


def _weight_problems(
    config: PipelineConfig, traits: PolicyLossTraits, correction: Correction | None
) -> Iterator[ConfigProblem]:
    """Yield a problem for a weight that the loss already has, or a token-level weight for a loss of whole responses."""
    if correction is None or correction.weight is None:
        return
    name, path = config.actor_train.pg_variant, "train_infer_correction.weight"
    if traits.importance_weighted and (config.old_logprobs != "recompute" or traits.needs_proximal):
        reason = "has its own behaviour weight" if traits.needs_proximal else "is anchored on the behaviour policy"
        message = f"the distance to the policy that sampled would count twice: {name} {reason}"
        remedy = "remove the weight" + ("" if traits.needs_proximal else ", or set `old_logprobs: recompute`")
        yield ConfigProblem(path, message, remedy)
    elif traits.sequence_valued and correction.weight.level == "token":
        message = f"{name} gives a response one loss, so weights of its tokens would act as their mean"
        yield ConfigProblem(f"{path}.level", message, "set `level: sequence` or `level: geometric`")


def _why_uncorrected(config: PipelineConfig, traits: PolicyLossTraits, weighted: bool) -> str | None:
    """Return why the loss would treat stale samples as fresh; None if it does not, or if there are none."""
    steps = derived.optimizer_steps_per_step(config, config.actor_train)
    if not traits.uses_anchor and steps > 1:
        return f"it has no ratio, and {steps} optimizer steps are taken on each batch"
    anchored = traits.corrects and (config.old_logprobs != "recompute" or traits.needs_proximal)
    if anchored or weighted or not derived.may_be_stale(config):
        return None
    staleness = derived.resolved_max_staleness(config)
    reason = "its ratio is taken against recomputed log-probabilities" if traits.uses_anchor else "it has no ratio"
    return f"{reason}, and tokens are up to {staleness} versions old"


def _anchor_problems(config: PipelineConfig, traits: PolicyLossTraits, weighted: bool) -> Iterator[ConfigProblem]:
    """Yield a problem if recomputed log-probabilities have no effect, or take away a loss's own correction."""
    if config.old_logprobs != "recompute":
        return
    name = config.actor_train.pg_variant
    if not traits.uses_anchor:
        message = f"recompute has no effect: {name} has no ratio to anchor"
        yield ConfigProblem("old_logprobs", message, "remove the key, or choose a `pg_variant` with a ratio")
        return
    not_chosen = not any(differs_from_default(config.actor_train, key) for key in ("pg_variant", "pg_variant_args"))
    one_step = derived.optimizer_steps_per_step(config, config.actor_train) == 1
    if one_step and not traits.needs_proximal and not (weighted and not_chosen):
        message = f"recompute: with one optimizer step a batch the ratio is exactly 1, and {name} is just vanilla"
        remedy = "set `old_logprobs: behaviour`, take several optimizer steps, or choose `pg_variant: vanilla`"
        yield ConfigProblem("old_logprobs", message, remedy)


def _estimator_problems(
    config: PipelineConfig, estimator: AdvantageEstimator, objective: PolicyObjective | None
) -> Iterator[ConfigProblem]:
    """Yield the problems of an estimator that needs what this pipeline lacks, or that would have nothing to work on."""
    traits, name = estimator.traits, config.adv_estimator
    yield from _critic_problems(config, traits)
    if isinstance(config, AgenticConfig):
        yield from _episode_problems(config, traits)
    elif traits.for_episodes:
        message = f"{name} is defined on episodes of several turns, and `rlvr` has one"
        yield ConfigProblem("adv_estimator", message, "use reinforce, grpo, rloo or another one of single responses")
    if traits.group_relative and derived.group_size(config) == 1:
        message = f"1: {name} compares the samples of a group, so all advantages would be 0"
        yield ConfigProblem(derived.group_size_key(config), message, "set at least 2, or `adv_estimator: reinforce`")
    if traits.whitens and config.whiten_advantages:
        message = f"true has no effect: {name} gives advantages mean 0 and deviation 1 itself"
        yield ConfigProblem("whiten_advantages", message, "remove the key")
    if traits.needs_greedy_baseline:
        for key in ("norm_mean_type", "norm_std_type", "length_penalty", "reward_clip"):
            if vars(config)[key] not in (None, "none"):
                message = f"{name} compares with the plain score of a greedy response; this would change one side only"
                yield ConfigProblem(key, message, "remove the key, or choose another `adv_estimator`")
    yield from _normalisation_problems(config, traits)
    in_turns = _reward_weights(config, traits)[1] > 0
    varies = traits.for_episodes or (
        traits.returns_to_go and (estimator.knobs.gamma < 1 or config.add_token_level_kl or in_turns)
    )
    if varies and objective is not None and objective.traits.sequence_valued:
        message = f"{name} gives the tokens of a response different advantages, and {objective.pg_variant} assumes one"
        yield ConfigProblem("adv_estimator", message, "use grpo or rloo, or another `pg_variant`")


def _critic_problems(config: PipelineConfig, traits: AdvantageTraits) -> Iterator[ConfigProblem]:
    """Yield a problem if the estimator reads values without a critic, or if nothing reads the critic's values."""
    name = config.adv_estimator
    if traits.needs_values and config.critic is None:
        remedy = "add `critic: {device_mapping: ...}`, or use an estimator without values, for example grpo or rloo"
        yield ConfigProblem("adv_estimator", f"{name} needs a value model, and there is no `critic`", remedy)
    elif not traits.needs_values and config.critic is not None:
        message = f"has no effect: `adv_estimator: {name}` reads no values"
        yield ConfigProblem("critic", message, "set `adv_estimator: gae`, or remove this section")


def _episode_problems(config: AgenticConfig, traits: AdvantageTraits) -> Iterator[ConfigProblem]:
    """Yield the problems of baselines that episodes lack, rewards of weight zero, and shaping of such rewards."""
    name = config.adv_estimator
    if traits.needs_greedy_baseline:
        message = f"{name} compares with a greedy response, which episodes do not have"
        yield ConfigProblem("adv_estimator", message, "use grpo, rloo, gigpo or step_reinforce")
    if config.length_penalty is not None and config.length_penalty.kind == "overlong":
        message = "overlong counts up to the longest response, and an episode has no such number of sampled tokens"
        yield ConfigProblem("length_penalty.kind", message, "set `kind: relative`, or remove the section")
    episode, step = _reward_weights(config, traits)
    if episode == step == 0:
        message = "0, and so is `step_reward_weight`: there would be nothing to learn from"
        yield ConfigProblem("episode_reward_weight", message, "set one of the two above 0")
    elif episode == 0:
        for key in ("reward_clip", "norm_mean_type", "norm_std_type", "length_penalty"):
            if vars(config)[key] not in (None, "none"):
                message = f"has no effect: it shapes the episode's reward, whose weight is 0 (adv_estimator {name})"
                yield ConfigProblem(key, message, "set `episode_reward_weight` above 0, or remove the key")


def _normalisation_problems(config: PipelineConfig, traits: AdvantageTraits) -> Iterator[ConfigProblem]:
    """Yield a problem for reward normalisation that the estimator cancels.

    With a KL penalty or turn rewards in the token rewards, the scale has a meaning, so `norm_std_type` is accepted.
    """
    kinds = {"none": (), "batch": ("batch", "running"), "group": ("batch", "running", "tag", "group")}
    cancelled = {"norm_mean_type": kinds[traits.shifts_cancel]}
    if not config.add_token_level_kl and _reward_weights(config, traits)[1] == 0:
        cancelled["norm_std_type"] = kinds[traits.scales_cancel]
    for key, without_effect in cancelled.items():
        if vars(config)[key] in without_effect:
            message = f"{vars(config)[key]} has no effect: {config.adv_estimator} takes it out again"
            yield ConfigProblem(key, message, "remove the key, or use `adv_estimator: reinforce`")

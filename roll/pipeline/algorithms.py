"""What a run is trained on, built from its configuration: policy loss, correction, reward shaping, advantages.

A combination in which some part would have no effect, act twice, or train on stale tokens as if they were fresh is
refused here with the reason. What a variant needs and does is said by its traits in the registry, not by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from roll.algorithms.advantages import AdvantageEstimator, make_advantage_estimator
from roll.algorithms.correction import Correction, parse_correction
from roll.algorithms.kl import make_kl_controller
from roll.algorithms.moments import RunningMoments
from roll.algorithms.objective import PolicyObjective
from roll.algorithms.registry import KnobError
from roll.algorithms.reward_shaping import LengthPenalty, RewardShaping
from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.schema import ROLL_KNOBS, RLVRConfig
from roll.pipeline.advantages import AdvantageSettings

MOST_LAGS_REPORTED = 8
"""Metrics per lag stop here; the last one includes all older tokens."""

Built = TypeVar("Built")


@dataclass(frozen=True)
class Algorithms:
    """The mathematics of a run."""

    objective: PolicyObjective
    correction: Correction | None
    advantages: AdvantageSettings


def build_algorithms(config: RLVRConfig) -> Algorithms:
    """Raises `ConfigError` with every wrong name and knob, or else with every combination that cannot be meant."""
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
        problems += _estimator_problems(config, estimator)
    if problems:
        raise ConfigError(problems)
    return Algorithms(objective, correction, _advantages(config, estimator))


def _attempt(
    problems: list[ConfigProblem], build: Callable[[], Built], paths: tuple[str, str, dict[str, str]]
) -> Built | None:
    """What is built, or the problems at the path of its name, of its knobs, or of a knob that stands elsewhere."""
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


def _policy_paths(config: RLVRConfig) -> tuple[str, str, dict[str, str]]:
    actor = config.actor_train
    given = {knob: f"actor_train.{name}" for name, (_, knob) in ROLL_KNOBS.items() if vars(actor)[name] is not None}
    return "actor_train.pg_variant", "actor_train.pg_variant_args", given


def _objective(config: RLVRConfig, correction: Correction | None) -> PolicyObjective:
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
    )


def _correction(config: RLVRConfig) -> Correction | None:
    return parse_correction(config.train_infer_correction) if config.train_infer_correction else None


def _advantages(config: RLVRConfig, estimator: AdvantageEstimator) -> AdvantageSettings:
    controller = None
    if config.add_token_level_kl:
        controller = make_kl_controller(
            config.kl_controller, config.init_kl_coef, config.target_kl, config.kl_horizon
        )
    return AdvantageSettings(
        estimator=estimator,
        shaping=_shaping(config),
        reward_moments=RunningMoments(),
        whitened=config.whiten_advantages,
        advantage_clip=config.advantage_clip,
        kl_controller=controller,
        kl_estimator=config.kl_estimator,
    )


def _shaping(config: RLVRConfig) -> RewardShaping:
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
        difficulty=(config.difficulty_low_threshold, config.difficulty_high_threshold)
        if config.difficulty_mask
        else None,
    )


def _policy_problems(
    config: RLVRConfig, objective: PolicyObjective, correction: Correction | None
) -> Iterator[ConfigProblem]:
    """Corrections that are missing, act twice, or act on nothing."""
    traits, name = objective.traits, config.actor_train.pg_variant
    recompute = config.old_logprobs == "recompute"
    weighted = correction is not None and correction.weight is not None
    if traits.needs_proximal and not recompute:
        message = f"behaviour, but {name} is defined on recomputed log-probabilities"
        yield ConfigProblem("old_logprobs", message, "set `old_logprobs: recompute`")
        return
    if recompute and not traits.uses_anchor:
        message = f"recompute has no effect: {name} has no ratio to anchor"
        yield ConfigProblem("old_logprobs", message, "remove the key, or choose a `pg_variant` with a ratio")
    if weighted and traits.importance_weighted and (not recompute or traits.needs_proximal):
        reason = "has its own behaviour weight" if traits.needs_proximal else "is anchored on the behaviour policy"
        message = f"the distance to the policy that sampled would count twice: {name} {reason}"
        remedy = "remove the weight" + ("" if traits.needs_proximal else ", or set `old_logprobs: recompute`")
        yield ConfigProblem("train_infer_correction.weight", message, remedy)
    inert = recompute and traits.weight_is_constant and derived.optimizer_steps_per_step(config) == 1
    if inert:
        message = (
            f"recompute: with one optimizer step a batch the ratio is exactly 1, so {name}, whose bounds are its "
            "correction, would correct nothing"
        )
        yield ConfigProblem("old_logprobs", message, "set `old_logprobs: behaviour`, or take several optimizer steps")
    anchored = traits.corrects and (not recompute or traits.needs_proximal)
    if derived.may_be_stale(config) and not (anchored or weighted or inert or config.allow_uncorrected_off_policy):
        reason = "its ratio is taken against recomputed log-probabilities" if recompute else "it has no ratio"
        staleness = derived.resolved_max_staleness(config)
        message = f"{name} would train on tokens up to {staleness} versions old as if they were fresh: {reason}"
        remedy = (
            "choose `tis`, `ppo` or another loss with `old_logprobs: behaviour`, add `train_infer_correction.weight`, "
            "set `async_generation_ratio: 0`, or `allow_uncorrected_off_policy: true` for an experiment"
        )
        yield ConfigProblem("actor_train.pg_variant", message, remedy)
    elif config.allow_uncorrected_off_policy and (anchored or weighted or not derived.may_be_stale(config)):
        message = "true has no effect: nothing stale goes uncorrected here"
        yield ConfigProblem("allow_uncorrected_off_policy", message, "remove the key")


def _estimator_problems(config: RLVRConfig, estimator: AdvantageEstimator) -> Iterator[ConfigProblem]:
    """Estimators that need what this pipeline does not have, or would see nothing."""
    traits, name = estimator.traits, config.adv_estimator
    if traits.needs_values:
        message = f"{name} needs a value model, and `critic` is not part of this version"
        yield ConfigProblem("adv_estimator", message, "use an estimator without values, for example grpo or rloo")
    if traits.needs_turns or traits.needs_states:
        message = f"{name} is defined on episodes of several turns, and `rlvr` has one"
        yield ConfigProblem("adv_estimator", message, "use reinforce, grpo, rloo or another one of single responses")
    if traits.group_relative and config.num_return_sequences_in_group == 1:
        message = f"1: {name} compares the samples of a prompt, so all advantages would be 0"
        yield ConfigProblem(
            "num_return_sequences_in_group", message, "set at least 2, or `adv_estimator: reinforce`"
        )
    if traits.whitens and config.whiten_advantages:
        message = f"true has no effect: {name} gives advantages mean 0 and deviation 1 itself"
        yield ConfigProblem("whiten_advantages", message, "remove the key")
    if traits.needs_greedy_baseline:
        for key in ("norm_mean_type", "norm_std_type", "length_penalty", "reward_clip"):
            if vars(config)[key] not in (None, "none"):
                message = f"{name} compares with the plain score of a greedy response; this would change one side only"
                yield ConfigProblem(key, message, "remove the key, or choose another `adv_estimator`")

"""Checks that a configuration can work, run before anything loads.

The loader checks types. The rules here check ranges and relations: between keys, between roles and devices, and with
the file system. Every problem is reported at once with its path, the value, the reason and a remedy. A setting that
would have no effect is a problem too. Rules are plain functions in the `rules_*` modules; a new one is one line below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from roll.configs import (
    rules_chaos,
    rules_data,
    rules_deepspeed,
    rules_devices,
    rules_envs,
    rules_keys,
    rules_lora,
    rules_options,
    rules_restarts,
    rules_rewards,
    rules_trackers,
    rules_training,
)
from roll.configs.derived import rlvr
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.memory import estimate_memory
from roll.configs.schema import AgenticConfig, PipelineConfig, RLVRConfig

COMMON_RULES: tuple[Callable[[PipelineConfig], Iterator[ConfigProblem]], ...] = (
    rules_keys.unread_keys_are_left_alone,
    rules_keys.inert_keys_are_left_alone,
    rules_keys.roll_names_fit,
    rules_keys.names_are_known,
    rules_keys.output_can_be_written,
    rules_trackers.trackers_are_known,
    rules_trackers.options_are_known,
    rules_data.models_are_named,
    rules_devices.cluster_can_be_reached,
    rules_devices.devices_exist,
    rules_devices.roles_share_devices_whole,
    rules_devices.engines_divide_devices,
    rules_devices.weights_can_travel,
    rules_devices.weights_can_be_pushed,
    rules_devices.engine_reads_its_model_arguments,
    rules_devices.vllm_samples_at_the_temperature,
    rules_training.trainers_pack,
    rules_lora.adapters_are_trained,
    rules_lora.base_reference_sets_nothing,
    rules_training.gradients_are_added_up_in_float32,
    rules_deepspeed.states_can_leave_shared_devices,
    rules_devices.sglang_has_gpus,
    rules_devices.sglang_records_what_it_samples,
    rules_training.staleness_is_possible,
    rules_training.batches_divide,
    rules_training.lengths_fit,
    rules_training.sampling_varies,
    rules_training.kl_has_a_reference,
    rules_training.kl_controller_can_move,
    rules_training.rewards_keep_a_meaning,
    rules_training.schedule_is_clear,
    rules_training.mismatch_can_be_measured,
    rules_restarts.restarts_can_help,
    rules_chaos.chaos_is_wanted,
    rules_chaos.chaos_can_happen,
)
RLVR_RULES: tuple[Callable[[RLVRConfig], Iterator[ConfigProblem]], ...] = (
    rules_keys.inert_rlvr_keys_are_left_alone,
    rules_data.prompts_are_named,
    rules_data.prompt_settings_fit,
    rules_data.rewards_are_complete,
    rules_rewards.keys_fit_the_kind,
    rules_rewards.reward_models_are_complete,
    rules_rewards.verdicts_come_before_a_stall,
    rules_rewards.judges_are_complete,
    rules_rewards.verdicts_can_be_read,
    rules_data.validation_is_complete,
)
AGENTIC_RULES: tuple[Callable[[AgenticConfig], Iterator[ConfigProblem]], ...] = (
    rules_keys.inert_agentic_keys_are_left_alone,
    rules_envs.environments_are_named,
    rules_envs.tags_are_known,
    rules_envs.groups_are_enough,
    rules_envs.turns_fit,
    rules_envs.validation_is_complete,
)
MACHINE_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": (
        rules_data.models_exist,
        rules_data.prompts_exist,
        rules_devices.gpus_are_visible,
        rules_trackers.trackers_are_here,
    ),
    "agentic": (rules_data.models_exist, rules_devices.gpus_are_visible, rules_trackers.trackers_are_here),
}
"""Rules about the machine of the run; the machine where a configuration is written need not pass them."""
OWN_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": RLVR_RULES,
    "agentic": AGENTIC_RULES,
}


def check_config(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration if it can work; else raise `ConfigError` with every reason.

    Only files and the environment are read.
    """
    problems = [*_faults(config), *missing_here(config)]
    if problems:
        raise ConfigError(problems)
    return config


def check_elsewhere(config: PipelineConfig) -> list[ConfigProblem]:
    """Return what the machine of the run must have and this one lacks.

    Raises `ConfigError` with every reason that does not depend on the machine.
    """
    problems = _faults(config)
    if problems:
        raise ConfigError(problems)
    return missing_here(config)


def missing_here(config: PipelineConfig) -> list[ConfigProblem]:
    """Return a problem for each model, file or device that is missing on this machine."""
    return [problem for rule in MACHINE_RULES[config.pipeline] for problem in rule(config)]


def _faults(config: PipelineConfig) -> list[ConfigProblem]:
    """Return every reason why the configuration cannot work on any machine."""
    problems = [*rules_keys.numbers_are_in_range(config), *rules_options.options_are_usable(config)]
    reported = [problem.path for problem in problems]
    sane = _with_defaults_at(config, reported)
    rules = (*COMMON_RULES, *OWN_RULES[config.pipeline])
    return problems + [problem for rule in rules for problem in rule(sane) if not _is_within(problem.path, reported)]


def _is_within(path: str, others: list[str]) -> bool:
    return any(path == other or path.startswith(f"{other}.") for other in others)


def config_warnings(config: PipelineConfig) -> list[str]:
    """Warn about settings that work but are often not intended; the configuration has passed `check_config`."""
    if isinstance(config, AgenticConfig):
        own = rules_envs.env_warnings(config)
    else:
        own = rules_data.data_warnings(rlvr(config))
    return [
        *rules_devices.device_warnings(config),
        *own,
        *rules_data.model_warnings(config),
        *rules_training.training_warnings(config),
        *_memory_warnings(config),
    ]


def _memory_warnings(config: PipelineConfig) -> Iterator[str]:
    if config.cluster.device_memory_gib is not None:
        yield from (f"memory: {misfit} (estimated; see `roll check`)" for misfit in estimate_memory(config).misfits)


def _with_defaults_at(config: PipelineConfig, paths: list[str]) -> PipelineConfig:
    """Return a copy with the numbers at ``paths`` at their defaults, so that the other rules can do arithmetic."""
    sane = copy.deepcopy(config)
    for path in paths:
        rules_keys.reset(sane, path)
    return sane

"""`check_config`: can a configuration work? Run before anything loads.

The loader checks types. The rules check ranges and relations: between keys, between roles and devices, and with the
file system. Every problem is reported at once with its path, the value, the reason and a remedy. A setting that would
have no effect is a problem too. Rules are plain functions in the modules of this package; a new one is one line below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from roll.check import data, devices, rewards, rules, training
from roll.check.memory import estimate_memory
from roll.configs.derived import rlvr
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.fields import default_of, values_below
from roll.configs.run import AgenticConfig, PipelineConfig

COMMON_RULES: tuple[Callable[[PipelineConfig], Iterator[ConfigProblem]], ...] = (
    rules.unread_keys_are_left_alone,
    rules.switched_off_keys_are_left_alone,
    rules.inert_keys_are_left_alone,
    rules.roll_names_fit,
    rules.names_are_known,
    rules.workers_of_roll_have_a_place,
    rules.output_can_be_written,
    rules.trackers_are_known,
    data.validation_is_complete,
    devices.cluster_can_be_reached,
    devices.attention_can_be_computed,
    devices.devices_exist,
    devices.roles_share_devices_whole,
    devices.engines_divide_devices,
    devices.weights_can_travel,
    devices.engines_sample_what_is_asked,
    training.trainers_can_train,
    rules.states_can_leave_shared_devices,
    training.schedule_is_possible,
    training.batches_divide,
    training.lengths_fit,
    data.lengths_fit_the_model,
    training.sampling_varies,
    training.kl_has_a_reference,
    training.rewards_keep_a_meaning,
    training.mismatch_can_be_measured,
    rules.restarts_can_help,
    rules.chaos_can_happen,
)
OWN_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": (
        data.prompts_are_named,
        data.domain_shares_fit,
        data.rewards_are_complete,
        rewards.rewards_fit_their_kind,
        rewards.judges_are_complete,
    ),
    "agentic": (data.environments_are_named, data.tags_are_known, data.groups_are_enough),
}
"""Rules of one pipeline."""
MACHINE_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": (
        data.models_exist,
        data.prompts_exist,
        devices.gpus_are_visible,
        rules.trackers_are_here,
    ),
    "agentic": (data.models_exist, devices.gpus_are_visible, rules.trackers_are_here),
}
"""Rules about the machine of the run; the machine where a configuration is written need not pass them."""


INDEPENDENT_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": (rules.algorithms_are_known, data.models_exist, data.prompts_exist),
    "agentic": (rules.algorithms_are_known, data.models_exist),
}
"""Rules that can be asked of a configuration in which other keys are missing: each looks at one value that is there."""


def loaded(load: Callable[[], PipelineConfig]) -> PipelineConfig:
    """Return what ``load`` returns; add to its problems those that do not depend on what is wrong. Raises
    `ConfigError`."""
    try:
        return load()
    except ConfigError as error:
        if error.rest is None:
            raise
        reported = [problem.path for problem in error.problems]
        more = [problem for rule in INDEPENDENT_RULES[error.rest.pipeline] for problem in rule(error.rest)]
        more = [problem for problem in more if not rules.is_within(problem.path, reported)]
        raise ConfigError([*error.problems, *more]) from error


def check_config(config: PipelineConfig) -> PipelineConfig:
    """Return the configuration if it can work; else raise `ConfigError` with every reason.

    Only files and the environment are read.
    """
    problems = [*_faults(config), *missing_here(config)]
    if problems:
        raise ConfigError([*problems, *rules.algorithms_are_known(config)])
    return config


def check_elsewhere(config: PipelineConfig) -> list[ConfigProblem]:
    """Return what the machine of the run must have and this one lacks.

    Raises `ConfigError` with every reason that does not depend on the machine.
    """
    problems = _faults(config)
    if problems:
        raise ConfigError([*problems, *rules.algorithms_are_known(config)])
    return missing_here(config)


def missing_here(config: PipelineConfig) -> list[ConfigProblem]:
    """Return a problem for each model, file or device that is missing on this machine."""
    return [problem for rule in MACHINE_RULES[config.pipeline] for problem in rule(config)]


def _faults(config: PipelineConfig) -> list[ConfigProblem]:
    """Return every reason why the configuration cannot work on any machine."""
    problems = [*rules.numbers_are_in_range(config), *rules.options_are_usable(config)]
    reported = [problem.path for problem in problems]
    sane = copy.deepcopy(config)  # with these values at their defaults, so that the other rules can do arithmetic
    for path, section, _, item in list(values_below(sane)):
        if path in reported:
            setattr(section, item.name, default_of(item))
    found = [problem for rule in (*COMMON_RULES, *OWN_RULES[config.pipeline]) for problem in rule(sane)]
    return problems + [problem for problem in found if not rules.is_within(problem.path, reported)]


def config_warnings(config: PipelineConfig) -> list[str]:
    """Warn about settings that work but are often not intended; the configuration has passed `check_config`."""
    own = data.env_warnings(config) if isinstance(config, AgenticConfig) else data.data_warnings(rlvr(config))
    known = config.cluster.device_memory_gib is not None
    misfits = estimate_memory(config).misfits if known else []
    return [
        *devices.device_warnings(config),
        *own,
        *training.training_warnings(config),
        *(f"memory: {misfit} (estimated; see `roll check`)" for misfit in misfits),
    ]

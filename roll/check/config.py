"""`check_config`: decides before anything loads if a configuration can work.

The loader checks types. The rules check ranges and relations: between keys, between roles and devices, and with the
file system. Every problem is reported at once with its path, the value, the reason and a remedy. A setting that would
have no effect is a problem too. Rules are plain functions in the modules of this package; a new rule also needs a line
in one of the lists below.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from roll.check import data, devices, pictures, rewards, rules, training
from roll.check.memory import estimate_memory
from roll.configs.derived import prompted
from roll.configs.errors import ConfigError, ConfigProblem, NoEffect
from roll.configs.fields import default_of, values_below
from roll.configs.loader import config_from_tree, load_config
from roll.configs.run import AgenticConfig, PipelineConfig, RunConfig, SFTConfig

RUN_RULES: tuple[Callable[[RunConfig], Iterator[ConfigProblem]], ...] = (
    rules.unread_keys_are_left_alone,
    rules.switched_off_keys_are_left_alone,
    rules.inert_keys_are_left_alone,
    rules.names_are_known,
    rules.workers_of_roll_have_a_place,
    rules.output_can_be_written,
    rules.trackers_are_known,
    devices.cluster_can_be_reached,
    devices.attention_can_be_computed,
    devices.devices_exist,
    devices.roles_share_devices_whole,
    training.trainers_can_train,
    training.warmup_is_set_once,
    training.batches_divide,
    data.lengths_fit_the_model,
    rules.restarts_have_a_checkpoint,
    data.validation_is_asked_for,
)
"""Rules of every pipeline."""
ROLLOUT_RULES: tuple[Callable[[PipelineConfig], Iterator[ConfigProblem]], ...] = (
    rules.roll_names_fit,
    pictures.engines_fit_the_pipeline,
    data.validation_samples_as_asked,
    devices.engines_divide_devices,
    devices.weights_can_travel,
    devices.engines_sample_what_is_asked,
    rules.states_can_leave_shared_devices,
    training.schedule_is_possible,
    training.lengths_fit,
    training.sampling_varies,
    training.kl_has_a_reference,
    training.teacher_can_teach,
    training.log_probabilities_have_the_weights,
    training.rewards_keep_a_meaning,
    training.mismatch_can_be_measured,
    training.experts_can_be_replayed,
    rules.restarts_can_help,
    rules.chaos_can_happen,
)
"""Rules of the pipelines of reinforcement learning."""
PROMPT_RULES: tuple[Callable[[Any], Iterator[ConfigProblem]], ...] = (
    *ROLLOUT_RULES,
    data.prompts_are_named,
    data.domain_shares_fit,
    data.rewards_are_complete,
    rewards.rewards_fit_their_kind,
    rewards.weights_are_weights,
    rewards.judges_are_complete,
)
"""Rules of the pipelines whose groups are samples of a prompt."""
OWN_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": PROMPT_RULES,
    "image": (
        *PROMPT_RULES,
        pictures.text_keys_are_left_alone,
        pictures.steps_are_possible,
        pictures.pictures_fit_the_model,
    ),
    "agentic": (*ROLLOUT_RULES, data.environments_are_named, data.tags_are_known, data.groups_are_enough),
    "sft": (
        data.prompts_are_named,
        data.domain_shares_fit,
        rules.length_is_said_once,
        rules.epochs_mean_the_same_to_all,
        rules.nothing_falls_back,
    ),
}
"""Rules of one pipeline."""
_EVERY_MACHINE = (devices.gpus_are_visible, rules.trackers_are_here, rules.secrets_are_given)
MACHINE_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": (data.models_exist, data.prompts_exist, *_EVERY_MACHINE),
    "agentic": (data.models_exist, *_EVERY_MACHINE),
    "image": (pictures.pipelines_exist, data.prompts_exist, *_EVERY_MACHINE),
    "sft": (data.models_exist, data.prompts_exist, *_EVERY_MACHINE),
}
"""Rules about the machine on which the run starts; they may fail where a configuration is only written or read."""


LACKING = ("rewards", "custom_envs", "actor_train.data_args", "validation.data_args")
"""Paths of settings that a file in ROLL's dialect may lack. `roll check` lists them among the needs."""


def read_config(
    source: str | Path | dict[str, Any], overrides: Sequence[str] = (), tell: Callable[[str], None] | None = None
) -> RunConfig:
    """Load a configuration from a file or a tree; see `load_config`.

    In ROLL's dialect, keys without an effect here are set to their defaults and reported to ``tell``. Raises
    `ConfigError`.
    """
    told: list[str] = []
    try:
        if isinstance(source, dict):
            config = config_from_tree(source, overrides, told.append)
        else:
            config = load_config(source, overrides, told.append)
        if told:
            told += leave_out_without_effect(config).values()
        return config
    finally:
        if told and tell is not None:
            tell("\n  ".join(told))


def leave_out_without_effect(config: RunConfig) -> dict[str, str]:
    """Set keys without effect to their defaults, and return a sentence for each path.

    This is repeated until no key is left without effect, since resetting one may leave others without.
    """
    sentences: dict[str, str] = {}
    while True:
        found = {each.path: each.message for each in _faults(config) if isinstance(each, NoEffect)}
        sections = {where: (section, item) for where, section, _, item in values_below(config)}
        new = [where for where in found if where in sections and where not in sentences]
        if not new:
            return sentences
        for where in new:
            section, item = sections[where]
            setattr(section, item.name, default_of(item))
            sentences[where] = f"{where}: {found[where].replace('has no effect:', 'has no effect here:')}"


INDEPENDENT_RULES: dict[str, tuple[Callable[[Any], Iterator[ConfigProblem]], ...]] = {
    "rlvr": (rules.algorithms_are_known, data.models_exist, data.prompts_exist, data.written_lengths_fit_the_model),
    "agentic": (rules.algorithms_are_known, data.models_exist, data.written_lengths_fit_the_model),
    "image": (rules.algorithms_are_known, pictures.pipelines_exist, data.prompts_exist),
    "sft": (data.models_exist, data.prompts_exist, data.written_lengths_fit_the_model),
}
"""Rules that also apply to a configuration in which other keys are wrong or missing."""


def loaded(load: Callable[[], RunConfig], here: bool = True) -> RunConfig:
    """Return the result of ``load``. If it fails, add the problems that `INDEPENDENT_RULES` find in the rest.

    ``here``: the run is to start on this machine, so files missing on it are problems, too. Raises `ConfigError`.
    """
    try:
        return load()
    except ConfigError as error:
        if error.rest is None:
            raise
        reported = [problem.path for problem in error.problems]
        pipeline = error.rest.pipeline
        asked = [each for each in INDEPENDENT_RULES[pipeline] if here or each not in MACHINE_RULES[pipeline]]
        more = [problem for rule in asked for problem in rule(error.rest)]
        more = [problem for problem in more if not rules.is_within(problem.path, reported)]
        raise ConfigError([*error.problems, *more]) from error


def check_config(config: RunConfig) -> RunConfig:
    """Return the configuration if it can work; else raise `ConfigError` with every problem.

    Only files and the environment are read.
    """
    problems = [*_faults(config), *missing_here(config)]
    if problems:
        raise ConfigError([*problems, *_unknown_algorithms(config)])
    return config


def check_elsewhere(config: RunConfig, may_lack: Sequence[str] = ()) -> list[ConfigProblem]:
    """Return the problems that are allowed for a run on another machine.

    These are problems at the paths in ``may_lack``, then models, files and devices that this machine lacks. Raises
    `ConfigError` if there is any other problem.
    """
    problems = _faults(config)
    lacking = [problem for problem in problems if problem.path in may_lack]
    if len(lacking) < len(problems):
        others = [problem for problem in problems if problem not in lacking]
        raise ConfigError([*others, *_unknown_algorithms(config)])
    return [*lacking, *missing_here(config)]


def _unknown_algorithms(config: RunConfig) -> list[ConfigProblem]:
    return list(rules.algorithms_are_known(config)) if isinstance(config, PipelineConfig) else []


def missing_here(config: RunConfig) -> list[ConfigProblem]:
    """Return a problem for each model, file or device that is missing on this machine."""
    return [problem for rule in MACHINE_RULES[config.pipeline] for problem in rule(config)]


def _faults(config: RunConfig) -> list[ConfigProblem]:
    """Return every problem that does not depend on the machine."""
    problems = [*rules.numbers_are_in_range(config), *rules.options_are_usable(config)]
    reported = [problem.path for problem in problems]
    sane = copy.deepcopy(config)  # wrong values become defaults, so that the other rules can compute
    for path, section, _, item in list(values_below(sane)):
        if path in reported:
            setattr(section, item.name, default_of(item))
    found = [problem for rule in (*RUN_RULES, *OWN_RULES[config.pipeline]) for problem in rule(sane)]
    return problems + [problem for problem in found if not rules.is_within(problem.path, reported)]


def config_warnings(config: RunConfig) -> list[str]:
    """Warn about settings that work but are often not intended; the configuration has passed `check_config`."""
    if isinstance(config, AgenticConfig):
        own = data.env_warnings(config)
    else:
        own = data.data_warnings(config if isinstance(config, SFTConfig) else prompted(config))
    known = config.cluster.device_memory_gib is not None
    misfits = estimate_memory(config).misfits if known else []
    return [
        *devices.device_warnings(config),
        *own,
        *(training.training_warnings(config) if isinstance(config, PipelineConfig) else ()),
        *(f"memory: {misfit} (estimated; see `roll check`)" for misfit in misfits),
    ]

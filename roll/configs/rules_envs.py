"""Rules about environments: their kinds, number and length, and their use in validation."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from roll.configs.derived import groups_ahead, sequence_length
from roll.configs.errors import ConfigProblem
from roll.configs.rules_data import greedy_is_plain
from roll.configs.rules_keys import IMPORT_PATH
from roll.configs.schema import AgenticConfig, EnvManagerConfig
from roll.configs.wording import choose_among, count, shown

ENV_MANAGERS = ("trajectory", "step")
_TAG = re.compile(r"[\w.-]+")
"""Pattern of a tag, which is part of metric names and of file names."""


def managers(config: AgenticConfig) -> dict[str, EnvManagerConfig]:
    """Return the sets of environments of a run by their key."""
    sets = {"train_env_manager": config.train_env_manager}
    return sets if config.val_env_manager is None else sets | {"val_env_manager": config.val_env_manager}


def environments_are_named(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Require an environment and a known environment manager for each tag."""
    if not config.custom_envs:
        remedy = "add one, for example `custom_envs: {lake: {env_type: frozen_lake}}`"
        yield ConfigProblem("custom_envs", "there is no environment", remedy)
    for tag, env in config.custom_envs.items():
        path = f"custom_envs.{tag}"
        if not _TAG.fullmatch(tag):
            message = f"{shown(tag)} is part of metric and file names"
            yield ConfigProblem(path, message, "use letters, digits, '-', '_' and '.'")
        if not env.env_type:
            yield ConfigProblem(f"{path}.env_type", "no environment is named", "write one, for example `frozen_lake`")
        if env.env_manager_cls not in ENV_MANAGERS and not IMPORT_PATH.fullmatch(env.env_manager_cls):
            message = f"{shown(env.env_manager_cls)} is neither a built-in environment manager nor an import path"
            remedy = choose_among(env.env_manager_cls, ENV_MANAGERS)
            yield ConfigProblem(f"{path}.env_manager_cls", message, remedy)


def tags_are_known(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Reject unknown, repeated and unused tags, and shares that do not match the tags."""
    used: set[str] = set()
    for path, manager in managers(config).items():
        used |= set(manager.tags or config.custom_envs)
        for index, tag in enumerate(manager.tags):
            if tag not in config.custom_envs:
                remedy = choose_among(tag, list(config.custom_envs))
                yield ConfigProblem(f"{path}.tags[{index}]", f"{shown(tag)} is no key of `custom_envs`", remedy)
        for tag, times in Counter(manager.tags).items():
            if times > 1:
                yield ConfigProblem(f"{path}.tags", f"{shown(tag)} is named {times} times", "name each tag once")
        yield from _partition_fits(path, manager, len(manager.tags or config.custom_envs))
    for tag in config.custom_envs:
        if tag not in used:
            message = "has no effect: neither training nor validation uses this tag"
            yield ConfigProblem(f"custom_envs.{tag}", message, "add it to `train_env_manager.tags`, or remove it")


def _partition_fits(path: str, manager: EnvManagerConfig, tags: int) -> Iterator[ConfigProblem]:
    shares = manager.num_groups_partition
    if not shares:
        return
    path = f"{path}.num_groups_partition"
    if len(shares) != tags:
        message = f"{shown(shares)} has {count(len(shares), 'number')} for {count(tags, 'tag')}"
        yield ConfigProblem(path, message, "write one number per tag")
    elif min(shares) < 0 or sum(shares) == 0:
        yield ConfigProblem(path, f"{shown(shares)} leaves no groups", "write numbers of at least 0, one above it")
    elif manager.num_env_groups is not None and sum(shares) != manager.num_env_groups:
        message = f"{shown(shares)} adds up to {sum(shares)}, and num_env_groups is {manager.num_env_groups}"
        yield ConfigProblem(path, message, "let the numbers add up to `num_env_groups`")


def groups_are_enough(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Require environments for all groups of a step, and room for all episodes of a group at once."""
    train = config.train_env_manager
    if train.max_traj_per_env is not None:
        path = "train_env_manager.max_traj_per_env"
        if train.num_env_groups is None:
            message = f"{train.max_traj_per_env} has no effect: num_env_groups is not set"
            yield ConfigProblem(path, message, "set `train_env_manager.num_env_groups`, or remove this key")
        elif train.num_env_groups * train.max_traj_per_env < config.rollout_batch_size:
            message = (
                f"{count(train.num_env_groups, 'group')} x {train.max_traj_per_env} = "
                f"{train.num_env_groups * train.max_traj_per_env} a step, and a step needs {config.rollout_batch_size}"
            )
            yield ConfigProblem(path, message, "raise it or `num_env_groups`, or lower `rollout_batch_size`")
    for path, manager in managers(config).items():
        if manager.group_size > config.env_workers.max_sessions:
            message = f"{manager.group_size} episodes, and only {config.env_workers.max_sessions} may be in progress"
            yield ConfigProblem(f"{path}.group_size", message, "lower it, or raise `env_workers.max_sessions`")


def turns_fit(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Reject a turn that is longer than a sequence allows."""
    room = sequence_length(config) - 1
    for tag, env in config.custom_envs.items():
        if env.max_tokens_per_step is not None and env.max_tokens_per_step > room:
            message = f"{env.max_tokens_per_step} is more than a sequence of {room + 1} tokens has room for"
            path = f"custom_envs.{tag}.max_tokens_per_step"
            yield ConfigProblem(path, message, "lower it, or raise `response_length` or `sequence_length`")


def validation_is_complete(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Require environments, their number, `eval_steps` and meaningful sampling for validation."""
    manager = config.val_env_manager
    if manager is None:
        if config.eval_steps > 0:
            message = f"{config.eval_steps} asks for validation, but there are no validation environments"
            yield ConfigProblem("eval_steps", message, "add `val_env_manager`, or set 0")
        return
    if config.eval_steps == 0:
        remedy = "set `eval_steps` to how often, or remove this section"
        yield ConfigProblem("val_env_manager", "has no effect: eval_steps is 0", remedy)
    if manager.num_env_groups is None:
        remedy = "set it, for example 64"
        yield ConfigProblem("val_env_manager.num_env_groups", "the size of the validation set is not given", remedy)
    elif manager.num_env_groups < len(manager.tags or config.custom_envs):
        tags = count(len(manager.tags or config.custom_envs), "tag")
        message = f"{manager.num_env_groups} is less than the {tags}: not every tag would be validated"
        yield ConfigProblem("val_env_manager.num_env_groups", message, "raise it, or name fewer `tags`")
    sampling = config.validation.generating_args
    yield from greedy_is_plain(sampling)
    if sampling.temperature > 0 and sampling.num_return_sequences != 1:
        path = "validation.generating_args.num_return_sequences"
        message = f"{sampling.num_return_sequences} has no effect on episodes"
        yield ConfigProblem(path, message, "set `val_env_manager.group_size` instead")


def env_warnings(config: AgenticConfig) -> Iterator[str]:
    """Warn about environments that work but may not be intended."""
    train = config.train_env_manager
    wanted = config.rollout_batch_size + groups_ahead(config)
    if train.num_env_groups is not None and train.num_env_groups < wanted:
        yield (
            f"train_env_manager.num_env_groups {train.num_env_groups} is below the {wanted} groups that may be in "
            "flight: the others wait for a place"
        )
    val = config.val_env_manager
    if val is not None and val.group_size > 1 and config.validation.generating_args.temperature == 0:
        yield (
            f"val_env_manager.group_size {val.group_size} with greedy sampling: episodes of a group differ only where "
            "their environment is random beyond its seed"
        )

"""Rules about single keys: numbers in range, known names, and no key that nothing reads."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any

from roll.configs.derived import present_roles, reward_models, trained_roles, uses_kl
from roll.configs.errors import ConfigProblem
from roll.configs.schema import (
    FORWARD_STRATEGIES,
    LARGEST_NUMBER,
    ROLL_KNOBS,
    STRATEGIES_OF_ROLES,
    TRAINED_ROLES,
    UNREAD_KEYS,
    AgenticConfig,
    PipelineConfig,
    RewardConfig,
    RLVRConfig,
    WorkerConfig,
)
from roll.configs.wording import choose_among, shown
from roll.tracking.run_directory import RunDirectory

_IDENTIFIER = r"[A-Za-z_]\w*"
IMPORT_PATH = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}(\.{_IDENTIFIER})*")
"""Pattern of an import path, `package.module:name`."""
_REGISTERED_NAME = re.compile(r"[A-Za-z_][\w-]*")


def default_of(item: Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def differs_from_default(section: Any, name: str) -> bool:
    """Return True if a key of a section differs from its default."""
    item = next(item for item in fields(section) if item.name == name)
    return bool(vars(section)[name] != default_of(item))


def values_below(section: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any, Field[Any]]]:
    """Yield each field below a dataclass instance as (path, section, value, field)."""
    for item in fields(section):
        path, value = prefix + item.name, vars(section)[item.name]
        yield path, section, value, item
        if is_dataclass(value):
            yield from values_below(value, f"{path}.")
        elif isinstance(value, dict):
            for key, below in value.items():
                if is_dataclass(below):
                    yield from values_below(below, f"{path}.{key}.")
        elif isinstance(value, list):
            for index, below in enumerate(value):
                if is_dataclass(below):
                    yield from values_below(below, f"{path}[{index}].")


def numbers_are_in_range(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject numbers outside the range that their field declares, infinity and NaN included."""
    for path, _, value, item in values_below(config):
        limits = item.metadata.get("range")
        if limits is None or value is None:
            continue
        too_large = not -LARGEST_NUMBER <= value <= LARGEST_NUMBER
        if too_large or not limits.contains(value):
            reason = f"is beyond {LARGEST_NUMBER:g}" if too_large else f"must be {limits}"
            yield ConfigProblem(path, f"{shown(value)} {reason}", f"the default is {shown(default_of(item))}")


def reset(config: PipelineConfig, path: str) -> None:
    """Reset the field at ``path`` to its default, in place."""
    for candidate, section, _, item in list(values_below(config)):
        if candidate == path:
            setattr(section, item.name, default_of(item))


def unread_keys_are_left_alone(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject keys of a role that only other roles read."""
    for role, section in present_roles(config).items():
        for key in UNREAD_KEYS[role]:
            default = default_of(next(item for item in fields(section) if item.name == key))
            value = vars(section)[key]
            if not is_dataclass(value):
                if value != default:
                    yield _unread(f"{role}.{key}", value, role, key)
                continue
            for item in fields(value):
                if vars(value)[item.name] != vars(default)[item.name]:
                    yield _unread(f"{role}.{key}.{item.name}", vars(value)[item.name], role, f"{key}.{item.name}")


def _unread(path: str, value: Any, role: str, key: str) -> ConfigProblem:
    section = key.partition(".")[0]
    readers = [name for name, unread in UNREAD_KEYS.items() if name != role and section not in unread]
    belongs = " or ".join(f"`{name}.{key}`" for name in readers)
    message = f"{shown(value)} has no effect: nothing reads this key here"
    return ConfigProblem(path, message, f"it belongs under {belongs}")


def inert_keys_are_left_alone(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject keys that another setting switches off."""
    users = [reward for reward in reward_models(config).values() if reward.model_args.model_name_or_path is None]
    if config.reward_pretrain is not None and not users:
        yield ConfigProblem(
            "reward_pretrain",
            f"{shown(config.reward_pretrain)} has no effect: no reward loads this model",
            "remove it, or set `verifier: reward_model` in a reward without a `model_name_or_path` of its own",
        )
    if not config.use_kl_loss and differs_from_default(config, "kl_loss_coef"):
        yield _inert("kl_loss_coef", config.kl_loss_coef, "`use_kl_loss` is false", "set `use_kl_loss: true`")
    if not config.add_token_level_kl:
        for key in ("init_kl_coef", "kl_controller"):
            if differs_from_default(config, key):
                remedy = "set `add_token_level_kl: true`"
                yield _inert(key, vars(config)[key], "`add_token_level_kl` is false", remedy)
    if config.critic is None:
        for key in ("critic_warmup", "value_clip"):
            if differs_from_default(config, key):
                yield _inert(key, vars(config)[key], "there is no `critic`", "add `critic` and `adv_estimator: gae`")
    yield from _inert_without_a_switch(config)
    yield from _inert_without_canaries(config)
    if config.mismatch_alarm is None and differs_from_default(config, "mismatch_action"):
        yield _inert("mismatch_action", config.mismatch_action, "`mismatch_alarm` is not set", "set `mismatch_alarm`")
    yield from _inert_straight_through(config)
    if not uses_kl(config) and differs_from_default(config, "kl_estimator"):
        yield _inert("kl_estimator", config.kl_estimator, "there is no KL term", "set `use_kl_loss: true`")
    if config.async_generation_ratio == 0:
        yield from _inert_when_synchronous(config)
    yield from _inert_batching(config)


def inert_rlvr_keys_are_left_alone(config: RLVRConfig) -> Iterator[ConfigProblem]:
    """Reject keys of the RLVR pipeline that another setting switches off."""
    if config.validation is None and differs_from_default(config, "val_batch_size"):
        yield _inert("val_batch_size", config.val_batch_size, "there is no `validation`", "add `validation`")


def inert_agentic_keys_are_left_alone(config: AgenticConfig) -> Iterator[ConfigProblem]:
    """Reject keys of the agentic pipeline that another setting switches off, and prompts, which episodes do not use."""
    data = config.actor_train.data_args
    for item in fields(data):
        if differs_from_default(data, item.name):
            reason = "episodes begin with what their environment says"
            yield _inert(f"actor_train.data_args.{item.name}", vars(data)[item.name], reason, "use `pipeline: rlvr`")
    if config.template == "raw" and config.chat_template_kwargs:
        value, remedy = config.chat_template_kwargs, "set `template: chat`"
        yield _inert("chat_template_kwargs", value, "`template` is raw", remedy)
    if config.template == "chat":
        for item in fields(config.raw_turns):
            if differs_from_default(config.raw_turns, item.name):
                value, remedy = vars(config.raw_turns)[item.name], "set `template: raw`"
                yield _inert(f"raw_turns.{item.name}", value, "`template` is chat", remedy)
    for tag, env in config.custom_envs.items():
        for key in ("history_length", "keep_first_observation"):
            if env.env_manager_cls == "trajectory" and differs_from_default(env, key):
                reason, remedy = "a trajectory shows all turns before", "set `env_manager_cls: step`"
                yield _inert(f"custom_envs.{tag}.{key}", vars(env)[key], reason, remedy)
    if config.val_env_manager is None:
        for item in fields(config.validation):
            if differs_from_default(config.validation, item.name):
                value, remedy = vars(config.validation)[item.name], "add `val_env_manager`"
                yield _inert(f"validation.{item.name}", value, "there is no `val_env_manager`", remedy)
    elif config.val_env_manager.max_traj_per_env is not None:
        played = config.val_env_manager.max_traj_per_env
        yield _inert("val_env_manager.max_traj_per_env", played, "validation plays each group once", "set the groups")


def _inert_straight_through(config: PipelineConfig) -> Iterator[ConfigProblem]:
    if config.kl_estimator == "k3_straight_through" and uses_kl(config) and not config.use_kl_loss:
        reason = "a penalty in the rewards has no gradient, and its value is that of k3"
        yield _inert("kl_estimator", config.kl_estimator, reason, "set `kl_estimator: k3`")


def _inert_without_a_switch(config: PipelineConfig) -> Iterator[ConfigProblem]:
    for switch, wanted, keys in (
        ("kl_controller", "adaptive", ("target_kl", "kl_horizon")),
        ("difficulty_mask", True, ("difficulty_low_threshold", "difficulty_high_threshold")),
    ):
        if vars(config)[switch] == wanted:
            continue
        for key in keys:
            if differs_from_default(config, key):
                reason, remedy = f"`{switch}` is {shown(vars(config)[switch])}", f"set `{switch}: {shown(wanted)}`"
                yield _inert(key, vars(config)[key], reason, remedy)
    penalty = config.length_penalty
    if penalty is not None:
        key, kind = ("correct_above", "relative") if penalty.kind == "overlong" else ("buffer", "overlong")
        if differs_from_default(penalty, key):
            reason, remedy = f"`length_penalty.kind` is {penalty.kind}", f"set `kind: {kind}`"
            yield _inert(f"length_penalty.{key}", vars(penalty)[key], reason, remedy)


def _inert_without_canaries(config: PipelineConfig) -> Iterator[ConfigProblem]:
    if config.weight_update.canary_interval > 0:
        return
    for key in ("canary_prompts", "canary_tolerance"):
        if differs_from_default(config.weight_update, key):
            value, remedy = vars(config.weight_update)[key], "set `weight_update.canary_interval` to at least 1"
            yield _inert(f"weight_update.{key}", value, "`weight_update.canary_interval` is 0", remedy)


def roll_names_fit(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require that an argument under ROLL's name belongs to the chosen policy loss and is given once."""
    actor = config.actor_train
    for name, (loss, knob) in ROLL_KNOBS.items():
        value = vars(actor)[name]
        if value is None:
            continue
        if actor.pg_variant != loss:
            reason = f"it is a knob of `{loss}`, and pg_variant is `{actor.pg_variant}`"
            yield _inert(f"actor_train.{name}", value, reason, f"set `pg_variant: {loss}`")
        elif knob in actor.pg_variant_args:
            message = f"{shown(value)}, but `pg_variant_args.{knob}` sets the same knob"
            yield ConfigProblem(f"actor_train.{name}", message, "keep one of the two")


def _inert_when_synchronous(config: PipelineConfig) -> Iterator[ConfigProblem]:
    ahead = "set `async_generation_ratio` above 0"
    reason = "with async_generation_ratio 0 nothing is generated ahead"
    if config.consumption == "ready_first":
        yield _inert("consumption", config.consumption, f"{reason}, and a step needs every group", ahead)
    if config.staleness_policy == "drop":
        yield _inert("staleness_policy", config.staleness_policy, f"{reason}, so no group is ever late", ahead)


def _inert_batching(config: PipelineConfig) -> Iterator[ConfigProblem]:
    for name, role in trained_roles(config).items():
        if role.use_dynamic_batching_in_train:
            arguments, key = role.training_args, "per_device_train_batch_size"
            if arguments.gradient_accumulation_steps is None and differs_from_default(arguments, key):
                yield _inert(
                    f"{name}.training_args.{key}",
                    arguments.per_device_train_batch_size,
                    "dynamic batching cuts micro-batches by tokens, and an optimizer step takes the whole batch",
                    "set `gradient_accumulation_steps`, or `use_dynamic_batching_in_train: false`",
                )
        elif differs_from_default(role, "max_tokens_per_microbatch_in_train"):
            yield _inert_budget(name, role, "train")
    for name, role in present_roles(config).items():
        if "infer_batch_size" in UNREAD_KEYS[name]:
            continue
        if role.use_dynamic_batching_in_infer and differs_from_default(role, "infer_batch_size"):
            yield _inert(
                f"{name}.infer_batch_size",
                role.infer_batch_size,
                "dynamic batching cuts micro-batches by tokens",
                "set `use_dynamic_batching_in_infer: false`",
            )
        if not role.use_dynamic_batching_in_infer and differs_from_default(role, "max_tokens_per_microbatch_in_infer"):
            yield _inert_budget(name, role, "infer")


def _inert_budget(name: str, role: WorkerConfig, mode: str) -> ConfigProblem:
    key = f"max_tokens_per_microbatch_in_{mode}"
    switch = f"use_dynamic_batching_in_{mode}"
    return _inert(f"{name}.{key}", vars(role)[key], f"`{switch}` is false", f"set `{switch}: true`")


def _inert(path: str, value: Any, reason: str, remedy: str) -> ConfigProblem:
    return ConfigProblem(path, f"{shown(value)} has no effect: {reason}", f"{remedy}, or remove this key")


def own_classes_have_their_form(path: str, section: WorkerConfig | RewardConfig) -> Iterator[ConfigProblem]:
    """Require the form of an import path for custom classes; the class itself is looked up later."""
    classes = {"worker_cls": section.worker_cls, "strategy_args.strategy_cls": section.strategy_args.strategy_cls}
    for key, value in classes.items():
        if value is not None and not IMPORT_PATH.fullmatch(value):
            message = f"{shown(value)} is no import path"
            yield ConfigProblem(f"{path}.{key}", message, "write `package.module:Class`")


def names_are_known(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require registered strategies for each role, and well-formed import paths."""
    for name, role in present_roles(config).items():
        known = STRATEGIES_OF_ROLES[name]
        strategy = role.strategy_args.strategy_name
        if strategy not in known:
            message = f"{shown(strategy)} is no strategy for this role"
            if name in TRAINED_ROLES and strategy in FORWARD_STRATEGIES:
                message += ": it only computes, and a role that learns needs an optimizer"
            yield ConfigProblem(f"{name}.strategy_args.strategy_name", message, choose_among(strategy, known))
        yield from own_classes_have_their_form(name, role)
    for stage, target in config.stages.items():
        if not (IMPORT_PATH.fullmatch(target) or _REGISTERED_NAME.fullmatch(target)):
            message = f"{shown(target)} is neither a name nor an import path"
            yield ConfigProblem(f"stages.{stage}", message, "write a registered name or `package.module:Class`")


def output_can_be_written(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require that the run's folder can be created."""
    if config.output_dir is None:
        if not re.fullmatch(r"[^/\\\0]+", config.exp_name) or config.exp_name in (".", ".."):
            message = f"{shown(config.exp_name)} is no folder name, and the run's folder is named after it"
            yield ConfigProblem("exp_name", message, "write a name without slashes, or set `output_dir`")
        return
    folder = Path(config.output_dir)
    if not config.output_dir.strip() or "\0" in config.output_dir:
        yield ConfigProblem("output_dir", f"{shown(config.output_dir)} is no path", "write a folder, or remove the key")
        return
    nearest_existing = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    if not nearest_existing.is_dir():
        message = f"{shown(config.output_dir)}: {nearest_existing} is a file"
        yield ConfigProblem("output_dir", message, "choose another folder")
    elif RunDirectory(folder).metrics.exists() and config.resume_from_checkpoint is False:
        message = f"{shown(config.output_dir)} holds a run already, whose results would be written over"
        remedy = "set `resume_from_checkpoint: true` to go on with it, name a new folder, or remove the key"
        yield ConfigProblem("output_dir", message, remedy)
    elif not os.access(nearest_existing, os.W_OK | os.X_OK):
        message = f"{shown(config.output_dir)}: no permission to write to {nearest_existing}"
        yield ConfigProblem("output_dir", message, "choose a folder that you may write to")

"""Rules about single keys and options: ranges, names, keys without effect, adapters, restarts, trackers, faults.

DeepSpeed 0.19 can move its states off a shared device only with some settings. It reports the others in the middle of a
run, when a device is handed over for the first time. The movable settings are listed here once; the trainer uses the
same list. The options of trackers are dataclasses beside each tracker's code, so a new tracker brings its own keys.
Only the named trackers are imported, and their libraries are not.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass, make_dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from roll.check.devices import readable_mappings
from roll.configs.derived import (
    present_roles,
    reference_is_base,
    reward_models,
    tracker_list,
    trained_roles,
    uses_kl,
    validation_settings,
    weight_transport,
)
from roll.configs.devices import compact
from roll.configs.engine_options import Options, is_too_large
from roll.configs.errors import ConfigProblem, choose_among, count, is_secret, problems_of, shown
from roll.configs.fields import IMPORT_PATH, LARGEST_NUMBER, default_of, differs_from_default
from roll.configs.loader import truth_value_problems, validation_problems
from roll.configs.rewards import RewardConfig
from roll.configs.roles import (
    ADAPTER_KEYS,
    ROLL_ARGUMENTS,
    TRAINED_ROLES,
    UNREAD_KEYS,
    ActorInferConfig,
    WorkerConfig,
)
from roll.configs.run import (
    PUBLICATION_CHAOS,
    TENSORBOARD,
    TRACKERS,
    AgenticConfig,
    ChaosEvent,
    PipelineConfig,
    RLVRConfig,
)
from roll.configs.strategies import FORWARD_STRATEGIES, TRAINERS, Trainer, strategies_of, strategy_of
from roll.tracking.plugins.process import TrackerPlugIn
from roll.tracking.run_directory import RunDirectory

TIMED = ("freeze", "delay_publication")


def chaos_is_wanted(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject chaos events unless `chaos.enabled` is true."""
    chaos = config.chaos
    if chaos.events and not chaos.enabled:
        message = f"{count(len(chaos.events), 'event')} would harm this run: it is for tests of recovery only"
        yield ConfigProblem("chaos.events", message, "remove them, or say `chaos.enabled: true`")
    if chaos.enabled and not chaos.events:
        yield ConfigProblem("chaos.enabled", "true has no effect: there are no events", "add `chaos.events`")


def chaos_can_happen(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject events that name no process of the run or no step that comes, and events given twice."""
    for index, event in enumerate(config.chaos.events):
        path = f"chaos.events[{index}]"
        if event in config.chaos.events[:index]:
            twin = config.chaos.events.index(event)
            message = f"the same as chaos.events[{twin}]: a run that goes on could not tell which has happened"
            yield ConfigProblem(path, message, "remove it, or give it another step")
        yield from _right_keys(event, path)
        yield from _right_moment(config, event, path)
        if event.kind not in PUBLICATION_CHAOS:
            yield from _right_process(config, event, path)
        elif event.kind == "corrupt_bucket" and weight_transport(config) in ("nccl", "cuda_ipc"):
            message = f"{shown(weight_transport(config))} has no buckets on this side of the engine's library"
            yield ConfigProblem(f"{path}.kind", message, "use another `weight_update.transport`")


def _right_keys(event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    if event.kind == "delay_publication" and event.seconds is None:
        yield ConfigProblem(f"{path}.seconds", f"{event.kind} needs its length", "give the seconds")
    if event.kind not in TIMED and event.seconds is not None:
        yield ConfigProblem(f"{path}.seconds", f"{event.seconds:g} has no effect on {event.kind}", "remove it")
    if event.kind in PUBLICATION_CHAOS:
        for key in ("role", "rank"):
            if differs_from_default(event, key):
                message = f"{shown(vars(event)[key])} has no effect on {event.kind}, which happens to all engines"
                yield ConfigProblem(f"{path}.{key}", message, "remove it")


def _right_moment(config: PipelineConfig, event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    end = config.max_steps
    last = end if event.kind in PUBLICATION_CHAOS else end - 1  # processes stop with the last step
    if event.at_step > last:
        message = f"{event.at_step} never comes: the run ends with step {end}"
        yield ConfigProblem(f"{path}.at_step", message, f"at most {last}")
        return
    interval = config.weight_update.interval_steps
    validated = validation_settings(config) is not None and config.eval_steps and event.at_step % config.eval_steps == 0
    published = event.at_step == end or not event.at_step % interval or validated
    if event.kind in PUBLICATION_CHAOS and not published:
        message = f"version {event.at_step} is not published (weight_update.interval_steps: {interval})"
        yield ConfigProblem(f"{path}.at_step", message, f"a multiple of {interval}")


def _right_process(config: PipelineConfig, event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    roles: dict[str, WorkerConfig | RewardConfig] = {**present_roles(config), **reward_models(config)}
    if event.role == "driver":
        processes = 1
    elif event.role not in roles:
        remedy = choose_among(event.role, ["driver", *roles])
        yield ConfigProblem(f"{path}.role", f"there is no {event.role} in this run", remedy)
        return
    else:
        role = roles[event.role]
        devices = len(readable_mappings(config).get(event.role, []))
        processes = devices // role.num_gpus_per_engine if isinstance(role, ActorInferConfig) else devices
    if event.rank >= processes:
        message = f"{event.rank}, but {event.role} has {processes}"
        yield ConfigProblem(f"{path}.rank", message, f"at most {max(processes - 1, 0)}")


@dataclass(frozen=True)
class Obstacle:
    """The reason why states cannot leave a device."""

    key: str
    """Key in `zero_optimization`."""
    message: str
    remedy: str


def obstacle_to_moving(options: Options, *, bfloat16: bool, learns: bool) -> Obstacle | None:
    """Return what prevents moving the states of a role to the host and back; None if nothing does."""
    stage = options.get("zero_optimization.stage", 0)
    if not learns:
        if stage != 3:
            return None
        return Obstacle(
            "stage", "stage 3 of a role without an optimizer: DeepSpeed cannot move its weights",
            "write stage 0, or use `hf_infer` or `fsdp2_train`",
        )  # fmt: skip
    if stage in (1, 2, 3) and zero_device(options, "offload_param") != "none":
        return Obstacle(
            "offload_param", "DeepSpeed moves nothing where parameters are offloaded",
            "remove this key and set `offload_optimizer`, or use `fsdp2_train` with `offload: cpu`",
        )  # fmt: skip
    if stage == 3 and zero_device(options, "offload_optimizer") == "none":
        return Obstacle(
            "stage", "stage 3: DeepSpeed moves no states of torch's AdamW",
            "write `offload_optimizer: {device: cpu}`, which keeps them on the host, or stage 2",
        )  # fmt: skip
    if stage == 1 and bfloat16:
        return Obstacle(
            "stage", "stage 1 in bfloat16: DeepSpeed cannot move its states", "write stage 2, which can be moved"
        )
    return None


def zero_device(options: Options, section: str) -> str:
    """Return the place of a `zero_optimization` section's states: `none` (on the device), `cpu` or `nvme`."""
    return str(options.get(f"zero_optimization.{section}.device", "none"))


def states_can_leave_shared_devices(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject DeepSpeed roles on shared GPUs whose states cannot make room for the other roles."""
    if config.cluster.device != "cuda":
        return
    mappings = readable_mappings(config)
    for name, role in present_roles(config).items():
        if role.strategy_args.strategy_name != "deepspeed_train":
            continue
        own = set(mappings.get(name, ()))
        sharing = [other for other, devices in mappings.items() if other != name and own & set(devices)]
        obstacle = obstacle_to_moving(
            Options.of(role),
            bfloat16=role.model_args.dtype == "bfloat16",
            learns=name in TRAINED_ROLES,
        )
        if sharing and obstacle is not None:
            shared = own & {device for other in sharing for device in mappings[other]}
            yield ConfigProblem(
                f"{name}.strategy_args.strategy_config.zero_optimization.{obstacle.key}",
                f"{obstacle.message}, and they have to make room on device {compact(sorted(shared))} for "
                f"{' and '.join(sharing)}",
                f"{obstacle.remedy}; or give {name} devices of its own",
            )


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
    for name, (loss, argument) in ROLL_ARGUMENTS.items():
        value = vars(actor)[name]
        if value is None:
            continue
        if actor.pg_variant != loss:
            reason = f"it is an argument of `{loss}`, and pg_variant is `{actor.pg_variant}`"
            yield _inert(f"actor_train.{name}", value, reason, f"set `pg_variant: {loss}`")
        elif argument in actor.pg_variant_args:
            message = f"{shown(value)}, but `pg_variant_args.{argument}` sets the same argument"
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
    """Require strategies that are known, for each role."""
    for name, role in present_roles(config).items():
        kind, strategy = strategies_of(name), role.strategy_args.strategy_name
        for found in problems_of(partial(kind.find, strategy, f"{name}.strategy_args.strategy_name")):
            if name in TRAINED_ROLES and strategy in FORWARD_STRATEGIES.built_in:
                message = f"{found.message}: it only computes, and a role that learns needs an optimizer"
                found = replace(found, message=message)
            yield found
        yield from own_classes_have_their_form(name, role)


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


def adapters_are_trained(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject adapters for any role but the policy, and for trainers that do not support them."""
    for role, section in present_roles(config).items():
        arguments, path = section.model_args, f"{role}.model_args"
        given = [key for key in ADAPTER_KEYS if differs_from_default(arguments, key)]
        if role != "actor_train":
            for key in given:
                message = f"{shown(vars(arguments)[key])} has no effect: only actor_train learns with adapters"
                yield ConfigProblem(f"{path}.{key}", message, "remove this key")
            continue
        if arguments.lora_target is None:
            for key in given:
                message = f"{shown(vars(arguments)[key])} has no effect: no layer has adapters"
                yield ConfigProblem(f"{path}.{key}", message, "set `lora_target`, or remove this key")
            continue
        strategy = strategy_of(role, section)
        if isinstance(strategy, Trainer) and not strategy.adapters:
            name = section.strategy_args.strategy_name
            message = f"{shown(arguments.lora_target)}, but {name} trains no adapters"
            able = [f"`{each}`" for each, record in TRAINERS.built_in.items() if record.adapters]
            remedy = f"use {' or '.join(able)}, or remove the keys `lora_...`"
            yield ConfigProblem(f"{path}.lora_target", message, remedy)
        if not arguments.lora_target:
            remedy = "name layers, for example `q_proj,v_proj` or `all-linear`, or remove this key"
            yield ConfigProblem(f"{path}.lora_target", f"{shown(arguments.lora_target)} names no layer", remedy)


def base_reference_sets_nothing(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject settings of a reference that is the trainer without its adapters."""
    if config.reference is None or not reference_is_base(config):
        return
    for path, value in _own_settings(config.reference, config.actor_train, ""):
        if path in ("device_mapping", "model_args.model_name_or_path"):
            continue
        message = f"{shown(value)} has no effect: the reference is actor_train without its adapters, no second model"
        remedy = "remove this key, or give the reference devices or a model of its own"
        yield ConfigProblem(f"reference.{path}", message, remedy)


def _own_settings(section: Any, trainer: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys that differ both from their default and from the trainer's section."""
    for item in fields(section):
        value, theirs = vars(section)[item.name], vars(trainer)[item.name]
        if is_dataclass(value):
            yield from _own_settings(value, theirs, f"{prefix}{item.name}.")
        elif differs_from_default(section, item.name) and value != theirs:
            yield prefix + item.name, value


def options_are_usable(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject values that `engine_options` does not allow."""
    for name, role in present_roles(config).items():
        strategy = strategy_of(name, role)
        if isinstance(strategy, Trainer) and not strategy.learns:
            continue
        for option, value, allowed in Options.of(role).wrong():
            path = f"{name}.strategy_args.strategy_config.{option}"
            reason = f"is beyond {LARGEST_NUMBER:g}" if is_too_large(value) else "is not usable"
            yield ConfigProblem(path, f"{shown(value)} {reason}", f"write {allowed}")


def restarts_can_help(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require a checkpoint to restart from, and an asynchronous run if it may fall back to ratio 0."""
    restarts = config.restarts
    if restarts.max_in_a_row == 0:
        for key in ("synchronous_after", "delay_seconds"):
            if differs_from_default(restarts, key):
                message = f"{shown(vars(restarts)[key])} has no effect: a failed run does not begin again"
                yield ConfigProblem(f"restarts.{key}", message, "set `restarts.max_in_a_row`, or remove this key")
        return
    if not 0 < config.save_steps < config.max_steps:
        message = f"{restarts.max_in_a_row} would each begin at step 0: the run writes no checkpoints on its way"
        yield ConfigProblem("restarts.max_in_a_row", message, "set `save_steps` below `max_steps`, or remove this key")
    for index, event in enumerate(config.chaos.events):
        if (event.kind, event.role) == ("fill_disk", "driver"):
            message = "fill_disk of the driver would last through its restarts, which are made by the same process"
            yield ConfigProblem(f"chaos.events[{index}]", message, "remove `restarts.max_in_a_row`")
    after = restarts.synchronous_after
    if after is None:
        return
    if after > restarts.max_in_a_row:
        restarted = count(restarts.max_in_a_row, "failure")
        message = f"{after} has no effect: no more than {restarted} in a row are followed by a restart"
        yield ConfigProblem("restarts.synchronous_after", message, f"set at most {restarts.max_in_a_row}")
    if config.async_generation_ratio == 0:
        message = f"{after} has no effect: the run is synchronous"
        yield ConfigProblem("restarts.synchronous_after", message, "remove it, or set `async_generation_ratio` above 0")


_KEYS = "tracker_kwargs"


@dataclass(frozen=True)
class ChosenTracker:
    """A plug-in tracker of a run."""

    name: str
    package: str | None
    install: str
    secret: str | None
    """The environment variable that must hold its key."""
    mode: str


def chosen_trackers(config: PipelineConfig) -> list[ChosenTracker]:
    """Return the plug-in trackers of a configuration, without those whose options are wrong."""
    chosen = []
    for name in tracker_list(config):
        plug_in = _plug_in(name)
        written = config.tracker_kwargs.get(name, {})
        if plug_in is not None and not list(_option_problems(name, plug_in.Options, written)):
            options = plug_in.Options(**written)
            secret, mode = plug_in.secret(options), plug_in.mode(options)
            chosen.append(ChosenTracker(name, plug_in.package, plug_in.install, secret, mode))
    return chosen


def _plug_in(name: str) -> type[TrackerPlugIn] | None:
    """Return the class of a plug-in tracker; None for TensorBoard and for a name that a rule reports."""
    if name == TENSORBOARD or problems_of(partial(TRACKERS.load, name, "track_with")):
        return None
    found: Any = TRACKERS.load(name, "track_with")
    return found


def tracker_words(config: PipelineConfig) -> list[str]:
    """Describe where metrics go besides `metrics.jsonl`."""
    words = [f"{tracker.name} ({tracker.mode})" for tracker in chosen_trackers(config)]
    return ["TensorBoard", *words] if tracker_list(config) else words


def trackers_are_known(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject unknown and repeated trackers."""
    names = tracker_list(config)
    as_list = not isinstance(config.track_with, str)
    for index, name in enumerate(names):
        path = f"track_with[{index}]" if as_list else "track_with"
        if name != TENSORBOARD:
            yield from problems_of(partial(TRACKERS.load, name, path))
    if len(set(names)) != len(names):
        yield ConfigProblem("track_with", f"{shown(names)} names a tracker twice", "name each once")


def options_are_known(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject options of trackers that are unknown or unused, and unknown options."""
    for name, options in config.tracker_kwargs.items():
        path = f"{_KEYS}.{name}"
        if name == TENSORBOARD:
            yield ConfigProblem(path, "TensorBoard has no options: its events are in the run's folder", "remove it")
        elif missing := problems_of(partial(TRACKERS.find, name, path)):
            yield from missing
        elif name not in tracker_list(config):
            remedy = f"add {name} to `track_with`, or remove these options"
            yield ConfigProblem(path, f"{shown(options)} has no effect: {name} is not used", remedy)
        elif plug_in := _plug_in(name):
            yield from _option_problems(path, plug_in.Options, options)


def _option_problems(path: str, kind: type, options: dict[str, Any]) -> Iterator[ConfigProblem]:
    secrets = [key for key in options if is_secret(key)]
    for key in secrets:
        remedy = "remove it here, and from the file's history; `docs/trackers.md` has the variable"
        yield ConfigProblem(f"{path}.{key}", "keys are taken from the environment only", remedy)
    tree = {key: value for key, value in options.items() if key not in secrets}
    problems = truth_value_problems(kind, tree)
    strict = make_dataclass(kind.__name__, [], bases=(kind,), namespace={"__pydantic_config__": {"extra": "forbid"}})
    try:
        TypeAdapter(strict).validate_python(tree)
    except ValidationError as error:
        known = {problem.path for problem in problems}
        problems += [item for item in validation_problems(error, kind, tree) if item.path not in known]
    for problem in problems:
        yield ConfigProblem(f"{path}.{problem.path}", problem.message, problem.remedy)


def trackers_are_here(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require the package of each tracker, and its key in the environment."""
    for tracker in chosen_trackers(config):
        if tracker.package is not None and not is_installed(tracker.package):
            message = f"{tracker.name} needs the package {tracker.package}, which is not installed"
            yield ConfigProblem("track_with", message, f"{tracker.install}, or remove {tracker.name}")
        if tracker.secret is not None and not os.environ.get(tracker.secret):
            message = f"{tracker.name} ({tracker.mode}) needs a key, and the variable {tracker.secret} is not set"
            remedy = f"set it, or choose {_KEYS}.{tracker.name} that send nothing: docs/trackers.md"
            yield ConfigProblem("track_with", message, remedy)


def is_installed(package: str) -> bool:
    """Return True if a package can be imported; a mere folder of that name, such as wandb's output, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None

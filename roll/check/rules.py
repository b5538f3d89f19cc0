"""Rules about single keys and options: ranges, names, keys without effect, restarts, trackers, faults.

DeepSpeed 0.19 can move its states off a shared device only with some settings. With other settings it fails in the
middle of a run, when a device is handed over for the first time. `obstacle_to_moving` knows them, also for the trainer.
The options of trackers are dataclasses beside each tracker's code, so a new tracker brings its own keys. Only the named
trackers are imported, and their libraries are not.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, make_dataclass, replace
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from roll.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from roll.check.devices import readable_mappings
from roll.configs import derived, fields
from roll.configs.devices import compact
from roll.configs.errors import MASK, ConfigProblem, choose_among, count, is_secret, problems_of, shown, without_effect
from roll.configs.loader import validated
from roll.configs.rewards import RewardConfig
from roll.configs.roles import (
    ADAPTER_KEYS,
    COMPARED_ROLES,
    ROLL_ARGUMENTS,
    TRAINED_ROLES,
    UNREAD_KEYS,
    UNREAD_PATHS,
    ActorInferConfig,
)
from roll.configs.run import (
    PUBLICATION_CHAOS,
    TENSORBOARD,
    TRACKERS,
    AgenticConfig,
    ChaosEvent,
    PipelineConfig,
    PromptConfig,
    RLVRConfig,
    RunConfig,
    SFTConfig,
)
from roll.configs.strategies import FORWARD_STRATEGIES, Options, Trainer, strategies_of, strategy_of
from roll.tracking.plugins.process import TrackerPlugIn
from roll.tracking.run_directory import RunDirectory


def numbers_are_in_range(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject numbers outside the range that their field declares, infinity and NaN included."""
    for path, section, value, item in fields.values_below(config):
        limits = fields.range_of(fields.field_types(section.__class__)[item.name])
        if limits is not None and value is not None and (fields.is_too_large(value) or not limits.contains(value)):
            reason = f"is beyond {fields.LARGEST_NUMBER:g}" if fields.is_too_large(value) else f"must be {limits}"
            yield ConfigProblem(path, f"{shown(value)} {reason}", f"the default is {shown(fields.default_of(item))}")


def switched_off_keys_are_left_alone(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject keys whose needed key (`needs` of `option`) is off. Sections that nothing reads have another rule."""
    unread = [*UNREAD_PATHS, *(role for role in derived.role_sections(config) if derived.is_trainer(config, role))]
    if isinstance(config, AgenticConfig):
        unread += ["actor_train.data_args", "val_env_manager"]
    for path, section, _, item in fields.values_below(config):
        needed = item.metadata["needs"]
        if needed is None or is_within(path, unread):
            continue
        prefix, (switch, _, on) = path.removesuffix(item.name), needed.partition(": ")
        value = vars(section)[switch]
        text = value if isinstance(value, str) else shown(value)
        if text == on or (not on and value):
            continue
        reason = f"`{prefix}{switch}` is {'not set' if value is None else text}"
        remedy = f"set `{prefix}{needed}`" + (" to at least 1" if not on and value == 0 else "")
        if needed == "critic":
            remedy = "add `critic` and `adv_estimator: gae`"
        for below, inert in fields.changes(section, item.name):
            yield without_effect(prefix + below, inert, reason, f"{remedy}, or remove this key")


def is_within(path: str, others: Iterable[str]) -> bool:
    """Return True if a path is one of the others, or below one."""
    return any(path == other or path.startswith(f"{other}.") for other in others)


def unread_keys_are_left_alone(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject keys that only other roles read, and settings of a role whose work the trainer does."""
    for role, section in derived.present_roles(config).items():
        for path, value in fields.changes(section, *UNREAD_KEYS[role]):
            key = path.partition(".")[0]
            readers = [f"`{name}.{path}`" for name, unread in UNREAD_KEYS.items() if key not in unread]
            remedy = f"it belongs under {' or '.join(readers)}"
            if isinstance(config, SFTConfig):
                remedy = "remove it: nothing is generated in `pipeline: sft`"
            yield without_effect(f"{role}.{path}", value, "nothing reads this key here", remedy)
    if not isinstance(config, PipelineConfig):
        return
    if config.actor_logp is not None and derived.logp_is_trainer(config):
        for path, value in fields.changes(config.actor_logp):
            if path != "device_mapping":
                reason = "without devices of its own this role is actor_train"
                yield without_effect(f"actor_logp.{path}", value, reason, "remove this key, or give it devices")
    if config.teacher is not None and derived.is_policy(config, "teacher"):
        for path, value in fields.changes(config.teacher):
            if path not in ("weights", "prompt"):
                reason = "the teacher is actor_train itself"
                yield without_effect(f"teacher.{path}", value, reason, "remove this key, or set `weights: frozen`")
    trained = dict(fields.changes(config.actor_train))
    for role in COMPARED_ROLES:
        if not derived.is_base(config, role):
            continue
        for path, value in fields.changes(vars(config)[role]):
            apart = ("device_mapping", "model_args.model_name_or_path", "prompt")
            if path not in apart and trained.get(path) != value:
                reason = f"the {role} is actor_train without its adapters, no second model"
                remedy = f"remove this key, or give the {role} devices or a model of its own"
                yield without_effect(f"{role}.{path}", value, reason, remedy)


def inert_keys_are_left_alone(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject keys that have no effect because of several other settings together."""
    for prefix, section, keys, reason, remedy in _inert_keys(config):
        for path, value in fields.changes(section, *keys):
            yield without_effect(prefix + path, value, reason, remedy)


def _inert_keys(config: RunConfig) -> Iterator[tuple[str, Any, tuple[str, ...], str, str]]:
    """Yield prefix and section of keys without effect, their names, the reason and the remedy."""
    yield from _inert_keys_of_roles(config)
    if isinstance(config, RLVRConfig | SFTConfig):
        sections = [config.actor_train, *([] if config.validation is None else [config.validation])]
        if all(section.data_args.template == "raw" for section in sections):
            reason = "texts of `template: raw` are taken as they are"
            yield "", config, ("on_control_tokens",), reason, "set `template: chat`, or remove this key"
    if isinstance(config, PipelineConfig):
        yield from _inert_keys_of_rollouts(config)


def _inert_keys_of_rollouts(config: PipelineConfig) -> Iterator[tuple[str, Any, tuple[str, ...], str, str]]:
    if all(reward.model_args.model_name_or_path is not None for reward in derived.reward_models(config).values()):
        remedy = "remove it, or set `verifier: reward_model` in a reward without a `model_name_or_path` of its own"
        yield "", config, ("reward_pretrain",), "no reward loads this model", remedy
    if not derived.uses_kl(config):
        yield "", config, ("kl_estimator",), "there is no KL term", "set `use_kl_loss: true`, or remove this key"
    elif config.kl_estimator == "k3_straight_through" and not config.use_kl_loss:
        reason = "a penalty in the rewards has no gradient, and its value is that of k3"
        yield "", config, ("kl_estimator",), reason, "set `kl_estimator: k3`, or remove this key"
    if not derived.learns_from_rewards(config):
        yield from _rewardless_keys(config)
    if config.async_generation_ratio == 0:
        reason = "with async_generation_ratio 0 nothing is generated ahead, and "
        remedy = "set `async_generation_ratio` above 0, or remove this key"
        yield "", config, ("staleness_policy",), reason + "no group is ever late", remedy
        if config.consumption == "ready_first":
            yield "", config, ("consumption",), reason + "a step needs every group", remedy
    validation, mappings = derived.validation_settings(config), readable_mappings(config)
    engine = mappings.pop("actor_infer", [])
    if validation is not None and validation.mode == "overlap":
        remedy = "remove this key"
        if any({*engine} & {*others} for others in mappings.values()):
            reason = "the engine shares its devices, and takes turns with the other roles"
            yield "validation.", validation, ("replicas",), reason, remedy
        elif len(engine) == config.actor_infer.num_gpus_per_engine:
            reason = "the engine has one replica, which cannot keep a version"
            yield "validation.", validation, ("replicas",), reason, remedy
    if not isinstance(config, AgenticConfig):
        return
    reason = "episodes begin with what their environment says"
    yield "actor_train.", config.actor_train, ("data_args",), reason, "use `pipeline: rlvr`, or remove this key"
    for tag, env in config.custom_envs.items():
        if env.env_manager_cls in _SHOWN_BY:
            keys, reason = ("history_length", "keep_first_observation"), _SHOWN_BY[env.env_manager_cls]
            yield f"custom_envs.{tag}.", env, keys, reason, "set `env_manager_cls: step`, or remove this key"
    for name, manager in (("train_env_manager", config.train_env_manager), ("val_env_manager", config.val_env_manager)):
        if manager is not None and derived.only_agents(config, manager):
            reason, remedy = "an agent's requests are no actions, valid or not", "remove this key"
            yield f"{name}.", manager, ("format_penalty",), reason, remedy
    if config.val_env_manager is not None:
        reason, remedy = "validation plays each group once", "set the groups, or remove this key"
        yield "val_env_manager.", config.val_env_manager, ("max_traj_per_env",), reason, remedy


def _rewardless_keys(config: PipelineConfig) -> Iterator[tuple[str, Any, tuple[str, ...], str, str]]:
    """Yield the keys without effect (as `_inert_keys`) if the policy learns from its teacher alone."""
    keys = ["reward_clip", "norm_mean_type", "norm_std_type", "length_penalty", "repetition_penalty"]
    if isinstance(config, AgenticConfig):
        keys += ["episode_reward_weight", "step_reward_weight"]
    if config.distillation is not None and config.distillation.use != "rewards":
        keys += ["adv_estimator", "adv_estimator_args", "whiten_advantages", "add_token_level_kl"]
        keys += ["advantage_clip"] if config.distillation.use == "loss" else []
    reason = "distillation.reward_coef is 0, so the policy learns from its teacher alone"
    yield "", config, tuple(keys), reason, "set `distillation.reward_coef` above 0, or remove this key"


def _inert_keys_of_roles(config: RunConfig) -> Iterator[tuple[str, Any, tuple[str, ...], str, str]]:
    for name, role in derived.trained_roles(config).items():
        if role.use_dynamic_batching_in_train and role.training_args.gradient_accumulation_steps is None:
            reason = "dynamic batching cuts micro-batches by tokens, and an optimizer step takes the whole batch"
            other = "" if isinstance(config, SFTConfig) else "`gradient_accumulation_steps`, or "
            remedy = f"set {other}`use_dynamic_batching_in_train: false`, or remove this key"
            yield f"{name}.training_args.", role.training_args, ("per_device_train_batch_size",), reason, remedy
    if isinstance(config, SFTConfig):
        yield from _inert_keys_of_examples(config)
    for name, section in derived.roles_and_reward_models(config).items():
        reason, remedy = "only actor_train learns with adapters", "remove this key"
        if isinstance(section, RewardConfig):
            reason, remedy = "a reward model is not trained", "remove it; merge adapters into the model"
        elif name == "actor_train":
            reason, remedy = "no layer has adapters", "set `lora_target`, or remove this key"
        if name != "actor_train" or section.model_args.lora_target is None:
            yield f"{name}.model_args.", section.model_args, ADAPTER_KEYS, reason, remedy


def _inert_keys_of_examples(config: SFTConfig) -> Iterator[tuple[str, Any, tuple[str, ...], str, str]]:
    if config.validation is None:
        passes = ("max_tokens_per_microbatch_in_infer", "use_dynamic_batching_in_infer", "infer_batch_size")
        yield (
            "actor_train.",
            config.actor_train,
            passes,
            "only validation has passes without gradients",
            "remove this key",
        )
        return
    held_out = config.validation.data_args
    keys = ["domain_interleave_probs", *(["shuffle"] if held_out.max_samples is None else [])]
    yield "validation.data_args.", held_out, tuple(keys), "each example is measured once", "remove this key"


def roll_names_fit(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require that keys of `actor_train` that set a policy-loss argument under its name in ROLL (`ROLL_ARGUMENTS`)
    belong to the chosen loss, and that `pg_variant_args` does not set the same argument."""
    actor = config.actor_train
    for name, (loss, argument) in ROLL_ARGUMENTS.items():
        value = vars(actor)[name]
        if value is None:
            continue
        if actor.pg_variant != loss:
            reason = f"it is an argument of `{loss}`, and pg_variant is `{actor.pg_variant}`"
            yield without_effect(f"actor_train.{name}", value, reason, f"set `pg_variant: {loss}`, or remove this key")
        elif argument in actor.pg_variant_args:
            message = f"{shown(value)}, but `pg_variant_args.{argument}` sets the same argument"
            yield ConfigProblem(f"actor_train.{name}", message, "keep one of the two")


def names_are_known(config: RunConfig) -> Iterator[ConfigProblem]:
    """Require a model for each role, known strategies, and well-formed import paths of custom classes."""
    if not all(derived.model_path(config, role) for role in derived.present_roles(config).values()):
        yield ConfigProblem("pretrain", "no model is given", "write the folder or the hub name of the model to train")
    for name, role in derived.roles_and_reward_models(config).items():
        kind, strategy = strategies_of(name), role.strategy_args.strategy_name
        for found in problems_of(partial(kind.find, strategy, f"{name}.strategy_args.strategy_name")):
            if name in TRAINED_ROLES and strategy in FORWARD_STRATEGIES.built_in:
                message = f"{found.message}: it only computes, and a role that learns needs an optimizer"
                found = replace(found, message=message)
            yield found
        classes = {"worker_cls": role.worker_cls, "strategy_args.strategy_cls": role.strategy_args.strategy_cls}
        for key, value in classes.items():
            if value is not None and not fields.IMPORT_PATH.fullmatch(value):
                message = f"{shown(value)} is no import path"
                if not is_worker_of_roll(value):
                    yield ConfigProblem(f"{name}.{key}", message, "write `package.module:Class`")


_SHOWN_BY = {"trajectory": "a trajectory shows all turns before", "agent": "an agent says what the policy reads"}
"""Environment manager -> reason why it ignores the keys of the history window."""
_VERIFIERS_OF_WORKERS = {"Math": "math", "Code": "code", "Judge": "judge", "Choice": "exact"}
"""Part of the class name of a reward worker of ROLL -> our verifier."""


def is_worker_of_roll(name: str | None) -> bool:
    """Return True for the dotted path of a class of ROLL; import paths of this project have a colon."""
    return name is not None and name.startswith("roll.") and ":" not in name


def workers_of_roll_have_a_place(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject ROLL's worker classes; the remedy names their replacement."""
    rewards = config.rewards if isinstance(config, PromptConfig) else {}
    workers = {name: section.worker_cls for name, section in derived.present_roles(config).items()}
    workers |= {f"rewards.{name}": reward.worker_cls for name, reward in rewards.items()}
    for name, worker in workers.items():
        if worker is not None and is_worker_of_roll(worker):
            message = f"{shown(worker)} is a worker of ROLL, which is not here"
            remedy = f"remove it; {_in_place_of(name, worker)} (docs/howto/plug_ins.md)"
            yield ConfigProblem(f"{name}.worker_cls", message, remedy)


def _in_place_of(role: str, worker: str) -> str:
    """Return the replacement of one of ROLL's workers, as part of a remedy."""
    if role.startswith("rewards."):
        known = [ours for part, ours in _VERIFIERS_OF_WORKERS.items() if part in worker.rpartition(".")[2]]
        return f"write `verifier: {known[0]}`" if known else "name a function of a response under `verifier`"
    if role == "actor_train":
        return "a loss of one's own is a function under `pg_variant`, an estimator one under `adv_estimator`"
    return "an engine or a trainer of one's own is a class under `strategy_args.strategy_name`"


def algorithms_are_known(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Require known names of policy loss and advantage estimator. Import paths are only resolved later."""
    yield from problems_of(partial(POLICY_LOSSES.find, config.actor_train.pg_variant, "actor_train.pg_variant"))
    yield from problems_of(partial(ADVANTAGE_ESTIMATORS.find, config.adv_estimator, "adv_estimator"))


def output_can_be_written(config: RunConfig) -> Iterator[ConfigProblem]:
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


def options_are_usable(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject values that `OPTIONS` does not allow."""
    for name, role in derived.present_roles(config).items():
        strategy = strategy_of(name, role)
        if isinstance(strategy, Trainer) and not strategy.learns:
            continue
        for option, value, kind in Options.of(role).wrong():
            path = f"{name}.strategy_args.strategy_config.{option}"
            reason = f"is beyond {fields.LARGEST_NUMBER:g}" if fields.is_too_large(value) else "is not usable"
            yield ConfigProblem(path, f"{shown(value)} {reason}", f"write {fields.describe(kind)}")


def secrets_are_given(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject masked secrets, which a configuration has that was saved by a run."""
    for path in _masks(asdict(config)):
        message = f"{MASK} stands for a secret that was left out when this configuration was saved"
        yield ConfigProblem(path, message, "write the value, or `${oc.env:NAME}` for that of an environment variable")


def _masks(tree: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the masked secrets in a plain tree, such as ``servers[0].api_key``."""
    if isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from _masks(value, f"{path}[{number}]")
    elif isinstance(tree, dict):
        for key, value in tree.items():
            below = f"{path}.{key}" if path else str(key)
            if value == MASK and is_secret(str(key)):
                yield below
            yield from _masks(value, below)


def length_is_said_once(config: SFTConfig) -> Iterator[ConfigProblem]:
    """Reject `max_steps` beside `epochs`."""
    if config.epochs is not None:
        for path, value in fields.changes(config, "max_steps"):
            yield without_effect(path, value, f"epochs is {config.epochs}", "keep one of the two")


def epochs_mean_the_same_to_all(config: SFTConfig) -> Iterator[ConfigProblem]:
    """Reject `epochs` beside `domain_interleave_probs`, with which domains are not learned equally often."""
    if config.epochs is not None and config.actor_train.data_args.domain_interleave_probs is not None:
        message = (
            f"{config.epochs}, but with `domain_interleave_probs` some examples are learned more often than others"
        )
        yield ConfigProblem("epochs", message, "set `max_steps`, or leave each domain its natural share")


def nothing_falls_back(config: SFTConfig) -> Iterator[ConfigProblem]:
    """Reject `restarts.synchronous_after`: fine-tuning has no asynchronous mode to leave."""
    after = config.restarts.synchronous_after
    if after is not None:
        reason = "supervised fine-tuning generates nothing ahead"
        yield without_effect("restarts.synchronous_after", after, reason, "remove this key")


def restarts_have_a_checkpoint(config: RunConfig) -> Iterator[ConfigProblem]:
    """Require a checkpoint to restart from."""
    restarts = config.restarts
    if restarts.max_in_a_row == 0:
        return
    steps = math.inf if isinstance(config, SFTConfig) and config.epochs else config.max_steps
    if not 0 < config.save_steps < steps:
        message = f"{restarts.max_in_a_row} would each begin at step 0: the run writes no checkpoints on its way"
        yield ConfigProblem("restarts.max_in_a_row", message, "set `save_steps` below `max_steps`, or remove this key")


def restarts_can_help(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject automatic restarts where they cannot help.

    A full disk of the driver outlasts its restarts, and a synchronous run cannot fall back to ratio 0.
    """
    restarts = config.restarts
    if restarts.max_in_a_row == 0:
        return
    for index, event in enumerate(config.chaos.events):
        if (event.kind, event.role) == ("fill_disk", "driver"):
            message = "fill_disk of the driver would last through its restarts, which are made by the same process"
            yield ConfigProblem(f"chaos.events[{index}]", message, "remove `restarts.max_in_a_row`")
    after = restarts.synchronous_after
    if after is None:
        return
    if after > restarts.max_in_a_row:
        restarted = count(restarts.max_in_a_row, "failure")
        reason = f"no more than {restarted} in a row are followed by a restart"
        yield without_effect("restarts.synchronous_after", after, reason, f"set at most {restarts.max_in_a_row}")
    if config.async_generation_ratio == 0:
        remedy = "remove it, or set `async_generation_ratio` above 0"
        yield without_effect("restarts.synchronous_after", after, "the run is synchronous", remedy)


def chaos_can_happen(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject chaos events unless `chaos.enabled` is true, impossible events, and events given twice.

    An event is impossible if it names a process or a step that the run does not have.
    """
    chaos = config.chaos
    if chaos.events and not chaos.enabled:
        message = f"{count(len(chaos.events), 'event')} would harm this run: it is for tests of recovery only"
        yield ConfigProblem("chaos.events", message, "remove them, or say `chaos.enabled: true`")
    if chaos.enabled and not chaos.events:
        yield ConfigProblem("chaos.enabled", "true has no effect: there are no events", "add `chaos.events`")
    for index, event in enumerate(chaos.events):
        path = f"chaos.events[{index}]"
        if event in chaos.events[:index]:
            twin = chaos.events.index(event)
            message = f"the same as chaos.events[{twin}]: a resumed run could not tell which of them has happened"
            yield ConfigProblem(path, message, "remove it, or give it another step")
        yield from _right_keys(event, path)
        yield from _right_moment(config, event, path)
        if event.kind not in PUBLICATION_CHAOS:
            yield from _right_process(config, event, path)
        elif event.kind == "corrupt_bucket" and config.weight_update.transport in ("nccl", "cuda_ipc"):
            message = f"{shown(config.weight_update.transport)} has no buckets on this side of the engine's library"
            yield ConfigProblem(f"{path}.kind", message, "use another `weight_update.transport`")


def _right_keys(event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    if event.kind == "delay_publication" and event.seconds is None:
        yield ConfigProblem(f"{path}.seconds", f"{event.kind} needs its length", "give the seconds")
    if event.kind not in ("freeze", "delay_publication") and event.seconds is not None:
        yield without_effect(f"{path}.seconds", event.seconds, f"{event.kind} takes no time", "remove it")
    if event.kind in PUBLICATION_CHAOS:
        for key, value in fields.changes(event, "role", "rank"):
            yield without_effect(f"{path}.{key}", value, f"{event.kind} happens to all engines", "remove it")


def _right_moment(config: PipelineConfig, event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    end = config.max_steps
    last = end if event.kind in PUBLICATION_CHAOS else end - 1  # processes stop with the last step
    if event.at_step > last:
        message = f"{event.at_step} never comes: the run ends with step {end}"
        yield ConfigProblem(f"{path}.at_step", message, f"at most {last}")
        return
    interval = config.weight_update.interval_steps
    validates = derived.validation_settings(config) is not None and config.eval_steps > 0
    validated = validates and event.at_step % config.eval_steps == 0
    published = event.at_step == end or not event.at_step % interval or validated
    if event.kind in PUBLICATION_CHAOS and not published:
        message = f"version {event.at_step} is not published (weight_update.interval_steps: {interval})"
        yield ConfigProblem(f"{path}.at_step", message, f"a multiple of {interval}")


def _right_process(config: PipelineConfig, event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    roles = derived.roles_and_reward_models(config)
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


def obstacle_to_moving(options: Options, *, bfloat16: bool, learns: bool) -> ConfigProblem | None:
    """Return the problem that prevents moving a role's states to the host and back; None if they can be moved.

    The path of the problem is a key of `zero_optimization`.
    """
    stage = options.get("zero_optimization.stage", 0)
    if not learns:
        message = "stage 3 of a role without an optimizer: DeepSpeed cannot move its weights"
        remedy = "write stage 0, or use `hf_infer` or `fsdp2_train`"
        return ConfigProblem("stage", message, remedy) if stage == 3 else None
    if stage in (1, 2, 3) and options.get("zero_optimization.offload_param.device", "none") != "none":
        remedy = "remove this key and set `offload_optimizer`, or use `fsdp2_train` with `offload: cpu`"
        return ConfigProblem("offload_param", "DeepSpeed moves nothing where parameters are offloaded", remedy)
    if stage == 3 and options.get("zero_optimization.offload_optimizer.device", "none") == "none":
        remedy = "write `offload_optimizer: {device: cpu}`, which keeps them on the host, or stage 2"
        return ConfigProblem("stage", "stage 3: DeepSpeed moves no states of torch's AdamW", remedy)
    if stage == 1 and bfloat16:
        message = "stage 1 in bfloat16: DeepSpeed cannot move its states"
        return ConfigProblem("stage", message, "write stage 2, which can be moved")
    return None


def states_can_leave_shared_devices(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject DeepSpeed roles on shared GPUs whose states cannot move to the host for the other roles."""
    if config.cluster.device != "cuda":
        return
    mappings = readable_mappings(config)
    for name, role in derived.present_roles(config).items():
        if role.strategy_args.strategy_name != "deepspeed_train":
            continue
        own = set(mappings.get(name, ()))
        sharing = {other: own & set(devices) for other, devices in mappings.items() if other != name}
        shared = set[int]().union(*sharing.values())
        bfloat16 = role.model_args.dtype == "bfloat16"
        obstacle = obstacle_to_moving(Options.of(role), bfloat16=bfloat16, learns=name in TRAINED_ROLES)
        if shared and obstacle is not None:
            others = " and ".join(other for other, devices in sharing.items() if devices)
            room = f"they have to make room on device {compact(shared)} for {others}"
            path = f"{name}.strategy_args.strategy_config.zero_optimization.{obstacle.path}"
            remedy = f"{obstacle.remedy}; or give {name} devices of its own"
            yield ConfigProblem(path, f"{obstacle.message}, and {room}", remedy)


def chosen_trackers(config: RunConfig) -> list[tuple[str, type[TrackerPlugIn], Any]]:
    """Return name, class and options of each plug-in tracker of a run whose options are valid."""
    chosen = []
    for name in derived.tracker_list(config):
        plug_in, options = _plug_in(name), config.tracker_kwargs.get(name, {})
        if plug_in is not None and not list(_option_problems(name, plug_in.Options, options)):
            chosen.append((name, plug_in, plug_in.Options(**options)))
    return chosen


def _plug_in(name: str) -> type[TrackerPlugIn] | None:
    """Return the class of a plug-in tracker; None for TensorBoard and for a name that a rule reports."""
    if name == TENSORBOARD or problems_of(partial(TRACKERS.load, name, "track_with")):
        return None
    found: Any = TRACKERS.load(name, "track_with")
    return found


def tracker_words(config: RunConfig) -> list[str]:
    """Describe the trackers that get metrics, besides `metrics.jsonl`."""
    words = [f"{name} ({plug_in.mode(options)})" for name, plug_in, options in chosen_trackers(config)]
    return ["TensorBoard", *words] if derived.tracker_list(config) else words


def trackers_are_known(config: RunConfig) -> Iterator[ConfigProblem]:
    """Reject unknown and repeated trackers, options for unknown or unused trackers, and unknown options."""
    names = derived.tracker_list(config)
    as_list = not isinstance(config.track_with, str)
    for index, name in enumerate(names):
        path = f"track_with[{index}]" if as_list else "track_with"
        if name != TENSORBOARD:
            yield from problems_of(partial(TRACKERS.load, name, path))
    if len(set(names)) != len(names):
        yield ConfigProblem("track_with", f"{shown(names)} names a tracker twice", "name each once")
    for name, options in config.tracker_kwargs.items():
        path = f"tracker_kwargs.{name}"
        if name == TENSORBOARD:
            yield ConfigProblem(path, "TensorBoard has no options: its events are in the run's folder", "remove it")
        elif missing := problems_of(partial(TRACKERS.find, name, path)):
            yield from missing
        elif name not in names:
            remedy = f"add {name} to `track_with`, or remove these options"
            yield without_effect(path, options, f"{name} is not used", remedy)
        elif plug_in := _plug_in(name):
            yield from _option_problems(path, plug_in.Options, options)


def _option_problems(path: str, kind: type, options: dict[str, Any]) -> Iterator[ConfigProblem]:
    secrets = [key for key in options if is_secret(key)]
    for key in secrets:
        remedy = "remove it here, and from the file's history; `docs/trackers.md` has the variable"
        yield ConfigProblem(f"{path}.{key}", "keys are taken from the environment only", remedy)
    _, problems = validated(_strict(kind), {key: value for key, value in options.items() if key not in secrets})
    for problem in problems:
        yield replace(problem, path=f"{path}.{problem.path}")


@cache
def _strict(kind: type) -> type:
    """Return a dataclass with the same fields that rejects any other key."""
    return make_dataclass(kind.__name__, [], bases=(kind,), namespace={"__pydantic_config__": {"extra": "forbid"}})


def trackers_are_here(config: RunConfig) -> Iterator[ConfigProblem]:
    """Require the package of each tracker, and its API key in the environment."""
    for name, plug_in, options in chosen_trackers(config):
        if plug_in.package is not None and not is_installed(plug_in.package):
            message = f"{name} needs the package {plug_in.package}, which is not installed"
            yield ConfigProblem("track_with", message, f"{plug_in.install}, or remove {name}")
        secret = plug_in.secret(options)
        if secret is not None and not os.environ.get(secret):
            message = f"{name} ({plug_in.mode(options)}) needs a key, and the variable {secret} is not set"
            remedy = f"set it, or choose tracker_kwargs.{name} that send nothing: docs/trackers.md"
            yield ConfigProblem("track_with", message, remedy)


def is_installed(package: str) -> bool:
    """Return True if a package can be imported. A plain folder of its name, such as wandb's output, does not count."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None

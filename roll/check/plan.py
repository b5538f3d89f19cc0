"""Summary of a run, printed before anything loads: its arithmetic, and the models, data and packages it needs.

`plan` formats the numbers of a configuration that passed `check_config` in sentences that a reader can verify: prompts
times samples, optimizer steps, devices, groups ahead and the maximum age of a token. `needs` lists models, data,
packages and devices, and says for each if it is here.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from roll.check.config import config_warnings
from roll.check.data import data_sections, files_of, has_model, is_local, needs_datasets, task_sets, why_unreadable
from roll.check.devices import FLASH_ATTENTION, sees_gpus
from roll.check.memory import TIGHT, MemoryEstimate
from roll.check.memory_parts import GIB
from roll.check.rules import chosen_trackers, is_installed, tracker_words
from roll.configs import derived
from roll.configs.devices import compact, parse_device_mapping
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.configs.roles import COMPARED_ROLES, RowArguments, WorkerConfig
from roll.configs.run import (
    AgenticConfig,
    DistillationConfig,
    EnvManagerConfig,
    PipelineConfig,
    PromptConfig,
    RunConfig,
    SFTConfig,
)
from roll.configs.strategies import Strategy, strategy_of
from roll.distribution import install_command


def plan(config: RunConfig) -> str:
    """Format the numbers of a checked configuration (samples per step, optimizer steps, lag, ...) as console lines."""
    rows = plan_rows(config)
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def plan_rows(config: RunConfig) -> list[tuple[str, str]]:
    """Return the numbers of a checked configuration as pairs of subject and sentence."""
    own = _supervised_rows(config) if isinstance(config, SFTConfig) else _rollout_rows(derived.reinforcement(config))
    return [
        *own,
        ("metrics", ", ".join(["metrics.jsonl", *tracker_words(config)])),
        *(("warning", warning) for warning in config_warnings(config)),
    ]


def _supervised_rows(config: SFTConfig) -> list[tuple[str, str]]:
    slots = "CPU slot" if config.cluster.device == "cpu" else "GPU"
    actor, devices = config.actor_train, count(derived.total_devices(config), slots)
    length = count(config.max_steps, "training step")
    if config.epochs is not None:
        length = "1 pass over the examples" if config.epochs == 1 else f"{config.epochs:,} passes over the examples"
    optimizer = f"one optimizer step per training step, loss {config.loss_agg_mode} over the tokens of responses"
    if config.epochs is None and (warmup := derived.warmup_steps(config, actor)):
        optimizer += f"; {count(config.max_steps, 'step')}, {warmup:,} of them warm-up"
    validation = "none"
    if config.validation is not None:
        rhythm = f"before the first step, every {_steps(config.eval_steps)} and after the last"
        validation = f"loss on {_sources(config.validation.data_args)}: {rhythm}"
    return [
        ("run", f"{config.exp_name}: supervised fine-tuning, {length} on {devices}"),
        ("actor_train", _role(config, "actor_train", actor)),
        ("data", _sources(actor.data_args)),
        ("batch", f"{count(config.train_batch_size, 'example')} a step, of up to {config.sequence_length:,} tokens"),
        ("optimizer", optimizer),
        ("validation", validation),
    ]


def _rollout_rows(config: PipelineConfig) -> list[tuple[str, str]]:
    slots = "CPU slot" if config.cluster.device == "cpu" else "GPU"
    steps, devices = count(config.max_steps, "training step"), count(derived.total_devices(config), slots)
    roles, data = derived.roles_and_reward_models(config), _sources(config.actor_train.data_args)
    if isinstance(config, AgenticConfig):
        data = _environments(config, config.train_env_manager)
    return [
        ("run", f"{config.exp_name}: {steps} on {devices}"),
        *((name, _role(config, name, role)) for name, role in roles.items()),
        *((role, "actor_train without its adapters") for role in COMPARED_ROLES if derived.is_base(config, role)),
        *(
            (role, "actor_train itself, with another prompt")
            for role in COMPARED_ROLES
            if derived.is_policy(config, role)
        ),
        *([("actor_logp", "actor_train itself")] if derived.logp_is_trainer(config) else []),
        ("data", data or "not named yet"),
        *([("distillation", _distillation(config.distillation))] if config.distillation is not None else []),
        ("batch", _batch(config)),
        ("optimizer", _optimizer(config)),
        _lengths(config),
        ("schedule", _schedule(config)),
        ("staleness", _staleness(config)),
        ("weights", _weights(config)),
        ("validation", _validation(config)),
    ]


def _lengths(config: PipelineConfig) -> tuple[str, str]:
    sampling = derived.picture_sampling(config)
    if sampling is None:
        return "lengths", (
            f"prompt up to {config.prompt_length:,} + response up to {derived.max_new_tokens(config):,} tokens, "
            f"together up to {derived.sequence_length(config):,}"
        )
    scales = {"guidance": sampling.guidance_scale, "true guidance": sampling.true_cfg_scale}
    guided = ", ".join(f"{name} {scale:g}" for name, scale in scales.items() if scale > 1) or "no guidance"
    return "pictures", (
        f"{sampling.width} x {sampling.height} pixels in {count(sampling.num_inference_steps, 'step')}, "
        f"{sampling.window_size} of the first {sampling.reach} with noise ({sampling.kind} {sampling.noise_level:g}), "
        f"which are trained on; {guided}"
    )


def _role(config: RunConfig, name: str, role: WorkerConfig | RewardConfig) -> str:
    owned = {other: parse_device_mapping(mapping) for other, mapping in derived.device_mappings(config).items()}
    devices, strategy, target = owned[name], strategy_of(name, role), role.model_args.lora_target
    sharing = [other for other, theirs in owned.items() if other != name and set(devices) & set(theirs)]
    whole_models = isinstance(role, RewardConfig) or (strategy is not None and strategy.replicates)
    workers = count(len(devices), "replica" if whole_models else "rank")
    if name == "actor_infer":
        workers = count(derived.engine_replicas(derived.reinforcement(config)), "replica")
    adapters = ""
    if target is not None:
        layers = target if isinstance(target, str) else ", ".join(target)
        adapters = f", adapters of rank {role.model_args.lora_rank} on {layers}"
    return (
        f"{role.strategy_args.strategy_name}, {workers} on device {compact(devices)} "
        f"({'shared with ' + ', '.join(sharing) if sharing else 'of its own'}), "
        f"model {derived.model_path(config, role)}{adapters}"
    )


def _environments(config: AgenticConfig, manager: EnvManagerConfig) -> str:
    shares = derived.used_tags(config, manager)
    whole = count(sum(shares.values()), "group")
    kinds = {tag: config.custom_envs[tag] for tag in shares}
    return ", ".join(
        f"{tag} ({kind.env_type}, {shares[tag]} of {whole}, up to {count(kind.max_steps, 'turn')})"
        for tag, kind in kinds.items()
    )


def _sources(data: RowArguments) -> str:
    tasks = [f"{source.dataset} ({count(source.size, 'task')}, seed {source.seed})" for source in task_sets(data)]
    hub = [f"{source.dataset} ({source.split})" for source in data.hub]
    return ", ".join([*files_of(data), *hub, *tasks])


def _batch(config: PipelineConfig) -> str:
    group, member = ("seed", "episode") if isinstance(config, AgenticConfig) else ("prompt", "sample")
    actor = config.actor_train
    steps = derived.optimizer_steps_per_step(config, actor) // config.ppo_epochs
    return (
        f"{count(config.rollout_batch_size, group)} x {count(derived.group_size(config), member)} = "
        f"{count(derived.samples_per_step(config), member)} a step; "
        f"{count(steps, 'optimizer step')} of {derived.optimizer_batch_size(config, actor):,}"
        + (f", {config.ppo_epochs} epochs" if config.ppo_epochs > 1 else "")
    )


def _distillation(settings: DistillationConfig) -> str:
    rewards = f"beside rewards of weight {settings.reward_coef:g}" if settings.reward_coef else "without rewards"
    return f"{settings.coef:g} x reverse KL to the teacher, in the {settings.use}, {rewards}"


def _optimizer(config: PipelineConfig) -> str:
    warmup, alone = derived.warmup_steps(config, config.actor_train), config.critic_warmup
    return (
        count(config.max_steps - alone, "training step")
        + (f" after {alone:,} of the critic alone" if alone else "")
        + f" x {derived.optimizer_steps_per_step(config, config.actor_train):,} = "
        + count(derived.total_optimizer_steps(config, config.actor_train), "optimizer step")
        + (f", {warmup:,} of them warm-up" if warmup else "")
    )


def _schedule(config: PipelineConfig) -> str:
    streams = config.actor_train.stream_groups
    early = "groups are trained on as they finish" + (", if nothing needs the whole batch" if streams == "auto" else "")
    if config.async_generation_ratio == 0:
        return f"ratio 0 (on-policy): {'generation and training take turns' if streams is False else early}"
    return (
        f"ratio {config.async_generation_ratio:g} x {count(config.rollout_batch_size, 'group')} = up to "
        f"{count(derived.groups_ahead(config), 'group')} in flight beyond the batch being trained; "
        f"{derived.resolved_consumption(config)}" + ("" if streams is False else f"; {early}")
    )


def _staleness(config: PipelineConfig) -> str:
    most, least = derived.resolved_max_staleness(config), derived.least_staleness(config)
    reason = f"ceil({config.async_generation_ratio:g}) + {config.weight_update.interval_steps} - 1 = {least}"
    if most > least:
        reason = f"configured; at least {least} is needed"
    return f"no token older than {count(most, 'policy version')} is trained on ({reason})"


def _weights(config: PipelineConfig) -> str:
    transport = derived.weight_transport(config).replace("_", " ")
    rhythm = _steps(config.weight_update.interval_steps)
    pulled = ", pulled by each replica" if config.weight_update.mode == "pull" else ""
    contents = {"full": "", "adapter": ", adapters alone", "delta": ", as deltas"}
    alone = contents[config.weight_update.content]
    return f"published every {rhythm} ({transport}{alone}{pulled}); running requests: {config.weight_update.in_flight}"


def _validation(config: PipelineConfig) -> str:
    times = derived.validation_count(config)
    if not times:
        return "none"
    data = ""
    if isinstance(config, PromptConfig) and config.validation is not None:
        data = _sources(config.validation.data_args)
    elif isinstance(config, AgenticConfig) and config.val_env_manager is not None:
        manager = config.val_env_manager
        groups, size = count(manager.num_env_groups or 0, "seed"), count(manager.group_size, "episode")
        data = f"{groups} x {size}: {_environments(config, manager)}"
    rhythm = f"before the first step, every {_steps(config.eval_steps)} and after the last"
    pinned = derived.pinned_replicas(config)
    kept = f"; {count(pinned, 'replica')} of {derived.engine_replicas(config)} meanwhile" if pinned else ""
    return f"{count(times, 'time')} ({rhythm}) on {data}{kept}"


def _steps(number: int) -> str:
    return "step" if number == 1 else f"{number} steps"


@dataclass(frozen=True)
class Need:
    """A model, file, package or device that a run needs."""

    what: str
    state: str
    """Place where it is, or the way to get it."""
    here: bool


def needs(config: RunConfig, estimate: MemoryEstimate) -> list[Need]:
    """List everything that a checked configuration needs."""
    return [*_inputs(config), *_packages(config), *_trackers(config), *_devices(config, estimate)]


def _need(what: str, here: bool, missing: str, present: str = "installed") -> Need:
    return Need(what, present if here else missing, here)


def missing_packages(config: RunConfig) -> dict[str, Strategy]:
    """Map each role whose strategy needs a package that is not installed here to that strategy."""
    strategies = {role: strategy_of(role, section) for role, section in derived.present_roles(config).items()}
    return {
        role: each for role, each in strategies.items() if each and each.package and find_spec(each.package) is None
    }


def _inputs(config: RunConfig) -> Iterator[Need]:
    """Yield models, judges that must answer when the run starts (no request is sent here), and data files."""
    roles = derived.roles_and_reward_models(config).values()
    for model in sorted({derived.model_path(config, role) for role in roles}):
        if is_local(model):
            yield _need(f"model {model}", has_model(Path(model)), "not here", "here")
        else:
            yield Need(f"model {model}", "a hub name: fetched when the run starts, if it is not in the cache", False)
    if not isinstance(config, PromptConfig | SFTConfig):
        return
    rewards = config.rewards.values() if isinstance(config, PromptConfig) else ()
    judges = {(each.judge.model, each.judge.base_url) for each in rewards if each.judge is not None}
    for model, address in sorted(judges):
        yield Need(f"judge {model}", f"asked at {address} when the run starts", False)
    for name in sorted({name for section in data_sections(config).values() for name in files_of(section)}):
        row = "example" if isinstance(config, SFTConfig) else "prompt"
        reason = why_unreadable(Path(name))
        lacks = "not here" if reason == "is no file" else reason
        yield _need(f"data {name}", not reason, f"{lacks}: JSONL or Parquet, one {row} per row", "here")
    sources = [source for section in data_sections(config).values() for source in section.hub]
    for dataset in sorted({source.dataset for source in sources}):
        here = Path(dataset).is_dir()
        yield _need(
            f"data set {dataset}", here, "fetched from the hub when the run starts, if it is not cached", "here"
        )


def _packages(config: RunConfig) -> Iterator[Need]:
    strategies = {
        section.strategy_args.strategy_name: strategy_of(role, section)
        for role, section in derived.present_roles(config).items()
    }
    for name, strategy in sorted(strategies.items()):
        if strategy is None or strategy.package is None:
            continue
        need = _package(strategy.package, strategy.install)
        yield need
        if not need.here and strategy.package_tells is not None:
            state = f"not checked here: {strategy.package_tells}, which only the package knows"
            yield Need(f"options of {name}", state, False)
    if config.actor_train.model_args.lora_target is not None:
        yield _package("peft", install_command("peft"))
    if isinstance(config, PromptConfig | SFTConfig) and any(map(needs_datasets, data_sections(config).values())):
        yield _package("datasets", install_command("datasets"))
    used = {
        section.model_args.attn_implementation
        for role, section in derived.roles_and_reward_models(config).items()
        if (strategy := strategy_of(role, section)) is not None and strategy.chooses_attention
    }
    for name in sorted(used & FLASH_ATTENTION.keys()):
        module, install = FLASH_ATTENTION[name]
        yield _package(module, f"{install}, or `attn_implementation: sdpa`")
    if any(map(derived.compiles_layers, derived.present_roles(config).values())):
        compiler = os.environ.get("CXX", "g++")
        missing = "not found here: install it, or set `compile` in `strategy_config` to false"
        yield _need(f"C++ compiler {compiler}", shutil.which(compiler) is not None, missing)


def _package(name: str, install: str) -> Need:
    return _need(f"package {name}", find_spec(name) is not None, f"not installed here: {install}")


def _trackers(config: RunConfig) -> Iterator[Need]:
    for name, plug_in, options in chosen_trackers(config):
        if plug_in.package is not None:
            missing = f"not installed here: {plug_in.install}"
            yield _need(f"package {plug_in.package}", is_installed(plug_in.package), missing)
        secret = plug_in.secret(options)
        if secret is not None:
            here = bool(os.environ.get(secret))
            yield _need(f"variable {secret}", here, f"not set here: the key of {name}", "set")


def _devices(config: RunConfig, estimate: MemoryEstimate) -> Iterator[Need]:
    cluster = config.cluster
    if cluster.num_nodes > 1:
        yield Need(f"{cluster.num_nodes} nodes", f"a Ray cluster at {cluster.address}", False)
    if cluster.device == "cpu":
        return
    slots = count(cluster.num_devices_per_node, "GPU")
    if estimate.device_bytes is not None:
        slots += f" of {estimate.device_bytes / GIB:g} GiB"
    elif estimate.devices:
        least = max(devices.peak for devices in estimate.devices) / GIB / TIGHT
        slots += f" of {math.ceil(least)} GiB or more"
    if cluster.num_nodes > 1:
        slots += " on each node"
    sees = cluster.address is None and sees_gpus(os.environ, Path("/dev"))
    state = "a driver is here; their number and memory were not looked up" if sees else "none here"
    yield Need(slots, state, False)

"""The needs of a run that are not in its file: models, data, packages, devices, and what is already here."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from roll.check.data import files_of, is_local
from roll.check.devices import sees_gpus
from roll.check.memory import TIGHT, MemoryEstimate
from roll.check.memory_parts import GIB
from roll.check.rules import chosen_trackers, is_installed
from roll.configs import derived
from roll.configs.errors import count
from roll.configs.run import PipelineConfig, RLVRConfig
from roll.configs.strategies import Strategy, strategy_of


@dataclass(frozen=True)
class Need:
    """One need of a run."""

    what: str
    state: str
    """Its place, or how to get it."""
    here: bool


def needs(config: PipelineConfig, estimate: MemoryEstimate) -> list[Need]:
    """List everything that a checked configuration needs."""
    return [
        *_models(config), *_judges(config), *_files(config), *_packages(config), *_trackers(config),
        *_devices(config, estimate),
    ]  # fmt: skip


def missing_packages(config: PipelineConfig) -> dict[str, Strategy]:
    """Return role -> its strategy, where the package of the strategy is not installed here."""
    strategies = {role: strategy_of(role, section) for role, section in derived.present_roles(config).items()}
    return {role: each for role, each in strategies.items() if each and each.package and not _installed(each.package)}


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _models(config: PipelineConfig) -> Iterator[Need]:
    models = {derived.model_path(config, role) for role in derived.present_roles(config).values()}
    models |= {derived.reward_model_path(config, reward) for reward in derived.reward_models(config).values()}
    for model in sorted(models):
        if not is_local(model):
            yield Need(f"model {model}", "a hub name: fetched when the run starts, if it is not in the cache", False)
        else:
            here = (Path(model) / "config.json").is_file()
            yield Need(f"model {model}", "here" if here else "not here", here)


def _judges(config: PipelineConfig) -> Iterator[Need]:
    """List addresses that must answer when the run starts; no request is sent here."""
    rewards = config.rewards.values() if isinstance(config, RLVRConfig) else ()
    judges = {(reward.judge.model, reward.judge.base_url) for reward in rewards if reward.judge is not None}
    for model, address in sorted(judges):
        yield Need(f"judge {model}", f"asked at {address} when the run starts", False)


def _files(config: PipelineConfig) -> Iterator[Need]:
    if not isinstance(config, RLVRConfig):
        return
    sections = [config.actor_train.data_args, *([config.validation.data_args] if config.validation is not None else [])]
    for name in sorted({name for section in sections for name in files_of(section)}):
        here = Path(name).is_file()
        yield Need(f"data {name}", "here" if here else "not here: JSONL, one prompt per line", here)


def _packages(config: PipelineConfig) -> Iterator[Need]:
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
        yield _package("peft", 'pip install "roll[lora]"')
    if any(
        section.model_args.attn_implementation == "flash_attention_2"
        and (strategy := strategy_of(role, section)) is not None
        and strategy.chooses_attention
        for role, section in derived.roles_and_reward_models(config).items()
    ):
        yield _package("flash_attn", "pip install flash-attn --no-build-isolation, or `attn_implementation: sdpa`")


def _package(name: str, install: str) -> Need:
    here = _installed(name)
    return Need(f"package {name}", "installed" if here else f"not installed here: {install}", here)


def _trackers(config: PipelineConfig) -> Iterator[Need]:
    for tracker in chosen_trackers(config):
        if tracker.package is not None:
            here = is_installed(tracker.package)
            state = "installed" if here else f"not installed here: {tracker.install}"
            yield Need(f"package {tracker.package}", state, here)
        if tracker.secret is not None:
            here = bool(os.environ.get(tracker.secret))
            state = "set" if here else f"not set here: the key of {tracker.name}"
            yield Need(f"variable {tracker.secret}", state, here)


def _devices(config: PipelineConfig, estimate: MemoryEstimate) -> Iterator[Need]:
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
    state = "a driver is here; how many and how large they are was not looked at" if sees else "none here"
    yield Need(slots, state, False)

"""Rules about adapters (LoRA): the roles that may train them, and the adapter-free reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from roll.configs.derived import present_roles, reference_is_base
from roll.configs.errors import ConfigProblem
from roll.configs.rules_keys import differs_from_default
from roll.configs.schema import ADAPTER_KEYS, ADAPTER_STRATEGIES, TRAIN_STRATEGIES, PipelineConfig
from roll.configs.wording import shown


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
        strategy = section.strategy_args.strategy_name
        if strategy in TRAIN_STRATEGIES and strategy not in ADAPTER_STRATEGIES:
            message = f"{shown(arguments.lora_target)}, but {strategy} trains no adapters"
            remedy = f"use `{ADAPTER_STRATEGIES[0]}`, or remove the keys `lora_...`"
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

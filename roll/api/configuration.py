"""Configurations from Python: a file, a dictionary or a dataclass, with objects allowed where files have names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from roll.check.config import loaded, read_config
from roll.configs.dialects import roll as rolls_dialect
from roll.configs.dialects.rules import leaves
from roll.configs.errors import ConfigError, ConfigProblem, choose_among
from roll.configs.given import is_given, with_tokens
from roll.configs.loader import read_mapping
from roll.configs.plugins import problem
from roll.configs.run import RunConfig
from roll.data.sources import DEFAULT_DOMAIN
from roll.tracking.files import say

Source = str | os.PathLike[str] | Mapping[str, Any] | RunConfig
"""Path of a YAML file, a dictionary of configuration keys, or a `roll.RLVRConfig`, `roll.AgenticConfig`,
`roll.ImageConfig` or `roll.SFTConfig`."""
Given = Callable[..., Any] | Mapping[str, Callable[..., Any]] | None
"""One object for all names, a dictionary from name to object, or None."""

_OF_ANY_VERIFIER = ("tag_included", "num_workers", "timeout_seconds", "max_retries")


def load_config(config: Source, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge, resolve and validate a configuration.

    ``overrides`` are ``dotted.key=value``, as on the command line. Dictionaries and dataclasses are treated like a
    file: `${...}` refers to other keys, and every key is checked. Raises `roll.ConfigError` with every problem found.
    """
    tree, pickles = with_tokens(_tree(config))
    if pickles:
        message = "objects stand in place of names, and a configuration is text"
        raise problem(", ".join(pickles), message, "give them to `roll.train` or `roll.check`, or write import paths")
    written = _checked(overrides)
    return loaded(lambda: read_config(tree, written, say), here=False)


def with_given(
    config: Source,
    overrides: Sequence[str],
    reward: Given,
    loss: Given,
    advantage: Given,
    env: Given,
    here: bool = True,
) -> tuple[RunConfig, dict[str, bytes]]:
    """Return a configuration in which tokens stand for the given objects, and the pickled objects by token.

    ``here``: see `loaded`. Raises `ConfigError`.
    """
    tree, written = _tree(config), _checked(overrides)
    if env is not None and not _may_be_agentic(tree, written):
        raise problem(
            "env", "only the pipeline `agentic` has environments", "write `pipeline: agentic`, or leave it out"
        )
    if reward is not None:
        _put(tree, "rewards", "reward", reward, "verifier", _OF_ANY_VERIFIER.__contains__)
    if env is not None:
        _put(tree, "custom_envs", "env", env, "env_type", lambda other: other != "env_config")
    if loss is not None:
        tree["actor_train"] = _replaced(_section(tree, "actor_train"), "pg_variant", loss)
    if advantage is not None:
        tree = _replaced(tree, "adv_estimator", advantage)
    tree, pickles = with_tokens(tree)
    trackers = tree.get("track_with")
    if any(is_given(str(name)) for name in (trackers if isinstance(trackers, list) else [trackers])):
        message = "a tracker runs in a process of its own, which imports it"
        raise problem("track_with", message, "put it in a file and write `package.module:Class`")
    return loaded(lambda: read_config(tree, written, say), here), pickles


def _tree(config: Any) -> dict[str, Any]:
    if isinstance(config, RunConfig):
        return dict(_plain(config))
    if isinstance(config, Mapping):
        return dict(config)
    if not isinstance(config, str | os.PathLike):
        message = f"is of the type {type(config).__name__}"
        raise problem("the configuration", message, "give the path of a file, a dictionary, or a `roll.RLVRConfig`")
    return read_mapping(Path(config))


def _may_be_agentic(tree: Mapping[str, Any], overrides: Sequence[str]) -> bool:
    """Return False if the configuration is of another pipeline. An override of `pipeline` is left to the loader."""
    if any(each.startswith("pipeline=") for each in overrides):
        return True
    pipeline = rolls_dialect.pipeline_of(dict(leaves(tree))) if rolls_dialect.is_roll(tree) else tree.get("pipeline")
    return pipeline == "agentic"


def _checked(overrides: Sequence[str]) -> Sequence[str]:
    """Return the overrides. Raises `ConfigError` unless they are a list of strings."""
    if isinstance(overrides, str) or not all(isinstance(each, str) for each in overrides or ()):
        raise problem("overrides", f"{overrides!r} is no list of texts", 'write `overrides=["max_steps=10"]`')
    return overrides or ()


def _plain(value: Any) -> Any:
    """Convert dataclasses to dictionaries. Unlike `asdict`, this copies no object."""
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _section(tree: Mapping[str, Any], key: str, path: str = "") -> dict[str, Any]:
    """Return a copy of a section, empty if it is not a mapping. Reading the tree later reports that with its path.

    ``path``: path of the tree itself. Raises `ConfigError` for a reference, since its other keys would be lost.
    """
    section = tree.get(key)
    if isinstance(section, str) and "${" in section:
        message = f"is {section}, and an object given from Python would replace all that this refers to"
        remedy = "write the section out, or put the object where the reference leads to"
        raise problem(f"{path}{key}", message, remedy)
    return dict(section) if isinstance(section, Mapping) else {}


def _replaced(section: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """Put an object in place of a name, and drop the arguments (``<key>_args``) that were meant for that name."""
    return {name: each for name, each in section.items() if name != f"{key}_args"} | {key: value}


def _put(tree: dict[str, Any], name: str, argument: str, given: Given, key: str, keeps: Callable[[str], bool]) -> None:
    """Put the objects of an argument as ``key`` into the entries of a section ``name``. A single object goes into all.

    ``keeps``: True for the other keys of an entry that do not belong to the replaced name. Raises `ConfigError` for
    objects whose names the section does not have, since they would never be used.
    """
    section = tree[name] = _section(tree, name)
    objects = given if isinstance(given, Mapping) else dict.fromkeys(section or [DEFAULT_DOMAIN], given)
    unused = [entry for entry in objects if section and entry not in section]
    if unused:
        raise ConfigError(
            [
                ConfigProblem(
                    argument, f"the configuration has no `{entry}`", choose_among(str(entry), map(str, section))
                )
                for entry in unused
            ]
        )
    for entry, each in objects.items():
        before = _section(section, entry, f"{name}.")
        section[entry] = {other: value for other, value in before.items() if keeps(other)} | {key: each}

"""Configuration errors: all problems at once, each with its path and a remedy.

The command line turns a `ConfigError` into exit code 2 and a plain message; nothing else ever becomes exit code 2. For
a key of another toolkit the remedy is its equivalent here (`roll/configs/dialects`), since the most similar name would
often be a wrong guess. The name of a key decides if it is secret; secret values appear neither in messages nor in saved
configurations.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from roll.tracking.logs import MASK, is_secret_name

Value = TypeVar("Value")


@dataclass(frozen=True)
class ConfigProblem:
    """One wrong key or value."""

    path: str
    """Dotted path of the key, for example ``actor_train.training_args.learning_rate``."""
    message: str
    """Description of the problem, with the value."""
    remedy: str
    """Suggested correction."""

    def __str__(self) -> str:
        return f"{self.path}: {self.message}\n    -> {self.remedy}"


class NoEffect(ConfigProblem):
    """The problem of a key that has no effect because of other settings."""


def without_effect(path: str, value: Any, reason: str, remedy: str) -> ConfigProblem:
    """Return the problem of a key that has no effect because of other settings."""
    return NoEffect(path, f"{shown(value)} has no effect: {reason}", remedy)


class ConfigError(Exception):
    """A configuration with at least one problem."""

    def __init__(self, problems: Sequence[ConfigProblem], rest: Any = None) -> None:
        """``rest``: the configuration without its wrong keys, for further checks; None if that does not load either."""
        if not problems:
            raise ValueError("a ConfigError needs at least one problem")
        self.problems = list(problems)
        self.rest = rest
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[list[ConfigProblem]]]:
        """Support pickling: a worker may fail with this error."""
        return type(self), (self.problems,)


def problems_of(attempt: Callable[[], object]) -> list[ConfigProblem]:
    """Return the problems with which ``attempt`` fails; empty if it succeeds."""
    try:
        attempt()
    except ConfigError as error:
        return error.problems
    return []


class Problems:
    """Collector of problems, so that one problem does not hide another."""

    def __init__(self) -> None:
        self.found: list[ConfigProblem] = []

    def attempt(self, look_up: Callable[..., Value], *arguments: Any, **options: Any) -> Value | None:
        """Return the result of ``look_up``, or None after noting its problems if it raised `ConfigError`."""
        try:
            return look_up(*arguments, **options)
        except ConfigError as error:
            self.found += error.problems
            return None

    def add(self, path: str, message: str, remedy: str) -> None:
        """Note one problem."""
        self.found.append(ConfigProblem(path, message, remedy))

    def raise_any(self) -> None:
        """Raise `ConfigError` with all problems so far, if there are any."""
        if self.found:
            raise ConfigError(self.found)


RENAMED = {
    "num_gpus_per_node": "cluster.num_devices_per_node",
    "lr": "actor_train.training_args.learning_rate",
    "train_batch_size": "rollout_batch_size",
    "batch_size": "rollout_batch_size",
    "model": "pretrain",
    "model_path": "pretrain",
    "bucket_size_mb": "param_update_gather_bucket_size_mb",
    "group_size": "num_return_sequences_in_group",
    "trackers": "track_with",
    "report_to": "track_with",
    "logger": "track_with",
}
"""Foreign name -> its name here; used only if no key of the schema has the foreign name."""

_LONGEST_SHOWN = 80


def is_secret(name: str) -> bool:
    """Return True if a key's name marks its value as a secret (`roll.tracking.logs.is_secret_name`).

    ``api_key_env`` is not secret: it only names the variable that holds the key.
    """
    return is_secret_name(name) and name != "api_key_env"


def masked(tree: Any) -> Any:
    """Return a copy of a plain tree with the values of secret keys replaced."""
    if isinstance(tree, dict):
        return {
            key: MASK if is_secret(key) and value is not None and not isinstance(value, bool) else masked(value)
            for key, value in tree.items()
        }
    if isinstance(tree, list):
        return [masked(value) for value in tree]
    return tree


def shown(value: Any, name: str = "") -> str:
    """Format a value for a message: like YAML flow style, shortened, masked if its key ``name`` is secret."""
    if is_secret(name) and value is not None:
        return MASK
    text = json.dumps(masked(value), ensure_ascii=False, default=str)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to ``name``; None if none is similar."""
    matches = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=cutoff)
    return matches[0] if matches else None


def choose_among(name: str, known: Iterable[str]) -> str:
    """Return the remedy for a wrong name: the nearest known name, and all of them."""
    names = list(known)
    if not names:
        return "there is none to choose from"
    match = nearest(name, names)
    return (f"did you mean `{match}`? " if match else "") + f"known: {', '.join(f'`{item}`' for item in names)}"


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Return ``did you mean `x`?`` if a known name is similar, else the list of the known names (at most twelve)."""
    names = sorted(known)
    match = nearest(name, names)
    if match is not None:
        return f"did you mean `{match}`?"
    return choose_among(name, names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")


def count(number: int, word: str) -> str:
    """Format a number with its noun: ``1 sample``, ``2 samples``, ``2 batches``."""
    plural = word + ("es" if word.endswith(("s", "sh", "ch")) else "s")
    return f"{number:,} {word if number == 1 else plural}"

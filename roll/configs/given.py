"""Objects that a Python program passes where a configuration has a name, such as a reward written in a notebook.

A configuration is text, so it holds a token, ``given from Python: <name>``, and this process holds the pickled object
of the token. Workers receive the pickles with their start arguments, never from a file, so a configuration file cannot
make a process load a pickle. A saved configuration keeps the token; a run that reads it fails unless the program passes
the object again.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import date
from typing import Any

import cloudpickle

from roll.configs.errors import ConfigError, ConfigProblem

DEEPEST = 50
"""Maximum number of levels of a tree."""
PREFIX = "given from Python: "

_pickles: dict[str, bytes] = {}
_objects: dict[str, Any] = {}


class NotGiven(ImportError):
    """A token whose object this process does not have."""


def is_given(name: str) -> bool:
    """Return True if a name is the token of an object passed by a Python program."""
    return name.startswith(PREFIX)


def given_object(token: str) -> Any:
    """Return the object of a token. Raises `NotGiven`, and `ImportError` if its pickle does not load here."""
    if token not in _pickles:
        raise NotGiven(f"`{token}` was an object of a Python program, and it is in no file")
    if token not in _objects:
        try:
            _objects[token] = pickle.loads(_pickles[token])  # the caller's own object, see above
        except Exception as error:
            raise ImportError(f"`{token}` cannot be unpickled here: {type(error).__name__}: {error}") from error
    return _objects[token]


def given_pickles() -> Mapping[str, bytes]:
    """Return the pickles of this process by token, for processes that it starts."""
    return dict(_pickles)


def receive(pickles: Mapping[str, bytes]) -> None:
    """Add pickles received from the parent process."""
    for token, pickled in pickles.items():
        if _pickles.get(token) != pickled:
            _objects.pop(token, None)
        _pickles[token] = pickled


@contextmanager
def holding_given(pickles: Mapping[str, bytes]) -> Iterator[None]:
    """Hold pickles for the duration of the context, for a check in the caller's own process."""
    before = dict(_pickles)
    receive(pickles)
    try:
        yield
    finally:
        for token in pickles:
            del _pickles[token]
            _objects.pop(token, None)
        receive(before)


def _pickled(value: Callable[..., Any]) -> bytes:
    """Pickle an object, by value if other processes cannot import it: from `__main__` or a module without a file."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    if module is None or module.__spec__ is not None or module.__name__ == "__main__":
        return bytes(cloudpickle.dumps(value))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(value))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def with_tokens(tree: Any) -> tuple[Any, dict[str, bytes]]:
    """Return a tree with a token in place of each callable, and the pickles by token.

    The same object gets the same token; several objects of one name are numbered. Paths become text, and NumPy scalars
    plain numbers. Raises `ConfigError` with each object that cannot be pickled, and each value that a configuration
    cannot hold.
    """
    tokens: dict[int, str] = {}
    objects: dict[str, Callable[..., Any]] = {}
    pickles: dict[str, bytes] = {}
    problems: list[ConfigProblem] = []

    def token_of(value: Callable[..., Any], path: str) -> str:
        if id(value) in tokens:
            return tokens[id(value)]
        name = str(getattr(value, "__qualname__", None) or type(value).__qualname__).rpartition("<locals>.")[2]
        token, number = PREFIX + name, 1
        while token in objects:
            number += 1
            token = f"{PREFIX}{name} ({number})"
        tokens[id(value)], objects[token] = token, value
        try:
            pickles[token] = _pickled(value)
        except Exception as error:
            message = f"`{name}` cannot be sent to workers: {type(error).__name__}: {error}"
            remedy = "let it make what cannot be pickled (a lock, a file, a connection) when it is called"
            problems.append(ConfigProblem(path, message, remedy))
        return token

    def walked(value: Any, path: str, depth: int = 0) -> Any:
        if depth > DEEPEST:
            problems.append(ConfigProblem(path[:100], "the value contains itself", "let no part of it contain itself"))
            return None
        if isinstance(value, Mapping):
            return {
                key: walked(below, f"{path}.{key}" if path else str(key), depth + 1) for key, below in value.items()
            }
        if isinstance(value, (list, tuple)):
            return [walked(below, f"{path}[{index}]", depth + 1) for index, below in enumerate(value)]
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
            return value.item()
        if callable(value):
            return token_of(value, path)
        if value is not None and not isinstance(value, str | int | float | date):
            message = f"{type(value).__name__} is not a type that a configuration can hold"
            problems.append(ConfigProblem(path, message, "write text, a number, a boolean, a list or a mapping"))
        return value

    replaced = walked(tree, "")
    if problems:
        raise ConfigError(problems)
    return replaced, pickles

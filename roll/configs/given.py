"""Objects that a Python program gives in place of names, such as a reward that was written in a notebook.

A configuration is text, so it holds a token, ``given from Python: <name>``, and this process holds the pickled object
for it. Workers receive the pickles with the arguments of their start, never from a file: what a configuration file
says cannot make a process load a pickle. A saved configuration therefore names the object honestly, and a run that
reads it without being given the object again is refused.
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
"""Most levels of a tree."""
PREFIX = "given from Python: "

_pickles: dict[str, bytes] = {}
_objects: dict[str, Any] = {}


class NotGiven(ImportError):
    """The object of a token was not given to this process."""


def is_given(name: str) -> bool:
    """Return True if a name stands for an object that a Python program gave."""
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
    """Add pickles that the process which started this one has sent."""
    for token, pickled in pickles.items():
        if _pickles.get(token) != pickled:
            _objects.pop(token, None)
        _pickles[token] = pickled


@contextmanager
def holding_given(pickles: Mapping[str, bytes]) -> Iterator[None]:
    """Hold pickles while this is open, for a check within the caller's own process."""
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
    """Pickle by value what other processes could not import: what is in `__main__`, or in a module without a file."""
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

    The same object gets the same token; two objects of one name are numbered. Paths become text, and scalars of numpy
    plain numbers. Raises `ConfigError` with each object that cannot be pickled, and each other value that is no text,
    number, list or mapping.
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
            problems.append(ConfigProblem(path[:100], "the tree has no end", "let no part of it contain itself"))
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
            message = f"{type(value).__name__} is nothing that a configuration can hold"
            problems.append(ConfigProblem(path, message, "write text, a number, a boolean, a list or a mapping"))
        return value

    replaced = walked(tree, "")
    if problems:
        raise ConfigError(problems)
    return replaced, pickles

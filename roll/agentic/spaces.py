"""Spaces of gymnasium in text: actions told in words and read from JSON, observations written as JSON.

Whole numbers, small vectors, texts, and tuples and dicts of them. `can_be_written` says what else a space would need.
Reading never raises anything but `NoAction`, whatever the text, and names the part that does not fit.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from gymnasium import Space, spaces

from roll.agentic.base import ActionFormat, ActionReader, answer_in, as_answer, how_to_answer
from roll.agentic.endpoint.json_text import loaded

MOST_NUMBERS = 64
"""Numbers of one vector. More are pictures or states of simulators, which nobody reads or writes as text."""
_UNBOUNDED = 1e30
_ALPHANUMERIC = spaces.Text(1).character_set
_MOST_SHOWN = 100
"""Characters of a text's alphabet that are told."""
_EXAMPLES = 4


class NoAction(ValueError):
    """A text is no action. The message is for the policy."""


class Actions(Protocol):
    """Reads an environment's actions from the policy's texts, and tells the policy how to write them."""

    def read(self, text: str) -> Any:
        """Return the action that a policy's text names. Raises `NoAction`."""

    def instructions(self) -> str:
        """Return one or two sentences for the policy."""

    def examples(self) -> tuple[str, ...]:
        """Return some texts that are actions."""


@dataclass(frozen=True)
class NamedActions(Actions):
    """Actions that have names."""

    reader: ActionReader
    first: int
    """Number of the first one."""

    def read(self, text: str) -> int:
        chosen = self.reader.read(text)
        if chosen is None:
            raise NoAction(self.reader.complaint())
        return self.first + chosen

    def instructions(self) -> str:
        return self.reader.instructions()

    def examples(self) -> tuple[str, ...]:
        return self.reader.examples()


@dataclass(frozen=True)
class JsonActions(Actions):
    """Actions of a space that `can_be_written`."""

    space: Space[Any]
    action_format: ActionFormat

    def read(self, text: str) -> Any:
        """Return the action that a text names; the brackets around a whole list may be left out. Raises `NoAction`."""
        answer = answer_in(text, self.action_format)
        if answer is None:
            raise NoAction(f"That was no action. {self.instructions()}")
        try:
            return _read(self.space, self._value(answer), "the action")
        except ValueError as wrong:
            raise NoAction(f"That was no action: {wrong}. {self.instructions()}") from None
        except OverflowError:  # a whole number that only just has no place in double precision
            raise NoAction(f"That was no action: a number is too large. {self.instructions()}") from None

    def instructions(self) -> str:
        how = how_to_answer("your action", self.action_format)
        return f"An action is {described(self.space)}{'' if self._is_text else ', as JSON'}. {how}"

    def examples(self) -> tuple[str, ...]:
        space = copy.deepcopy(self.space)
        space.seed(0)
        drawn = [space.sample() for _ in range(_EXAMPLES)]
        if self._is_text:  # what surrounds an answer is stripped
            texts = [each.strip() for each in drawn if space.contains(each.strip())]
        else:
            texts = [json.dumps(_plain(each)) for each in drawn]
        return tuple(as_answer(text, self.action_format) for text in texts)

    @property
    def _is_text(self) -> bool:
        return isinstance(self.space, spaces.Text)

    def _value(self, answer: str) -> Any:
        if self._is_text:
            return answer
        try:
            return loaded(answer)
        except ValueError:
            try:
                return loaded(f"[{answer}]")
            except ValueError:
                raise ValueError(f"{_shown(answer)} is no JSON") from None


def can_be_written(space: Any) -> str | None:
    """Return why values of a space cannot be written as text; None if they can."""
    match space:
        case spaces.Dict() | spaces.Tuple() if not len(space.spaces):
            return f"{space} is empty"
        case spaces.Dict() if not all(isinstance(key, str) for key in space.spaces):
            return f"{space} has keys that are no texts"
        case spaces.Dict():
            return next(filter(None, map(can_be_written, space.spaces.values())), None)
        case spaces.Tuple():
            return next(filter(None, map(can_be_written, space.spaces)), None)
        case spaces.Text():
            return None
    numbers = _numbers(space)
    if numbers is None:
        return f"{space} is no space of numbers, vectors or texts"
    if not 1 <= numbers.low.size <= MOST_NUMBERS:
        return f"{space} has {numbers.low.size} numbers, and 1 to {MOST_NUMBERS} can be written"
    return None


def described(space: Space[Any]) -> str:
    """Return a space in words, such as `a list of 2 numbers from -1 to 1`."""
    match space:
        case spaces.Dict():
            return "an object with " + _listed(f"`{key}` ({described(each)})" for key, each in space.spaces.items())
        case spaces.Tuple():
            return f"a list of {len(space.spaces)}: " + "; ".join(map(described, space.spaces))
        case spaces.Text():
            return f"a text of {space.min_length} to {space.max_length} {_characters(space)}"
    numbers = _numbers(space)
    assert numbers is not None  # as `can_be_written` says
    kind, shape = "whole number" if numbers.whole else "number", numbers.low.shape
    text = f"a list of {' lists of '.join(map(str, shape))} {kind}s" if shape else f"a {kind}"
    ranges = [_range(low, high) for low, high in zip(numbers.low.flat, numbers.high.flat, strict=True)]
    if len(set(ranges)) == 1:
        return f"{text} {ranges[0]}".rstrip()
    return f"{text} ({'; '.join(each or 'any' for each in ranges)})"


def written(value: Any) -> str:
    """Return an observation as text: JSON, with six digits of each number; a text as it is."""
    return value if isinstance(value, str) else json.dumps(_plain(value, digits=6), ensure_ascii=False)


@dataclass(frozen=True)
class _Numbers:
    """A number, or an array of them."""

    low: np.ndarray
    high: np.ndarray
    """Of the same shape."""
    whole: bool
    dtype: Any


def _numbers(space: Any) -> _Numbers | None:
    match space:
        case spaces.Discrete():
            first = np.array(int(space.start))
            return _Numbers(first, first + (int(space.n) - 1), True, np.int64)
        case spaces.MultiDiscrete():
            return _Numbers(space.start, space.start + space.nvec - 1, True, space.dtype)
        case spaces.MultiBinary():
            return _Numbers(np.zeros(space.shape, int), np.ones(space.shape, int), True, space.dtype)
        case spaces.Box():
            return _Numbers(space.low, space.high, not np.issubdtype(space.dtype, np.floating), space.dtype)
    return None


def _read(space: Any, value: Any, where: str) -> Any:
    """Return the element of a space that a JSON value is. Raises `ValueError` with what is wrong."""
    match space:
        case spaces.Dict():
            if not isinstance(value, dict):
                raise ValueError(f"{where} is {_shown(value)}, and no object")
            odd = [key for key in (*space.spaces, *value) if (key in value) != (key in space.spaces)]
            if odd:
                lacks = "has no" if odd[0] in space.spaces else "has an unknown"
                raise ValueError(f"{where} {lacks} `{odd[0][:60]}`")
            return {key: _read(each, value[key], f"`{key}`") for key, each in space.spaces.items()}
        case spaces.Tuple():
            items = _list(value, len(space.spaces), where)
            parts = enumerate(zip(space.spaces, items, strict=True), 1)
            return tuple(_read(each, item, f"part {number} of {where}") for number, (each, item) in parts)
        case spaces.Text():
            if not isinstance(value, str) or not space.contains(value):
                raise ValueError(f"{where} is {_shown(value)}, and no {described(space).removeprefix('a ')}")
            return value
    numbers = _numbers(space)
    assert numbers is not None  # as `can_be_written` says
    shape = numbers.low.shape
    if numbers.low.size == 1 and isinstance(value, int | float):
        for _ in shape:
            value = [value]
    found = np.array(_flat(value, shape, where), dtype=object).reshape(shape)
    for number, low, high in zip(found.flat, numbers.low.ravel().tolist(), numbers.high.ravel().tolist(), strict=True):
        if numbers.whole and number != int(number):
            raise ValueError(f"{where} has {_shown(number)}, which is no whole number")
        is_end = not numbers.whole and _digits(number) in (_digits(low), _digits(high))  # as the policy reads them
        if not (low <= number <= high or is_end):
            raise ValueError(f"{where} has {_shown(number)}, which is not {_range(low, high) or 'finite'}")
    if numbers.whole:
        return int(found[()]) if isinstance(space, spaces.Discrete) else found.astype(numbers.dtype)
    most = np.finfo(numbers.dtype).max
    within = np.clip(np.clip(found.astype(float), numbers.low, numbers.high), -most, most)
    return np.asarray(within, dtype=numbers.dtype)


def _flat(value: Any, shape: tuple[int, ...], where: str) -> list[float]:
    """Return the numbers in nested lists of a shape. Raises `ValueError`."""
    if not shape:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where} has {_shown(value)}, which is no number")
        return [value]
    return [each for item in _list(value, shape[0], where) for each in _flat(item, shape[1:], where)]


def _list(value: Any, length: int, where: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{where} is {_shown(value)}, and no list of {length}")
    return value


def _plain(value: Any, digits: int | None = None) -> Any:
    """Return an element of a space as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each, digits) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(each, digits) for each in value]
    if isinstance(value, str):
        return value
    array = np.asarray(value)
    if array.dtype == bool:
        array = array.astype(int)
    if digits is not None and np.issubdtype(array.dtype, np.floating):
        array = np.vectorize(lambda each: float(f"{each:.{digits}g}"), otypes=[float])(array)
    return array.tolist()


def _digits(number: Any) -> str:
    """Return a number as the policy reads it."""
    return f"{float(number):.6g}"


def _range(low: Any, high: Any) -> str:
    """Return the range in words; empty if there is none."""
    ends = [_digits(end) if abs(float(end)) < _UNBOUNDED else "" for end in (low, high)]
    match ends:
        case ["", ""]:
            return ""
        case [end, ""]:
            return f"from {end} up"
        case ["", end]:
            return f"up to {end}"
    return f"from {ends[0]} to {ends[1]}"


def _characters(space: spaces.Text) -> str:
    """Return in words what a text consists of; a policy cannot guess that a space is none of it."""
    if space.character_set == _ALPHANUMERIC:
        return "letters and digits, without spaces"
    known = "".join(sorted(space.character_set))
    return f"characters out of {json.dumps(known, ensure_ascii=False)}" if len(known) <= _MOST_SHOWN else "characters"


def _listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."

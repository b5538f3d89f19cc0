"""JSON that can be passed on: finite, of bounded depth, and text that UTF-8 can write.

What is refused here would fail later and elsewhere: in a chat template, in a tokenizer, or in a client's decoder.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

DEEPEST = 100
_LARGEST = 2**1024
"""Where double precision ends, and with it what most decoders take."""


def problem_of(value: Any) -> str | None:
    """Return what is wrong with a decoded JSON value; None if nothing is."""
    stack = [(value, 0)]
    while stack:
        value, depth = stack.pop()
        if depth > DEEPEST:
            return f"is nested more than {DEEPEST} levels deep"
        if isinstance(value, str):
            if not value.isascii() and not _encodable(value):
                return "holds half of a surrogate pair, which is no text"
        elif isinstance(value, dict):
            stack += [(key if isinstance(key, str) else object(), depth) for key in value]
            stack += [(each, depth + 1) for each in value.values()]
        elif isinstance(value, list):
            stack += [(each, depth + 1) for each in value]
        elif isinstance(value, int | float):
            if not abs(value) < _LARGEST:
                return "holds a number beyond double precision"
        elif value is not None:
            return "holds something that is no JSON"
    return None


def loaded(text: str) -> Any:
    """Return the JSON value that ``text`` is. Raises `ValueError` if it is none, or one that cannot be passed on."""
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if problem := problem_of(value):
        raise ValueError(problem)
    return value


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")

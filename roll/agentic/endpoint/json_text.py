"""Checks that JSON can be processed further: finite numbers, bounded depth, and strings that UTF-8 can encode.

Anything rejected here would fail later: in a chat template, in a tokenizer, or in a client's decoder.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

DEEPEST = 100
_LARGEST = 2**1024
"""Just above the range of double precision, which is all that most decoders accept."""


def problem_of(value: Any) -> str | None:
    """Return what is wrong with a decoded JSON value, or None."""
    level = [value]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for each in level:
            if isinstance(each, str):
                if not each.isascii() and not _encodable(each):
                    return "holds half of a surrogate pair, which is no text"
            elif isinstance(each, dict):
                level += (key if isinstance(key, str) else object() for key in each)
                below += each.values()
            elif isinstance(each, list):
                below += each
            elif isinstance(each, int | float):
                if not abs(each) < _LARGEST:
                    return "holds a number beyond double precision"
            elif each is not None:
                return "holds something that is no JSON"
        if not below:
            return None
        level = below
    return f"is nested more than {DEEPEST} levels deep"


def parsed(text: str) -> Any:
    """Decode JSON that is checked later. Raises `ValueError` if it is invalid."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def loaded(text: str) -> Any:
    """Decode JSON. Raises `ValueError` if it is invalid, or valid but not acceptable (`problem_of`)."""
    value = parsed(text)
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

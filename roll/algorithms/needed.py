"""Fields that only some losses and estimators need, and that callers may leave out for all others.

What is needed is declared in traits and checked before a function is called; this is the same promise where the field
is read, so that a wrong trait fails with the field's name.
"""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def needed(value: Value | None, name: str) -> Value:
    """The value. ``ValueError`` with the field's name if there is none."""
    if value is None:
        raise ValueError(f"{name} are needed here, and none were given; declare the need in the traits of the function")
    return value

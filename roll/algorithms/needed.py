"""Access to fields that only some losses and estimators need.

Required fields are declared in traits and checked before a function is called. This check guards the place where a
field is read, so that a wrong trait fails with the field's name.
"""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def needed(value: Value | None, name: str) -> Value:
    """Return the value. ``ValueError`` with the field's name if it is None."""
    if value is None:
        raise ValueError(f"{name} are needed here, and none were given; declare the need in the traits of the function")
    return value

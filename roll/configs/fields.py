"""How a key is declared: its help text, the range of its number, its default."""

from __future__ import annotations

import re
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal


@dataclass(frozen=True)
class Range:
    """A range of numbers with optional limits. NaN is in no range."""

    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None

    def contains(self, value: float) -> bool:
        """Return True if ``value`` is in the range."""
        return (
            value == value
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
            and (self.below is None or value < self.below)
        )

    def __str__(self) -> str:
        signs = {">=": self.at_least, ">": self.above, "<=": self.at_most, "<": self.below}
        return " and ".join(f"{sign} {limit}" for sign, limit in signs.items() if limit is not None)


LARGEST_NUMBER = 1e15
"""Upper limit of every setting, so that products of settings stay exact enough to compute with."""
POSITIVE = Range(above=0)
NOT_NEGATIVE = Range(at_least=0)
COUNT = Range(at_least=1)
SHARE = Range(at_least=0, at_most=1)
DECAY = Range(at_least=0, below=1)
NUCLEUS = Range(above=0, at_most=1)
SEED = Range(at_least=0, below=2**32)
ANY_FINITE = Range()


def option(default: Any = None, *, help: str, factory: Any = None, range: Range | None = None) -> Any:
    """Declare a dataclass field with its help text and the range of its number.

    ``factory`` replaces ``default`` for mutable values.
    """
    metadata = {"help": help} if range is None else {"help": help, "range": range}
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)


DeviceMapping = list[int] | int | str | None
LossAggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]

_IDENTIFIER = r"[A-Za-z_]\w*"
IMPORT_PATH = re.compile(rf"{_IDENTIFIER}(\.{_IDENTIFIER})*:{_IDENTIFIER}(\.{_IDENTIFIER})*")
"""Pattern of an import path, `package.module:name`."""


def default_of(item: Field[Any]) -> Any:
    """Return the default value of a dataclass field."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def differs_from_default(section: Any, name: str) -> bool:
    """Return True if a key of a section differs from its default."""
    item = next(item for item in fields(section) if item.name == name)
    return bool(vars(section)[name] != default_of(item))

"""Declaration of a key: its help text, and the range of its number."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from roll.configs.ranges import Range

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

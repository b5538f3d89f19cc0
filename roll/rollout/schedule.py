"""The scheduler's records, settings and errors."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Generic, Literal, Protocol, get_args

from roll.rollout.admission import Refusal, exact_ratio
from roll.rollout.buffer import ConsumptionOrder, FinishedGroup, Item, Result
from roll.rollout.ledger import DropReason

StalenessPolicy = Literal["wait", "drop"]


class FatalRolloutError(Exception):
    """An error that ends the run at once, without a retry. A rollout raises it alone or inside an exception group."""


class GroupTimeout(Exception):
    """An attempt took longer than the plan's ``group_timeout``."""


class SourceExhausted(RuntimeError):
    """The source ended before the run had all the groups it needs."""


class NoMoreBatches(Exception):
    """`next_batch` was called after the last batch of the run."""


class SchedulerStopped(RuntimeError):
    """`next_batch` was called (or was waiting) on a scheduler whose `run` was cancelled."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """Settings of how far generation may run ahead of training. Raises `ValueError` on impossible values."""

    batch_size: int
    """Groups per training step."""
    max_steps: int
    ratio: float | Fraction = 0
    """Number of batches by which generation may be ahead of training."""
    max_staleness: int = 0
    """Batch t holds no group started at a version below t minus this."""
    order: ConsumptionOrder = "ready_first"
    staleness_policy: StalenessPolicy = "wait"
    max_group_retries: int = 2
    max_consecutive_refunds: int = 64
    """Number of drops in a row that ends the run."""
    group_timeout: float | None = None
    """Longest time of one attempt, in seconds of the loop's clock. None: the rollout has deadlines of its own."""

    def __post_init__(self) -> None:
        exact_ratio(self.ratio)
        for name, value, least in (
            ("batch_size", self.batch_size, 1),
            ("max_steps", self.max_steps, 1),
            ("max_staleness", self.max_staleness, 0),
            ("max_group_retries", self.max_group_retries, 0),
            ("max_consecutive_refunds", self.max_consecutive_refunds, 1),
        ):
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if self.order not in get_args(ConsumptionOrder):
            raise ValueError(f"order must be one of {get_args(ConsumptionOrder)}, not {self.order!r}")
        if self.staleness_policy not in get_args(StalenessPolicy):
            policies = get_args(StalenessPolicy)
            raise ValueError(f"staleness_policy must be one of {policies}, not {self.staleness_policy!r}")
        if self.group_timeout is not None and self.group_timeout <= 0:
            raise ValueError(f"group_timeout must be positive, not {self.group_timeout}")


@dataclass(frozen=True, slots=True)
class Ticket(Generic[Item]):
    """The request that a rollout receives."""

    group_id: int
    item: Item
    start_version: int
    """Oldest version that a token of this attempt may come from. Lease replicas with ``min_version=start_version``."""
    attempt: int
    """Number of the attempt; 1 for the first."""


@dataclass(frozen=True, slots=True)
class DroppedGroup:
    """A group that was not trained on, and why."""

    group_id: int
    reason: DropReason
    attempts: int
    cause: BaseException | None


@dataclass(frozen=True, slots=True)
class SchedulerSnapshot:
    """The state of the scheduler at one instant."""

    ledger: dict[str, int]
    """Counts in the form of `Ledger.counts`."""
    steps_done: int
    version: int
    batches_taken: int
    waiting: Refusal | Literal["source", "stopped"]
    """The reason why no group is started now."""
    consumer_waiting: bool
    """True while a `next_batch` waits."""
    oldest_in_flight: int | None
    """Id of the group in flight that was issued first."""
    oldest_in_flight_age: float
    """Seconds since that group was issued; 0 if none is in flight."""
    holding_up: tuple[int, ...]
    """Groups in flight that alone hold up the next batch, because it is the last one that may take them."""


class SchedulerObserver(Protocol[Item, Result]):
    """Observer that is called when a group finishes or is dropped. An exception that it raises ends the run."""

    def group_finished(self, group: FinishedGroup[Item, Result]) -> None:
        """Handle a group that is ready to be trained on."""

    def group_dropped(self, group: DroppedGroup, version: int) -> None:
        """Handle a group that will not be trained on; ``version`` was the newest policy version at that time.

        Groups cancelled at the end of the run are not reported.
        """


def is_fatal(error: BaseException) -> bool:
    """Return True if the error is a `FatalRolloutError`, alone or inside an exception group."""
    if isinstance(error, BaseExceptionGroup):
        return error.subgroup(FatalRolloutError) is not None
    return isinstance(error, FatalRolloutError)

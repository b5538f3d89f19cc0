"""The asynchronous core: when each group starts, what becomes of it, and which batch it is trained in.

It uses only asyncio and the standard library. The scheduler that drives a cluster therefore also runs, unchanged, under
a virtual clock in tests.
"""

from roll.rollout.admission import TooManyRefunds
from roll.rollout.buffer import FinishedGroup
from roll.rollout.ledger import Ledger, LedgerError
from roll.rollout.router import Lease, NoReplica, Router
from roll.rollout.schedule import (
    DroppedGroup,
    FatalRolloutError,
    GroupTimeout,
    NoMoreBatches,
    SchedulePlan,
    SchedulerSnapshot,
    SchedulerStopped,
    SourceExhausted,
    Ticket,
)
from roll.rollout.scheduler import RolloutScheduler

__all__ = [
    "DroppedGroup",
    "FatalRolloutError",
    "FinishedGroup",
    "GroupTimeout",
    "Lease",
    "Ledger",
    "LedgerError",
    "NoMoreBatches",
    "NoReplica",
    "RolloutScheduler",
    "Router",
    "SchedulePlan",
    "SchedulerSnapshot",
    "SchedulerStopped",
    "SourceExhausted",
    "Ticket",
    "TooManyRefunds",
]

"""Fault injection for tests: kill or freeze a process, fill its disk, or corrupt weights in transit.

Only reachable through the configuration's `chaos`, which must be switched on.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Collection, Sequence
from typing import Any, Literal

import numpy as np

from roll.distributed.transports.base import WeightSender
from roll.strategies.infer.base import WeightBucket

Harm = Literal["kill", "freeze", "fill_disk"]
FULL_DISK_BYTES = 2**14
"""Largest file that a process with a full disk can write. Small files, such as a run's summary, still fit."""


def harm_this_process(harm: Harm, seconds: float | None) -> None:
    """Kill this process, stop it for ``seconds`` (None: for good), or limit its files as a full disk would."""
    if harm == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif harm == "freeze":
        if seconds is not None:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


class SpoilingSender:
    """A `WeightSender` that corrupts one byte of the chosen versions after their checksums were taken."""

    def __init__(self, sender: WeightSender, versions: Collection[int]) -> None:
        self._sender = sender
        self._versions = frozenset(versions)

    def begin(self, half: int) -> None:
        """See `WeightSender.begin`."""
        self._sender.begin(half)

    def allocate(self, half: int, index: int, size: int) -> np.ndarray:
        """See `WeightSender.allocate`."""
        return self._sender.allocate(half, index, size)

    def send(self, half: int, version: int, buckets: Sequence[WeightBucket]) -> list[Any]:
        """See `WeightSender.send`; flips one byte of the chosen versions first."""
        if version in self._versions:
            _, _, _, offset = buckets[0].tensors[0]
            buckets[0].data[offset] ^= 0xFF
        return self._sender.send(half, version, buckets)

    def release(self, version: int) -> None:
        """See `WeightSender.release`."""
        self._sender.release(version)

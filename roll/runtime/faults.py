"""Fault injection for tests: kill or freeze a process, fill its disk, or corrupt weights in transit.

Only reachable through the configuration's `chaos`, which must be switched on.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from typing import Literal

Fault = Literal["kill", "freeze", "fill_disk"]
FULL_DISK_BYTES = 2**14
"""Largest file that a process with a full disk can write. Small files, such as a run's summary, still fit."""


def inject_fault(fault: Fault, seconds: float | None) -> None:
    """Kill this process, stop it for ``seconds`` (None: for good), or limit its files as a full disk would."""
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "freeze":
        if seconds is not None:
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

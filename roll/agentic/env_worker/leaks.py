"""Resources that the process holds: the only way to notice an environment that leaks them.

Environments of many tags share a process, so a leak cannot be attributed to one of them. It can still be detected, and
a new process starts without it. Linux only: elsewhere nothing is measured and every number is 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Holdings:
    """Resources of this process at one moment."""

    open_files: int = 0
    threads: int = 0
    resident_bytes: int = 0

    def __sub__(self, other: Holdings) -> Holdings:
        return Holdings(
            self.open_files - other.open_files,
            self.threads - other.threads,
            self.resident_bytes - other.resident_bytes,
        )


def holdings() -> Holdings:
    """Measure the resources of this process."""
    if not _PROCESS.is_dir():
        return Holdings()
    resident_pages = int((_PROCESS / "statm").read_text().split()[1])
    return Holdings(
        open_files=len(os.listdir(_PROCESS / "fd")),
        threads=len(os.listdir(_PROCESS / "task")),
        resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
    )

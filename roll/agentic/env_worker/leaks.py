"""What the process holds of the system's resources: the only way to notice an environment that leaks them.

Environments of many tags share a process, so a leak cannot be laid at one environment's door; but it can be seen, and
a new process has none. Linux only: elsewhere nothing is measured and every figure is 0.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Holdings:
    """Of this process, now."""

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
    """Measure."""
    if not _PROCESS.is_dir():
        return Holdings()
    resident_pages = int((_PROCESS / "statm").read_text().split()[1])
    return Holdings(
        open_files=len(os.listdir(_PROCESS / "fd")),
        threads=len(os.listdir(_PROCESS / "task")),
        resident_bytes=resident_pages * os.sysconf("SC_PAGE_SIZE"),
    )

"""Facts of a process on this host: if it still exists, and if it is the same one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessFacts:
    """A process that exists."""

    started: int | None
    """Start time in the kernel's clock ticks since boot. Process ids are reused, but this number hardly ever repeats.
    None: the system does not report it."""
    stopped: bool
    """True if stopped by a signal (SIGSTOP) or a debugger."""


def look_at(pid: int) -> ProcessFacts | None:
    """Return the facts of a process; None if it no longer exists on this host."""
    stat = Path("/proc") / str(pid) / "stat"
    if not Path("/proc/self/stat").exists():
        return ProcessFacts(None, stopped=False) if _answers(pid) else None
    try:
        text = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may contain anything, so fields are counted from its end.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else ProcessFacts(int(fields[18]), stopped=state in "Tt")


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True

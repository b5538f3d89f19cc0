"""Is that process still there, and is it the same one? As this host's kernel sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessFacts:
    """A process that exists."""

    started: int | None
    """In the kernel's clock ticks since it was booted; process ids are used again, this number hardly. None: the
    system does not tell."""
    stopped: bool
    """By a signal (SIGSTOP) or a debugger."""


def look_at(pid: int) -> ProcessFacts | None:
    """None: there is no such process on this host any more."""
    stat = Path("/proc") / str(pid) / "stat"
    if not Path("/proc/self/stat").exists():
        return ProcessFacts(None, stopped=False) if _answers(pid) else None
    try:
        text = stat.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name in parentheses may hold anything, so fields are counted from its end.
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

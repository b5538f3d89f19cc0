"""Positions of threads and tasks as one line of the program: the innermost frame outside of libraries.

That line says more about a hang than the frames inside the library. The function that hangs in the library is added.
"""

from __future__ import annotations

import asyncio
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

_POOL_THREAD = "concurrent/futures/thread.py"
_HERE = str(Path(__file__).parents[1])
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def thread_place(ident: int) -> str | None:
    """Return the line that a thread is in; None for an idle pool thread, or if there is no such thread."""
    inner = sys._current_frames().get(ident)
    if inner is None or inner.f_code.co_filename.endswith(_POOL_THREAD):
        return None
    outwards = []
    frame: FrameType | None = inner
    while frame is not None:
        outwards.append(frame)
        frame = frame.f_back
    return _place(outwards)


def busy_threads() -> list[str]:
    """Return each thread that is busy and that the process waits for at exit, with its line."""
    threads = [each for each in threading.enumerate() if not each.daemon]
    places = {each.name: thread_place(each.ident) for each in threads if each.ident is not None}
    return [f"{name} in {place}" for name, place in places.items() if place is not None]


def working_place(thread_name: str) -> str | None:
    """Return the line of a busy thread whose name begins with ``thread_name``; None if all of them are idle."""
    idents = [thread.ident for thread in threading.enumerate() if thread.name.startswith(thread_name)]
    places = (thread_place(ident) for ident in idents if ident is not None)
    return next((place for place in places if place is not None), None)


def task_place(task: asyncio.Task[object]) -> str | None:
    """Return the line in which a task waits; None if that cannot be seen."""
    return _place(list(_frames_of(task))[::-1])


def _frames_of(task: asyncio.Task[object]) -> Iterator[FrameType]:
    """Yield the frames of the coroutines that await each other, the outermost first."""
    awaited: object = task.get_coro()
    while awaited is not None:
        coroutine = _awaiting(awaited)
        if coroutine is None:
            return
        frame, awaited = coroutine
        if frame is not None:
            yield frame


def _awaiting(awaited: object) -> tuple[FrameType | None, object] | None:
    """Return the frame of a coroutine or generator, and what it awaits; None for anything else."""
    if hasattr(awaited, "cr_frame") and hasattr(awaited, "cr_await"):
        return awaited.cr_frame, awaited.cr_await
    if hasattr(awaited, "ag_frame") and hasattr(awaited, "ag_await"):
        return awaited.ag_frame, awaited.ag_await
    if hasattr(awaited, "gi_frame") and hasattr(awaited, "gi_yieldfrom"):
        return awaited.gi_frame, awaited.gi_yieldfrom
    return None


def _place(outwards: list[FrameType]) -> str | None:
    """Return the line of the innermost own frame. ``outwards``: frames, the innermost first."""
    if not outwards:
        return None
    own = next((frame for frame in outwards if _is_own(frame.f_code.co_filename)), outwards[0])
    line = f"{'/'.join(Path(own.f_code.co_filename).parts[-3:])}:{own.f_lineno} {own.f_code.co_name}"
    return line if own is outwards[0] else f"{line} > {outwards[0].f_code.co_name}"


def _is_own(path: str) -> bool:
    return path.startswith(_HERE) or not path.startswith(("<", *_LIBRARIES))

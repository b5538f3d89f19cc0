"""Garbage collection of a process whose event loop must not stand still.

Python visits every object when it looks for cycles among the old ones: a second if tens of thousands of requests are in
flight. So old objects are looked through rarely here. Nearly all objects are freed without it, because they are in no
cycle; the young ones are collected as always.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

SHORTEST_WAIT_SECONDS = 600.0
LONGEST_WAIT_SECONDS = 3600.0
LARGEST_SHARE = 0.001
"""Largest share of the time that is spent on old objects, unless they would wait for longer than the longest wait."""
NEVER = 2**30


async def collect_rarely(clock: Callable[[], float] = time.perf_counter) -> None:
    """Collect old objects as rarely as they cost, until cancelled.

    Objects that are there now, mostly what imports made, are left out for good: nothing frees them before the process
    ends, and looking through them once takes most of a second. ``clock``: seconds, to measure a collection.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*before[:2], NEVER)
    try:
        wait = SHORTEST_WAIT_SECONDS
        while True:
            await asyncio.sleep(wait)
            began = clock()
            gc.collect()
            wait = min(LONGEST_WAIT_SECONDS, max(SHORTEST_WAIT_SECONDS, (clock() - began) / LARGEST_SHARE))
    finally:
        gc.set_threshold(*before)

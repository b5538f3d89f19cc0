"""Main program of the process that `roll.train` starts: reads an `Order`, runs it, and writes its `Result`."""

from __future__ import annotations

import atexit
import gc
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from roll.api.training import Order, Result
from roll.cli.main import FAILURE, run_to_its_end
from roll.configs.errors import ConfigProblem
from roll.tracking.run_directory import RunDirectory

STANDARD_INPUT = 0


def main() -> int:
    """Execute the `Order` on standard input and return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)  # a last garbage collection would scan all imports, for two seconds
    try:
        order: Order = pickle.load(sys.stdin.buffer)  # from the process that started this one
        threading.Thread(target=_end_with_the_caller, daemon=True).start()
        with os.fdopen(order.results, "w") as results:
            return conduct(order, partial(print, file=results, flush=True))
    except KeyboardInterrupt:
        return FAILURE


def conduct(order: Order, write: Callable[[str], None]) -> int:
    """Run to the end in the caller's folders and with its objects; return the exit code. ``write`` gets lines of
    JSON."""

    def tell(exit_code: int | None, run: RunDirectory | None, problems: Sequence[ConfigProblem] = ()) -> None:
        folder = None if run is None else str(run.root.resolve())
        write(json.dumps(asdict(Result(exit_code, folder, [asdict(problem) for problem in problems]))))

    started = time.monotonic()
    order.folders.enter()
    ended = run_to_its_end("the configuration", lambda: order.config, started, partial(tell, None))
    tell(ended.exit_code, ended.run, ended.problems)
    return ended.exit_code


def _end_with_the_caller() -> None:
    """Interrupt the run at the end of standard input, which means that the caller has died.

    Reads the file descriptor, because a thread that blocks in `sys.stdin` holds a lock that would hang the exit.
    """
    while os.read(STANDARD_INPUT, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)

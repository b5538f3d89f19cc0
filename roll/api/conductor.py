"""The process that conducts a run for `roll.train`: it is told what to run, and says how that ended."""

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
from dataclasses import asdict

from roll.api.training import Order, Result
from roll.cli.main import FAILURE, run_to_its_end

STANDARD_INPUT = 0


def main() -> int:
    """Conduct the run that standard input describes; return the exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(gc.freeze)  # a last garbage collection would scan all imports, for two seconds
    try:
        order: Order = pickle.load(sys.stdin.buffer)  # from the process that started this one
        threading.Thread(target=_end_with_the_caller, daemon=True).start()
        result = conduct(order)
    except KeyboardInterrupt:
        return FAILURE
    with os.fdopen(order.results, "w") as results:
        print(json.dumps(asdict(result)), file=results)
    return result.exit_code


def conduct(order: Order) -> Result:
    """Run to the end, with the folders and the objects of the caller."""
    started = time.monotonic()
    order.folders.enter()
    ended = run_to_its_end("the configuration", lambda: order.config, started)
    run = None if ended.run is None else str(ended.run.root.resolve())
    return Result(ended.exit_code, run, [asdict(problem) for problem in ended.problems])


def _end_with_the_caller() -> None:
    """Interrupt the run once standard input ends. Not read through `sys.stdin`, whose lock would hang the exit."""
    while os.read(STANDARD_INPUT, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)

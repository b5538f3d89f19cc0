"""`roll.train`: a run from a Python program, a notebook included.

The run is conducted by a process of its own. So the caller may be within a running event loop, keeps its log handlers
and signals, and can start one run after the other. Objects given in place of names reach that process, and the workers
of the run, as pickles through pipes and arguments. Its standard input stays open while the caller lives: when the
caller dies, the run ends in order, as after Ctrl-C.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial

from roll.api.configuration import Given, Source, with_given
from roll.api.runs import Run, open_run
from roll.cli.main import FAILURE, run_to_its_end
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.run import RunConfig
from roll.runtime.process import DriverFolders, driver_folders
from roll.tracking.run_directory import RunDirectory

POLL_SECONDS = 0.2
"""Longest time until an interrupt is noticed while the run prints nothing."""
RESULT_SECONDS = 5.0
"""Longest wait for the result of a process that has ended."""
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from roll.api.training import main
sys.exit(main())
"""


class RunFailed(RuntimeError):
    """A run ended with a failure; ``run`` shows what it did until then."""

    def __init__(self, message: str, run: Run | None) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Order:
    """All that the process of a run is told."""

    config: RunConfig
    folders: DriverFolders
    """Working folder and import path of the caller, and the objects that it gave."""
    results: int
    """File descriptor to which the process writes a `Result`, as one line of JSON: once when the run has a folder, and
    once at its end."""


@dataclass(frozen=True)
class Result:
    """Outcome of the process of a run."""

    exit_code: int | None = None
    """None if it did not come to its end: it was killed."""
    run: str | None = None
    """Folder of the run; None if nothing was started."""
    problems: list[dict[str, str]] = field(default_factory=list)


def train(
    config: Source,
    *,
    reward: Given = None,
    loss: Given = None,
    advantage: Given = None,
    env: Given = None,
    overrides: Sequence[str] = (),
) -> Run:
    """Train as a configuration says, and return the finished run.

    ``config``: the path of a YAML file, a dictionary of its keys, or a `roll.RLVRConfig`, `roll.AgenticConfig`,
    `roll.ImageConfig` or `roll.SFTConfig`; a dictionary or a dataclass may hold objects where a file has names. Objects
    can also be given beside it:

    - ``reward``: a verifier for all rewards of the configuration, which need no section if no prompt has a domain; or
      one for each reward by its name, such as a domain of the prompts;
    - ``env``: an environment class for all tags, or one for each tag;
    - ``loss``: a policy loss, in place of `actor_train.pg_variant`;
    - ``advantage``: an advantage estimator, in place of `adv_estimator`.

    Arguments that were configured for a replaced name are left out. ``overrides`` are ``dotted.key=value``, as on the
    command line. Progress is printed while the call waits.

    Raises `roll.ConfigError` with every problem before anything starts, `roll.RunFailed` if the run fails, and
    `KeyboardInterrupt` once an interrupted run has ended in order.
    """
    typed, pickles = with_given(config, overrides, reward, loss, advantage, env)
    folders = driver_folders()
    result = _conducted(typed, DriverFolders(folders.work, folders.imports, pickles))
    if result.problems:
        raise ConfigError([ConfigProblem(**each) for each in result.problems])
    run = None if result.run is None else open_run(result.run)
    if result.exit_code is None:
        where = "" if run is None else f"; the run in {run.path} can go on from its newest checkpoint"
        raise RunFailed(f"the process that conducts the run was killed{where}", run)
    if result.exit_code != 0 or run is None:
        cause = "nothing was started" if run is None else run.summary.get("error")
        raise RunFailed(f"{cause or 'the run failed'}; what it printed says more", run)
    return run


def _conducted(config: RunConfig, folders: DriverFolders) -> Result:
    """Run to the end in another process, and pass on what it prints."""
    receiving, sending = os.pipe()
    results = os.fdopen(receiving)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(folders.imports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(sending,),
            start_new_session=True,  # Ctrl-C on a terminal reaches the caller alone, which passes it on
        )
    except BaseException:
        results.close()
        raise
    finally:
        os.close(sending)
    said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        with results:
            for line in results:
                said.put(line)
            said.put("")

    # From the start, since the process cannot end before its result is read if a pipe does not hold it all. In a
    # thread, since another process may have inherited the end that writes.
    threading.Thread(target=read, daemon=True).start()
    try:
        _tell(process, Order(config, folders, sending))
        interrupted = _passed_on(process)
    except BaseException:
        process.terminate()
        raise
    if interrupted:
        raise KeyboardInterrupt
    result = Result()
    with suppress(queue.Empty, TypeError, ValueError):
        while result.exit_code is None:
            result = Result(**json.loads(said.get(timeout=RESULT_SECONDS)))
    return result


def _tell(process: subprocess.Popen[bytes], order: Order) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has died; what it printed is passed on
        process.stdin.write(pickle.dumps(order))
        process.stdin.flush()


def _passed_on(process: subprocess.Popen[bytes]) -> bool:
    """Print what a process prints until it has ended, and send it each interrupt; return True if there was one."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.put(line.decode(errors="replace"))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    interrupted = False
    while True:
        try:
            if (line := _next(lines, process)) is None:
                return interrupted
            print(line, end="", flush=True)
        except KeyboardInterrupt:
            interrupted = True
            process.send_signal(signal.SIGINT)


def _next(lines: queue.SimpleQueue[str | None], process: subprocess.Popen[bytes]) -> str | None:
    """Return the next line; None once the process has ended, even if another one holds its output open."""
    while True:
        with suppress(queue.Empty):
            line = lines.get(timeout=POLL_SECONDS)
            if line is None:
                process.wait()
            return line
        if process.poll() is not None:
            return None


STANDARD_INPUT = 0


def main() -> int:
    """Conduct the run that standard input describes, in a process of its own; return the exit code."""
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
    """Run to the end, with the folders and the objects of the caller; return the exit code. ``write``: a line."""

    def tell(exit_code: int | None, run: RunDirectory | None, problems: Sequence[ConfigProblem] = ()) -> None:
        folder = None if run is None else str(run.root.resolve())
        write(json.dumps(asdict(Result(exit_code, folder, [asdict(problem) for problem in problems]))))

    started = time.monotonic()
    order.folders.enter()
    ended = run_to_its_end("the configuration", lambda: order.config, started, partial(tell, None))
    tell(ended.exit_code, ended.run, ended.problems)
    return ended.exit_code


def _end_with_the_caller() -> None:
    """Interrupt the run once standard input ends. Not read through `sys.stdin`, whose lock would hang the exit."""
    while os.read(STANDARD_INPUT, 1):
        pass
    os.kill(os.getpid(), signal.SIGINT)

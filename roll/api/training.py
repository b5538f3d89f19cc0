"""`roll.train`: start a run from a Python program or a notebook.

The run has a process of its own, so the caller may be inside a running event loop, keeps its log handlers and signal
handlers, and can start several runs in sequence. Objects given in place of names reach that process and its workers as
pickles. The process reads from a pipe that the caller holds open: if the caller dies, the run shuts down as after
Ctrl-C.
"""

from __future__ import annotations

import atexit
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
from roll.runtime.process import DriverFolders, driver_folders, freeze_at_exit
from roll.tracking.run_directory import RunDirectory

POLL_SECONDS = 0.2
"""Interval at which interrupts are noticed while the run prints nothing."""
RESULT_SECONDS = 5.0
"""Longest wait for the result after the process has ended."""
_START = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from roll.api.training import main
sys.exit(main())
"""


class RunFailed(RuntimeError):
    """The run failed. ``run`` gives access to what it did until then; None if it never started."""

    def __init__(self, message: str, run: Run | None) -> None:
        super().__init__(message)
        self.run = run


@dataclass(frozen=True)
class Order:
    """Input of the process that executes the run."""

    config: RunConfig
    folders: DriverFolders
    """Working directory and import path of the caller, and the pickled objects."""
    results: int
    """File descriptor to which the process writes a `Result` as one line of JSON: once when the run has its directory,
    and once at the end."""


@dataclass(frozen=True)
class Result:
    """Outcome of the process that executes the run."""

    exit_code: int | None = None
    """None if the process was killed."""
    run: str | None = None
    """Run directory; None if nothing was started."""
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
    """Train as the configuration says, and return the finished run.

    ``config`` is the path of a YAML file, a dictionary of its keys, or a `roll.RLVRConfig`, `roll.AgenticConfig`,
    `roll.ImageConfig` or `roll.SFTConfig`. Dictionaries and dataclasses may hold objects where a file has names.
    Objects can also be passed as arguments:

    - ``reward``: one verifier for all rewards of the configuration (which needs no `rewards` if its prompts have no
      domains), or a dictionary from the reward's name, such as a domain of the prompts, to its verifier;
    - ``env``: one environment class for all tags, or a dictionary from tag to class;
    - ``loss``: a policy loss, in place of `actor_train.pg_variant`;
    - ``advantage``: an advantage estimator, in place of `adv_estimator`.

    Arguments that were configured for a replaced name are dropped. ``overrides`` are ``dotted.key=value``, as on the
    command line. The call blocks and prints the run's progress.

    Raises `roll.ConfigError` with every problem before anything starts, `roll.RunFailed` if the run fails, and
    `KeyboardInterrupt` after an interrupted run has shut down.
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
    """Execute the run in another process, and print its output."""
    receiving, sending = os.pipe()
    results = os.fdopen(receiving)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, json.dumps(folders.imports)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(sending,),
            start_new_session=True,  # Ctrl-C on a terminal reaches only the caller, which forwards it
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

    # Read from the start: a result larger than the pipe would block the process. Read in a thread: another process may
    # have inherited the writing end, and then end-of-file never comes.
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
    with suppress(BrokenPipeError):  # the process has died; its output is printed all the same
        process.stdin.write(pickle.dumps(order))
        process.stdin.flush()


def _passed_on(process: subprocess.Popen[bytes]) -> bool:
    """Print the output of a process until it ends, and forward interrupts to it. Return True if there was one."""
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
    """Return the next line of output; None once the process has ended, even if the pipe is still open elsewhere."""
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
    """Read an `Order` from standard input and execute it; return the exit code. Entry point of the run's process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit.register(freeze_at_exit)
    try:
        order: Order = pickle.load(sys.stdin.buffer)  # from the process that started this one
        threading.Thread(target=_end_with_the_caller, daemon=True).start()
        with os.fdopen(order.results, "w") as results:
            return conduct(order, partial(print, file=results, flush=True))
    except KeyboardInterrupt:
        return FAILURE


def conduct(order: Order, write: Callable[[str], None]) -> int:
    """Execute an order in this process; return the exit code. ``write`` sends one line to the caller."""

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

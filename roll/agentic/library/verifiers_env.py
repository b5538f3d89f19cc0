"""Environments of the package `verifiers`, run unmodified as agents that call the policy over HTTP.

The package needs the main thread of its process, and its newer releases conflict with the packages of a run. So each
environment is hosted by a separate program (`verifiers_program.py`), in any interpreter, which runs the rollouts of all
episodes. A rollout that ends with an error is a failed episode, not a reward of 0.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from subprocess import PIPE
from typing import Any

from roll.agentic.base import BadOption, ResetAnswer, StepAnswer, TextGame, Unavailable
from roll.agentic.library import verifiers_program
from roll.agentic.library.agent import AgentStopped, require_parser
from roll.agentic.library.programs import LastWords, Shared
from roll.configs.plugins import require


class VerifiersEnv(TextGame):
    """An environment of `verifiers`; the seed selects a row of its data.

    Even seeds (training) select from its training set, odd seeds (validation) from its evaluation set.
    """

    ends_calls_when_closed = True

    def __init__(
        self,
        environment: str,
        args: Mapping[str, Any] | None = None,
        python: str | None = None,
        tool_parser: str | None = None,
        render_mode: str | None = "ansi",
    ) -> None:
        """Check the options. The program is started at the first reset.

        ``environment`` is the name of an installed environment, or ``package.module:function`` that returns one;
        ``args`` are its arguments. ``python``: interpreter with the package `verifiers`; by default the run's own.
        ``tool_parser``: see `AgentEnv`. Raises `BadOption` and `ConfigError`.
        """
        super().__init__(render_mode)
        require_parser(tool_parser)
        if python is None:
            require(["verifiers"], "verifiers", "environment")
        elif (found := shutil.which(python)) is None:
            raise BadOption("python", f"there is no program {python!r}", "name an interpreter that has `verifiers`")
        else:
            python = found
        try:
            wanted = json.dumps({"environment": environment, "args": dict(args or {})}, sort_keys=True)
        except TypeError as cause:
            raise BadOption("args", f"they cannot be written as JSON ({cause})", "use texts and numbers") from cause
        self._key = (python, wanted)
        self._lock = threading.Lock()
        self._closed = False
        self._program: _Rollouts | None = None
        self._running: int | None = None
        """Request number of the running rollout."""
        self._seed = 0
        self._frame = ""

    def render(self) -> str:
        """Return the task and, after the step, the result."""
        return self._frame

    def close(self) -> None:
        """Cancel the running rollout, whose step then raises `AgentStopped`, and end the program if it is unused."""
        with self._lock:
            self._closed = True
            program, self._program = self._program, None
            if program is not None and self._running is not None:
                program.cancel(self._running)
        if program is not None:
            _PROGRAMS.give_back(program)

    def _begin(self, seed: int | None) -> ResetAnswer:
        self._seed = 0 if seed is None else seed
        answer = self._living_program().ask({"seed": self._seed})
        self._frame = json.dumps(answer.result(), ensure_ascii=False)
        return self._frame, {"state": self._frame}

    def _act(self, text: str) -> StepAnswer:
        where = json.loads(text)
        with self._lock:
            if self._closed or self._program is None:
                raise AgentStopped("the rollout was stopped")
            answer = self._program.ask({"seed": self._seed, **where})
            self._running = answer.number
        try:
            result = answer.result()
        except concurrent.futures.CancelledError:
            raise AgentStopped("the rollout was stopped") from None
        finally:
            self._running = None
        self._frame = f"{self._frame}\n{json.dumps(result)}"
        reward = result.pop("reward")
        return "", reward, True, False, result

    def _living_program(self) -> _Rollouts:
        with self._lock:
            program = self._program
            if program is not None and program.is_alive():
                return program
            self._program = None
        if program is not None:
            _PROGRAMS.give_back(program)
        taken = _PROGRAMS.take(*self._key)
        with self._lock:
            if not self._closed:
                self._program = taken
                return taken
        _PROGRAMS.give_back(taken)
        raise AgentStopped("the environment was closed")


class _Answer(concurrent.futures.Future[Any]):
    """The answer to a request. An error of the rollout becomes a `RuntimeError`."""

    number = 0


class _Rollouts:
    """A running program, and its unanswered requests."""

    def __init__(self, python: str | None, wanted: str) -> None:
        """Start the program and wait until it has loaded the environment. Raises `Unavailable`."""
        environment = dict(os.environ)
        if python is None:  # same import path as this process
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        else:  # as if the interpreter's virtual environment were activated
            environment["PATH"] = os.pathsep.join([str(Path(python).parent.absolute()), os.environ.get("PATH", "")])
        command = [python or sys.executable, str(Path(verifiers_program.__file__)), wanted]
        self._python = command[0]
        self._process = subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=PIPE, env=environment, start_new_session=True
        )
        assert self._process.stderr is not None and self._process.stdout is not None
        self._words = LastWords(self._process.stderr, "verifiers")
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, _Answer] = {}
        self._is_over = False
        first = self._process.stdout.readline()
        if why := self._unloaded(first):
            self.end()
            raise Unavailable(f"the environment of verifiers cannot be loaded: {why}")
        threading.Thread(target=self._read, name="verifiers", daemon=True).start()

    def ask(self, request: Mapping[str, Any]) -> _Answer:
        """Send a request."""
        answer = _Answer()
        with self._lock:
            answer.number = next(self._numbers)
            if self._is_over:
                answer.set_exception(RuntimeError(self._ended()))
                return answer
            self._waiting[answer.number] = answer
            self._send({"id": answer.number, **request})
        return answer

    def cancel(self, number: int) -> None:
        """Cancel a rollout. Its answer is cancelled immediately."""
        with self._lock:
            answer = self._waiting.pop(number, None)
            if answer is not None:
                answer.cancel()
                self._send({"id": number, "cancel": True})

    def is_alive(self) -> bool:
        return not self._is_over

    def end(self) -> None:
        self._is_over = True
        with suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]  # it is a pipe
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(verifiers_program.END_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, request: Mapping[str, Any]) -> None:
        with suppress(OSError):  # if the program has ended, `_read` fails the request
            self._process.stdin.write(json.dumps(request).encode() + b"\n")  # type: ignore[union-attr]
            self._process.stdin.flush()  # type: ignore[union-attr]

    def _unloaded(self, first: bytes) -> str | None:
        """Return what is wrong with the program's first line, or None if it reports that the environment is loaded."""
        if not first:
            return f"the program ended; {self._words}"
        try:
            told = json.loads(first)
            return str(told["error"]) if "error" in told else None
        except (ValueError, TypeError):
            return f"`{self._python}` wrote {first[:80]!r} before the program began"

    def _read(self) -> None:
        with self._process.stdout as answers:  # type: ignore[union-attr]
            for line in answers:
                try:
                    told = json.loads(line)
                except ValueError:
                    break  # the program was killed while it wrote
                with self._lock:
                    answer = self._waiting.pop(told["id"], None)
                if answer is None:
                    continue  # it was cancelled
                if "error" in told:
                    answer.set_exception(RuntimeError(told["error"]))
                else:
                    answer.set_result(told["result"])
        with self._lock:
            self._is_over = True
            lost, self._waiting = list(self._waiting.values()), {}
        why = self._ended()
        for answer in lost:
            answer.set_exception(RuntimeError(why))

    def _ended(self) -> str:
        return f"the program that holds the environment has ended; {self._words}"


_PROGRAMS: Shared[_Rollouts] = Shared(_Rollouts)

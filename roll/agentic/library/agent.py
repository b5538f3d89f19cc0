"""Agents as environments: an unmodified program that calls a model over HTTP runs once per episode.

A reset chooses the task. The only step receives the URL and key of the episode's model (from `AgentManager`), runs the
agent to its end, and returns its reward. An agent is a Python function, called in this process, or a command, run in
its own process group. The process group is killed afterwards, even if this process is killed.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from roll.agentic.base import BadOption, ResetAnswer, StepAnswer, TextGame
from roll.agentic.endpoint.session import EarlierReasoning
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.agentic.library.programs import guarded
from roll.configs.errors import nearest_name_hint
from roll.configs.plugins import IMPORT_REMEDY, import_object

logger = logging.getLogger(__name__)

Task = dict[str, Any]
_TOLD_LINES, _TOLD_CHARACTERS = 5, 400
"""How much of the end of a command's output an error quotes."""
_LOGGED_CHARACTERS = 4000
RESULT_KEYS = ("reward", "success", "metrics")


class AgentStopped(RuntimeError):
    """The agent was stopped: its time limit passed, or its episode was given up."""


class AgentEnv(TextGame):
    """An environment that runs an agent once per episode.

    `run` is ``package.module:function``, plain or async, called with the task (a dict), the base URL and the API key of
    the model. `command` is a program with its arguments, which finds these in environment variables
    (`agent_environment`).

    The agent's result is what the function returns, or the last line of the command's output as JSON: a number, a
    boolean (success), or an object with a ``reward`` and optionally ``success`` and ``metrics``. With a ``verifier``
    (``package.module:function`` of the task and the output), it is what the verifier returns.
    """

    ends_calls_when_closed = True

    def __init__(
        self,
        run: str | None = None,
        command: list[str] | None = None,
        tasks: str | None = None,
        folder: str | None = None,
        verifier: str | None = None,
        tool_parser: str | None = None,
        earlier_reasoning: EarlierReasoning = "keep",
        untrained_models: list[str] | None = None,
        ignore_response_format: bool = False,
        render_mode: str | None = "ansi",
    ) -> None:
        """Resolve and check the options. Raises `BadOption`.

        ``tasks``: JSONL file of objects, one of which the seed selects; without it the task is ``{"seed": seed}``.
        ``folder``: the command's working directory. The other options are those of the endpoint. ``tool_parser``:
        format of the model's tool calls; by default that of the chat template. ``earlier_reasoning``,
        ``untrained_models``, ``ignore_response_format``: see `SessionSettings`.
        """
        super().__init__(render_mode)
        if (run is None) == (command is None):
            raise BadOption("run", "an agent is a function or a command", "set one of `run` and `command`")
        if command == []:
            raise BadOption("command", "it is empty", "name a program and its arguments")
        if folder is not None and command is None:
            raise BadOption("folder", "a function has no folder of its own", "set it together with `command`")
        require_parser(tool_parser)
        if folder is not None and not Path(folder).is_dir():
            raise BadOption("folder", f"there is no folder {folder!r}", "name the folder that the command starts in")
        if command and "/" not in command[0] and shutil.which(command[0]) is None:
            raise BadOption("command", f"there is no program {command[0]!r}", "name one of PATH, or its whole path")
        self._function = None if run is None else require_function("run", run, ("task", "base_url", "api_key"))
        self._command = command
        self._folder = folder
        self._verifier = None if verifier is None else require_function("verifier", verifier, ("task", "output"))
        self._tasks = None if tasks is None else tasks_of(tasks)
        self._task: Task = {}
        self._frame = ""
        self._lock = threading.Lock()
        self._stopped = False
        self._stop: Callable[[], object] | None = None
        """Function that stops the running agent; None if it cannot be stopped."""

    def render(self) -> str:
        """Return the task and, after the step, the result."""
        return self._frame

    def close(self) -> None:
        """Stop the running agent, if any. Its step raises `AgentStopped`."""
        with self._lock:
            self._stopped = True
            if self._stop is not None:
                self._stop()

    def _begin(self, seed: int | None) -> ResetAnswer:
        tasks = self._tasks
        task = {"seed": seed} if tasks is None else tasks[int(self.np_random.integers(len(tasks)))]
        self._frame = json.dumps(task, ensure_ascii=False)
        self._task = json.loads(self._frame)  # the episode's own copy
        return self._frame, {"state": self._frame}

    def _act(self, text: str) -> StepAnswer:
        where = json.loads(text)
        base_url, api_key = where["base_url"], where["api_key"]
        task = json.loads(json.dumps(self._task))  # the agent's own copy
        if self._function is not None:
            output = self._called(self._function(task, base_url, api_key))
        else:
            output = self._output_of(agent_environment(self._task, base_url, api_key))
        if self._verifier is not None:
            result = self._verifier(self._task, output)
        else:
            result = output if self._command is None else _last_line(output)
        reward, info = read_result(result)
        self._frame = f"{self._frame}\n{json.dumps({'reward': reward} | info, default=str)}"
        return "", reward, True, False, info

    def _called(self, returned: Any) -> Any:
        """Return the value of a function; run a coroutine in a new event loop."""
        return asyncio.run(self._awaited(returned)) if inspect.isawaitable(returned) else returned

    async def _awaited(self, running: Awaitable[Any]) -> Any:
        task, loop = asyncio.ensure_future(running), asyncio.get_running_loop()
        self._can_be_stopped(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            return await task
        except asyncio.CancelledError:
            raise AgentStopped("the agent was stopped") from None
        finally:
            self._can_be_stopped(None)

    def _output_of(self, environment: Mapping[str, str]) -> str:
        """Run the command and return its standard output. Raises `RuntimeError`, which quotes the end of its output."""
        command = self._command or []
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = guarded(command, stdout=out, stderr=err, cwd=self._folder, env=environment)
            with process.stdin as alive:  # type: ignore[union-attr]  # it is a pipe
                self._can_be_stopped(alive.close)
                try:
                    code = process.wait()
                finally:
                    self._can_be_stopped(None)
            output, errors = _text_of(out), _text_of(err)
        if self._stopped:
            raise AgentStopped(f"the agent was stopped; {_end_of(errors or output)}")
        if code:
            raise RuntimeError(f"the agent ended with exit code {code}; {_end_of(errors or output)}")
        if errors:
            logger.info("an agent wrote: %s", errors[-_LOGGED_CHARACTERS:])
        return output

    def _can_be_stopped(self, stop: Callable[[], object] | None) -> None:
        with self._lock:
            self._stop = stop
            if self._stopped and stop is not None:
                stop()


def require_parser(name: str | None) -> None:
    """Raise `BadOption` if there is no tool-call parser of this name."""
    if name is not None and name not in PARSERS:
        raise BadOption("tool_parser", f"there is no parser {name!r}", nearest_name_hint(name, PARSERS))


def agent_environment(task: Task, base_url: str, api_key: str) -> dict[str, str]:
    """Return a command's environment variables: this process's, and the model's address under the usual names."""
    host = urlsplit(base_url).hostname or ""
    direct = {key: f"{os.environ[key]},{host}" if os.environ.get(key) else host for key in ("NO_PROXY", "no_proxy")}
    return {
        **os.environ,
        **direct,
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
        "ROLL_TASK": json.dumps(task),
    }


def read_result(result: Any) -> tuple[Any, dict[str, Any]]:
    """Split an agent's result into its reward and the entries of `info`.

    Raises `ValueError` for unknown keys. Types of values are checked later, as for every environment.
    """
    if not isinstance(result, Mapping):
        reward, info = result, {}
    elif "reward" in result:
        for key in result:
            if key not in RESULT_KEYS:
                raise ValueError(
                    f"the agent's result has an unknown key {key!r}; {nearest_name_hint(key, RESULT_KEYS)}"
                )
        reward, info = result["reward"], {key: value for key, value in result.items() if key != "reward"}
    else:
        raise ValueError(f"the agent's result has no `reward`: {_shortened(repr(dict(result)))}")
    if isinstance(reward, bool):
        reward, info = float(reward), {"success": reward, **info}
    return reward, info


def tasks_of(path: str) -> tuple[Task, ...]:
    """Return the tasks in a JSONL file, cached per process until the file changes. Raises `BadOption`."""
    try:
        file = os.stat(path)
        return _tasks_in(path, (file.st_ino, file.st_mtime_ns, file.st_size))
    except (OSError, UnicodeDecodeError) as cause:
        raise BadOption(
            "tasks", f"{path} cannot be read ({cause})", "name a file of JSON objects, one a line"
        ) from cause


@cache
def _tasks_in(path: str, _state: tuple[int, ...]) -> tuple[Task, ...]:
    """Read the tasks in a file, whose ``_state`` changes with its content."""
    lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    tasks = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                task = json.loads(line)
            except json.JSONDecodeError as cause:
                raise BadOption("tasks", f"{path}, line {number}: {cause}", "write one JSON object a line") from cause
            if not isinstance(task, dict):
                raise BadOption("tasks", f"{path}, line {number} is no JSON object", "write one JSON object a line")
            tasks.append(task)
    if not tasks:
        raise BadOption("tasks", f"{path} has no tasks", "write one JSON object a line")
    return tuple(tasks)


def require_function(option: str, path: str, arguments: tuple[str, ...]) -> Callable[..., Any]:
    """Import a function, and check that it accepts these arguments. Raises `BadOption`."""
    try:
        found = import_object(path)
    except ImportError as cause:
        raise BadOption(option, str(cause), IMPORT_REMEDY) from cause
    if not callable(found):
        raise BadOption(option, f"`{path}` is a {type(found).__name__}", "name a function")
    try:
        inspect.signature(found).bind(*arguments)
    except TypeError as cause:
        remedy = f"it is called with {', '.join(arguments)}, in this order"
        raise BadOption(option, f"`{path}` cannot be called: {cause}", remedy) from cause
    except ValueError:
        pass  # a C function without a signature
    return found


def _last_line(output: str) -> Any:
    """Decode the last non-empty line as JSON. Raises `ValueError`."""
    lines = [line for line in output.splitlines() if line.strip()]
    last = lines[-1] if lines else ""
    try:
        return json.loads(last)
    except json.JSONDecodeError:
        remedy = "print the reward, or set `verifier`"
        raise ValueError(
            f"the last line of the agent's output is no JSON: {_shortened(repr(last))}; {remedy}"
        ) from None


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _end_of(output: str) -> str:
    """Return the end of an output on one line, because errors of environments are reported on one line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = " | ".join(lines[-_TOLD_LINES:])[-_TOLD_CHARACTERS:]
    return f"the end of its output: {told}" if told else "it wrote nothing"


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}..."

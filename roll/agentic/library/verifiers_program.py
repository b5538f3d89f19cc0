"""Program that hosts one environment of the package `verifiers` and runs its rollouts concurrently.

It runs in the interpreter with that package and imports no module of ours. Its argument is a JSON object with
``environment`` and ``args``. It reads one JSON object per line: a request has an ``id`` and a ``seed``, and asks for
the seed's task or, with ``base_url`` and ``api_key``, for a rollout of it; ``{"id": n, "cancel": true}`` cancels one.
Its first output line reports whether the environment is loaded; then each request gets a line of JSON with ``id`` and
``result`` or ``error``. At the end of its input, the program ends with its process group.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # not this folder, whose modules are not top-level packages

import asyncio
import contextvars
import importlib
import itertools
import json
import logging
import queue
import random
import signal
import threading
import traceback
from collections.abc import Sequence
from typing import IO, Any
from urllib.parse import urlsplit

END_SECONDS = 3.0
"""Time that the environment has to release its resources."""
MOST_TASKS = 10_000
"""Number of tasks taken from an endless task set."""
_ODD_ANSWERS = ("EmptyModelResponseError", "InvalidModelResponseError")
"""Errors caused by malformed answers of the policy. Such episodes count; otherwise the answers would be free."""
_failed_rewards: contextvars.ContextVar[list[str]] = contextvars.ContextVar("failed_rewards")
"""Errors of the current rollout's reward functions, which the package replaces by zeros and logs."""


class _Noted(logging.Handler):
    """Log handler that records errors of reward functions."""

    def emit(self, record: logging.LogRecord) -> None:
        failed = _failed_rewards.get(None)
        if failed is not None and record.levelno >= logging.ERROR:
            failed.append(record.getMessage())


class Environments:
    """An environment of verifiers 0.1 (`vf.Environment`)."""

    def __init__(self, environment: str, args: dict[str, Any]) -> None:
        import verifiers as vf

        self._env: Any = _made(environment, args) if ":" in environment else vf.load_environment(environment, **args)
        if not isinstance(self._env, vf.Environment):
            raise TypeError(f"{environment} is a {type(self._env).__name__}, which is no verifiers.Environment")
        if getattr(self._env, "requires_group_rollouts", False):
            raise ValueError("it has reward functions of a whole group, and episodes are judged one by one")
        logging.getLogger("verifiers.rubrics").addHandler(_Noted())

    def task(self, seed: int) -> dict[str, Any]:
        """Return the row that a seed selects: even seeds from the training set, odd ones from the evaluation set."""
        rows = self._env.get_eval_dataset() if seed % 2 else self._env.get_dataset()
        return dict(rows[random.Random(seed).randrange(len(rows))])

    def shown(self, seed: int) -> Any:
        """Return a JSON value that describes the task."""
        return self.task(seed)["prompt"]

    async def rollout(self, seed: int, base_url: str, api_key: str) -> dict[str, Any]:
        """Run a rollout and return its result. Raises `RuntimeError` if it ended with an error."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        failed: list[str] = []
        _failed_rewards.set(failed)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=None) as client:
            asked = OpenAIChatCompletionsClient(client)
            output = await self._env.run_rollout(self.task(seed), asked, "policy", {})
        error = output.get("error")
        chain = "" if error is None else str(error.get("error_chain_repr", error) if isinstance(error, dict) else error)
        is_odd = any(name in chain for name in _ODD_ANSWERS)
        if error is not None and not is_odd:
            raise RuntimeError(f"the rollout ended by an error: {chain}")
        reward = output["reward"]
        metrics = _numbers(output.get("metrics")) | {"failed_rewards": len(failed), "odd_answers": float(is_odd)}
        return {"reward": reward, "success": reward >= self._env.pass_threshold, "metrics": metrics}

    async def close(self) -> None:
        """Release the resources of the environment."""
        await self._env._teardown()


class Tasksets:
    """A task set of verifiers 0.4, with an agent of that package.

    The argument ``agent`` has fields of its `AgentConfig`; the other arguments are those of the task set.
    """

    def __init__(self, environment: str, args: dict[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

        config = {key: value for key, value in args.items() if key != "agent"}
        tasks = load_taskset(taskset_config_type(environment)(id=environment, **config))
        self._tasks: Sequence[Any] = list(tasks if tasks.bounded else itertools.islice(tasks, MOST_TASKS))
        self._agent = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}} | dict(args.get("agent", {}))
        self._numbers = itertools.count()

    def task(self, seed: int) -> Any:
        """Return the task that a seed selects."""
        return self._tasks[random.Random(seed).randrange(len(self._tasks))]

    def shown(self, seed: int) -> Any:
        """Return a JSON value that describes the task."""
        return self.task(seed).data.model_dump(mode="json")

    async def rollout(self, seed: int, base_url: str, api_key: str) -> dict[str, Any]:
        """Run a rollout and return its result. Raises `RuntimeError` if it ended with an error."""
        import verifiers.v1 as vf

        variable = f"ROLL_EPISODE_{next(self._numbers)}"  # the package reads keys only from environment variables
        os.environ[variable] = api_key
        try:
            client = {"type": "eval", "base_url": base_url, "api_key_var": variable}
            agent = vf.make_agent(vf.AgentConfig(**{"model": "policy", "client": client, **self._agent}))
            trace = await agent.run(self.task(seed))
        finally:
            del os.environ[variable]
        if not trace.ok:
            last = trace.last_error
            raise RuntimeError(f"the rollout ended by an error: {last.type}: {last.message}" if last else "it failed")
        return {"reward": trace.reward, "metrics": _numbers(trace.metrics)}

    async def close(self) -> None:
        """Do nothing: rollouts release their own resources."""


def _made(path: str, args: dict[str, Any]) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)(**args)


def _numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in dict(metrics or {}).items() if isinstance(value, int | float)}


def _loaded(environment: str, args: dict[str, Any]) -> Environments | Tasksets:
    import verifiers

    return Environments(environment, args) if hasattr(verifiers, "load_environment") else Tasksets(environment, args)


def _read(requests: IO[str], read: queue.SimpleQueue[str | None]) -> None:
    """Put the input lines into a queue, then None. After the end of the input, kill the process in `END_SECONDS`."""
    for line in requests:
        read.put(line)
    threading.Timer(END_SECONDS, _kill_group).start()  # even if closing the environment hangs
    read.put(None)


async def _serve(held: Environments | Tasksets, requests: queue.SimpleQueue[str | None], answers: IO[str]) -> None:
    """Answer requests until the end of the input."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(request: dict[str, Any]) -> None:
        number, seed = request["id"], request["seed"]
        try:
            if "base_url" in request:
                told: dict[str, Any] = {"result": await held.rollout(seed, request["base_url"], request["api_key"])}
            else:
                told = {"result": held.shown(seed)}
        except Exception as error:
            traceback.print_exc()
            told = {"error": _described(error)}
        finally:
            running.pop(number, None)
        _write(answers, id=number, **told)

    def begin(request: dict[str, Any]) -> None:
        if "cancel" in request:
            if request["id"] in running:
                running[request["id"]].cancel()
            return
        if "base_url" in request:
            _ask_directly(request["base_url"])
        running[request["id"]] = asyncio.ensure_future(answer(request))

    def take() -> None:
        while (line := requests.get()) is not None:
            loop.call_soon_threadsafe(begin, json.loads(line))
        loop.call_soon_threadsafe(over.set)

    threading.Thread(target=take, daemon=True).start()
    await over.wait()
    await held.close()


def _write(answers: IO[str], **told: Any) -> None:
    print(json.dumps(told, default=str), file=answers, flush=True)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _ask_directly(base_url: str) -> None:
    """Exclude the policy's address from proxies."""
    host = urlsplit(base_url).hostname or ""
    for key in ("NO_PROXY", "no_proxy"):
        hosts = os.environ.get(key, "").split(",")
        if host not in hosts:
            os.environ[key] = ",".join(filter(None, [*hosts, host]))


def _kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Load the environment, report the outcome, and answer requests."""
    # Keep the environment's own output apart from the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    told = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    # Read from now on, because the parent may die before the environment is loaded.
    requests: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=[told, requests], daemon=True).start()
    wanted = json.loads(sys.argv[1])
    try:
        held = _loaded(wanted["environment"], wanted["args"])
    except Exception as error:
        traceback.print_exc()
        _write(answers, error=_described(error))
        return
    _write(answers, result=None)
    try:
        asyncio.run(_serve(held, requests, answers))
    finally:
        _kill_group()


if __name__ == "__main__":
    main()

"""A cluster in this process: a whole run, from its command line to its workers, without Ray and without processes.

What stands in for Ray here is what the product uses of it: actors, references, the object store, placement and deaths.
An actor is a real worker (`WorkerProcess`, `RewardWorker`, `EnvWorker`) on the driver's event loop, its heavy work in
its own thread; arguments and results are copied on their way, numpy arrays arrive read-only, errors and deaths are
Ray's own. A run of three steps takes a second. Not to be had here: several ranks of one trainer, several nodes, and all
that is about processes (signals, their ids, their memory, their output); such runs take `ray_cluster`.

    run_pipeline(task, IN_THIS_PROCESS, tiny_config(task))
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
import pickle
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from ray import cloudpickle
from ray.exceptions import ActorDiedError, RayTaskError

# All that says `ray.remote` while it is imported, before anything stands in for it.
import roll.agentic.pool  # noqa: F401
import roll.pipeline.main  # noqa: F401
import roll.runtime.placement  # noqa: F401
import roll.weights.transports  # noqa: F401
from roll.trainers.trainer import join_process_group, leave_process_group
from tests.runtime.references import Reference

IN_THIS_PROCESS = "in this process"
"""Said in place of a cluster's address."""
NODE = "the only node"
READY = "__ray_ready__"
"""Method that Ray adds to each actor; it answers as soon as the actor runs."""

_present: ContextVar[Actor] = ContextVar("the actor whose code runs")


def copied(value: Any) -> Any:
    """As it arrives in another process: nothing is shared, and arrays are not to be written to."""
    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(data, buffers=[bytes(buffer.raw()) for buffer in buffers])


class Actor:
    """An instance whose methods are called as Ray's actors are: ``actor.method.remote(*args)``."""

    def __init__(self, cluster: FakeCluster, body: Callable[[], Any], name: str) -> None:
        self._cluster = cluster
        self._name = name
        self._tasks: dict[asyncio.Task[None], asyncio.Future[Any]] = {}
        self._death: str | None = None
        self._body: Any = None
        try:
            self._body = Context().run(body)
        except Exception as error:
            self._death = str(ActorDiedError(_task_error(f"{name}.__init__", error)))

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_") and method != READY:
            raise AttributeError(method)
        return SimpleNamespace(remote=partial(self._call, method))

    def _call(self, method: str, *args: Any) -> Reference:
        loop = asyncio.get_running_loop()
        answer = loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # who does not ask need not know
        if self._death is not None:
            answer.set_exception(_death(self._death))
            return Reference(answer)
        values = [copied(self._cluster.stored[arg.number] if isinstance(arg, Stored) else arg) for arg in args]
        task = loop.create_task(self._run(method, values, answer), context=Context())
        self._tasks[task] = answer
        task.add_done_callback(lambda task: self._tasks.pop(task, None))
        return Reference(answer)

    async def _run(self, method: str, args: list[Any], answer: asyncio.Future[Any]) -> None:
        _present.set(self)
        try:
            if args[:1] == ["start"]:
                async with self._cluster.loading:
                    result = await self._result(method, args)
            else:
                result = await self._result(method, args)
        except Exception as error:
            if not answer.done():
                answer.set_exception(_task_error(f"{self._name}.{method}", error).as_instanceof_cause())
        else:
            if not answer.done():
                answer.set_result(copied(result))

    async def _result(self, method: str, args: list[Any]) -> Any:
        if method == READY:
            return True
        called = getattr(self._body, method)
        if inspect.iscoroutinefunction(called):
            return await called(*args)
        with _alarm_of_its_own():
            return called(*args)

    def die(self, because: str) -> None:
        """End all calls and those to come, as with the process of an actor."""
        if self._death is not None:
            return
        self._death = f"The actor died unexpectedly before finishing this task.\nThe actor is dead because {because}."
        for task, answer in list(self._tasks.items()):
            if not answer.done():
                answer.set_exception(_death(self._death))
            task.cancel()
        worker = getattr(self._body, "_worker", None)
        shutdown = getattr(getattr(worker, "_strategy", None), "shutdown", None)
        if inspect.iscoroutinefunction(shutdown):  # an engine has a thread that would outlive it
            ending = asyncio.get_running_loop().create_task(shutdown(), context=Context())
            self._cluster.endings.add(ending)
            ending.add_done_callback(self._cluster.endings.discard)
        if worker is not None:
            worker._thread.shutdown(wait=False, cancel_futures=True)


class ActorClass:
    """What ``ray.remote`` makes of a class; where an actor is to run says nothing here."""

    def __init__(self, cluster: FakeCluster, body: type) -> None:
        self._cluster = cluster
        self._body = body

    def options(self, **_: Any) -> ActorClass:
        """Of these there is one place for all."""
        return self

    def remote(self, *args: Any) -> Actor:
        """A new actor."""
        return Actor(self._cluster, partial(self._body, *map(copied, args)), self._body.__name__)


class Stored:
    """A reference to what was put into the object store."""

    def __init__(self, number: int) -> None:
        self.number = number


class FakeCluster:
    """Stands in for Ray while it is open."""

    def __init__(self) -> None:
        self.stored: dict[int, Any] = {}
        self.loading: asyncio.Lock
        """transformers changes torch for the whole process while it loads a model: one after the other."""
        self.endings: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> FakeCluster:
        here = SimpleNamespace(get_node_id=lambda: NODE)
        node = {"Alive": True, "NodeID": NODE, "Resources": {"CPU": 64.0}, "RayletSocketName": "/nowhere/at/all"}
        stands_in = {
            "ray.init": self._begin,
            "ray.shutdown": lambda: None,
            "ray.nodes": lambda: [node],
            "ray.get_runtime_context": lambda: here,
            "ray.util.get_node_ip_address": lambda: "127.0.0.1",
            "ray.remote": self._remote,
            "ray.kill": lambda actor, **_: actor.die("it was killed by `ray.kill`"),
            "ray.put": self._put,
            "ray.get": lambda reference, **_: copied(self.stored[reference.number]),
            "roll.runtime.placement.placement_group": lambda *_, **__: SimpleNamespace(ready=_at_once),
            "roll.runtime.placement.remove_placement_group": lambda group: None,
            "roll.runtime.placement._describe_node": _Probe(),
            # What is about the process as a whole, and the process is pytest's.
            "roll.runtime.workers.give_away_output": lambda *_: None,
            "roll.runtime.workers.configure_logging": lambda *_: None,
            "roll.runtime.workers.return_large_blocks": lambda: False,
            "roll.engines.hf.model.keep_blocks_of": lambda parameters: False,
            "roll.trainers.model.keep_blocks_of": lambda parameters: False,
            "roll.runtime.workers.inject_fault": inject_fault_here,
            "roll.agentic.worker.give_away_output": lambda *_: None,
            "roll.agentic.worker.configure_logging": lambda *_: None,
            "roll.trainers.trainer.join_process_group": join_once,
        }
        for name, stand_in in stands_in.items():
            self._patches.setattr(name, stand_in)
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.undo()
        leave_process_group()

    def _begin(self, **_: Any) -> None:
        """A run connects, with an event loop of its own."""
        self.loading = asyncio.Lock()

    def _remote(self, body: type | None = None, **_: Any) -> Any:
        return partial(ActorClass, self) if body is None else ActorClass(self, body)

    def _put(self, value: Any) -> Stored:
        reference = Stored(next(self._numbers))
        self.stored[reference.number] = copied(value)
        return reference


class _Probe:
    """The remote function that describes a node."""

    def options(self, **_: Any) -> _Probe:
        return self

    def remote(self) -> Awaitable[Any]:
        return _at_once({"gpus": [], "cores": os.cpu_count()})


async def _at_once(value: Any = None) -> Any:
    return value


def inject_fault_here(fault: str, seconds: float | None) -> None:
    """In place of `inject_fault`: the process is not the actor's own."""
    if fault != "kill":
        raise NotImplementedError(f"{fault} is for real processes; take `ray_cluster`")
    _present.get().die("its worker process was killed")


def join_once(setup: Any, timeout_seconds: float) -> None:
    """In place of `join_process_group`: all roles of this process share a group of one rank."""
    if setup.world_size != 1:
        raise NotImplementedError("several ranks need processes; take `ray_cluster`")
    if not dist.is_initialized():
        join_process_group(setup, timeout_seconds)


@contextmanager
def _alarm_of_its_own() -> Iterator[None]:
    """Plain verifiers take the alarm of their process; this one's is pytest's, for its timeouts."""
    handler, (left, interval) = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)


def _task_error(name: str, error: Exception) -> RayTaskError:
    return RayTaskError(name, traceback.format_exc(), error)


def _death(text: str) -> ActorDiedError:
    death = ActorDiedError()
    death.error_msg = text
    return death

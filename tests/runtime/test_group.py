"""The end of a worker as the driver sees it: Ray's errors become a death, a failure or nothing, each with a name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from ray.exceptions import (
    ActorDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
    WorkerCrashedError,
)

from roll.runtime.placement import WorkerPlace
from roll.runtime.workers import WorkerDied, WorkerFailed, WorkerGroup, WorkerHandle, WorkerIdentity
from tests.runtime.references import Reference

MEMORY = OutOfMemoryError("Memory on the node was 15.28GB used / 16.00GB limit (0.955)\nGeneral advice, exit code 1")


class Method:
    """A method of an actor, as Ray gives it."""

    def __init__(self, answer: Callable[[], object]) -> None:
        self._answer = answer

    def remote(self, *args: object) -> Reference:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        answer = self._answer()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not None:
            future.set_result(answer)
        return Reference(future)


class Actor:
    """A Ray actor whose calls and whose watch end as they are told to; None: never."""

    def __init__(self, call: object = None, watch: object = None) -> None:
        self.invoke = Method(lambda: call)
        self.watch = Method(lambda: watch)


def handle(actor: Actor, rank: int = 0) -> WorkerHandle:
    place = WorkerPlace(0, "cpu", (rank,), 1)
    return WorkerHandle(WorkerIdentity("actor_train", rank, 2, place, None), "module:Class", actor)


def failure(work: Callable[[], object]) -> Exception:
    async def main() -> Exception:
        async with asyncio.timeout(60):
            try:
                await work()
            except Exception as error:
                return error
            raise AssertionError("nothing was raised")

    return asyncio.run(main())


@pytest.mark.parametrize("error", [ActorDiedError(), MEMORY, NodeDiedError("its node died"), WorkerCrashedError()])
def test_every_kind_of_death_is_one_with_the_workers_name(error):
    death = failure(lambda: handle(Actor(call=error)).call("train"))
    assert isinstance(death, WorkerDied) and death.worker == "actor_train/0"
    watched = asyncio.run(handle(Actor(watch=error)).wait_for_death())
    assert isinstance(watched, WorkerDied) and watched.worker == "actor_train/0"


def test_a_death_for_want_of_memory_says_so():
    death = failure(lambda: handle(Actor(call=MEMORY)).call("train"))
    assert "ran low on memory (15.28GB used / 16.00GB)" in str(death) and "advice" not in str(death)


@pytest.mark.parametrize(
    "error",
    [
        RayTaskError("train", "trace", OutOfMemoryError("of its own")).as_instanceof_cause(),
        ObjectLostError("0", None, "f"),
    ],
)
def test_what_a_living_worker_raises_and_an_answer_that_got_lost_are_failures_of_the_call(error):
    failed = failure(lambda: handle(Actor(call=error)).call("train"))
    assert isinstance(failed, WorkerFailed) and failed.worker == "actor_train/0" and failed.method == "train"


def test_the_rank_that_ran_out_of_memory_is_named_and_not_its_peer_that_failed_first():
    peer = handle(Actor(call=RayTaskError("train", "trace", RuntimeError("connection closed by peer"))), 0)
    dead = handle(Actor(watch=MEMORY), 1)
    error = failure(lambda: WorkerGroup([peer, dead]).call_all("train"))
    assert isinstance(error, WorkerDied) and error.worker == "actor_train/1"


def test_the_watch_of_a_group_ends_with_a_death_for_want_of_memory():
    error = failure(lambda: WorkerGroup([handle(Actor()), handle(Actor(watch=MEMORY), 1)]).watch())
    assert isinstance(error, WorkerDied) and error.worker == "actor_train/1"

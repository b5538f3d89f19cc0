"""The end of a process that Ray tells of in its own ways."""

from __future__ import annotations

import asyncio

import pytest
import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError

from roll.agentic.pool import EnvProcess, EpisodeKey, ProcessLost
from roll.agentic.worker import Reset
from roll.runtime.workers import WorkerDied
from tests.runtime.references import Reference


class DeadActor:
    """Every method of it raises the same error of Ray."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def submit(self) -> DeadActor:
        return self

    collect = __ray_ready__ = submit

    def remote(self, *args: object) -> Reference:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_exception(self._error)
        return Reference(future)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutOfMemoryError("Memory on the node was 15.28GB used / 16.00GB limit (0.955)\nAdvice"), "15.28GB used"),
        (NodeDiedError("The node is gone"), "The node is gone"),
    ],
)
def test_a_death_that_ray_has_another_class_for_is_one_and_the_process_is_taken_for_ended(error, words, monkeypatch):
    killed = []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))

    async def main() -> None:
        actor = DeadActor(error)
        process = EnvProcess("environments/0", actor, 1.0, lambda process, report: None)
        key = EpisodeKey("a", 7)
        asking = asyncio.create_task(process.ask(Reset(process.open(), "a", 7, False), key))
        with pytest.raises(WorkerDied, match=f"worker environments/0 died: .*{words}"):
            await process.serve()
        for call in (asking, process.ask(Reset(process.open(), "a", 8, False), EpisodeKey("a", 8))):
            with pytest.raises(ProcessLost, match=words):
                await call
        await process.end()
        assert killed == [actor]

    asyncio.run(asyncio.wait_for(main(), 60))

"""What people read about the end of a process."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest
from ray.exceptions import NodeDiedError, OutOfMemoryError

from roll.agentic import pool as process_module
from roll.agentic.pool import EnvProcess, ProcessLost, death_cause

HEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: EnvWorker\n\tpid: 7\n"
EXIT = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            f"{HEAD}{EXIT}Worker unexpectedly exits with a connection error code 2. End of file. Some common causes "
            "include: (1) the process was killed by the OOM killer, (2) ray stop --force was called.",
            "its process ended without a word, by a signal or an exit",
        ),
        (
            f"{HEAD}{EXIT}Worker exits unexpectedly. Worker exits with an exit code 4.",
            "its process ended with exit code 4",
        ),
        (
            f"{HEAD}The actor is dead because it was killed by `ray.kill`.",
            "The actor is dead because it was killed by `ray.kill`",
        ),
        (
            f"{HEAD}The actor is dead because its node has died. Node Id: 0123. More about nodes.",
            "The actor is dead because its node has died",
        ),
        (
            "The actor died because of an error raised in its creation task, ray::EnvWorker.__init__()\n"
            "  File x, line 1\nOSError: no licence. Ask for one.\n",
            "OSError: no licence. Ask for one.",
        ),
        ("", "no cause given"),
    ],
)
def test_the_cause_of_a_death_is_short(text, cause):
    assert death_cause(text) == cause


class Reference:
    """The answer of an actor that is gone, as Ray gives it."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def future(self) -> Future[object]:
        future: Future[object] = Future()
        future.set_exception(self._error)
        return future

    def __await__(self):
        return asyncio.wrap_future(self.future()).__await__()


class DeadActor:
    """Every method of it raises the same error of Ray."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    @property
    def start(self) -> DeadActor:
        return self

    submit = collect = close = start

    def remote(self, *args: object) -> Reference:
        return Reference(self._error)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OutOfMemoryError("Memory on the node was 15.28GB used / 16.00GB limit (0.955)\nAdvice"), "15.28GB used"),
        (NodeDiedError("The node is gone"), "The node is gone"),
    ],
)
def test_a_death_that_ray_has_another_class_for_is_one_and_the_process_is_taken_for_ended(error, words, monkeypatch):
    killed = []
    monkeypatch.setattr(process_module.ray, "kill", killed.append)

    async def main() -> str:
        actor = DeadActor(error)
        process = EnvProcess("environments/0", actor, 1.0, lambda process, because: None)
        with pytest.raises(ProcessLost, match="the worker process died"):
            await process.start(1.0)
        with pytest.raises(ProcessLost) as death:
            await process.serve()
        await process.close_environments(1.0)
        await process.kill()
        assert killed == [actor]
        return str(death.value)

    assert words in asyncio.run(asyncio.wait_for(main(), 60))

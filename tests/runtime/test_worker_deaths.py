"""What is a death and what is not, however Ray says it; and how a process that is gone, or stuck, is ended."""

import asyncio

import pytest
import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayTaskError,
    WorkerCrashedError,
)

from roll.rollout.clock import run_virtual
from roll.runtime.workers import (
    ACTOR_GONE,
    EXIT_SECONDS,
    ProcessHandle,
    WorkerDied,
    WorkerTimeout,
    death_cause,
    is_gone_for_good,
)
from tests.runtime.references import Reference

MEMORY_TEXT = """Task was killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 07f0) was 15.28GB used / 16.00GB limit (0.955), which exceeds the threshold.
Ray killed 1 worker(s) based on the killing policy
Refer to the documentation on how to address the out of memory issue: https://docs.ray.io/. To disable worker killing,
set the environment variable `RAY_memory_monitor_refresh_ms` to zero."""
HEAD = "The actor died unexpectedly before finishing this task.\n\tclass_name: EnvWorker\n\tpid: 7\n"
EXIT = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR Worker exit detail: "


@pytest.mark.parametrize(
    "error", [ActorDiedError(), OutOfMemoryError(MEMORY_TEXT), NodeDiedError("its node died"), WorkerCrashedError()]
)
def test_deaths_are_known_whatever_their_class(error):
    assert isinstance(error, ACTOR_GONE) and is_gone_for_good(error)


def test_what_passes_and_what_a_living_actor_raises_are_no_deaths():
    raised = RayTaskError("score", "traceback", OutOfMemoryError("of a task of its own")).as_instanceof_cause()
    assert isinstance(raised, OutOfMemoryError), "Ray makes it one"
    for error in (ActorUnavailableError("the network is gone", None), raised, ObjectLostError("00", None, "f")):
        assert not is_gone_for_good(error)


def test_a_death_for_want_of_memory_is_said_in_a_few_words_with_the_figures():
    cause = death_cause(OutOfMemoryError(MEMORY_TEXT))
    assert cause == "it was killed because its node ran low on memory (15.28GB used / 16.00GB)"
    assert death_cause(OutOfMemoryError("")) == "it was killed because its node ran low on memory"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            f"{HEAD}{EXIT}Worker unexpectedly exits with a connection error code 2. End of file. Some common causes "
            "include: (1) the process was killed by the OOM killer, (2) ray stop --force was called.",
            "it ended without a message, by an exit or a signal such as that of the system's memory killer",
        ),
        (
            f"{HEAD}{EXIT}Worker exits unexpectedly. Worker exits with an exit code 4.",
            "it ended with exit code 4",
        ),
        (
            f"{HEAD}{EXIT}Worker exits unexpectedly by a signal. SystemExit is raised (sys.exit is called). "
            "Exit code: 1. The process receives a SIGTERM.",
            "it was ended by a SIGTERM",
        ),
        (f"{HEAD}{EXIT}Worker exits. Exit code: -9.", "it ended with exit code -9"),
        (f"{HEAD}{EXIT}The disk is full. Nothing works.", "The disk is full. Nothing works"),
        (
            f"{HEAD}The actor is dead because its owner has died. Owner Id: 0123 Owner Ip address: 10.0.0.1 Owner "
            "worker exit type: SYSTEM_ERROR Worker exit detail: Owner's worker process has crashed.",
            "its owner has died: Owner's worker process has crashed",
        ),
        (
            f"{HEAD}The actor is dead because it was killed by `ray.kill`.",
            "it was killed by `ray.kill`",
        ),
        (
            f"{HEAD}The actor is dead because its node has died. Node Id: 0123. More about nodes.",
            "its node has died",
        ),
        (
            "The actor died because of an error raised in its creation task, ray::EnvWorker.__init__()\n"
            '  File "x", line 1, in make\n    raise OSError()\n    ^\nOSError: no licence.\n  Ask for one.\nSoon.\n',
            "OSError: no licence. Ask for one. Soon.",
        ),
        (HEAD, "The actor died unexpectedly before finishing this task. class_name: EnvWorker pid: 7"),
        ("", "no cause given"),
    ],
)
def test_the_cause_of_a_death_is_short(text, cause):
    death = ActorDiedError()
    death.error_msg = text
    assert str(death) == text and death_cause(death) == cause


class Actor:
    """Its calls get an answer after so many seconds, and none when it is gone."""

    def __init__(self, seconds=0.0, dies_in=0.0):
        self.dead = False
        self._seconds = seconds
        self._dies_in = dies_in

    def __getattr__(self, method):
        return self

    __ray_ready__ = property(lambda self: self)

    def remote(self, *args):
        return Reference(asyncio.ensure_future(self._answer(args)))

    async def _answer(self, args):
        await asyncio.sleep(self._dies_in if self.dead else self._seconds)
        if self.dead:
            raise ActorDiedError()
        return args

    def kill(self, no_restart):
        self.dead = True


@pytest.fixture
def killing(monkeypatch):
    monkeypatch.setattr(ray, "kill", Actor.kill)


def test_a_call_has_a_deadline_and_an_error_with_the_name_of_the_process():
    async def use():
        handle = ProcessHandle("rewards.math/0", Actor(seconds=5.0))
        assert await handle.call("judge", 1, timeout=6.0) == (1,)
        with pytest.raises(WorkerTimeout, match=r"rewards.math/0.judge did not return within 4 s"):
            await handle.call("judge", 1, timeout=4.0)
        handle.actor.dead = True
        with pytest.raises(WorkerDied, match="worker rewards.math/0 died"):
            await handle.call("judge", 1)

    run_virtual(use())


@pytest.mark.parametrize("dies_in", [0.0, EXIT_SECONDS / 2, EXIT_SECONDS * 2])
def test_the_end_of_a_process_is_waited_for_but_not_for_ever(dies_in, killing, caplog):
    async def use():
        await ProcessHandle("rewards.math/0", Actor(dies_in=dies_in)).end()
        return asyncio.get_running_loop().time()

    waited = run_virtual(use())
    assert waited == pytest.approx(min(dies_in, EXIT_SECONDS), abs=0.1)
    assert ("is still there after 10 s" in caplog.text) == (dies_in > EXIT_SECONDS)

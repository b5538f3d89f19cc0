import asyncio

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from roll.rollout.clock import run_virtual
from roll.runtime.workers import BEAT_SECONDS, Beat, Heartbeats


class Handle:
    """A worker that answers, is silent from some question on, or dies."""

    def __init__(self, silent_after=None, dies=False, fails_once=None):
        self.name = "actor_train/0"
        self.pid = 1
        self.asked = 0
        self._silent_after = silent_after
        self._dies = dies
        self._fails_once = fails_once

    async def beat(self):
        self.asked += 1
        if self._dies:
            raise RayActorError()
        if self.asked == 1 and self._fails_once is not None:
            raise self._fails_once
        if self.asked == self._silent_after:
            await asyncio.Event().wait()
        return Beat(0.0, None)


def beats_after(seconds, *handles, then=lambda present: None):
    async def scenario():
        present = list(handles)
        heartbeats = Heartbeats(lambda: present, clock=asyncio.get_running_loop().time)
        task = asyncio.create_task(heartbeats.run())
        await asyncio.sleep(seconds)
        then(present)
        await asyncio.sleep(2 * BEAT_SECONDS)
        last = {handle: heartbeats.last(handle) for handle in {*handles, *present}}
        task.cancel()
        await asyncio.wait([task])
        return last, asyncio.get_running_loop().time()

    return run_virtual(scenario())


def test_a_silent_worker_is_not_asked_again_and_holds_up_nobody():
    well, silent = Handle(), Handle(silent_after=3)
    last, now = beats_after(20, well, silent)
    assert silent.asked == 3 and well.asked > 10
    assert now - last[silent].at > 15
    assert now - last[well].at <= BEAT_SECONDS


def test_a_dead_worker_ends_nothing_and_a_new_process_has_said_nothing_yet():
    well, dead = Handle(), Handle(dies=True)
    new = Handle(silent_after=1)
    last, _ = beats_after(5, well, dead, then=lambda present: present.__setitem__(0, new))
    assert last[dead] is None and dead.asked == 1
    assert last[new] is None and last[well] is None, "one that is gone is forgotten"


@pytest.mark.parametrize(
    "failure", [ActorUnavailableError("the network is gone", None), RayTaskError("beat", "traceback", OSError("proc"))]
)
def test_a_failure_that_passes_is_no_death(failure):
    troubled = Handle(fails_once=failure)
    last, now = beats_after(10, troubled)
    assert troubled.asked > 4 and now - last[troubled].at <= BEAT_SECONDS


def test_a_process_that_does_not_run_yet_is_not_asked():
    starting = Handle()
    starting.pid = None
    beats_after(5, starting)
    assert starting.asked == 0

import asyncio
import gc
import os
import weakref
from types import SimpleNamespace

from roll.pipeline.status import StatusKeeper
from roll.tracking.status import look_at
from roll.tracking.waits import WaitBoard


class Handle:
    """A worker in this process that has not answered yet."""

    def __init__(self, name, is_local=True):
        self.name, self.pid, self.is_local = name, os.getpid(), is_local


def keeper_of(handles):
    recorder = SimpleNamespace(waits=WaitBoard())
    return StatusKeeper(SimpleNamespace(stall_timeout_seconds=10, max_steps=1), recorder, lambda: handles)


def test_a_worker_is_known_by_the_time_its_process_began_for_ids_are_used_again():
    async def scenario():
        return keeper_of([Handle("actor_train/0"), Handle("actor_train/1", is_local=False)]).now().workers

    here, elsewhere = asyncio.run(scenario())
    assert (here.name, here.pid, here.has_answered) == ("actor_train/0", os.getpid(), False)
    assert here.started == look_at(os.getpid()).started
    assert elsewhere.started is None


def test_workers_that_were_replaced_are_forgotten():
    async def scenario():
        handles = [Handle("actor_infer/0")]
        keeper = keeper_of(handles)
        asked = keeper.now().workers[0].asked_since
        assert keeper.now().workers[0].asked_since == asked, "asked once"
        gone = weakref.ref(handles[0])
        handles[0] = Handle("actor_infer/0")
        assert len(keeper.now().workers) == 1
        gc.collect()
        return gone()

    assert asyncio.run(scenario()) is None

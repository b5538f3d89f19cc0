"""Generation that shares its devices: it lets go as soon as another role waits, and goes on afterwards."""

import asyncio

import pytest

from roll.pipeline.rollouts import EngineGate
from roll.rollout.clock import run_virtual
from roll.runtime.locks import DeviceLock


class Engine:
    """A pool and resident in one: a request takes ten seconds of waking time."""

    def __init__(self):
        self.awake = asyncio.Event()
        self.awake.set()
        self.moves = []

    async def generate(self, request, *, sticky_key=None, min_version=None, pinned=False):
        for _ in range(10):
            await asyncio.sleep(1)
            await self.awake.wait()
        return request

    async def offload_states(self):
        self.awake.clear()
        self.moves.append("sleep")

    async def load_states(self):
        self.awake.set()
        self.moves.append("wake")


class Trainer:
    async def offload_states(self): ...

    async def load_states(self): ...


def gate_and_lock(*roles):
    engine, lock = Engine(), DeviceLock(roles)
    lock.register("infer", engine)
    if "train" in roles:
        lock.register("train", Trainer())
    return EngineGate(engine, lock, "infer"), lock, engine


def test_a_waiting_trainer_interrupts_generation_which_then_goes_on():
    async def scenario():
        gate, lock, engine = gate_and_lock("infer", "train")
        running = asyncio.create_task(gate.run())
        request = asyncio.create_task(gate.generate("request"))
        await asyncio.sleep(3.5)
        async with asyncio.timeout(1), lock.hold("train"):
            assert not engine.awake.is_set()
            late = asyncio.create_task(gate.generate("late"))
            await asyncio.sleep(0.5)
            assert not late.done()
        assert await request == "request" and await late == "late"
        assert engine.moves == ["sleep", "wake"]
        await asyncio.sleep(1)
        assert lock.holder is None
        running.cancel()

    run_virtual(scenario())


def test_an_idle_engine_does_not_keep_its_devices():
    async def scenario():
        gate, lock, _ = gate_and_lock("infer", "train")
        running = asyncio.create_task(gate.run())
        await gate.generate("request")
        await asyncio.sleep(1)
        assert lock.holder is None
        running.cancel()

    run_virtual(scenario())


def test_a_cancelled_request_leaves_no_demand_behind():
    async def scenario():
        gate, lock, _ = gate_and_lock("infer")
        running = asyncio.create_task(gate.run())
        request = asyncio.create_task(gate.generate("request"))
        await asyncio.sleep(1)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.sleep(1)
        assert lock.holder is None
        running.cancel()
        await asyncio.wait([running])
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())

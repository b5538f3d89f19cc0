import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.clock import run_virtual
from roll.runtime.locks import DeviceLock, build_device_locks
from tests.tiers import examples


class States:
    """A resident that records when it was moved; moving takes a second."""

    def __init__(self, role, log):
        self.role, self.log, self.loaded = role, log, True

    async def load_states(self):
        await asyncio.sleep(1)
        self.loaded = True
        self.log.append(("load", self.role))

    async def offload_states(self):
        await asyncio.sleep(1)
        self.loaded = False
        self.log.append(("offload", self.role))


def lock_with_states(*roles):
    log = []
    lock = DeviceLock(roles)
    residents = {role: States(role, log) for role in roles}
    for role, resident in residents.items():
        lock.register(role, resident)
    return lock, residents, log


def test_taking_the_lock_offloads_the_other_role_before_it_loads_ones_own():
    async def scenario():
        lock, residents, log = lock_with_states("train", "infer")
        async with lock.hold("train"):
            assert not residents["infer"].loaded
        async with lock.hold("infer"):
            assert residents["infer"].loaded and not residents["train"].loaded
        assert log == [("offload", "infer"), ("offload", "train"), ("load", "infer")]

    run_virtual(scenario())


def test_states_that_were_moving_when_the_mover_was_cancelled_are_moved_whatever_was_known():
    """A half of them may be on the devices, or none."""

    async def scenario(first, then, after):
        lock, residents, log = lock_with_states("train", "infer")
        async with lock.hold("train"):
            pass
        moving = asyncio.create_task(held(lock, first))
        await asyncio.sleep(after)
        moving.cancel()
        await asyncio.wait([moving])
        async with lock.hold(then):
            assert residents[then].loaded and not any(each.loaded for role, each in residents.items() if role != then)

    async def held(lock, role):
        async with lock.hold(role):
            await asyncio.sleep(100)

    for first in ("train", "infer"):
        for then in ("train", "infer"):
            for after in (0.5, 1.5, 5):
                run_virtual(scenario(first, then, after))


def test_a_role_whose_processes_have_ended_leaves_nothing_to_move():
    async def scenario():
        lock, residents, log = lock_with_states("train", "infer")
        async with lock.hold("train"):
            pass
        lock.forget("train")
        log.clear()
        async with lock.hold("infer"):
            assert log == [("load", "infer")]
        async with lock.hold("train"):  # while its new processes load their model
            lock.register("train", residents["train"])
        async with lock.hold("infer"):
            assert log == [("load", "infer"), ("offload", "infer"), ("offload", "train"), ("load", "infer")]
        with pytest.raises(KeyError):
            lock.forget("critic")

    run_virtual(scenario())


def test_a_role_with_devices_of_its_own_never_moves_its_states():
    async def scenario():
        lock, _, log = lock_with_states("train")
        for _ in range(3):
            async with lock.hold("train"):
                pass
        assert log == []

    run_virtual(scenario())


def test_tasks_of_one_role_share_the_lock_but_do_not_overtake_a_waiting_role():
    async def scenario():
        lock, _, _ = lock_with_states("train", "infer")
        order = []

        async def work(role, name, seconds):
            async with lock.hold(role):
                order.append(name)
                await asyncio.sleep(seconds)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(work("infer", "infer-1", 10))
            await asyncio.sleep(1)
            tasks.create_task(work("infer", "infer-2", 10))
            await asyncio.sleep(1)
            tasks.create_task(work("train", "train", 1))
            await asyncio.sleep(1)
            tasks.create_task(work("infer", "infer-3", 1))
        assert order == ["infer-1", "infer-2", "train", "infer-3"]

    run_virtual(scenario())


def test_the_lock_is_released_when_the_holder_raises():
    async def scenario():
        lock, _, _ = lock_with_states("train", "infer")
        with pytest.raises(RuntimeError, match="out of memory"):
            async with lock.hold("train"):
                raise RuntimeError("out of memory")
        async with asyncio.timeout(10), lock.hold("infer"):
            pass

    run_virtual(scenario())


def test_a_cancelled_waiter_does_not_keep_others_waiting():
    async def scenario():
        lock, _, _ = lock_with_states("train", "infer")

        async def hold(role):
            async with lock.hold(role):
                await asyncio.sleep(5)

        first = asyncio.create_task(hold("infer"))
        await asyncio.sleep(1)
        waiting = asyncio.create_task(hold("train"))
        await asyncio.sleep(1)
        waiting.cancel()
        async with asyncio.timeout(1), lock.hold("infer"):
            pass
        await first

    run_virtual(scenario())


def test_a_foreign_role_is_refused():
    async def scenario():
        lock = DeviceLock(["train"])
        with pytest.raises(KeyError, match="reference"):
            async with lock.hold("reference"):
                pass

    run_virtual(scenario())


def test_roles_that_share_a_device_through_a_third_share_the_lock():
    locks = build_device_locks({"train": [0, 1], "infer": [2], "reference": [1], "other": [3]})
    assert locks["train"] is locks["reference"]
    assert locks["infer"] is not locks["train"]
    assert locks["other"] is not locks["infer"]


jobs_of_roles = st.tuples(
    st.sampled_from(["train", "infer", "reference"]), st.integers(0, 5), st.integers(0, 5), st.booleans()
)


@settings(max_examples=examples(150))
@given(st.lists(jobs_of_roles, min_size=1, max_size=12))
def test_two_roles_never_hold_at_once_and_everyone_gets_a_turn(jobs):
    async def scenario():
        lock, residents, _ = lock_with_states("train", "infer", "reference")
        holding = []
        finished = []

        async def work(index, role, delay, seconds, cancelled):
            await asyncio.sleep(delay)
            task = asyncio.current_task()
            if cancelled:
                asyncio.get_running_loop().call_later(seconds, task.cancel)
            try:
                async with lock.hold(role):
                    holding.append(role)
                    assert set(holding) == {role}
                    assert [name for name, states in residents.items() if states.loaded] == [role]
                    try:
                        await asyncio.sleep(seconds)
                    finally:
                        holding.remove(role)
            except asyncio.CancelledError:
                task.uncancel()
            finished.append(index)

        async with asyncio.timeout(1000), asyncio.TaskGroup() as tasks:
            for index, job in enumerate(jobs):
                tasks.create_task(work(index, *job))
        assert sorted(finished) == list(range(len(jobs)))
        assert lock.holder is None

    run_virtual(scenario())

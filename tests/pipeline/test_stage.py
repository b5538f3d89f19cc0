import asyncio
import weakref
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from roll.pipeline.stage import Channel, Stage, StageGraph, StageState
from roll.rollout.clock import run_virtual
from roll.runtime.locks import DeviceLock
from roll.tracking.timeline import Timeline


@dataclass
class Item:
    number: int
    seconds: dict[str, float] = field(default_factory=dict)
    complete: bool = True

    def note_time(self, stage, seconds):
        self.seconds[stage] = seconds


async def items(count):
    for number in range(count):
        yield number


class Recorded(Timeline):
    """A timeline that remembers each change of state: actor, state, time."""

    def __init__(self):
        super().__init__(clock=lambda: asyncio.get_running_loop().time())
        self.changes = []

    def transition(self, actor, state, **details):
        super().transition(actor, state, **details)
        self.changes.append((actor, state, self.last_states()[actor].since))


class Wired:
    """A source, a slow stage that may fail at one item, and a sink that remembers what it has seen."""

    def __init__(self, count=3, seconds=1.0, fail_at=None, **slow):
        self.recorder = Recorded()
        self.seen, self.finished = [], []

        async def make(number):
            return Item(number)

        async def dawdle(item):
            await asyncio.sleep(seconds)
            if item.number == fail_at:
                raise ValueError(f"item {item.number} is bad")
            return item

        async def see(item):
            self.seen.append(item)
            return item

        async def finish(item):
            self.finished.append(dict(item.seconds))

        first, second = Channel("first"), Channel("second")
        self.source = Stage("source", make, items(count), self.recorder, outbox=first)
        self.slow = Stage("slow", dawdle, first, self.recorder, outbox=second, **slow)
        self.sink = Stage("sink", see, second, self.recorder, finish=finish)
        self.graph = StageGraph([self.source, self.slow, self.sink])


def test_items_flow_in_order_and_all_stages_end_done():
    async def scenario():
        wired = Wired(5)
        await wired.graph.run()
        assert [item.number for item in wired.seen] == [0, 1, 2, 3, 4]
        assert {stage.state for stage in wired.graph.stages} == {StageState.DONE}
        assert wired.seen[0].seconds["slow"] == pytest.approx(1.0)

    run_virtual(scenario())


def test_a_failing_stage_is_failed_cancels_the_others_and_its_own_error_is_raised():
    async def scenario():
        wired = Wired(50, fail_at=1)
        cancelled = asyncio.Event()

        async def background():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(ValueError, match="item 1 is bad"):
            await wired.graph.run({"background": background})
        assert wired.slow.state is StageState.FAILED
        assert "item 1 is bad" in wired.recorder.last_states()["stage/slow"].details["error"]
        assert [item.number for item in wired.seen] == [0]
        assert cancelled.is_set()

    run_virtual(scenario())


def test_a_failing_background_task_ends_the_run_with_its_error():
    async def scenario():
        wired = Wired(50)

        async def watch():
            await asyncio.sleep(2.5)
            raise RuntimeError("worker actor_train/0 died")

        with pytest.raises(RuntimeError, match="actor_train/0 died"):
            await wired.graph.run({"watch": watch})

    run_virtual(scenario())


def test_what_must_come_first_comes_before_any_stage():
    async def scenario():
        wired = Wired(1)

        async def first():
            await asyncio.sleep(7)
            assert wired.source.state is StageState.IDLE

        await wired.graph.run(first=first)
        assert asyncio.get_running_loop().time() >= 8
        assert wired.recorder.changes[0][2] >= 7

    run_virtual(scenario())


def test_an_item_is_finished_with_the_time_of_the_last_stage_noted():
    async def scenario():
        wired = Wired(2, seconds=3)
        await wired.graph.run()
        assert wired.finished == [{"source": 0, "slow": 3, "sink": 0}] * 2

    run_virtual(scenario())


def test_a_stage_waits_for_others_before_it_takes_the_devices():
    async def scenario():
        lock = DeviceLock(["slow", "other"])
        ready = asyncio.Event()

        async def before(item):
            await ready.wait()

        wired = Wired(1, before=before, hold=lambda: lock.hold("slow"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(wired.graph.run())
            await asyncio.sleep(1)
            assert wired.slow.state is StageState.WAITING_RESOURCE
            async with lock.hold("other"):  # free: whoever is waited for can take them
                ready.set()
        assert len(wired.seen) == 1

    run_virtual(scenario())


def test_cancelling_the_run_cancels_every_stage():
    async def scenario():
        wired = Wired(50, seconds=100)
        run = asyncio.create_task(wired.graph.run())
        await asyncio.sleep(5)
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert len(asyncio.all_tasks()) == 1

    run_virtual(scenario())


def test_the_timeline_tells_waiting_for_devices_from_running():
    async def scenario():
        lock = DeviceLock(["slow", "other"])

        async def other():
            async with lock.hold("other"):
                await asyncio.sleep(5)

        wired = Wired(1, hold=lambda: lock.hold("slow"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other())
            await asyncio.sleep(0)
            await wired.graph.run()
        changes = [change[1:] for change in wired.recorder.changes if change[0] == "stage/slow"]
        seconds = {state: end - start for (state, start), (_, end) in pairwise(changes)}
        assert seconds["waiting for devices"] == pytest.approx(5)
        assert seconds["running"] == pytest.approx(1)

    run_virtual(scenario())


@pytest.mark.parametrize("passes", [True, False])
def test_parts_of_a_batch_go_on_only_where_the_next_stage_wants_them_and_never_to_the_side(passes):
    async def main():
        async def part(number):
            return Beside(number, complete=number % 2 == 1)

        side, outbox, made = Channel("side"), Channel("out"), [[], []]
        stage = Stage("parts", part, items(4), Recorded(), outbox=outbox, side=side, passes_parts=passes)

        async def collect(channel, found):
            async for item in channel:
                found.append(item.number)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(stage.run())
            for channel, found in zip((outbox, side), made, strict=True):
                tasks.create_task(collect(channel, found))
        return made

    assert run_virtual(main()) == [[0, 1, 2, 3] if passes else [1, 3], [1, 3]]


class Beside(Item):
    def beside(self):
        return self


@dataclass
class Part(Item):
    parts: int = 1


def test_a_busy_stage_takes_the_parts_that_wait_as_one_but_none_of_the_next_batch():
    async def main():
        taken = []

        async def take(part):
            taken.append((part.number, part.parts))
            await asyncio.sleep(2.6)
            return part

        async def join(parts):
            return Part(parts[-1].number, complete=parts[-1].complete, parts=len(parts))

        async def produce(channel):
            for number in range(9):
                await channel.put(Part(number, complete=number in (3, 8)))
                await asyncio.sleep(1)
            await channel.close()

        inbox = Channel("parts", 16)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(produce(inbox))
            tasks.create_task(Stage("slow", take, inbox, Recorded(), join=join).run())
        return taken

    assert run_virtual(main()) == [(0, 1), (2, 2), (3, 1), (6, 3), (8, 2)]


def test_a_stage_lets_go_of_what_it_has_passed_on_so_that_the_last_one_can_free_it():
    async def main():
        made, left = [], []

        async def slowly():
            for number in range(3):
                yield number
                await asyncio.sleep(5)

        async def make(number):
            item = Item(number)
            made.append(weakref.ref(item))
            return item

        async def same(item):
            return item

        async def finish(item):
            await asyncio.sleep(1)
            del item
            left.append([reference() is not None for reference in made])

        first, second = Channel("first"), Channel("second")
        await StageGraph(
            [
                Stage("source", make, slowly(), Recorded(), outbox=first),
                Stage("between", same, first, Recorded(), outbox=second),
                Stage("sink", same, second, Recorded(), finish=finish),
            ]
        ).run()
        return left

    assert run_virtual(main()) == [[False] * number for number in (1, 2, 3)]

import asyncio
from dataclasses import dataclass, field

import pytest

from roll.pipeline.stage import Channel, ChannelClosed, Stage, StageGraph, StageState
from roll.rollout.clock import run_virtual
from roll.runtime.locks import DeviceLock
from roll.tracking.timeline import Timeline


@dataclass
class Item:
    number: int
    seconds: dict[str, float] = field(default_factory=dict)

    def note_time(self, stage, seconds):
        self.seconds[stage] = seconds


class Source(Stage):
    def __init__(self, recorder, outbox, count):
        super().__init__("source", recorder, outbox=outbox)
        self.left = list(range(count))

    async def take_input(self):
        if not self.left:
            raise ChannelClosed("done")
        return self.left.pop(0)

    async def process(self, number):
        return Item(number)


class Slow(Stage):
    def __init__(self, recorder, inbox, outbox, seconds=1.0, fail_at=None, **kwargs):
        super().__init__("slow", recorder, inbox=inbox, outbox=outbox, **kwargs)
        self.seconds, self.fail_at = seconds, fail_at

    async def process(self, item):
        await asyncio.sleep(self.seconds)
        if item.number == self.fail_at:
            raise ValueError(f"item {item.number} is bad")
        return item


class Sink(Stage):
    def __init__(self, recorder, inbox):
        super().__init__("sink", recorder, inbox=inbox)
        self.seen = []

    async def process(self, item):
        self.seen.append(item)
        return item


def wire(count=3, **slow):
    loop_time = lambda: asyncio.get_running_loop().time()  # noqa: E731
    recorder = Timeline(clock=loop_time)
    first, second = Channel("first"), Channel("second")
    return Source(recorder, first, count), Slow(recorder, first, second, **slow), Sink(recorder, second), recorder


def test_items_flow_in_order_and_all_stages_end_done():
    async def scenario():
        source, slow, sink, _ = wire(5)
        await StageGraph([source, slow, sink]).run()
        assert [item.number for item in sink.seen] == [0, 1, 2, 3, 4]
        assert {stage.state for stage in (source, slow, sink)} == {StageState.DONE}
        assert sink.seen[0].seconds["slow"] == pytest.approx(1.0)

    run_virtual(scenario())


def test_a_failing_stage_is_failed_cancels_the_others_and_its_own_error_is_raised():
    async def scenario():
        source, slow, sink, recorder = wire(50, fail_at=1)
        cancelled = asyncio.Event()

        async def background():
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        with pytest.raises(ValueError, match="item 1 is bad"):
            await StageGraph([source, slow, sink]).run([("background", background)])
        assert slow.state is StageState.FAILED
        assert "item 1 is bad" in recorder.last_states()["stage/slow"].details["error"]
        assert [item.number for item in sink.seen] == [0]
        assert cancelled.is_set()

    run_virtual(scenario())


def test_a_failing_background_task_ends_the_run_with_its_error():
    async def scenario():
        source, slow, sink, _ = wire(50)

        async def watch():
            await asyncio.sleep(2.5)
            raise RuntimeError("worker actor_train/0 died")

        with pytest.raises(RuntimeError, match="actor_train/0 died"):
            await StageGraph([source, slow, sink]).run([("watch", watch)])

    run_virtual(scenario())


def test_what_must_come_first_comes_before_any_stage():
    async def scenario():
        source, slow, sink, recorder = wire(1)

        async def first():
            await asyncio.sleep(7)
            assert source.state is StageState.IDLE

        await StageGraph([source, slow, sink]).run(first=first)
        assert asyncio.get_running_loop().time() >= 8
        assert recorder.spans()[0].start >= 7

    run_virtual(scenario())


def test_a_sink_delivers_an_item_with_its_own_time_noted():
    async def scenario():
        delivered = []

        class Last(Slow):
            async def deliver(self, item):
                delivered.append(dict(item.seconds))

        source, slow, _, recorder = wire(2)
        await StageGraph([source, Last(recorder, source.outbox, None, seconds=3)]).run()
        assert delivered == [{"source": 0, "slow": 3}] * 2

    run_virtual(scenario())


def test_cancelling_the_run_cancels_every_stage():
    async def scenario():
        source, slow, sink, _ = wire(50, seconds=100)
        run = asyncio.create_task(StageGraph([source, slow, sink]).run())
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

        source, slow, sink, recorder = wire(1, hold=lambda: lock.hold("slow"))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(other())
            await asyncio.sleep(0)
            await StageGraph([source, slow, sink]).run()
        spans = {span.state: span.end - span.start for span in recorder.spans() if span.actor == "stage/slow"}
        assert spans["waiting for devices"] == pytest.approx(5)
        assert spans["running"] == pytest.approx(1)

    run_virtual(scenario())

import asyncio
from types import SimpleNamespace

import pytest

from roll.pipeline.stage import StepCounter
from roll.pipeline.status import RunStalled, StatusKeeper, watch_for_stall
from roll.rollout.clock import run_virtual
from roll.rollout.scheduler import RolloutScheduler, SchedulePlan
from roll.tracking.timeline import Timeline
from roll.tracking.waits import WaitBoard, acting, holding, waiting


def started(limit):
    """As much of a run as its status is made of, and the run's keeper."""

    async def endless(request):
        await asyncio.Event().wait()

    scheduler = RolloutScheduler(SchedulePlan(batch_size=2, max_steps=1), iter(range(9)), endless)
    clock = asyncio.get_running_loop().time
    recorder = SimpleNamespace(timeline=Timeline(clock=clock), waits=WaitBoard(clock))
    context = SimpleNamespace(
        recorder=recorder,
        scheduler=scheduler,
        pool=SimpleNamespace(completed=0, tokens_seen=0, restarts=0, buffers=SimpleNamespace(holders=lambda: {})),
        side=SimpleNamespace(steps=0, metrics=lambda: {}),
        steps=StepCounter(),
        checkpoints=SimpleNamespace(progress=lambda: ()),
    )
    config = SimpleNamespace(stall_timeout_seconds=limit, max_steps=1)
    keeper = StatusKeeper(config, recorder, handles=list, clock=clock)
    keeper.running(context, [])
    return context, keeper


def test_a_run_in_which_nothing_moves_ends_with_the_end_of_the_longest_chain():
    async def scenario():
        run, keeper = started(limit=100)

        async def train():
            with acting("stage/train", run.recorder.waits), waiting("worker/actor_train/0", "train"):
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(run.scheduler.run()), asyncio.create_task(train())]
        with pytest.raises(RunStalled, match=r"100 s(.|\n)*worker actor_train/0 \(train\), since 1\d\d s"):
            await watch_for_stall(keeper, 100)
        assert 100 < asyncio.get_running_loop().time() < 120
        for task in tasks:
            task.cancel()

    run_virtual(scenario())


def test_a_deadlock_is_named_as_such():
    async def scenario():
        run, keeper = started(limit=100)

        async def takes(first, second, name):
            with acting(name, run.recorder.waits), holding(first, "as itself"):
                await asyncio.sleep(1)
                with waiting(second, "the devices"):
                    await asyncio.Event().wait()

        tasks = [asyncio.create_task(takes("devices/a", "devices/b", "stage/one"))]
        tasks.append(asyncio.create_task(takes("devices/b", "devices/a", "stage/two")))
        with pytest.raises(RunStalled, match=r"stage/one and stage/two wait for each other since 10\d s"):
            await watch_for_stall(keeper, 100)
        for task in tasks:
            task.cancel()

    run_virtual(scenario())


def test_a_pause_of_the_whole_process_is_no_stall():
    """Stopped by a signal for an hour: all clocks go on, and nobody could move."""

    async def scenario():
        run, keeper = started(limit=100)
        watch = asyncio.create_task(watch_for_stall(keeper, 100))
        await asyncio.sleep(50)
        asyncio.get_running_loop().advance(3600)
        await asyncio.sleep(40)
        assert not watch.done()
        await asyncio.wait([watch])
        assert isinstance(watch.exception(), RunStalled)

    run_virtual(scenario())


@pytest.mark.parametrize("what", ["a stage", "a request", "a token", "a restart", "a step of an environment"])
def test_any_movement_puts_the_deadline_off(what):
    async def scenario():
        run, keeper = started(limit=100)
        run.side.metrics = lambda: {"env_workers/steps": float(run.side.steps)}
        watch = asyncio.create_task(watch_for_stall(keeper, 100))
        for turn in range(10):
            await asyncio.sleep(90)
            if what == "a stage":
                run.recorder.timeline.transition("stage/train", "running", turn=turn)
            elif what == "a request":
                run.pool.completed += 1
            elif what == "a token":
                run.pool.tokens_seen += 1
            elif what == "a step of an environment":
                run.side.steps += 1
            else:
                run.pool.restarts += 1
        assert not watch.done()
        await asyncio.wait([watch])
        assert isinstance(watch.exception(), RunStalled)

    run_virtual(scenario())

import asyncio
from types import SimpleNamespace

import pytest

from roll.pipeline.stall import RunStalled, watch_for_stall
from roll.rollout.clock import run_virtual
from roll.rollout.schedule import SchedulePlan
from roll.rollout.scheduler import RolloutScheduler
from roll.tracking.timeline import Timeline


def context(limit):
    """As much of a run as the watch looks at."""

    async def endless(ticket):
        await asyncio.Event().wait()

    scheduler = RolloutScheduler(SchedulePlan(batch_size=2, max_steps=1), iter(range(9)), endless)
    loop_time = asyncio.get_running_loop().time
    return SimpleNamespace(
        config=SimpleNamespace(stall_timeout_seconds=limit),
        recorder=SimpleNamespace(timeline=Timeline(clock=loop_time)),
        scheduler=scheduler,
        pool=SimpleNamespace(completed=0, restarts=0),
        side=SimpleNamespace(steps=0, metrics=lambda: {}),
    )


def test_a_run_in_which_nothing_moves_ends_with_a_report_of_who_waits_for_what():
    async def scenario():
        run = context(limit=100)
        run.recorder.timeline.transition("stage/train", "waiting for input")
        generation = asyncio.create_task(run.scheduler.run())
        with pytest.raises(RunStalled, match=r"100 s(.|\n)*stage/train +waiting for input(.|\n)*'in_flight': 2"):
            await watch_for_stall(run)
        assert 100 < asyncio.get_running_loop().time() < 120
        generation.cancel()

    run_virtual(scenario())


@pytest.mark.parametrize("what", ["a stage", "a request", "a restart", "a step of an environment"])
def test_any_movement_puts_the_deadline_off(what):
    async def scenario():
        run = context(limit=100)
        run.side.metrics = lambda: {"env_workers/steps": float(run.side.steps)}
        watch = asyncio.create_task(watch_for_stall(run))
        for turn in range(10):
            await asyncio.sleep(90)
            if what == "a stage":
                run.recorder.timeline.transition("stage/train", "running", turn=turn)
            elif what == "a request":
                run.pool.completed += 1
            elif what == "a step of an environment":
                run.side.steps += 1
            else:
                run.pool.restarts += 1
        assert not watch.done()
        await asyncio.wait([watch])
        assert isinstance(watch.exception(), RunStalled)

    run_virtual(scenario())

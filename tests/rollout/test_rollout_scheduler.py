"""What the scheduler does with one event at a time: starts, failures, drops, ends, and errors on both of its sides."""

import asyncio
import itertools
from contextlib import nullcontext, suppress
from dataclasses import replace

import pytest

from roll.rollout.admission import TooManyDrops
from roll.rollout.clock import Deadlock, run_virtual
from roll.rollout.journal import RolloutProgress, recover
from roll.rollout.scheduler import (
    FatalRolloutError,
    NoMoreBatches,
    RolloutScheduler,
    SchedulePlan,
    SchedulerStopped,
    SourceExhausted,
)


def plan(**changes):
    return SchedulePlan(**({"batch_size": 2, "max_steps": 3} | changes))


def scheduler_of(rollout, source=None, group_filter=None, **changes):
    return RolloutScheduler(plan(**changes), source or itertools.count(), rollout, group_filter=group_filter)


async def train(scheduler, seconds=1.0):
    """A trainer that publishes at once. Returns the batches."""
    batches = []
    for step in range(1, scheduler.plan.max_steps + 1):
        batches.append(await scheduler.next_batch())
        await asyncio.sleep(seconds)
        scheduler.training_step_done(step)
        scheduler.weights_published(step)
    return batches


async def run_and_train(scheduler):
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(scheduler.run())
        trainer = tasks.create_task(train(scheduler))
    return trainer.result()


async def both_sides(scheduler):
    """What `run` and a waiting `next_batch` end with."""
    results = await asyncio.gather(scheduler.run(), scheduler.next_batch(), return_exceptions=True)
    return results


async def echo(request):
    await asyncio.sleep(1)
    return request.item * 10


def test_batches_carry_items_results_and_versions():
    scheduler = scheduler_of(echo)
    batches = run_virtual(run_and_train(scheduler))
    assert [[group.group_id for group in batch] for batch in batches] == [[0, 1], [2, 3], [4, 5]]
    last = batches[-1][-1]
    assert (last.item, last.result, last.start_version) == (5, 50, 2)


def test_after_the_last_batch_run_returns_and_asking_again_is_an_error():
    async def main():
        scheduler = scheduler_of(echo, max_steps=1)
        runner = asyncio.create_task(scheduler.run())
        await scheduler.next_batch()
        with pytest.raises(NoMoreBatches):
            await scheduler.next_batch()
        await runner
        with pytest.raises(NoMoreBatches):
            await scheduler.next_batch()
        assert scheduler.ledger.counts() | {"issued": 2, "consumed": 2, "in_flight": 0, "buffered": 0} == (
            scheduler.ledger.counts()
        )

    run_virtual(main())


@pytest.mark.parametrize(("ratio", "in_flight"), [(0, 2), (0.5, 3), (1, 4), (2, 6)])
def test_all_admissible_groups_start_in_one_iteration_in_issue_order(ratio, in_flight):
    async def main():
        started = []

        async def rollout(request):
            started.append(request.group_id)
            await asyncio.sleep(1)

        scheduler = scheduler_of(rollout, ratio=ratio, max_staleness=2)
        runner = asyncio.create_task(scheduler.run())
        await asyncio.sleep(0)
        assert scheduler.ledger.in_flight == in_flight
        await asyncio.sleep(0)
        assert started == list(range(in_flight))
        runner.cancel()

    run_virtual(main())


def test_of_very_many_groups_some_start_in_each_turn_of_the_loop():
    async def main():
        started = []

        async def rollout(request):
            started.append(request.group_id)
            await asyncio.sleep(1)

        scheduler = scheduler_of(rollout, batch_size=600)
        runner = asyncio.create_task(scheduler.run())
        in_flight = []
        for _ in range(5):
            await asyncio.sleep(0)
            in_flight.append(scheduler.ledger.in_flight)
        assert in_flight == [256, 512, 600, 600, 600]
        scheduler.pause_admission()
        assert started == list(range(600))
        runner.cancel()

    run_virtual(main())


def test_the_version_of_a_group_is_that_of_its_start_not_of_its_end():
    async def main():
        async def rollout(request):
            await asyncio.sleep(100 if request.group_id == 3 else 1)

        scheduler = scheduler_of(rollout, ratio=1, max_staleness=1)
        batches = await run_and_train(scheduler)
        return {group.group_id: (step, group.start_version) for step, batch in enumerate(batches) for group in batch}

    consumed = run_virtual(main())
    assert consumed[3] == (1, 0), "begun at version 0, so due in batch 1, and waited for"


def test_a_failed_attempt_is_retried_with_the_newest_version():
    async def main():
        async def rollout(request):
            await asyncio.sleep(5 if request.group_id == 3 else 1)
            if request.group_id == 3 and request.attempt == 1:
                raise OSError("the environment broke")
            return request.attempt

        scheduler = scheduler_of(rollout, ratio=1, max_staleness=2)
        batches = await run_and_train(scheduler)
        return next(group for batch in batches for group in batch if group.group_id == 3)

    group = run_virtual(main())
    assert group.result == 2
    assert group.start_version > 0


@pytest.mark.parametrize("retries", [0, 1])
def test_a_failure_of_the_group_that_holds_up_a_batch_frees_it_at_once(retries):
    """Group 1 is due in batch 1. At 10 s it is retried with newer weights, so it is due later, or it is dropped."""

    async def main():
        async def rollout(request):
            if request.group_id == 1 and request.attempt == 1:
                await asyncio.sleep(10)
                raise OSError("the environment broke")
            await asyncio.sleep(100 if request.group_id in (1, 3) else 1)

        scheduler = scheduler_of(rollout, batch_size=1, ratio=1, max_staleness=1, max_group_retries=retries)
        runner = asyncio.create_task(scheduler.run())
        await scheduler.next_batch()
        scheduler.training_step_done(1)
        scheduler.weights_published(1)
        (group,) = await scheduler.next_batch()
        assert (group.group_id, asyncio.get_running_loop().time()) == (2, 10)
        runner.cancel()

    run_virtual(main())


def test_a_group_that_keeps_failing_is_dropped_with_its_cause_and_its_slot_given_back(caplog):
    async def main():
        async def rollout(request):
            await asyncio.sleep(1)
            if request.group_id == 1:
                attempts.append(request.attempt)
                raise OSError("the environment broke")

        attempts = []
        scheduler = scheduler_of(rollout, max_group_retries=2)
        batches = await run_and_train(scheduler)
        assert [[group.group_id for group in batch] for batch in batches] == [[0, 2], [3, 4], [5, 6]]
        assert scheduler.ledger.dropped == {"failed": 1}
        assert attempts == [1, 2, 3]
        assert "group 1 failed 3 times and is dropped: OSError('the environment broke')" in caplog.text

    run_virtual(main())


def test_filtered_groups_give_their_slots_back():
    """Without the slot given back, ratio 0 would wait for ever for a batch that can no longer fill."""

    async def main():
        scheduler = scheduler_of(echo, group_filter=lambda result: result % 30 != 0)
        batches = await run_and_train(scheduler)
        assert [group.item for batch in batches for group in batch] == [1, 2, 4, 5, 7, 8]
        assert scheduler.ledger.dropped == {"filtered": 3}

    run_virtual(main())


def test_a_deadline_of_the_rollout_itself_is_a_failure():
    async def main():
        async def rollout(request):
            async with asyncio.timeout(10):
                await asyncio.sleep(1000 if request.group_id == 0 else 1)

        scheduler = scheduler_of(rollout, max_group_retries=1)
        await run_and_train(scheduler)
        assert scheduler.ledger.dropped == {"failed": 1}

    run_virtual(main())


def test_something_cancelled_inside_a_rollout_is_a_failure_of_that_attempt():
    async def main():
        async def rollout(request):
            if request.attempt == 1:
                lost = asyncio.get_running_loop().create_future()
                lost.cancel()
                await lost
            return request.attempt

        scheduler = scheduler_of(rollout)
        batches = await run_and_train(scheduler)
        assert {group.result for batch in batches for group in batch} == {2}

    run_virtual(main())


@pytest.mark.parametrize("caught", [False, True])
def test_so_it_is_after_tasks_of_the_rollout_failed(caught):
    """Python 3.11 leaves the owner of a group of tasks, one of which failed, marked as cancelled."""

    async def fails():
        raise RuntimeError("a sample")

    async def samples():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(asyncio.sleep(5))
            tasks.create_task(fails())

    async def rollout(request):
        if request.attempt == 1:
            with suppress(ExceptionGroup) if caught else nullcontext():
                await samples()
        if request.attempt <= 2:
            lost = asyncio.get_running_loop().create_future()
            lost.cancel()
            await lost
        return request.attempt

    batches = run_virtual(run_and_train(scheduler_of(rollout, max_group_retries=2)))
    assert {group.result for batch in batches for group in batch} == {3}


def test_too_many_drops_surface_on_both_sides():
    async def rollout(request):
        await asyncio.sleep(1)
        raise OSError("no route to host")

    scheduler = scheduler_of(rollout, max_group_retries=0, max_consecutive_refunds=5)
    for error in run_virtual(both_sides(scheduler)):
        assert isinstance(error, TooManyDrops)
        assert "5 failed" in str(error) and "no route to host" in str(error)
        assert isinstance(error.__cause__, OSError)
    assert scheduler.ledger.dropped["failed"] == 5
    assert scheduler.ledger.in_flight == 0
    scheduler.ledger.check()


def test_rollouts_that_fail_at_once_do_not_spin_for_ever():
    async def rollout(request):
        raise OSError("refused")

    scheduler = scheduler_of(rollout, max_consecutive_refunds=64)
    assert [type(error) for error in run_virtual(both_sides(scheduler))] == [TooManyDrops, TooManyDrops]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_fatal_error_ends_the_run_at_once(wrapped):
    attempts = []

    async def rollout(request):
        attempts.append(request.group_id)
        await asyncio.sleep(1 + request.group_id)
        fatal = FatalRolloutError("the tokenizer does not fit the model")
        raise ExceptionGroup("samples", [OSError("a sample"), fatal]) if wrapped else fatal

    scheduler = scheduler_of(rollout)
    for error in run_virtual(both_sides(scheduler)):
        assert isinstance(error, ExceptionGroup if wrapped else FatalRolloutError)
    assert attempts == [0, 1]
    assert scheduler.ledger.dropped == {"cancelled": 2}


def test_of_two_errors_the_first_one_ends_the_run():
    async def rollout(request):
        await asyncio.sleep(1)
        raise FatalRolloutError(f"group {request.group_id}")

    assert [str(error) for error in run_virtual(both_sides(scheduler_of(rollout)))] == ["group 0"] * 2


def test_a_run_that_has_failed_starts_nothing_more():
    """Whatever is reported to it before it has come to its end."""

    async def main():
        scheduler = scheduler_of(echo, group_filter=lambda result: broken())

        def broken():
            scheduler.pause_admission()
            raise KeyError("scores")

        errors = asyncio.gather(scheduler.run(), scheduler.next_batch(), return_exceptions=True)
        await asyncio.sleep(0)
        while not scheduler.why_waiting() == "stopped":
            await asyncio.sleep(0.5)
        scheduler.resume_admission()
        await errors
        assert scheduler.ledger.issued == 2 and scheduler.ledger.dropped == {"cancelled": 2}

    run_virtual(main())


def test_a_filter_that_raises_ends_the_run_and_names_the_group():
    def broken(result):
        raise KeyError("scores")

    for error in run_virtual(both_sides(scheduler_of(echo, group_filter=broken))):
        assert isinstance(error, KeyError)
        assert error.__notes__ == ["raised by the group filter on group 0"]


def test_what_is_told_of_filtered_groups_ends_the_run_with_its_own_error():
    def full_disk(result):
        raise OSError(28, "cannot write: No space left on device", "groups.jsonl")

    told = RolloutScheduler(plan(), itertools.count(), echo, group_filter=lambda result: False, on_filtered=full_disk)
    for error in run_virtual(both_sides(told)):
        assert isinstance(error, OSError) and error.filename == "groups.jsonl"
        assert not getattr(error, "__notes__", []), "no filter is blamed"
    assert "filtered" not in told.ledger.dropped


def test_a_source_that_ends_too_early_is_an_error():
    async def main():
        scheduler = scheduler_of(echo, source=iter(range(3)), ratio=1, max_staleness=1)
        errors = await both_sides(scheduler)
        assert scheduler.why_waiting() == "source"
        return errors

    for error in run_virtual(main()):
        assert isinstance(error, SourceExhausted)
        assert str(error) == "the source ended after 3 groups; 3 more are needed"


def test_a_source_with_just_enough_is_enough():
    assert len(run_virtual(run_and_train(scheduler_of(echo, source=iter(range(6)), ratio=1, max_staleness=1)))) == 3


def test_a_source_that_raises_ends_the_run_with_its_own_error():
    def source():
        yield 0
        raise ValueError("line 2 is no JSON")

    for error in run_virtual(both_sides(scheduler_of(echo, source=source()))):
        assert str(error) == "line 2 is no JSON"
        assert error.__notes__ == ["raised by the source, asked for the item of group 1"]


def test_a_keyboard_interrupt_in_a_rollout_is_not_swallowed():
    async def rollout(request):
        await asyncio.sleep(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_virtual(run_and_train(scheduler_of(rollout)))


def test_a_cancelled_run_stops_its_rollouts_and_tells_the_consumer():
    async def main():
        stopped = []

        async def rollout(request):
            try:
                await asyncio.sleep(1000)
            finally:
                stopped.append(request.group_id)

        scheduler = scheduler_of(rollout)
        runner = asyncio.create_task(scheduler.run())
        consumer = asyncio.create_task(scheduler.next_batch())
        await asyncio.sleep(1)
        runner.cancel()
        results = await asyncio.gather(runner, consumer, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert isinstance(results[1], SchedulerStopped)
        assert stopped == [0, 1]
        assert scheduler.ledger.dropped == {"cancelled": 2}
        assert asyncio.get_running_loop().time() == 1
        assert scheduler.holding_up() == []
        scheduler.pause_admission()
        scheduler.resume_admission()
        assert scheduler.ledger.issued == 2, "nothing starts after the end"

    run_virtual(main())


@pytest.mark.parametrize("policy", ["wait", "drop"])
def test_what_rollouts_raise_when_they_are_stopped_is_no_failure_of_the_run(policy):
    async def main():
        async def rollout(request):
            if request.group_id < 2:
                return
            try:
                await asyncio.sleep(1000)
            finally:
                raise FatalRolloutError("the engine is gone")

        scheduler = scheduler_of(rollout, ratio=1, max_staleness=1, staleness_policy=policy)
        runner = asyncio.create_task(scheduler.run())
        await scheduler.next_batch()
        runner.cancel()
        with pytest.raises(SchedulerStopped):
            await scheduler.next_batch()
        with pytest.raises(asyncio.CancelledError):
            await runner
        with pytest.raises(SchedulerStopped):
            await scheduler.next_batch()

    run_virtual(main())


def test_a_cancelled_consumer_loses_no_batch():
    async def main():
        scheduler = scheduler_of(echo, max_steps=1)
        runner = asyncio.create_task(scheduler.run())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await scheduler.next_batch()
        assert [group.group_id for group in await scheduler.next_batch()] == [0, 1]
        await runner

    run_virtual(main())


def test_a_second_consumer_is_refused():
    async def main():
        scheduler = scheduler_of(echo, max_steps=1)
        runner = asyncio.create_task(scheduler.run())
        consumer = asyncio.create_task(scheduler.next_batch())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="another task already waits"):
            await scheduler.next_batch()
        await consumer
        await runner
        with pytest.raises(RuntimeError, match="runs once"):
            await scheduler.run()

    run_virtual(main())


def test_under_wait_the_late_group_is_waited_for_and_under_drop_it_is_replaced():
    def consumed(policy):
        async def rollout(request):
            await asyncio.sleep(500 if request.group_id == 0 else 1)

        async def main():
            batches = await run_and_train(scheduler)
            return batches, asyncio.get_running_loop().time()

        scheduler = scheduler_of(rollout, ratio=1, max_staleness=1, staleness_policy=policy)
        batches, seconds = run_virtual(main())
        return [group.group_id for batch in batches for group in batch], dict(scheduler.ledger.dropped), seconds

    waited, dropped, seconds = consumed("wait")
    assert sorted(waited) == [0, 1, 2, 3, 4, 5] and dropped == {} and seconds > 500
    replaced, dropped, seconds = consumed("drop")
    assert sorted(replaced) == [1, 2, 3, 4, 5, 6] and dropped == {"stale": 1}
    assert seconds < 20, "what is dropped is not waited for"


def test_a_stale_rollout_that_ends_normally_in_spite_of_its_cancellation_is_not_counted_twice():
    async def main():
        async def rollout(request):
            try:
                await asyncio.sleep(500 if request.group_id == 0 else 1)
            except asyncio.CancelledError:
                return "partial"

        scheduler = scheduler_of(rollout, ratio=1, max_staleness=1, staleness_policy="drop")
        batches = await run_and_train(scheduler)
        assert 0 not in {group.group_id for batch in batches for group in batch}
        assert scheduler.ledger.dropped == {"stale": 1}

    run_virtual(main())


def test_a_budget_alone_would_let_one_slow_rollout_grow_old():
    """With budget for four more batches but R = 1, training waits for the slow group at batch 1."""

    async def main():
        async def rollout(request):
            await asyncio.sleep(1000 if request.group_id == 1 else 0.1)

        scheduler = scheduler_of(rollout, max_steps=8, ratio=4, max_staleness=1)
        batches = await run_and_train(scheduler)
        return [step for step, batch in enumerate(batches) for group in batch if group.group_id == 1]

    assert run_virtual(main()) == [1]


def test_nothing_starts_while_admission_is_paused():
    async def main():
        scheduler = scheduler_of(echo)
        scheduler.pause_admission()
        runner = asyncio.create_task(scheduler.run())
        await asyncio.sleep(100)
        assert scheduler.ledger.issued == 0
        assert scheduler.why_waiting() == "paused"
        scheduler.resume_admission()
        assert scheduler.ledger.issued == 2
        runner.cancel()

    run_virtual(main())


def test_it_says_what_is_waited_for():
    async def main():
        async def rollout(request):
            await asyncio.sleep(100 if request.group_id == 1 else 1)

        scheduler = scheduler_of(rollout, ratio=1, max_staleness=1)
        runner = asyncio.create_task(scheduler.run())
        await asyncio.sleep(0)
        assert (scheduler.why_waiting(), scheduler.ledger.in_flight) == ("budget", 4)
        assert [group.group_id for group in await scheduler.next_batch()] == [0, 2]
        scheduler.training_step_done(1)
        await asyncio.sleep(20)
        assert scheduler.why_waiting() == "version"
        assert scheduler.holding_up() == [], "there are too few ready groups, whoever is late"
        scheduler.weights_published(1)
        await asyncio.sleep(10)
        assert scheduler.why_waiting() == "complete"
        assert scheduler.holding_up() == [1]
        runner.cancel()

    run_virtual(main())


def test_admission_may_be_paused_and_resumed_before_the_run_begins():
    async def main():
        scheduler = scheduler_of(echo)
        scheduler.pause_admission()
        scheduler.resume_admission()
        assert scheduler.ledger.issued == 0
        assert len(await run_and_train(scheduler)) == 3

    run_virtual(main())


def test_only_a_scheduler_that_has_done_nothing_is_resumed():
    async def main():
        progress = RolloutProgress(1, 3, {}, (2,))
        recovered = recover([], progress)
        fresh = scheduler_of(echo)
        with pytest.raises(ValueError, match="1 steps of 2 groups were done, but 1 groups"):
            fresh.resume(progress, recover([], replace(progress, open_groups=(1, 2))), None)
        resumed = scheduler_of(echo)
        resumed.resume(progress, recovered, None)
        with pytest.raises(RuntimeError, match="before it has done anything"):
            resumed.resume(progress, recovered, None)
        runner = asyncio.create_task(resumed.run())
        assert [group.group_id for group in await resumed.next_batch()] == [2, 3]
        runner.cancel()
        running = scheduler_of(echo)
        running.pause_admission()
        runner = asyncio.create_task(running.run())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="before it has done anything"):
            running.resume(progress, recovered, None)
        runner.cancel()

    run_virtual(main())


def test_what_was_in_flight_does_not_begin_again_during_a_pause():
    async def main():
        started = []

        async def rollout(request):
            started.append((request.group_id, request.start_version))
            await asyncio.sleep(1)

        progress = RolloutProgress(1, 4, {}, (2, 3))
        scheduler = scheduler_of(rollout)
        scheduler.resume(progress, recover([], progress), None)
        scheduler.pause_admission()
        runner = asyncio.create_task(scheduler.run())
        await asyncio.sleep(100)
        assert started == [] and scheduler.ledger.in_flight == 2
        scheduler.resume_admission()
        await scheduler.next_batch()
        assert started == [(2, 1), (3, 1)]
        runner.cancel()

    run_virtual(main())


def test_what_a_run_that_was_shortened_has_no_batch_for_is_trained_on_when_it_is_lengthened_again():
    async def main():
        ahead = RolloutProgress(1, 6, {"failed": 1}, (3, 4, 5))
        shortened = scheduler_of(echo, max_steps=2, ratio=1, max_staleness=1)
        shortened.resume(ahead, recover([], ahead), None)
        runner = asyncio.create_task(shortened.run())
        assert [group.group_id for group in await shortened.next_batch()] == [3, 4]
        await runner
        shortened.training_step_done(2)
        assert shortened.ledger.dropped == {"failed": 1, "cancelled": 1}
        progress = shortened.progress()
        assert progress == RolloutProgress(2, 6, {"failed": 1}, (5,))
        lengthened = scheduler_of(echo, max_steps=3, ratio=1, max_staleness=1)
        lengthened.resume(progress, recover([], progress), None)
        runner = asyncio.create_task(lengthened.run())
        assert [group.group_id for group in await lengthened.next_batch()] == [5, 6]
        await runner

    run_virtual(main())


def test_reports_of_training_and_weights_are_checked():
    async def main():
        scheduler = scheduler_of(echo)
        runner = asyncio.create_task(scheduler.run())
        with pytest.raises(ValueError, match="0 batches were handed out"):
            scheduler.training_step_done(1)
        await scheduler.next_batch()
        with pytest.raises(ValueError, match="only 0 training steps are done"):
            scheduler.weights_published(1)
        scheduler.training_step_done(1)
        scheduler.weights_published(1)
        with pytest.raises(ValueError, match="never go back"):
            scheduler.weights_published(0)
        runner.cancel()

    run_virtual(main())


def test_weights_that_never_arrive_are_a_visible_deadlock():
    async def main():
        scheduler = scheduler_of(echo)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(scheduler.run(), name="the-run")
            await scheduler.next_batch()
            scheduler.training_step_done(1)
            await scheduler.next_batch()

    with pytest.raises(Deadlock, match="next_groups"):
        run_virtual(main())


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": 0},
        {"max_steps": 0},
        {"ratio": -1},
        {"max_staleness": -1},
        {"order": "newest"},
        {"staleness_policy": "ignore"},
        {"max_group_retries": -1},
        {"max_consecutive_refunds": 0},
    ],
)
def test_a_plan_that_means_nothing_is_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        plan(**changes)


def test_the_smallest_values_that_mean_something_are_accepted():
    smallest = {"batch_size": 1, "max_steps": 1, "max_group_retries": 0, "max_consecutive_refunds": 1}
    batches = run_virtual(run_and_train(scheduler_of(echo, **smallest)))
    assert [len(batch) for batch in batches] == [1]


def test_a_plan_that_says_sizes_only_is_synchronous_patient_and_bounded():
    assert plan() == plan(
        ratio=0,
        max_staleness=0,
        order="ready_first",
        staleness_policy="wait",
        max_group_retries=2,
        max_consecutive_refunds=64,
    )

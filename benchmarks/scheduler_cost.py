"""Measure the cost of the scheduler per group, with many groups in flight.

Rollouts only wait, on a virtual clock, and training takes no time, so all measured computing is the scheduler's and
asyncio's. The whole life of a group counts: admission, task, completion, choice of the batch. The components are
measured alone on the same number of groups; `bare task` is the cost of asyncio itself for a task that sleeps once.
Figures are CPU time of this process, which other programs on the machine disturb least; `wall` is wall-clock time.

    python benchmarks/scheduler_cost.py --in-flight 10000 --batch-size 512
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import time
from collections.abc import Callable
from fractions import Fraction

from roll.rollout.admission import Admission
from roll.rollout.buffer import ConsumptionOrder, FinishedGroup, GroupBuffer
from roll.rollout.clock import run_virtual
from roll.rollout.ledger import Ledger
from roll.rollout.scheduler import GroupRequest, RolloutScheduler, SchedulePlan


def latencies(count: int) -> list[float]:
    """Draw the virtual seconds of each rollout, log-normal with a long tail."""
    generator = random.Random(0)
    return [generator.lognormvariate(0.0, 0.5) for _ in range(count)]


def plan_for(in_flight: int, batch_size: int, steps: int, order: ConsumptionOrder) -> SchedulePlan:
    """Return a plan that keeps ``in_flight`` groups beyond training, with a bound just large enough for it."""
    ratio = Fraction(max(in_flight - batch_size, 0), batch_size)
    return SchedulePlan(batch_size=batch_size, max_steps=steps, ratio=ratio, max_staleness=-(-ratio // 1), order=order)


def measure_scheduler(plan: SchedulePlan) -> tuple[float, float, int]:
    """Return CPU and wall seconds of a whole run, and the most groups in flight after a batch was taken."""
    waits = latencies(plan.batch_size * plan.max_steps)

    async def rollout(request: GroupRequest[int]) -> None:
        await asyncio.sleep(waits[request.group_id])

    async def train(scheduler: RolloutScheduler[int, None]) -> int:
        peak = 0
        for step in range(1, plan.max_steps + 1):
            await scheduler.next_batch()
            scheduler.training_step_done(step)
            scheduler.weights_published(step)
            peak = max(peak, scheduler.ledger.in_flight)
        return peak

    async def main() -> int:
        scheduler = RolloutScheduler(plan, itertools.count(), rollout)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(scheduler.run())
            trainer = tasks.create_task(train(scheduler))
        return trainer.result()

    wall_started, cpu_started = time.perf_counter(), time.process_time()
    peak = run_virtual(main())
    return time.process_time() - cpu_started, time.perf_counter() - wall_started, peak


def measure_bare_tasks(plan: SchedulePlan, in_flight: int) -> float:
    """Return CPU seconds of asyncio alone: the same number of tasks that sleep once, the same number at a time."""
    waits = latencies(plan.batch_size * plan.max_steps)

    async def main() -> None:
        for begin in range(0, len(waits), in_flight):
            async with asyncio.TaskGroup() as tasks:
                for wait in waits[begin : begin + in_flight]:
                    tasks.create_task(asyncio.sleep(wait))

    return timed(lambda: run_virtual(main()))


def measure_ledger(plan: SchedulePlan) -> float:
    """Return CPU seconds of issue, finish and consume."""

    def run() -> None:
        ledger = Ledger()
        for _ in range(plan.batch_size * plan.max_steps):
            group_id = ledger.issue()
            ledger.finish(group_id)
            ledger.consume(group_id)

    return timed(run)


def measure_admission(plan: SchedulePlan) -> float:
    """Return CPU seconds of one decision per group."""
    admission = Admission(
        batch_size=plan.batch_size, max_steps=plan.max_steps, ratio=plan.ratio, max_staleness=plan.max_staleness
    )

    def run() -> None:
        for number in range(plan.batch_size * plan.max_steps):
            admission.refusal(number)

    return timed(run)


def measure_buffer(plan: SchedulePlan, in_flight: int) -> float:
    """Return CPU seconds of start, finish, readiness check and batch selection; groups finish in random order."""
    total = plan.batch_size * plan.max_steps
    generator = random.Random(0)
    buffer: GroupBuffer[None, None] = GroupBuffer(
        batch_size=plan.batch_size, max_staleness=plan.max_staleness, order=plan.order
    )
    started_at_version: dict[int, int] = {}
    running: list[int] = []

    def refill() -> None:
        limit = min(total, buffer.batches_taken * plan.batch_size + in_flight)
        for group_id in range(len(started_at_version), limit):
            buffer.start(group_id, buffer.batches_taken)
            started_at_version[group_id] = buffer.batches_taken
            running.append(group_id)

    def finish_one() -> None:
        position = generator.randrange(len(running))
        running[position], running[-1] = running[-1], running[position]
        group_id = running.pop()
        buffer.finish(FinishedGroup(group_id, None, None, started_at_version[group_id]))

    def run() -> None:
        refill()
        while buffer.batches_taken < plan.max_steps:
            finish_one()
            while buffer.batch_ready():
                buffer.take()
                refill()

    return timed(run)


def timed(function: Callable[[], object]) -> float:
    """Return CPU seconds of one call."""
    started = time.process_time()
    function()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description="Scheduler cost per group, in CPU microseconds.")
    parser.add_argument("--in-flight", type=int, default=10_000, help="groups in flight")
    parser.add_argument("--batch-size", type=int, default=512, help="groups per training step")
    parser.add_argument("--steps", type=int, default=100, help="training steps")
    arguments = parser.parse_args()
    groups = arguments.batch_size * arguments.steps
    size = f"{arguments.in_flight} groups in flight, {arguments.batch_size} per batch, {groups} groups in all"
    print(f"{size}; CPU microseconds per group")
    for order in ("ready_first", "fifo"):
        plan = plan_for(arguments.in_flight, arguments.batch_size, arguments.steps, order)
        cpu_seconds, wall_seconds, peak = measure_scheduler(plan)
        figures = {
            "whole life": cpu_seconds,
            "  wall": wall_seconds,
            "  bare task": measure_bare_tasks(plan, arguments.in_flight),
            "  ledger": measure_ledger(plan),
            "  admission": measure_admission(plan),
            "  buffer": measure_buffer(plan, arguments.in_flight),
        }
        print(f"{order} (bound {plan.max_staleness}, up to {peak} in flight after a batch was taken)")
        for name, value in figures.items():
            print(f"  {name:<14}{1e6 * value / groups:8.2f}")


if __name__ == "__main__":
    main()

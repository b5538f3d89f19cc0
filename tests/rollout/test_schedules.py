"""Thousands of adversarial schedules around the real scheduler, on a virtual clock.

Each schedule has its own latencies, failures, filters, hanging rollouts, publication delays, training times and pauses.
The world below keeps accounts of its own, so that the ledger is not its own witness.
"""

import asyncio
import itertools
import math
import random
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction

from hypothesis import example, given, settings
from hypothesis import strategies as st

from roll.rollout.clock import run_virtual
from roll.rollout.scheduler import FatalRolloutError, RolloutScheduler, SchedulePlan
from tests.tiers import examples
from tests.witness import Witness

RATIOS = [0, 0.25, 0.5, 1, 1.5, 2, 3]
NO_END = 1e5
"""Seconds of a rollout that hangs: longer than anything else in a schedule."""


@dataclass(frozen=True)
class Case:
    plan: SchedulePlan
    interval: int
    """Weights are published every so many steps."""
    latencies: tuple[float, ...] | str
    """Seconds, repeated over the groups, or the name of a distribution."""
    publish_delays: tuple[float, ...]
    train_seconds: tuple[float, ...]
    pauses: tuple[float, ...]
    """Seconds of going on and of pausing, alternating; empty: no pauses."""
    failures: float
    hangs: float
    filtered: float
    prefetch: bool
    """Whether batch t + 1 is asked for while step t trains."""
    seed: int
    least: int = 100
    """Groups of a batch that are asked for at a time."""


DISTRIBUTIONS = ["log-normal", "one slow", "half slow", "slow crowds", "youngest first", "at once"]
SECONDS = st.sampled_from([0.0, 0.01, 0.3, 1.0, 1.0, 5.0, 40.0])


@st.composite
def cases(draw, ratios=RATIOS, orders=("ready_first", "fifo"), policies=("wait", "drop"), clean=None):
    clean = draw(st.booleans()) if clean is None else clean
    ratio = draw(st.sampled_from(ratios))
    interval = draw(st.integers(1, 3))
    hangs = 0.0 if clean else draw(st.sampled_from([0.0, 0.0, 0.1, 0.3]))
    default_bound = math.ceil(ratio) + interval - 1
    plan = SchedulePlan(
        batch_size=draw(st.integers(1, 4)),
        max_steps=draw(st.integers(1, 7)),
        ratio=ratio,
        max_staleness=draw(st.integers(interval - 1, default_bound + 1)),
        order=draw(st.sampled_from(orders)),
        staleness_policy=draw(st.sampled_from(policies)),
        max_group_retries=draw(st.integers(0, 2)),
        max_consecutive_refunds=100_000,
    )
    short_list = st.lists(SECONDS, min_size=1, max_size=6).map(tuple)
    return Case(
        plan=plan,
        interval=interval,
        latencies=draw(short_list | st.sampled_from(DISTRIBUTIONS)),
        publish_delays=draw(short_list),
        train_seconds=draw(short_list),
        pauses=draw(st.just(()) | st.tuples(st.sampled_from([0.7, 3.0, 30.0]), SECONDS)),
        failures=0.0 if clean else draw(st.sampled_from([0.0, 0.1, 0.5])),
        hangs=hangs,
        filtered=0.0 if clean else draw(st.sampled_from([0.0, 0.2, 0.6])),
        prefetch=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        least=draw(st.sampled_from([100, 1, 2])),
    )


async def batch_in_parts(scheduler, least):
    """The next batch, and that its parts are as large as was asked for, sorted, and no more than they must be."""
    groups, complete = [], False
    while not complete:
        part = await scheduler.next_groups(least)
        ids = [group.group_id for group in part.groups]
        assert ids == sorted(set(ids)) and ids
        complete = part.completes
        assert complete or len(ids) >= least
        groups += part.groups
        assert complete == (len(groups) == scheduler.plan.batch_size)
        assert complete or scheduler.ledger.buffered >= len(groups), "consumed before the batch was whole"
    return sorted(groups, key=lambda group: group.group_id)


class World:
    """Everything around the scheduler: rollouts, a trainer, a publisher, a validator that pauses."""

    def __init__(self, case):
        self.case = case
        self.plan = case.plan
        self.witness = Witness()
        self.handed_items = itertools.count()
        self.scheduler = RolloutScheduler(
            case.plan, self.handed_items, self.rollout, group_filter=lambda result: result["kept"]
        )
        self.started = []
        self.attempts = {}
        self.last_version = {}
        self.returned = set()
        self.filtered = set()
        self.batches = []
        self.steps_done = 0
        self.version = 0
        self.budget = Fraction(case.plan.ratio) * case.plan.batch_size

    def check(self):
        ledger = self.scheduler.ledger
        ledger.check()
        assert ledger.consumed % self.plan.batch_size == 0
        assert len(self.started) <= ledger.issued
        ahead = ledger.net_issued - (self.steps_done + 1) * self.plan.batch_size
        assert ahead < self.budget + 1, "more groups were issued than the budget allows"

    def latency(self, dice, group_id):
        kind = self.case.latencies
        if kind == "log-normal":
            return dice.lognormvariate(0, 1.5)
        if kind == "one slow":
            return 300.0 if group_id == self.case.seed % 5 and not self.case.hangs else 0.1
        if kind == "half slow":
            return 60.0 if dice.random() < 0.5 else 0.1
        if kind == "slow crowds":
            return 60.0 if group_id % (3 * self.plan.batch_size) < 2 * self.plan.batch_size else 0.1
        if kind == "youngest first":
            return 20.0 - group_id % 16
        if kind == "at once":
            return None
        return kind[group_id % len(kind)]

    async def rollout(self, request):
        """End the run at once where something is wrong: any other exception of a rollout would only be retried."""
        try:
            with self.witness.watching():
                async with asyncio.timeout(90.0 if self.case.hangs else None):
                    return await self.roll_out(request)
        except AssertionError as violation:
            raise FatalRolloutError("see what was asserted") from violation

    async def roll_out(self, request):
        self.check()
        if request.attempt == 1:
            self.started.append(request.group_id)
        assert request.attempt == self.attempts.get(request.group_id, 0) + 1
        assert request.item == request.group_id
        assert request.start_version <= self.version
        assert request.start_version >= self.last_version.get(request.group_id, 0)
        self.attempts[request.group_id] = request.attempt
        self.last_version[request.group_id] = request.start_version
        dice = random.Random(self.case.seed * 1_000_003 + request.group_id * 101 + request.attempt)
        if dice.random() < self.case.hangs:
            await asyncio.sleep(NO_END)
        latency = self.latency(dice, request.group_id)
        if latency is not None:
            await asyncio.sleep(latency)
        self.check()
        if dice.random() < self.case.failures:
            raise OSError("the environment broke")
        assert request.group_id not in self.returned
        self.returned.add(request.group_id)
        kept = dice.random() >= self.case.filtered
        if not kept:
            self.filtered.add(request.group_id)
        return {"group_id": request.group_id, "kept": kept}

    async def produce_batches(self, channel):
        for index in range(self.plan.max_steps):
            batch = await batch_in_parts(self.scheduler, self.case.least)
            self.accept(index, batch)
            await channel.put(batch)

    def accept(self, index, batch):
        ids = [group.group_id for group in batch]
        assert len(batch) == self.plan.batch_size
        assert ids == sorted(set(ids))
        for group in batch:
            assert group.start_version == self.last_version[group.group_id]
            assert index - group.start_version <= self.plan.max_staleness, "older than the bound"
            assert group.result["group_id"] == group.item == group.group_id
        self.batches.append(ids)
        self.check()

    async def train(self):
        channel = asyncio.Queue(maxsize=1)
        publications = asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            publisher = tasks.create_task(self.publish(publications))
            if self.case.prefetch:
                tasks.create_task(self.produce_batches(channel))
            for step in range(self.plan.max_steps):
                if not self.case.prefetch:
                    self.accept(step, await batch_in_parts(self.scheduler, self.case.least))
                else:
                    await channel.get()
                await asyncio.sleep(self.case.train_seconds[step % len(self.case.train_seconds)])
                self.steps_done = step + 1
                self.scheduler.training_step_done(step + 1)
                self.check()
                if (step + 1) % self.case.interval == 0:
                    publications.put_nowait(step + 1)
            publisher.cancel()

    async def publish(self, publications):
        for delay in itertools.cycle(self.case.publish_delays):
            version = await publications.get()
            await asyncio.sleep(delay)
            self.version = version
            self.scheduler.weights_published(version)
            self.check()

    async def validate(self):
        while self.case.pauses:
            await asyncio.sleep(self.case.pauses[0])
            issued = self.scheduler.ledger.issued
            self.scheduler.pause_admission()
            await asyncio.sleep(self.case.pauses[1])
            assert self.scheduler.ledger.issued == issued, "a group was issued while admission was paused"
            self.scheduler.resume_admission()

    async def main(self):
        async with asyncio.TaskGroup() as tasks:
            validator = tasks.create_task(self.validate())
            runner = tasks.create_task(self.scheduler.run())
            await self.train()
            await runner
            validator.cancel()
            with suppress(asyncio.CancelledError):
                await validator

    def run(self):
        try:
            run_virtual(self.main())
        finally:
            self.witness.testify()
        self.check()
        ledger = self.scheduler.ledger
        consumed = [group_id for batch in self.batches for group_id in batch]
        assert ledger.consumed == len(consumed) == len(set(consumed)) == self.plan.max_steps * self.plan.batch_size
        assert ledger.in_flight == ledger.buffered == 0 and ledger.open_groups() == []
        assert ledger.issued == ledger.consumed + sum(ledger.dropped.values()) == next(self.handed_items)
        assert ledger.dropped["cancelled"] == 0
        assert set(consumed) <= self.returned - self.filtered
        assert self.started == sorted(set(self.started)), "groups begin in issue order, once"
        if self.plan.staleness_policy == "wait":
            assert ledger.dropped["stale"] == 0
            assert self.started == list(range(ledger.issued))
            assert set(consumed) == self.returned - self.filtered, "a good group was lost"
            assert ledger.dropped["filtered"] == len(self.filtered)
        return self


@settings(max_examples=examples(1500))
@given(cases())
def test_any_schedule_keeps_bound_and_equation_and_ends(case):
    World(case).run()


@settings(max_examples=examples(300))
@given(
    batch_size=st.integers(1, 2),
    ratio=st.sampled_from([1.5, 2, 3]),
    policy=st.sampled_from(["wait", "drop"]),
    latencies=st.lists(st.sampled_from([0.1, 0.1, 60.0, 70.0]), min_size=8, max_size=12).map(tuple),
)
def test_fast_young_groups_never_crowd_out_slow_old_ones(batch_size, ratio, policy, latencies):
    """The schedules that the rule "wait for groups due now" gets wrong: several slow groups share a later deadline."""
    plan = SchedulePlan(
        batch_size=batch_size, max_steps=8, ratio=ratio, max_staleness=math.ceil(ratio), staleness_policy=policy
    )
    World(Case(plan, 1, latencies, (0.0,), (0.01,), (), 0.0, 0.0, 0.0, False, 0)).run()


# Group 1 holds up batch 2, for which others are ready when it is asked for.
HELD_UP = SchedulePlan(batch_size=1, max_steps=6, ratio=2, max_staleness=2)


@settings(max_examples=examples(300))
@given(cases(policies=("wait",), clean=True))
@example(Case(HELD_UP, 1, (0.01, 40.0, 0.01), (0.0,), (0.3,), (), 0.0, 0.0, 0.0, False, 0))
def test_nothing_is_dropped_for_being_slow(case):
    world = World(case).run()
    assert world.scheduler.ledger.issued == world.scheduler.ledger.consumed


@settings(max_examples=examples(200))
@given(cases(ratios=(0,), policies=("wait",)))
def test_ratio_zero_with_bound_zero_is_on_policy(case):
    world = World(case)
    if case.plan.max_staleness == 0:
        accept = world.accept

        def accept_on_policy(index, batch):
            assert {group.start_version for group in batch} == {index}
            accept(index, batch)

        world.accept = accept_on_policy
    world.run()


@settings(max_examples=examples(200))
@given(cases(orders=("fifo",)))
def test_fifo_is_issue_order(case):
    world = World(case).run()
    consumed = [group_id for batch in world.batches for group_id in batch]
    assert consumed == sorted(consumed)
    if not (case.failures or case.hangs or case.filtered or case.plan.staleness_policy == "drop"):
        assert consumed == list(range(len(consumed))), "the same groups meet in the same batches at any latency"


@settings(max_examples=examples(100))
@given(cases(), st.integers(1, 60))
def test_a_run_stopped_at_any_moment_still_adds_up(case, seconds):
    world = World(case)

    async def main():
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await world.main()
        return len(asyncio.all_tasks())

    assert run_virtual(main()) == 1, "a task outlived the run"
    world.witness.testify()
    ledger = world.scheduler.ledger
    ledger.check()
    assert ledger.in_flight == ledger.buffered == 0
    assert ledger.issued == ledger.consumed + sum(ledger.dropped.values())

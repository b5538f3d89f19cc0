"""Runs that are killed again and again, on a virtual clock, with the real scheduler and the real recovery.

Weights are stood for by a fingerprint of everything that went into them, so training on a rollout of weights that no
longer exist, on a group twice, or on another group than the undisturbed run would, is seen in one comparison.
"""

import asyncio
import itertools
import json
import math
import random
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.buffer import FinishedGroup
from roll.rollout.clock import run_virtual
from roll.rollout.journal import RolloutProgress, dropped_record, finished_record, recover, went_back_record
from roll.rollout.scheduler import FatalRolloutError, RolloutScheduler, SchedulePlan
from tests.rollout.test_schedules import batch_in_parts
from tests.tiers import examples
from tests.witness import Witness


@dataclass(frozen=True)
class Case:
    plan: SchedulePlan
    save_every: int
    latencies: tuple[float, ...]
    train_seconds: float
    publish_seconds: float
    failures: float
    filtered: float
    prefetch: bool
    forgotten: int
    """Records that were not on the disk yet at each crash."""
    damaged: bool
    """Whether the newest checkpoint is lost at each crash as well."""
    seed: int
    later_ratio: float | None = None
    """Of every process but the first; None: the same."""
    least: int = 100
    """Groups of a batch that are asked for at a time."""
    new_dice: bool = False
    """Whether a group that is made again in a later process may end in another way."""

    def plan_of(self, life: int) -> SchedulePlan:
        if life == 0 or self.later_ratio is None:
            return self.plan
        return replace(self.plan, ratio=self.later_ratio, max_staleness=math.ceil(self.later_ratio))


@dataclass
class Disk:
    """What outlives a crash."""

    records: list = field(default_factory=list)
    checkpoints: list[tuple[RolloutProgress, list[str]]] = field(default_factory=list)
    """Progress, and the fingerprints of all versions up to its step."""
    batches: dict[int, list[int]] = field(default_factory=dict)
    """Groups of each step whose training is part of what the last checkpoint (or the end) stands for."""


class Life:
    """One process of a run, from its start or resumption to its end or death."""

    def __init__(self, case: Case, disk: Disk, number: int) -> None:
        self.case, self.disk, self.plan = case, disk, case.plan_of(number)
        self.witness = Witness()
        self.luck = number if case.new_dice else 0
        items = itertools.count(1000)
        self.scheduler = RolloutScheduler(
            self.plan, items, self.rollout, group_filter=lambda result: result["kept"], observer=self
        )
        progress, versions = disk.checkpoints[-1] if disk.checkpoints else (RolloutProgress.at_start(), ["initial"])
        self.versions = list(versions)
        self.step = self.first_step = progress.steps_done
        self.version = self.step
        recovered = recover(disk.records, progress)
        self.begun_again = set(recovered.in_flight)
        self.known = set(recovered.finished)
        disk.records.append(went_back_record(progress.steps_done))
        disk.batches = {step: ids for step, ids in disk.batches.items() if step < self.step}
        self.scheduler.resume(progress, recovered, self.restored)

    def restored(self, group_id, item, payload):
        assert item == 1000 + group_id
        kept = json.loads(payload)
        return FinishedGroup(group_id, item, kept["result"], kept["start_version"])

    def group_finished(self, group):
        kept = {"result": group.result, "start_version": group.start_version}
        record = finished_record(group.group_id, group.result["version"], json.dumps(kept).encode())
        self.disk.records.append(record)

    def group_dropped(self, group_id, reason, version):
        self.disk.records.append(dropped_record(group_id, version, reason))

    async def rollout(self, request):
        """End the run at once where something is wrong: any other exception of a rollout would only be retried."""
        try:
            with self.witness.watching():
                return await self.roll_out(request)
        except AssertionError as violation:
            raise FatalRolloutError("see what was asserted") from violation

    async def roll_out(self, request):
        assert request.item == 1000 + request.group_id
        if self.case.later_ratio is None:
            assert request.group_id not in self.known, "a finished group was made again"
        dice = random.Random((self.luck << 40) + self.case.seed * 1_000_003 + request.group_id * 101 + request.attempt)
        failed, filtered = dice.random() < self.case.failures, dice.random() < self.case.filtered
        await asyncio.sleep(self.case.latencies[request.group_id % len(self.case.latencies)])
        if failed:
            raise OSError("the environment broke")
        # The first token was sampled with the weights of the start, the last one with the present ones.
        made_by = [self.versions[request.start_version], self.versions[self.version]]
        return {
            "made_by": made_by,
            "start_version": request.start_version,
            "version": self.version,
            "kept": not filtered,
        }

    def accept(self, step, batch):
        ids = [group.group_id for group in batch]
        assert len(ids) == self.plan.batch_size
        assert not {group_id for earlier in self.disk.batches.values() for group_id in earlier} & {*ids}
        for group in batch:
            assert step - group.start_version <= self.plan.max_staleness
            assert group.result["made_by"] == [
                self.versions[group.result["start_version"]],
                self.versions[group.result["version"]],
            ], "trained on a rollout of weights that were lost"
        return ids, [group.result["made_by"] for group in batch]

    async def train(self):
        channel, publications = asyncio.Queue(maxsize=1), asyncio.Queue()
        async with asyncio.TaskGroup() as tasks:
            publisher = tasks.create_task(self.publish(publications))
            if self.case.prefetch:
                tasks.create_task(self.produce_batches(channel))
            for step in range(self.first_step, self.plan.max_steps):
                batch = await (channel.get() if self.case.prefetch else self.next_batch())
                ids, made_by = self.accept(step, batch)
                await asyncio.sleep(self.case.train_seconds)
                self.disk.batches[step] = ids
                self.step = step + 1
                self.versions.append(str(hash((self.versions[-1], tuple(ids), str(made_by)))))
                self.scheduler.training_step_done(self.step)
                if self.step % self.case.save_every == 0:
                    self.disk.checkpoints.append((self.scheduler.progress(), list(self.versions)))
                publications.put_nowait(self.step)
            publisher.cancel()

    async def produce_batches(self, channel):
        for _ in range(self.first_step, self.plan.max_steps):
            await channel.put(await self.next_batch())

    async def next_batch(self):
        return await batch_in_parts(self.scheduler, self.case.least)

    async def publish(self, publications):
        while True:
            version = await publications.get()
            await asyncio.sleep(self.case.publish_seconds)
            self.version = version
            self.scheduler.weights_published(version)

    async def main(self):
        self.scheduler.pause_admission()
        async with asyncio.TaskGroup() as tasks:
            runner = tasks.create_task(self.scheduler.run())
            trainer = tasks.create_task(self.train())
            await asyncio.sleep(0.5)
            if not runner.done():  # A pause holds back what is to begin again; it may not lose it.
                assert self.begun_again <= {*self.scheduler.ledger.open_groups()}
            self.scheduler.resume_admission()
            await trainer

    def live(self, seconds: float | None) -> bool:
        """Whether it reached the end of the run."""

        async def mortal():
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self.main()
                    return True
            return False

        before_the_end = len(self.disk.records)
        try:
            ended = run_virtual(mortal())
        finally:
            self.witness.testify()
        if not ended:
            forgotten = min(self.case.forgotten, len(self.disk.records) - before_the_end)
            del self.disk.records[len(self.disk.records) - forgotten :]
            made = [progress.steps_done for progress, _ in self.disk.checkpoints]
            if self.case.damaged and made and made[-1] > self.first_step:
                self.disk.checkpoints.pop()
        return ended


def run(case: Case, lifetimes: list[float]) -> Life:
    disk = Disk()
    for number, seconds in enumerate([*lifetimes, None]):
        life = Life(case, disk, number)
        if life.live(seconds):
            break
    assert_each_group_ended_once(life)
    return life


def assert_each_group_ended_once(life: Life) -> None:
    """After the end of a run."""
    ledger, steps = life.scheduler.ledger, life.plan.max_steps
    ledger.check()
    assert life.step == steps and ledger.open_groups() == []
    consumed = [group_id for step in range(steps) for group_id in life.disk.batches[step]]
    assert len(consumed) == len(set(consumed)) == ledger.consumed
    assert ledger.issued == len(consumed) + ledger.dropped.total(), "a group ended twice, or never"
    assert ledger.dropped["cancelled"] == 0, "more groups were issued than the run has batches for"


@st.composite
def cases(draw, ratios=(0, 0.5, 1, 2), orders=("ready_first", "fifo")):
    ratio = draw(st.sampled_from(ratios))
    plan = SchedulePlan(
        batch_size=draw(st.integers(1, 3)),
        max_steps=draw(st.integers(2, 8)),
        ratio=ratio,
        max_staleness=math.ceil(ratio),
        order=draw(st.sampled_from(orders)),
        staleness_policy=draw(st.sampled_from(["wait", "drop"])),
        max_group_retries=draw(st.integers(0, 1)),
        max_consecutive_refunds=100_000,
    )
    return Case(
        plan=plan,
        save_every=draw(st.integers(1, 4)),
        latencies=tuple(draw(st.lists(st.sampled_from([0.1, 1.0, 3.0, 20.0]), min_size=1, max_size=6))),
        train_seconds=draw(st.sampled_from([0.1, 1.0, 10.0])),
        publish_seconds=draw(st.sampled_from([0.0, 1.0])),
        failures=draw(st.sampled_from([0.0, 0.3])),
        filtered=draw(st.sampled_from([0.0, 0.4])),
        prefetch=draw(st.booleans()),
        forgotten=draw(st.sampled_from([0, 0, 1, 5])),
        damaged=draw(st.booleans()),
        seed=draw(st.integers(0, 2**20)),
        least=draw(st.sampled_from([100, 1, 2])),
        new_dice=draw(st.booleans()),
    )


LIFETIMES = st.lists(st.floats(0.1, 60.0), max_size=5)


@settings(max_examples=examples(600))
@given(cases(), LIFETIMES)
def test_a_run_killed_at_any_moments_consumes_or_drops_every_group_exactly_once(case, lifetimes):
    run(case, lifetimes)


@settings(max_examples=examples(600))
@given(cases(ratios=(1, 2)), st.lists(st.tuples(st.floats(0.1, 60.0), st.integers(1, 2)), min_size=1, max_size=3))
def test_a_run_that_is_shortened_and_lengthened_consumes_or_drops_every_group_exactly_once(case, lives):
    """A process that is killed is followed by one with a step or two left. The last one has enough for everything."""
    disk = Disk()
    ends = [end for seconds, steps in lives for end in ((6, seconds), (steps, None))]
    for number, (steps, seconds) in enumerate([*ends, (6, None)]):
        done = disk.checkpoints[-1][0].steps_done if disk.checkpoints else 0
        life = Life(replace(case, plan=replace(case.plan, max_steps=done + steps), save_every=1), disk, number)
        assert life.live(seconds) or seconds is not None
    assert_each_group_ended_once(life)


@pytest.mark.parametrize("order", ["ready_first", "fifo"])
@pytest.mark.parametrize("new_dice", [False, True])
def test_a_crash_keeps_a_drop_together_with_its_successor_or_neither(order, new_dice):
    plan = SchedulePlan(
        batch_size=2,
        max_steps=5,
        ratio=0.5,
        max_staleness=1,
        order=order,
        max_group_retries=1,
        max_consecutive_refunds=100_000,
    )
    case = Case(
        plan=plan,
        save_every=1,
        latencies=(0.1,),
        train_seconds=1.0,
        publish_seconds=1.0,
        failures=0.3,
        filtered=0.4,
        prefetch=True,
        forgotten=0,
        damaged=True,
        seed=145,
        new_dice=new_dice,
    )
    run(case, [7.0])


@settings(max_examples=examples(300))
@given(cases(), st.sampled_from([0, 0.5, 1, 3]), LIFETIMES)
def test_so_does_one_that_goes_on_with_another_ratio(case, later_ratio, lifetimes):
    run(replace(case, later_ratio=later_ratio), lifetimes)


@settings(max_examples=examples(300))
@given(cases(ratios=(0,), orders=("fifo",)), LIFETIMES)
def test_at_ratio_zero_a_killed_run_is_the_undisturbed_one(case, lifetimes):
    case = replace(case, new_dice=False)  # A rollout's own dice come from the seed of the run and the group.
    assert run(case, lifetimes).versions == run(case, []).versions

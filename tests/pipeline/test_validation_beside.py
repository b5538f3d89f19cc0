"""Validations on replicas that keep their version: the real stages, scheduler, pool and validator, in virtual time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import partial

import pytest
from test_publication_schedule import Run

from roll.pipeline.rollouts import ValidationGenerator, ValidationResult, Validator
from tests.runtime.local_engines import request
from tests.tiers import examples


@dataclass(frozen=True)
class Measures(Validator):
    """Six requests a second apart; each takes as many seconds as it has tokens."""

    run_of: Run
    tokens: int = 6
    before: dict = field(default_factory=dict)
    """Version -> what happens before its first request."""

    async def measure(self, version):
        generator = ValidationGenerator(self.run_of.gate)

        async def one(index):
            await asyncio.sleep(index * (self.tokens > 6))
            asked = request(f"validation-{version}-{index}", self.tokens)
            return self.run_of.group(index, await generator.generate(asked))

        if version in self.before:
            await self.before[version]()
        groups = await self.made(6, one)
        assert len(groups) == 6
        return ValidationResult(version, {"val/addition/accuracy": float(version)}, list(groups.values()))


def beside(tmp_path, monkeypatch, *, tokens=6, pool, mode="overlap", **changes) -> Run:
    """A run that validates on replicas of its own; ``pool``: settings of its engines."""
    settings = {"mode": mode, "data_args": {"file_name": "val.jsonl"}}
    run = Run(tmp_path, monkeypatch, validation=settings, **changes)
    local = run.local
    run.local = lambda: local(**{"replicas": 4, "pinned_replicas": 1, **pool})
    run.validator = Measures(run, tokens, timeout_seconds=5000, attempts=3, on_event=run.events.append)
    return run


def check_records(run: Run, versions) -> None:
    """Each step has one record, in order, and those of validated versions have their result."""
    assert run.recorder.validated == versions
    assert list(run.recorder.steps) == list(range(run.config.max_steps + 1))
    told = {step: metrics.get("val/addition/accuracy") for step, metrics in run.recorder.steps.items()}
    assert {step: value for step, value in told.items() if value is not None} == {each: each for each in versions}


def longest_step(run: Run) -> float:
    ends = run.trainer.ends
    return max(later - earlier for earlier, later in zip(ends, ends[1:], strict=False))


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize(("tokens", "eval_steps", "pinned"), [(6, 1, 1), (6, 2, 2), (50, 7, 1)])
def test_steps_take_as_long_during_a_validation_as_without_one(
    tmp_path, monkeypatch, tokens, eval_steps, pinned, in_place
):
    """Training takes ten seconds, a publication eight, and a validation six, or longer than five steps."""
    both = {"max_steps": 16, "async_generation_ratio": 2, "rollout_batch_size": 4}
    pool = {"in_place": in_place, "pinned_replicas": pinned}
    done = beside(tmp_path, monkeypatch, tokens=tokens, pool=pool, eval_steps=eval_steps, **both).run()
    plain = Run(tmp_path, monkeypatch, **both)
    plain.local = partial(plain.local, replicas=4, in_place=in_place)
    assert longest_step(done) <= 1.1 * longest_step(plain.run()) == 11
    check_records(done, sorted({*range(0, 17, eval_steps), 16}))
    assert done.held_at_the_end == [16] * 4


def test_records_and_checkpoints_wait_for_the_validation_before_them(tmp_path, monkeypatch):
    done = beside(tmp_path, monkeypatch, tokens=40, pool={}, max_steps=8, eval_steps=4, async_generation_ratio=2).run()
    written = [step for name, step in done.events if name == "written"]
    assert written == list(range(1, 9)) and done.recorder.shown == [0, 4]
    for step in (2, 4, 6, 8):
        assert [name for name, number in done.events if number == step] == ["taken", "written", "synced", "recorded"]
    # The state after step 6 is taken while version 4 is measured.
    assert done.events.index(("taken", 6)) < done.events.index(("written", 4))


def test_the_next_validation_waits_for_the_one_before(tmp_path, monkeypatch):
    done = beside(tmp_path, monkeypatch, tokens=55, pool={}, max_steps=5, eval_steps=1, async_generation_ratio=2).run()
    check_records(done, list(range(6)))


def test_after_the_last_step_all_replicas_validate(tmp_path, monkeypatch):
    run = beside(tmp_path, monkeypatch, pool={}, max_steps=4, eval_steps=2, async_generation_ratio=2)
    kept = {}

    def look_at(version):
        async def look():
            kept[version] = run.pool._pinned is not None

        return look

    run.validator.before.update({version: look_at(version) for version in (2, 4)})
    check_records(run.run(), [0, 2, 4])
    assert kept == {2: True, 4: False}


def test_an_error_in_a_validation_ends_the_run_and_what_was_measured_is_written(tmp_path, monkeypatch):
    run = beside(tmp_path, monkeypatch, pool={}, max_steps=20, eval_steps=3, async_generation_ratio=2)

    async def breaks():
        await asyncio.sleep(35)
        raise RuntimeError("the judge is gone")

    run.validator.before[3] = breaks
    with pytest.raises(RuntimeError, match="the judge is gone"):
        run.run()
    assert list(run.recorder.steps) == list(range(len(run.recorder.steps))) and 5 <= len(run.recorder.steps) <= 8
    assert run.recorder.validated == [0]


@pytest.mark.parametrize("dual_buffer", [True, False])
@pytest.mark.parametrize("who", ["kept", "other", "all"])
def test_a_replica_that_dies_during_a_validation_comes_back_with_its_version(tmp_path, monkeypatch, dual_buffer, who):
    pool = {"dual_buffer": dual_buffer, "in_place": dual_buffer, "replicas": 2}
    run = beside(tmp_path, monkeypatch, pool=pool, max_steps=9, eval_steps=3, async_generation_ratio=2)
    before = {}

    async def kill():
        await asyncio.sleep(25)  # two versions later
        for name, replica in list(run.pool._replicas.items()):
            if who == "all" or (name in run.pool._pinned.names) == (who == "kept"):
                before[name] = replica.version
                replica.handle.kill()

    run.validator.before[3] = kill
    done = run.run()
    assert done.pool.restarts == (2 if who == "all" else 1) == len(before)
    assert set(before.values()) <= {3, 4, 5, 6} and (who == "other") != (3 in before.values())
    check_records(done, [0, 3, 6, 9])


def schedule(tmp_path, monkeypatch, seed: int) -> None:
    dice = random.Random(seed)
    replicas = dice.randint(2, 4)
    mode = dice.choice(["pause", "overlap", "overlap"])
    pulls = dice.random() < 0.4
    dual = pulls or dice.random() < 0.7
    run = beside(
        tmp_path,
        monkeypatch,
        tokens=dice.choice([2, 6, 15, 40]),
        pool={
            "replicas": replicas,
            "pinned_replicas": 0 if mode == "pause" else dice.randint(0, replicas - 1),
            "dual_buffer": dual,
            "in_place": dual and dice.random() < 0.6,
            "in_flight": dice.choice(["keep", "drain"]),
            "max_unavailable": dice.choice([0.25, 1.0]),
            "max_restarts": 10_000,
            "pull_after_seconds": dice.choice([0.0, 3.0, 40.0]) if pulls else None,
        },
        max_steps=dice.randint(3, 9),
        eval_steps=dice.randint(1, 4),
        mode=mode,
        async_generation_ratio=dice.choice([0, 0.5, 1, 2]),
        rollout_batch_size=dice.randint(1, 4),
        weight_update__interval_steps=dice.randint(1, 3),
    )
    often = dice.choice([8, 25, 100])
    told: list[tuple[int, int]] = []
    """The version with which groups start, and the oldest one of the engines that take their requests."""

    async def look():
        while True:
            await asyncio.sleep(0.7)
            oldest = run.pool._router.oldest()
            # One that starts may come with a version that has just become too old, and then takes the next at once.
            if any(replica._changing.locked() for replica in run.pool._replicas.values()):
                continue
            told.append((run.scheduler._admission.version, 10**6 if oldest is None else oldest))

    async def kill():
        while True:
            await asyncio.sleep(dice.expovariate(1 / often))
            alive = list(run.pool._replicas.values())
            for replica in dice.sample(alive, min(len(alive), dice.choice([1, 1, 1, 2, 4]))):
                replica.handle.kill()

    run.background |= {"kill": kill, "look": look}
    done = run.run()
    steps = done.config.max_steps
    check_records(done, sorted({*range(0, steps + 1, done.config.eval_steps), steps}))
    assert done.scheduler.ledger.consumed == steps * done.config.rollout_batch_size
    assert all(version <= oldest for version, oldest in told) and told
    assert done.pool._pinned is None and not done.pool._router._reserved


@pytest.mark.parametrize("block", range(10))
def test_whichever_replicas_die_and_when_a_validation_reads_its_version_and_nothing_hangs(tmp_path, monkeypatch, block):
    for seed in range(examples(20)):
        schedule(tmp_path, monkeypatch, 1000 * block + seed)

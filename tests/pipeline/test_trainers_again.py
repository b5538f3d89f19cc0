"""Trainers that die, and stages that raise, while engines and rollouts live on: the run goes back to its newest
checkpoint without a new engine, and nothing is lost or doubled.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import FinishedRun, run_pipeline
from test_agentic_runs import agentic_config
from tiny import tiny_config

from roll.configs.loader import load_config
from roll.data.records import derive_seed
from roll.engines.pool import InferencePool
from roll.pipeline.roles import Roles
from roll.pipeline.rollouts import Validator
from roll.tracking.status import WRITE_SECONDS, read_status
from roll.tracking.trackers import read_metrics
from roll.trainers.worker import TrainerGroup
from tests.tiers import quick

STEPS, BATCH = 6, 8
CRITIC = {
    "adv_estimator": "gae",
    "critic": {"device_mapping": [0], "training_args": {"learning_rate": 1e-3}},
}
COLOCATED = {"cluster__num_devices_per_node": 1, "actor_infer__device_mapping": [0]}
TWO_ENGINES = {"cluster__num_devices_per_node": 3, "actor_infer__device_mapping": [1, 2]}
REFERENCE = {"reference": {"device_mapping": [0]}, "use_kl_loss": True, "kl_loss_coef": 0.1}


def again(task, *, allowed: int = 1, **changes: Any) -> dict[str, Any]:
    """A run one step off that starts again as often in a row as it is allowed."""
    restarts = {"max_in_a_row": allowed, "delay_seconds": 0} if allowed else {}
    usual = {"max_steps": STEPS, "save_steps": 2, "async_generation_ratio": 1, "num_logged_samples": BATCH}
    return tiny_config(task, **{**usual, "restarts": restarts, **changes})


def killing(role: str, *steps: int, rank: int = 0) -> dict[str, Any]:
    events = [{"kind": "kill", "role": role, "rank": rank, "at_step": step} for step in steps]
    return {"chaos": {"enabled": True, "events": events}}


def started(run: FinishedRun) -> Counter[str]:
    """How often each process of a model was started."""
    log = (run.folder / "logs" / "driver.log").read_text()
    return Counter(re.findall(r"worker (\S+) runs as process", log))


def assert_nothing_lost_or_doubled(run: FinishedRun, *, steps: int = STEPS, went_back: int = 1) -> None:
    summary = run.summary
    assert summary["status"] == "success" and summary["steps"] == steps and summary["error"] is None
    assert len(summary["resumed_at"]) == went_back
    records = [record["step"] for record in read_metrics(run.folder / "metrics.jsonl")]
    assert records == list(range(steps + 1)), "each step has one record"
    samples = [sample for sample in run.samples if sample["split"] == "train"]
    assert Counter(sample["step"] for sample in samples) == dict.fromkeys(range(1, steps + 1), BATCH)
    trained_on = [sample["group_id"] for sample in samples]
    ledger = summary["ledger"]
    dropped = sum(number for name, number in ledger.items() if name.startswith("dropped/"))
    assert len(set(trained_on)) == len(trained_on) == ledger["consumed"] == steps * BATCH
    assert ledger["issued"] == ledger["consumed"] + dropped and ledger["in_flight"] == ledger["buffered"] == 0
    assert len(set(range(ledger["issued"])) - set(trained_on)) == dropped
    assert summary["lag/max"] <= load_config(run.folder / "config.yaml").async_generation_ratio


def assert_same_engines(run: FinishedRun, settings: Mapping[str, Any], *, trainers: int = 2) -> None:
    count = started(run)
    engines = len(settings.get("actor_infer__device_mapping", [1]))
    assert [count[f"actor_infer/{index}"] for index in range(engines)] == [1] * engines
    assert count["actor_train/0"] == trainers
    assert run.metrics[-1]["engine/restarts"] == 0


SETTINGS: dict[str, dict[str, Any]] = {
    "split": {},
    "colocated": COLOCATED,
    "critic": CRITIC,
    "colocated critic and reference": COLOCATED | CRITIC | REFERENCE,
    "streamed": {"actor_train__stream_groups": True},
    "pulled by two": TWO_ENGINES | {"weight_update__mode": "pull"},
    "drained": {"weight_update__in_flight": "drain"},
    "one buffer": {"weight_update__dual_buffer": False},
    "by the object store": {"weight_update__transport": "object_store"},
    "by files": {"weight_update__transport": "checkpoint"},
    "no lag": {"async_generation_ratio": 0},
    "far ahead": {"async_generation_ratio": 2},
}


SOAKED = (
    *("drained", "one buffer", "by the object store", "by files", "far ahead", "colocated critic and reference"),
    *("while it gathers the first version", "while it copies its state", "while it copies its model"),
    *("while one of two engines loads", "while engines wake", "while a validation pauses the rollouts"),
)
"""Alike others that `make test-all` runs."""


@pytest.mark.parametrize("settings", quick(SETTINGS, "split", "colocated", soaked=SOAKED))
def test_a_trainer_that_dies_is_replaced_while_engines_live_on(task, settings):
    config = again(task, save_steps=3, **killing("actor_train", 5), **SETTINGS[settings])
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, SETTINGS[settings])
    assert run.summary["resumed_at"][0] in (0, 3), "a checkpoint may have been on its way to the disk"


@pytest.mark.tier("all")
@pytest.mark.parametrize("role", ["critic", "reference"])
def test_so_is_a_critic_or_a_reference_and_all_go_back_together(task, role, capsys):
    config = again(task, **killing(role, 3), **CRITIC, **REFERENCE)
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, {})
    assert started(run)["critic/0"] == started(run)["reference/0"] == 2
    output = capsys.readouterr().out
    assert f"worker {role}/0 died" in output
    (roles,) = re.findall(r"begun again in place after step [02]: (.*)", output)
    assert set(roles.split(", ")) == {"actor_train", "critic", "reference"}


@pytest.mark.tier("all")
def test_environments_live_on_too(task):
    """A group is eight episodes of one seed."""
    episodes = agentic_config(task, max_steps=STEPS, save_steps=2, async_generation_ratio=1, num_logged_samples=BATCH)
    restarts = {"restarts": {"max_in_a_row": 1, "delay_seconds": 0}}
    run = run_pipeline(task, IN_THIS_PROCESS, episodes | restarts | killing("actor_train", 3))
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, {})
    assert run.metrics[-1]["env_workers/restarts"] == 0


class Death:
    """The death of the policy's first rank in the middle of a call, at the number-th one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, method: str, number: int) -> None:
        self.happened = False
        self._left = number
        self._call: Callable[..., Any] = getattr(owner, method)
        monkeypatch.setattr(owner, method, self._called())
        start = Roles._start_trainers

        async def start_and_note(roles: Roles) -> None:
            await start(roles)
            self.trainer = roles.trainer

        monkeypatch.setattr(Roles, "_start_trainers", start_and_note)

    def _called(self) -> Callable[..., Any]:
        death = self

        async def called(owner: Any, *args: Any, **options: Any) -> Any:
            if isinstance(owner, TrainerGroup) and owner is not death.trainer:
                return await death._call(owner, *args, **options)
            death._left -= 1
            running = asyncio.ensure_future(death._call(owner, *args, **options))
            try:
                if death._left == 0:
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                    death.happened = True
                    death.trainer.workers.workers[0].kill()
                return await running
            finally:
                running.cancel()

        return called


MOMENTS = {
    "while it trains": (TrainerGroup, "train", 3, {}),
    "while it adds up gradients": (TrainerGroup, "train_part", 6, {"actor_train__stream_groups": True}),
    "while it gathers": (TrainerGroup, "gather", 4, {}),
    "while it gathers the first version": (TrainerGroup, "gather", 1, {}),
    "while it sends": (TrainerGroup, "send", 4, {}),
    "while it copies its state": (TrainerGroup, "snapshot", 2, {}),
    "while it copies its model": (TrainerGroup, "export", 2, {}),
    "while it writes": (TrainerGroup, "written", 2, {}),
    "while an engine loads": (InferencePool, "publish", 4, {}),
    "while one of two engines loads": (InferencePool, "publish", 4, TWO_ENGINES),
    "while engines fall asleep": (InferencePool, "offload_states", 4, COLOCATED),
    "while engines wake": (InferencePool, "load_states", 4, COLOCATED),
    "while a validation pauses the rollouts": (Validator, "run", 3, {"validation__mode": "pause"}),
    "while a validation runs beside": (Validator, "run", 3, {"validation__mode": "overlap"} | TWO_ENGINES),
}


@pytest.mark.parametrize("moment", quick(MOMENTS, "while it sends", soaked=SOAKED))
def test_a_trainer_may_die_at_any_moment(task, monkeypatch, moment):
    owner, method, number, settings = MOMENTS[moment]
    if "validation__mode" in settings:
        settings = settings | {"validation__data_args": {"file_name": str(task / "val.jsonl")}, "eval_steps": 1}
    death = Death(monkeypatch, owner, method, number)
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, **settings))
    assert death.happened
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, settings)


@pytest.mark.tier("all")
def test_a_trainer_that_dies_before_the_first_checkpoint_begins_again_at_step_0_with_the_groups_that_are_there(task):
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, **killing("actor_train", 1), save_steps=4))
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, {})
    assert run.summary["resumed_at"] == [0]


@pytest.mark.tier("all")
def test_two_deaths_with_a_checkpoint_in_between_count_once_each_and_engines_outlive_both(task):
    wait = {"stages": {"advantage": "custom_parts:waits_for_checkpoints"}}
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, **killing("actor_train", 2, 5), **wait))
    assert_nothing_lost_or_doubled(run, went_back=2)
    assert_same_engines(run, {}, trainers=3)


@pytest.mark.tier("all")
def test_a_second_death_in_a_row_starts_everything_again_and_a_third_ends_the_run(task, capsys):
    """As often as allowed: the second one was not cured by new trainers."""
    config = again(task, allowed=2, save_steps=STEPS - 1, **killing("actor_train", 1, 2, 3))
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
    output = capsys.readouterr().out
    assert output.count("the trainers begin again after step 0 in 0 s (restart 1 of 2") == 1
    assert output.count("the run begins again after step 0 in 0 s (restart 2 of 2") == 1
    assert run.summary["status"] == "failed" and "worker actor_train/0 died" in run.summary["error"]
    assert started(run)["actor_infer/0"] == 2 and started(run)["actor_train/0"] == 3


@pytest.mark.tier("all")
def test_without_leave_to_restart_or_without_checkpoints_a_death_ends_the_run(task):
    for save_steps in (2, 0):
        config = again(task, allowed=0, save_steps=save_steps, **killing("actor_train", 2))
        run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
        assert run.summary["status"] == "failed" and "worker actor_train/0 died" in run.summary["error"]
        assert set(started(run).values()) == {1}


@pytest.mark.tier("all")
def test_trainers_that_cannot_begin_again_leave_it_to_a_restart_of_everything(task, monkeypatch, capsys):
    async def fail(roles, *_):
        raise OSError("no room for another trainer")

    monkeypatch.setattr(Roles, "start_trainers", fail)
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, **killing("actor_train", 3)))
    output = capsys.readouterr().out
    assert "the trainers could not begin again: OSError: no room for another trainer" in output
    assert "(restart 1 of 1 without" in output.partition("the run begins again")[2], "it is the same restart"
    assert_nothing_lost_or_doubled(run, went_back=2)
    assert started(run)["actor_infer/0"] == started(run)["actor_train/0"] == 2


@pytest.mark.tier("all")
@pytest.mark.parametrize("when", ["forget_weights", "start_trainers"])
def test_engines_that_fail_meanwhile_are_the_same_failure(task, monkeypatch, capsys, when):
    supervise, failing = InferencePool.run, []

    async def run(pool):
        supervising = asyncio.ensure_future(supervise(pool))
        failing.append(asyncio.Event())
        failed = asyncio.ensure_future(failing[-1].wait())
        try:
            await asyncio.wait([supervising, failed], return_when=asyncio.FIRST_COMPLETED)
            raise OSError("no engine is left")
        finally:
            supervising.cancel()
            failed.cancel()

    owner = InferencePool if when == "forget_weights" else Roles
    replaced = getattr(owner, when)

    async def then_fail(*args):
        await replaced(*args)
        failing[-1].set()
        await asyncio.sleep(0.1)

    monkeypatch.setattr(InferencePool, "run", run)
    monkeypatch.setattr(owner, when, then_fail)
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, **killing("actor_train", 3)))
    output = capsys.readouterr().out
    assert "the trainers could not begin again: RuntimeError: the engines have failed meanwhile" in output
    assert "(restart 1 of 1 without" in output.partition("the run begins again")[2], "it is the same restart"
    assert_nothing_lost_or_doubled(run, went_back=1 if when == "forget_weights" else 2)
    assert started(run)["actor_infer/0"] == 2


def test_an_interruption_meanwhile_ends_the_run(task, monkeypatch):
    async def interrupted(roles, *_):
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)

    monkeypatch.setattr(Roles, "start_trainers", interrupted)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        run = run_pipeline(task, IN_THIS_PROCESS, again(task, **killing("actor_train", 2)), expect=1)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert run.summary["status"] == "interrupted" and set(started(run).values()) == {1}


@pytest.mark.tier("all")
def test_meanwhile_the_run_is_said_to_start(task, monkeypatch):
    start, seen = Roles.start_trainers, []

    async def slow_start(roles, *args):
        await asyncio.sleep(2 * WRITE_SECONDS)
        seen.append(read_status(roles._run.status))
        await start(roles, *args)

    monkeypatch.setattr(Roles, "start_trainers", slow_start)
    assert_nothing_lost_or_doubled(run_pipeline(task, IN_THIS_PROCESS, again(task, **killing("actor_train", 2))))
    (status,) = seen
    assert status.phase == "starting" and {worker.name for worker in status.workers} == {"actor_infer/0"}


@pytest.mark.tier("all")
def test_a_stage_that_raises_once_is_tried_again_with_the_same_engines(task, capsys):
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, stages={"advantage": "custom_parts:fails_once"}))
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, {})
    assert "RuntimeError: once; the trainers begin again after step" in capsys.readouterr().out


@pytest.mark.tier("all")
def test_what_new_trainers_cannot_cure_starts_everything_again(task, capsys):
    """A policy that learned from a token that is too old must not be asked twice."""
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, stages={"advantage": "custom_parts:too_old_once"}))
    assert "the trainers begin again" not in capsys.readouterr().out
    assert_nothing_lost_or_doubled(run)
    assert started(run)["actor_infer/0"] == 2


@pytest.mark.tier("all")
def test_a_fault_that_was_injected_is_not_injected_again(task):
    corrupted = {"chaos": {"enabled": True, "events": [{"kind": "corrupt_bucket", "at_step": 3}]}}
    run = run_pipeline(task, IN_THIS_PROCESS, again(task, **corrupted))
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, {})


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.tier("all" if seed < 4 else "soak")) for seed in range(12)]
)
def test_whatever_the_settings_and_the_moment(task, monkeypatch, seed):
    dice = random.Random(derive_seed(seed, "trainers that die"))
    owner, method, number, needed = MOMENTS[dice.choice(sorted(MOMENTS))]
    settings = SETTINGS[dice.choice(sorted(SETTINGS))]
    if owner is Validator:
        needed = needed | {"validation__data_args": {"file_name": str(task / "val.jsonl")}, "eval_steps": 1}
    death = Death(monkeypatch, owner, method, dice.randint(1, number + 2))
    config = again(task, **{**settings, **needed, "save_steps": dice.choice([1, 2, 3])})
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    assert_nothing_lost_or_doubled(run, went_back=int(death.happened))
    assert_same_engines(run, {**settings, **needed}, trainers=1 + death.happened)


@pytest.mark.tier("all")
@pytest.mark.timeout(400)
def test_a_rank_of_two_that_is_killed_in_the_middle(task, ray_cluster):
    """Real processes: the other rank may be in a collective with the dead one."""
    ranks = {
        "cluster__num_devices_per_node": 3,
        "actor_train__device_mapping": [0, 1],
        "actor_infer__device_mapping": [2],
    }
    run = run_pipeline(task, ray_cluster, again(task, **ranks, **killing("actor_train", 3, rank=1)))
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, {})
    assert started(run)["actor_train/1"] == 2


@pytest.mark.tier("all")
@pytest.mark.timeout(400)
def test_the_trainer_of_a_colocated_run_is_killed(task, ray_cluster, capsys):
    run = run_pipeline(task, ray_cluster, again(task, **COLOCATED, **CRITIC, **killing("actor_train", 3)))
    assert_nothing_lost_or_doubled(run)
    assert_same_engines(run, COLOCATED)
    log = (run.folder / "logs" / "driver.log").read_text()
    first, second = re.findall(r"worker actor_train/0 runs as process (\d+)", log)
    assert first != second and f"worker actor_train/0 died: process {first}" in capsys.readouterr().out

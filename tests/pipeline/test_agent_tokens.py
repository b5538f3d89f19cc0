"""Tokens of agents are conserved, whatever is killed: what engines sampled is trained on once, or counted by cause."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cluster import IN_THIS_PROCESS
from killed_runs import KilledRun, newest_checkpoint, recorded_steps
from random_kills import DisturbedRun
from runs import FinishedRun, run_pipeline
from test_agent_runs import agent, agent_config

from roll.engines.base import Completion
from roll.engines.hf.engine import RequestTable
from roll.engines.replica import Replica
from roll.pipeline.recorder import RunRecorder

pytestmark = pytest.mark.needs("aiohttp")

tier = pytest.mark.tier
SCRIPT = str(Path(__file__).with_name("copy_agents.py"))
STEPS = 4
AfterStep = Callable[[int, Any, Any], None]
"""Gets the number of a step, the engines and the environment workers."""


class Witness:
    """What engines sampled, what the run heard of it, and what it was trained on."""

    def __init__(self, after_step: AfterStep = lambda *_: None) -> None:
        self.after_step = after_step
        self.attempts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """Engine and name of a request in it -> place in the turn and token, of each that was sampled."""
        self.heard: dict[str, int] = {}
        """Of a request whose end came back: its tokens."""
        self.trained: Counter[tuple[str, int, int]] = Counter()
        """Name of a turn, place in it, and the token."""
        self.samples = 0
        self._kept: list[Any] = []

    @contextmanager
    def watching(self) -> Iterator[Witness]:
        append, deliver, record = RequestTable.append, Replica._deliver, RunRecorder.step

        def appended(table: RequestTable, tokens: np.ndarray, *rest: Any) -> None:
            self._kept.append(table)  # so that its id stays its own
            for active, place, token in zip(table.requests, table.token_indices(), tokens, strict=True):
                self.attempts[f"{active.request.request_id}@{id(table)}"].append((int(place), int(token)))
            append(table, tokens, *rest)

        def delivered(replica: Replica, ended: Any) -> None:
            self._kept.append(replica)
            if isinstance(ended, Completion):
                self.heard[f"{ended.request_id}@{id(replica)}"] = len(ended.token_ids)
            deliver(replica, ended)

        async def recorded(
            recorder: RunRecorder, batch: Any, scheduler: Any, pool: Any, workers: Any, trainers: Any
        ) -> None:
            for group in batch.groups:
                for sample in group.samples:
                    self._train(group.group_id, sample)
            await record(recorder, batch, scheduler, pool, workers, trainers)
            self.after_step(batch.step + 1, pool, workers.pool)

        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(RequestTable, "append", appended)
            patches.setattr(Replica, "_deliver", delivered)
            patches.setattr(RunRecorder, "step", recorded)
            yield self

    def _train(self, group: int, sample: Any) -> None:
        self.samples += 1
        for turn in np.unique(sample.turns[sample.response_mask]).tolist():
            tokens = sample.token_ids[(sample.turns == turn) & sample.response_mask].tolist()
            self.trained.update((f"train-{group}-{sample.episode}-{turn}", *each) for each in enumerate(tokens))

    def check_trained(self, run: FinishedRun, lives: int = 1) -> None:
        """Each trained token was sampled at its place of its turn. In one life of the driver none is trained on twice;
        the ledger is exact in any case."""
        sampled = {(name.partition("#")[0], *each) for name, attempt in self.attempts.items() for each in attempt}
        assert self.trained and not self.trained.keys() - sampled
        assert max(self.trained.values()) <= lives
        ledger = run.summary["ledger"]
        assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
        groups = {name.split("-")[1] for name, *_ in self.trained}
        assert ledger["consumed"] == len(groups) == 4 * STEPS

    def check_sums(self, run: FinishedRun) -> dict[str, float]:
        """What the metrics say of the run's tokens adds up to what engines sampled. Returns those of the last step."""
        last = run.metrics[-1]
        assert check_causes(run) == self.trained.total()
        heard = sum(self.heard.values()) + last["engine/resumed_tokens"]
        assert heard == last["env_tokens/sampled"] + last["engine/abandoned_tokens"]
        lost = sum(map(len, self.attempts.values())) - heard
        assert lost >= 0 and (lost == 0 or last["engine/restarts"]), "only a dead engine takes tokens with it"
        return last


def check_causes(run: FinishedRun) -> float:
    """What agents sampled in turns that ended is trained on or has a cause. Returns the number of trained tokens."""
    last = run.metrics[-1]
    trained = sum(step["response/tokens"] for step in run.metrics)
    assert last["env_tokens/sampled"] == trained + last["env_tokens/untrained"] + last["env_tokens/discarded"]
    assert last["env_tokens/discarded"] > 0
    return trained


def config_of(task, **changes):
    """Agents that ask twice, go away, leave while they are answered or raise."""
    envs = {"copy": agent("copy_agents:hasty", max_steps=20, max_tokens_per_step=6)}
    base = {
        "max_steps": STEPS,
        "rollout_batch_size": 4,
        "response_length": 40,
        "train_env_manager__group_size": 4,
        "max_group_retries": 1,
        "max_consecutive_refunds": 100,
        "env_workers__num_workers": 2,
        "actor_infer__max_replica_restarts": 10,
    }
    return agent_config(task, envs, **(base | changes))


def with_programs(task, **changes):
    """And one group in four is of programs, of which every third kills itself."""
    program = agent(env_config={"command": [sys.executable, SCRIPT, "deadly"]})
    shares = {"train_env_manager__tags": ["copy", "program"], "train_env_manager__num_groups_partition": [3, 1]}
    return config_of(task, custom_envs__program=program, **shares, **changes)


class Kills:
    """Kills an environment worker after the first step, and an engine while it samples after each."""

    def __init__(self) -> None:
        self.engines = 0
        self._tasks: list[asyncio.Task[None]] = []

    def __call__(self, step: int, engines: Any, environments: Any) -> None:
        if step < STEPS:
            self._tasks.append(asyncio.get_running_loop().create_task(self._kill(step, engines, environments)))

    async def _kill(self, step: int, engines: Any, environments: Any) -> None:
        while not any(replica._pending for replica in engines._replicas.values()):
            await asyncio.sleep(0.002)
        if step == 1:
            environments._live[0].actor.die("it was killed by the test")
        else:
            next(iter(engines.handles())).kill()
            self.engines += 1


@tier("all")
@pytest.mark.parametrize("ratio", [pytest.param(0, marks=tier("soak")), 1])
def test_tokens_are_conserved_with_kills_of_engines_workers_and_agents(task, ratio):
    kills = Kills()
    with Witness(kills).watching() as witness:
        run = run_pipeline(task, IN_THIS_PROCESS, with_programs(task, async_generation_ratio=ratio))
    witness.check_trained(run)
    last = witness.check_sums(run)
    assert kills.engines == last["engine/restarts"] == STEPS - 2
    assert witness.samples > 4 * STEPS * 4, "histories that do not go on are samples of their own"
    # A step of which all tokens are older than its weights measures nothing.
    measured = [step["mismatch/abs_mean"] for step in run.metrics if step["mismatch/tokens"]]
    assert measured and max(measured) < 1e-5
    for name in ("env_workers/restarts", "env_workers/failures/program/raised", "engine/abandoned_tokens"):
        assert last[name] > 0, name


@tier("all")
def test_tokens_are_trained_on_once_when_the_driver_is_killed(task, tmp_path):
    """What was trained on after the checkpoint is lost with the weights, and trained on again."""
    killed = KilledRun(tmp_path, config_of(task, save_steps=2, async_generation_ratio=1))
    with Witness().watching() as witness:
        killed.kill_when(lambda out: recorded_steps(out) == 3 and newest_checkpoint(out) == 2)
        first, witness.trained = witness.trained, Counter()
        run = killed.finish()
    assert run.summary["resumed_at"] == [2]
    again = {name.split("-")[1] for name, *_ in witness.trained}
    witness.trained.update({each: 1 for each in first if each[0].split("-")[1] not in again})
    witness.check_trained(run)


@pytest.mark.timeout(900)
@tier("soak")
def test_tokens_are_conserved_with_kills_of_real_processes(task, ray_cluster):
    kill = {"kind": "kill", "role": "actor_infer", "at_step": 2}
    config = with_programs(task, async_generation_ratio=1, chaos={"enabled": True, "events": [kill]})
    run = run_pipeline(task, ray_cluster, config)
    check_causes(run)
    last, ledger = run.metrics[-1], run.summary["ledger"]
    assert last["engine/restarts"] == 1 and last["engine/abandoned_tokens"] > 0
    assert last["env_workers/failures/program/raised"] > 0
    assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")


@pytest.mark.timeout(900)
@tier("soak")
def test_no_group_is_trained_on_twice_when_the_process_of_the_driver_is_killed(task, tmp_path):
    chaos = {"enabled": True, "events": [{"kind": "kill", "role": "driver", "at_step": 3}]}
    config = with_programs(task, save_steps=2, async_generation_ratio=1, num_logged_samples=4, chaos=chaos)
    with DisturbedRun(tmp_path, config) as run:
        run.start()
        assert run.wait_for_the_end() != 0 and run.steps() in (2, 3), run.log_end()
        run.start()
        assert run.wait_for_the_end() == 0, run.log_end()
    finished = FinishedRun(run.out, 0)
    ledger = finished.summary["ledger"]
    assert finished.summary["resumed_at"] in ([0], [2]), "the checkpoint of step 2 may have been cut short"
    assert ledger["consumed"] == 4 * STEPS
    assert ledger["issued"] == sum(count for name, count in ledger.items() if name != "issued")
    trained_on = [sample["group_id"] for sample in finished.samples if sample["split"] == "train"]
    assert len(trained_on) == len(set(trained_on)) == 4 * STEPS

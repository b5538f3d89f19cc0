"""Promise 7 on real runs: what fails is healed with exact accounting, or ends the run in seconds with its cause."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import uuid
from pathlib import Path

import pytest
from runs import run_pipeline, start_command
from tiny import tiny_config

from roll.tracking.metrics import read_metrics

START_SECONDS = 120
END_SECONDS = 90


def rewarded_by(task, name, **changes):
    return tiny_config(task, rewards__addition__verifier=f"reward_functions:{name}", **changes)


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("raising_reward", "the verifier of this test always fails"),
        ("nonsense_reward", "no finite number"),
        ("hanging_reward", "0.5"),
    ],
)
def test_a_reward_that_never_works_ends_the_run_with_its_cause(task, ray_cluster, name, cause):
    config = rewarded_by(
        task,
        name,
        max_consecutive_refunds=2,
        max_group_retries=0,
        rewards__addition__timeout_seconds=0.5,
        rewards__addition__max_retries=0,
    )
    run = run_pipeline(task, ray_cluster, config, expect=1)
    assert run.summary["status"] == "failed"
    assert cause in run.summary["error"] and name in run.summary["error"]
    assert run.summary["steps"] == 0
    assert run.summary["ledger"]["dropped/failed"] == 2


def test_prompts_that_cannot_be_judged_are_dropped_and_counted(task, ray_cluster):
    config = rewarded_by(
        task,
        "sometimes_failing_reward",
        max_steps=6,
        async_generation_ratio=1,
        max_group_retries=0,
        rewards__addition__max_retries=0,
    )
    run = run_pipeline(task, ray_cluster, config)
    ledger = run.summary["ledger"]
    assert ledger["dropped/failed"] > 0
    assert ledger["issued"] == ledger["consumed"] + ledger["dropped/failed"] == 48 + ledger["dropped/failed"]


def test_a_reward_worker_that_dies_is_replaced(task, ray_cluster, tmp_path):
    config = rewarded_by(
        task, "dying_once_reward", rewards__addition__verifier_args={"marker": str(tmp_path / "died")}
    )
    run = run_pipeline(task, ray_cluster, config)
    assert (tmp_path / "died").exists()
    assert run.summary["ledger"]["issued"] == run.summary["ledger"]["consumed"] == 24


class Command:
    """A run in processes of its own, which are all found by a mark in their environment."""

    def __init__(self, folder: Path, config, monkeypatch):
        self.mark = f"ROLL_TEST_{uuid.uuid4().hex}"
        monkeypatch.setenv(self.mark, "1")
        self.process, self.out = start_command(folder, config)

    def processes(self) -> dict[int, str]:
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                if self.mark.encode() in (entry / "environ").read_bytes():
                    found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")[:80]
            except OSError:
                continue
        return found

    def wait_for_step(self, step: int) -> None:
        def reached():
            assert self.process.poll() is None, self.process.stdout.read()
            path = self.out / "metrics.jsonl"
            return path.exists() and any(row["step"] >= step for row in read_metrics(path))

        self.wait_until(reached, START_SECONDS, f"step {step}")

    def pid_of(self, worker: str) -> int:
        found = re.findall(rf"worker {worker} runs as process (\d+)", (self.out / "logs" / "driver.log").read_text())
        return int(found[-1])

    def end(self) -> str:
        """Wait for the end and make sure that nothing is left; returns what the command printed."""
        output, _ = self.process.communicate(timeout=END_SECONDS)
        self.wait_until(lambda: not self.processes(), END_SECONDS, "the end of all processes")
        return output

    @property
    def summary(self):
        return json.loads((self.out / "summary.json").read_text())

    def wait_until(self, condition, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{what} was not reached; still there: {self.processes()}"
            time.sleep(0.1)


@pytest.fixture
def command(task, monkeypatch):
    started = []

    def start(config) -> Command:
        started.append(Command(task, config, monkeypatch))
        return started[-1]

    yield start
    for each in started:
        for pid in each.processes():
            os.kill(pid, signal.SIGKILL)


def test_an_engine_killed_by_its_id_comes_back_and_nothing_is_lost_or_doubled(task, command):
    run = command(rewarded_by(task, "late_reward", max_steps=25, async_generation_ratio=1))
    run.wait_for_step(2)
    first = run.pid_of("actor_infer/0")
    os.kill(first, signal.SIGKILL)
    output, _ = run.process.communicate(timeout=START_SECONDS)
    assert run.process.returncode == 0, output
    assert run.pid_of("actor_infer/0") != first
    assert f"worker actor_infer/0 died: process {first}" in output
    ledger = run.summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] == 200
    assert read_metrics(run.out / "metrics.jsonl")[-1]["engine/restarts"] == 1
    assert run.summary["lag/max"] <= 1


def test_two_replicas_killed_one_while_it_generates_one_while_it_takes_weights(task, ray_cluster):
    steps = 4
    config = tiny_config(
        task,
        max_steps=steps,
        async_generation_ratio=1,
        response_length=40,
        num_logged_samples=8,
        cluster__num_devices_per_node=3,
        actor_infer__device_mapping=[1, 2],
        actor_infer__worker_cls="odd_engines:KilledTwice",
        actor_infer__generating_args={"ignore_eos": True},
        weight_update__in_flight="resume",  # whose caches are always those of the present weights
    )
    run = run_pipeline(task, ray_cluster, config)
    assert {path.name for path in (run.folder / "logs").glob("killed-*")} == {"killed-0", "killed-1"}
    last = run.metrics[-1]
    assert last["engine/restarts"] == 2
    assert last["engine/reissued"] > 0 and last["engine/resumed_tokens"] > 0
    ledger = run.summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] == steps * 8
    assert sorted(sample["group_id"] for sample in run.samples) == list(range(steps * 8)), "each once, none twice"
    assert run.summary["lag/max"] <= 1
    assert all(step["response/length_mean"] == step["response/length_max"] == 40 for step in run.metrics)
    measured = [step["mismatch/abs_mean"] for step in run.metrics if step["mismatch/tokens"]]
    assert measured and max(measured) < 1e-5, "tokens put together from two engines have the log-probabilities they had"


def test_a_trainer_killed_by_its_id_ends_the_run_in_seconds_and_is_named(task, command):
    run = command(rewarded_by(task, "late_reward", max_steps=500, async_generation_ratio=1))
    run.wait_for_step(1)
    pid = run.pid_of("actor_train/0")
    os.kill(pid, signal.SIGKILL)
    run.end()
    assert run.process.returncode == 1
    assert run.summary["status"] == "failed"
    assert f"worker actor_train/0 died: process {pid}" in run.summary["error"]


@pytest.mark.parametrize(
    ("signal_number", "in_background"), [(signal.SIGINT, False), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_an_interrupted_run_says_so_and_leaves_no_process(task, command, signal_number, in_background):
    config = rewarded_by(task, "late_reward", max_steps=500, async_generation_ratio=1)
    # A shell starts jobs in the background with SIGINT ignored.
    present = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_background else signal.getsignal(signal.SIGINT)
    try:
        run = command(config)
    finally:
        signal.signal(signal.SIGINT, present)
    run.wait_for_step(1)
    run.process.send_signal(signal_number)
    output = run.end()
    assert run.process.returncode == 1
    assert run.summary["status"] == "interrupted"
    assert "Traceback" not in output
    assert f"(`save_steps`): the same command with resume_from_checkpoint={run.out} begins again there" in output


def test_a_killed_driver_takes_its_processes_along_and_never_looks_like_a_success(task, command):
    run = command(rewarded_by(task, "late_reward", max_steps=500))
    run.wait_for_step(1)
    run.process.kill()
    run.end()
    assert run.summary["status"] == "running"

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
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline, start_command
from tiny import tiny_config

from roll.tracking.trackers import read_metrics
from tests import warm_workers

START_SECONDS = 120
END_SECONDS = 90


def rewarded_by(task, name, **changes):
    return tiny_config(task, rewards__addition__verifier=f"reward_functions:{name}", **changes)


@pytest.mark.parametrize(
    ("name", "seconds", "cause"),
    [
        ("raising_reward", 60, "the verifier of this test always fails"),
        ("nonsense_reward", 60, "no finite number"),
        ("hanging_reward", 0.1, "0.1"),
    ],
)
def test_a_reward_that_never_works_ends_the_run_with_its_cause(task, name, seconds, cause):
    config = rewarded_by(
        task,
        name,
        max_consecutive_refunds=2,
        max_group_retries=0,
        rewards__addition__timeout_seconds=seconds,
        rewards__addition__max_retries=0,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=1)
    assert run.summary["status"] == "failed"
    assert cause in run.summary["error"] and name in run.summary["error"]
    assert run.summary["steps"] == 0
    assert run.summary["ledger"]["dropped/failed"] == 2


def test_prompts_that_cannot_be_judged_are_dropped_and_counted(task):
    config = rewarded_by(
        task,
        "sometimes_failing_reward",
        max_steps=6,
        async_generation_ratio=1,
        max_group_retries=0,
        rewards__addition__max_retries=0,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    ledger = run.summary["ledger"]
    assert ledger["dropped/failed"] > 0
    assert ledger["issued"] == ledger["consumed"] + ledger["dropped/failed"] == 48 + ledger["dropped/failed"]


@pytest.mark.parametrize("role", ["actor_train", "actor_infer"])
def test_whoever_dies_is_replaced_or_named(task, role):
    """An engine is replaced, and nothing is lost or doubled; a trainer ends the run, which names it."""
    killed = {"enabled": True, "events": [{"kind": "kill", "role": role, "at_step": 2}]}
    config = rewarded_by(task, "late_reward", max_steps=5, async_generation_ratio=1, num_logged_samples=8, chaos=killed)
    run = run_pipeline(task, IN_THIS_PROCESS, config, expect=int(role == "actor_train"))
    if role == "actor_train":
        assert run.summary["status"] == "failed" and "worker actor_train/0 died" in run.summary["error"]
        return
    ledger = run.summary["ledger"]
    assert ledger["issued"] == ledger["consumed"] == 40
    assert sorted(sample["group_id"] for sample in run.samples) == list(range(40)), "each once, none twice"
    assert run.metrics[-1]["engine/restarts"] == 1 and run.summary["lag/max"] <= 1


class Command:
    """A run in processes of its own, which are all found by a mark in their environment: none is a fork."""

    def __init__(self, folder: Path, config, monkeypatch):
        self.mark = f"ROLL_TEST_{uuid.uuid4().hex}"
        monkeypatch.setenv(self.mark, "1")
        monkeypatch.delenv(warm_workers.ADDRESS, raising=False)
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
            return self.step() >= step

        self.wait_until(reached, START_SECONDS, f"step {step}")

    def step(self) -> int:
        path = self.out / "metrics.jsonl"
        return max((row["step"] for row in read_metrics(path)), default=0) if path.exists() else 0

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


@pytest.mark.tier("all")
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


@pytest.mark.tier("soak")
def test_processes_killed_by_their_ids_are_replaced_or_named_and_nothing_is_left(task, command, tmp_path):
    """First a reward worker, by itself; then an engine; in the end the trainer, without which there is no run."""
    died = tmp_path / "died"
    run = command(
        rewarded_by(
            task,
            "dying_once_reward",
            max_steps=5000,
            async_generation_ratio=1,
            rewards__addition__verifier_args={"marker": str(died)},
        )
    )
    run.wait_for_step(2)
    assert died.exists()
    first = run.pid_of("actor_infer/0")
    os.kill(first, signal.SIGKILL)
    run.wait_until(lambda: run.pid_of("actor_infer/0") != first, START_SECONDS, "another engine")
    run.wait_for_step(run.step() + 3)
    pid = run.pid_of("actor_train/0")
    os.kill(pid, signal.SIGKILL)
    output = run.end()
    assert run.process.returncode == 1
    assert f"worker actor_infer/0 died: process {first}" in output
    assert run.summary["status"] == "failed"
    assert f"worker actor_train/0 died: process {pid}" in run.summary["error"]
    assert read_metrics(run.out / "metrics.jsonl")[-1]["engine/restarts"] == 1
    assert run.summary["ledger"]["dropped/failed"] == 0 and run.summary["lag/max"] <= 1


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    ("signal_number", "in_background"),
    [pytest.param(signal.SIGINT, False, marks=pytest.mark.tier("soak")), (signal.SIGTERM, True)],
)
def test_an_interrupted_run_says_so_and_leaves_no_process(task, command, signal_number, in_background):
    """Nor does it begin again."""
    config = rewarded_by(
        task, "late_reward", max_steps=500, save_steps=400, async_generation_ratio=1, restarts={"max_in_a_row": 9}
    )
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
    assert (run.summary["status"], run.summary["resumed_at"]) == ("interrupted", [])
    assert "Traceback" not in output
    assert f"(`save_steps`): the same command with resume_from_checkpoint={run.out} begins again there" in output

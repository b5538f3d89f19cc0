"""Runs that are killed and go on: nothing lost, nothing twice, and at ratio 0 not one bit different."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from runs import ROOT, TESTS, FinishedRun, run_pipeline
from safetensors.torch import load_file
from test_agentic_runs import agentic_config
from tiny import tiny_config, write_config

from roll.pipeline.checkpoints import checkpoint_folder, read_checkpoint, saved_steps
from roll.rollout.journal import read_journal, recover, segments
from roll.tracking.metrics import read_metrics
from tests.unprivileged import obey_permissions

STEPS = 8

pytestmark = pytest.mark.timeout(400)


class Command:
    """The same command again and again, as a job scheduler would give it."""

    def __init__(self, folder: Path, config: dict) -> None:
        self.out = folder / "run"
        changed = {**config, "output_dir": str(self.out), "resume_from_checkpoint": True}
        self.path = write_config(folder, changed, "resumed.yaml")

    def start(self, *overrides: str, preexec_fn=None) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), "--config", str(self.path), *overrides],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=TESTS,
            start_new_session=True,
            preexec_fn=preexec_fn,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(TESTS)])},
        )

    def finish(self, *overrides: str, expect: int = 0, preexec_fn=None) -> FinishedRun:
        process = self.start(*overrides, preexec_fn=preexec_fn)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == expect, output
        self.output = output
        return FinishedRun(self.out, process.returncode)

    def steps(self) -> int:
        path = self.out / "metrics.jsonl"
        return max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0

    def kill_when(self, reached, *overrides: str) -> None:
        """SIGKILL of the driver, so that it can clean up nothing."""
        process = self.start(*overrides)
        try:
            give_up = time.monotonic() + 150
            while not reached():
                assert process.poll() is None, process.communicate()[0]
                assert time.monotonic() < give_up
                time.sleep(0.02)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()


def final_weights(run: FinishedRun):
    return load_file(checkpoint_folder(run.folder / "checkpoints", STEPS) / "model.safetensors")


def same_weights(one, other) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def reproducible(record: dict) -> dict:
    """What of a step's metrics does not depend on the clock or on processes, whose totals begin again with them."""
    timed = ("time/", "idle/", "tokens_per_second/", "weights/", "engine/", "canary/", "rewards/")
    return {name: value for name, value in record.items() if not name.startswith(timed)}


def assert_one_history(run: FinishedRun) -> None:
    assert run.summary["status"] == "success" and run.summary["steps"] == STEPS
    every_step = [record["step"] for record in read_metrics(run.folder / "metrics.jsonl")]
    assert every_step == list(range(0, STEPS + 1))
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == STEPS * 8
    assert ledger["issued"] == ledger["consumed"] + sum(
        count for name, count in ledger.items() if name.startswith("dropped/")
    )
    assert not list((run.folder / "checkpoints").glob(".*"))


@pytest.fixture(scope="module")
def undisturbed(task, ray_cluster):
    return run_pipeline(task, ray_cluster, tiny_config(task, max_steps=STEPS, save_steps=2))


def test_a_run_at_ratio_zero_that_is_killed_three_times_is_the_undisturbed_one_to_the_bit(
    task, undisturbed, tmp_path
):
    command = Command(tmp_path, tiny_config(task, max_steps=STEPS, save_steps=2, actor_train__device_mapping=[0]))
    command.kill_when(lambda: command.steps() >= 1)
    command.kill_when(lambda: command.steps() >= 3)
    command.kill_when(lambda: saved_steps(command.out / "checkpoints")[-1:] == [6])
    run = command.finish()
    assert_one_history(run)
    assert "the run goes on after step 6" in command.output
    assert run.summary["resumed_at"][-1] == 6
    assert [reproducible(record) for record in run.metrics] == [reproducible(record) for record in undisturbed.metrics]
    assert same_weights(final_weights(run), final_weights(undisturbed))
    assert saved_steps(run.folder / "checkpoints") == [6, 8]
    command.finish()
    assert f"has all its {STEPS} steps" in command.output


def test_finished_rollouts_are_not_made_again(task, tmp_path):
    """Every rollout leaves a line; after the kill only groups that the journal did not have are made."""
    calls = tmp_path / "calls"
    config = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        async_generation_ratio=2,
        rewards__addition__verifier="reward_functions:noted_reward",
        rewards__addition__verifier_args={"path": str(calls)},
    )
    command = Command(tmp_path, config)
    command.kill_when(lambda: saved_steps(command.out / "checkpoints")[-1:] == [4])
    checkpoint = read_checkpoint(checkpoint_folder(command.out / "checkpoints", 4))
    kept = {
        record.group_id
        for record in read_journal(command.out / "journal")
        if record.version <= 4 and record.group_id in checkpoint.state.progress.open_groups
    }
    before = len(calls.read_text().splitlines())
    run = command.finish()
    assert_one_history(run)
    made = len(calls.read_text().splitlines()) - before
    issued_later = STEPS * 8 - checkpoint.state.progress.issued
    again = len(checkpoint.state.progress.open_groups) - len(kept)
    assert kept and made <= (issued_later + again) * 4
    assert run.summary["lag/max"] <= 2
    assert len(segments(run.folder / "journal")) <= 5, "the journal keeps growing"


def test_episodes_go_on_to_the_bit_as_well(task, ray_cluster, tmp_path):
    config = agentic_config(task, max_steps=STEPS, save_steps=3, group_filter="zero_variance")
    undisturbed = run_pipeline(task, ray_cluster, config)
    command = Command(tmp_path, config)
    command.kill_when(lambda: command.steps() >= 4 and 3 in saved_steps(command.out / "checkpoints"))
    run = command.finish()
    assert "the run goes on after step 3" in command.output
    assert_one_history(run)
    assert same_weights(final_weights(run), final_weights(undisturbed))


def test_checkpoints_of_a_colocated_run_with_validation_at_each_step_do_not_wait_for_each_other(
    task, ray_cluster, tmp_path
):
    """The record of a step needs the devices for its validation; the next checkpoint is taken with them in hand."""
    validation = {"data_args": {"file_name": str(task / "val.jsonl")}}
    config = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=1,
        eval_steps=2,
        async_generation_ratio=1,
        actor_infer__device_mapping=[0],
        validation=validation,
        stall_timeout_seconds=60.0,
    )
    run = run_pipeline(task, ray_cluster, config)
    assert_one_history(run)
    assert saved_steps(run.folder / "checkpoints") == [STEPS - 1, STEPS]


def test_a_run_goes_on_with_two_ranks_where_one_was(task, tmp_path):
    config = tiny_config(task, max_steps=4, save_steps=2, cluster__num_devices_per_node=3)
    command = Command(tmp_path, config)
    command.finish()
    two_ranks = ["actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[2]"]
    run = command.finish(f"max_steps={STEPS}", *two_ranks)
    assert "the run goes on after step 4" in command.output and "(harmless)" in command.output
    assert_one_history(run)
    assert len(list((run.folder / "checkpoints" / f"step-{STEPS}" / "state" / "actor_train").iterdir())) == 2


def test_a_damaged_checkpoint_is_passed_over_and_one_of_another_task_refused(task, undisturbed, ray_cluster, tmp_path):
    command = Command(tmp_path, tiny_config(task, max_steps=STEPS, save_steps=2))
    command.kill_when(lambda: saved_steps(command.out / "checkpoints")[-1:] == [6])
    state = next((command.out / "checkpoints" / "step-6" / "state" / "actor_train").iterdir())
    state.write_bytes(state.read_bytes()[:-100])
    command.finish("rollout_batch_size=4", expect=2)
    assert "rollout_batch_size: was 8" in command.output
    command.finish("actor_train.training_args.learning_rate=0.5", expect=2)
    assert "learning_rate" in command.output and "accept_config_changes" in command.output
    other = tmp_path / "other.jsonl"
    other.write_text((task / "train.jsonl").read_text().replace("1+1", "1+3"))
    command.finish(f"actor_train.data_args.file_name={other}", "accept_config_changes=true", expect=2)
    assert "other prompts" in command.output
    run = command.finish("logging_steps=2")
    assert "passed over" in command.output and "the run goes on after step 4" in command.output
    assert_one_history(run)
    assert same_weights(final_weights(run), final_weights(undisturbed))
    assert (run.folder / "checkpoints" / "abandoned-step-6").is_dir()


def test_a_killed_run_whose_weights_travel_as_files_goes_on_and_leaves_none(task, tmp_path):
    """The same versions are published again; those of the killed process are deleted, wherever they were."""
    config = tiny_config(task, max_steps=STEPS, save_steps=2, weight_update__transport="checkpoint")
    command = Command(tmp_path, config)
    command.kill_when(lambda: command.steps() >= 4 and any(command.out.glob("weights/*/version-*")))
    shared = tmp_path / "shared"
    command.kill_when(lambda: any(shared.glob("*/version-*")), f"weight_update.checkpoint_dir={shared}")
    run = command.finish(f"weight_update.checkpoint_dir={shared}")
    assert_one_history(run)
    assert list(shared.iterdir()) == [] and not (run.folder / "weights").exists()


def test_two_processes_never_work_on_one_run(task, tmp_path):
    command = Command(tmp_path, tiny_config(task, max_steps=100_000))
    first = command.start()
    try:
        while command.steps() < 1:
            assert first.poll() is None
            time.sleep(0.05)
        command.finish(expect=1)
        assert "another process works on the run" in command.output
    finally:
        os.kill(first.pid, signal.SIGKILL)
        first.communicate()


def test_a_disk_that_is_full_ends_the_run_and_leaves_the_last_checkpoint(task, tmp_path):
    """A limit on the size of files stands for the disk: the checkpoint of step 4 is the first that is too large."""
    config = tiny_config(task, max_steps=STEPS, save_steps=2)
    command = Command(tmp_path, config)
    command.kill_when(lambda: saved_steps(command.out / "checkpoints")[-1:] == [2])
    tight = command.start("actor_train.worker_cls=custom_parts:TightTrainWorker", "accept_config_changes=true")
    output, _ = tight.communicate(timeout=200)
    assert tight.returncode == 1
    assert "File too large" in output and ".step-4.partial" in output
    assert saved_steps(command.out / "checkpoints")[:1] == [2]
    assert_one_history(command.finish("accept_config_changes=true"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("closed", ["checkpoints", "."])
def test_a_folder_that_cannot_be_written_is_named_and_the_last_checkpoint_stays(task, tmp_path, closed):
    """When the run is to go on, and in the middle of it."""
    slow = {"rewards__addition__verifier": "reward_functions:slow_reward"}  # so that no state is missed
    command = Command(tmp_path, tiny_config(task, max_steps=STEPS, save_steps=2, **slow))
    command.kill_when(lambda: saved_steps(command.out / "checkpoints")[-1:] == [2] and command.steps() >= 3)
    checkpoint, folder = checkpoint_folder(command.out / "checkpoints", 2), command.out / closed
    before = contents(checkpoint)
    command.out.chmod(0o555)
    command.finish(expect=2, preexec_fn=obey_permissions)
    assert f"no permission to write to {command.out}" in command.output and "nothing was started" in command.output
    assert "Traceback" not in command.output
    assert contents(checkpoint) == before and command.steps() >= 3
    command.out.chmod(0o755)

    process = command.start(preexec_fn=obey_permissions)
    try:
        while saved_steps(command.out / "checkpoints")[-1:] != [4]:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.02)
        folder.chmod(0o555)
        output, _ = process.communicate(timeout=200)
    finally:
        process.kill()
        folder.chmod(0o755)
    assert process.returncode == 1
    assert "Permission denied" in output and str(folder.resolve()) in output and "Traceback" not in output
    last = saved_steps(command.out / "checkpoints")[-1]
    assert last in (4, 6), "one may have been complete before the folder was closed"
    assert read_checkpoint(checkpoint_folder(command.out / "checkpoints", last)).step == last
    run = command.finish()
    assert f"the run goes on after step {last}" in command.output
    assert_one_history(run)


def test_rollouts_of_other_settings_are_made_again_and_nothing_is_skipped(task, tmp_path):
    """Every rollout leaves a line; after the change of the reward all that is trained on has one in the new file."""
    calls = {name: tmp_path / name for name in ("before", "after")}
    config = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        async_generation_ratio=2,
        rewards__addition__verifier="reward_functions:noted_reward",
        rewards__addition__verifier_args={"path": str(calls["before"])},
    )
    command = Command(tmp_path, config)
    command.kill_when(lambda: saved_steps(command.out / "checkpoints")[-1:] == [4])
    last = saved_steps(command.out / "checkpoints")[-1]
    progress = read_checkpoint(checkpoint_folder(command.out / "checkpoints", last)).state.progress
    assert recover(read_journal(command.out / "journal"), progress).finished, "there is something to make again"
    changed = (f"rewards.addition.verifier_args.path={calls['after']}", "accept_config_changes=true")
    command.finish(changed[0], expect=2)
    run = command.finish(*changed)
    assert "are made again, for these have changed: rewards.addition.verifier_args.path" in command.output
    assert_one_history(run)
    assert len(calls["after"].read_text().splitlines()) >= (STEPS - last) * 8 * 4
    assert run.summary["lag/max"] <= 2


def test_a_run_killed_at_random_moments_again_and_again_ends_like_any_other(task, tmp_path):
    dice = random.Random(5)
    config = tiny_config(task, max_steps=STEPS, save_steps=1, async_generation_ratio=1)
    command = Command(tmp_path, config)
    for _ in range(4):
        wanted = command.steps() + 1
        command.kill_when(lambda wanted=wanted: command.steps() >= wanted)
        time.sleep(dice.random() * 0.1)
    run = command.finish()
    assert_one_history(run)
    assert run.summary["lag/max"] <= 1
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["resume_from_checkpoint"] is True
    assert json.loads((run.folder / "timeline.json").read_text())

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import yaml
from fake_cluster import IN_THIS_PROCESS
from killed_runs import KilledRun, newest_checkpoint, recorded_steps
from runs import FinishedRun, run_pipeline
from safetensors.torch import load_file
from test_agentic_runs import agentic_config
from tiny import tiny_config

from roll.pipeline.checkpoints import checkpoint_folder, read_checkpoint, saved_steps
from roll.rollout.journal import read_journal, recover, segments
from roll.tracking.run_directory import RunDirectory
from roll.tracking.trackers import read_metrics
from tests.unprivileged import obeying_permissions

STEPS = 8


def final_weights(run: FinishedRun):
    return load_file(checkpoint_folder(run.folder / "checkpoints", STEPS) / "model.safetensors")


def same_weights(one, other) -> bool:
    return one.keys() == other.keys() and all((one[name] == other[name]).all() for name in one)


def reproducible(record: dict) -> dict:
    """What of a step's metrics does not depend on the clock or on processes, whose totals begin again with them."""
    timed = (
        "time/",
        "seconds/",
        "cpu_seconds/",
        "idle/",
        "tokens_per_second",
        "mfu/",
        "memory/",
        "weights/",
        "engine/",
        "canary/",
        "rewards/",
    )
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
def undisturbed(task):
    return run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, max_steps=STEPS, save_steps=2))


def test_a_run_at_ratio_zero_that_is_killed_three_times_is_the_undisturbed_one_to_the_bit(task, undisturbed, tmp_path):
    killed = KilledRun(tmp_path, tiny_config(task, max_steps=STEPS, save_steps=2))
    killed.kill_when(lambda out: recorded_steps(out) >= 1)
    assert newest_checkpoint(killed.out) == 0
    killed.kill_when(lambda out: recorded_steps(out) >= 3)
    killed.kill_when(lambda out: newest_checkpoint(out) == 6)
    run = killed.finish()
    assert_one_history(run)
    assert "the run goes on after step 6" in killed.output
    assert run.summary["resumed_at"] == [0, 2, 6]
    assert [reproducible(record) for record in run.metrics] == [reproducible(record) for record in undisturbed.metrics]
    assert same_weights(final_weights(run), final_weights(undisturbed))
    assert saved_steps(run.folder / "checkpoints") == [6, 8]
    killed.finish()
    assert f"has all its {STEPS} steps" in killed.output


def noting(task, path: Path):
    """Two steps ahead; every rollout leaves a line."""
    return tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        async_generation_ratio=2,
        rewards__addition__verifier="reward_functions:noted_reward",
        rewards__addition__verifier_args={"path": str(path)},
    )


def test_finished_rollouts_are_not_made_again(task, tmp_path):
    """After the kill only groups that the journal did not have are made."""
    calls = tmp_path / "calls"
    killed = KilledRun(tmp_path, noting(task, calls))
    killed.kill_when(lambda out: newest_checkpoint(out) == 4)
    checkpoint = read_checkpoint(checkpoint_folder(killed.out / "checkpoints", 4))
    kept = {
        record.group_id
        for record in read_journal(killed.out / "journal")
        if record.version <= 4 and record.group_id in checkpoint.state.progress.open_groups
    }
    calls.unlink()
    run = killed.finish()
    assert_one_history(run)
    made = len(calls.read_text().splitlines())
    issued_later = STEPS * 8 - checkpoint.state.progress.issued
    again = len(checkpoint.state.progress.open_groups) - len(kept)
    assert kept and made <= (issued_later + again) * 4
    assert run.summary["lag/max"] <= 2
    assert len(segments(run.folder / "journal")) <= 5, "the journal keeps growing"


@pytest.mark.tier("all")
def test_rollouts_of_other_settings_are_made_again_and_nothing_is_skipped(task, tmp_path):
    """After the change of the reward all that is trained on has a line in the new file."""
    after = tmp_path / "after"
    killed = KilledRun(tmp_path, noting(task, tmp_path / "before"))
    killed.kill_when(lambda out: newest_checkpoint(out) == 4)
    progress = read_checkpoint(checkpoint_folder(killed.out / "checkpoints", 4)).state.progress
    assert recover(read_journal(killed.out / "journal"), progress).finished, "there is something to make again"
    changed = (f"rewards.addition.verifier_args.path={after}", "accept_config_changes=true")
    killed.finish(changed[0], expect=2)
    run = killed.finish(*changed)
    assert "are made again, for these have changed: rewards.addition.verifier_args.path" in killed.output
    assert_one_history(run)
    assert len(after.read_text().splitlines()) >= (STEPS - 4) * 8 * 4
    assert run.summary["lag/max"] <= 2


def test_with_corrected_answers_finished_groups_are_judged_anew(task, tmp_path):
    """Nothing is right any more: what is left of `digit_reward` is the length of the response."""
    data = tmp_path / "train.jsonl"
    shutil.copy(task / "train.jsonl", data)
    config = tiny_config(task, max_steps=4, save_steps=2, async_generation_ratio=2, num_logged_samples=32)
    config["actor_train"]["data_args"]["file_name"] = str(data)
    killed = KilledRun(tmp_path, config)
    killed.kill_when(lambda out: newest_checkpoint(out) == 2)
    rows = [json.loads(line) for line in data.read_text().splitlines()]
    data.write_text("".join(json.dumps({**row, "ground_truth": "none"}) + "\n" for row in rows))
    run = killed.finish()
    assert "are made again, for these have changed: (ground truths or metadata of the prompts)" in killed.output
    later = [sample for sample in run.samples if sample["step"] > 2]
    assert len(later) == 16
    assert all(sample["score"] == pytest.approx(0.1 * len(sample["response"])) for sample in later)


@pytest.mark.tier("all")
def test_episodes_go_on_to_the_bit_as_well(task, tmp_path):
    config = agentic_config(task, max_steps=STEPS, save_steps=3, group_filter="zero_variance")
    undisturbed = run_pipeline(task, IN_THIS_PROCESS, config)
    killed = KilledRun(tmp_path, config)
    killed.kill_when(lambda out: newest_checkpoint(out) == 3)
    run = killed.finish()
    assert "the run goes on after step 3" in killed.output
    assert_one_history(run)
    assert same_weights(final_weights(run), final_weights(undisturbed))


def test_checkpoints_of_a_colocated_run_with_validation_at_each_step_do_not_wait_for_each_other(task):
    """The record of a step needs the devices for its validation; the next checkpoint is taken with them in hand."""
    validation = {"data_args": {"file_name": str(task / "val.jsonl")}}
    config = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=1,
        max_ckpt_to_keep=3,
        eval_steps=2,
        async_generation_ratio=1,
        actor_infer__device_mapping=[0],
        validation=validation,
        stall_timeout_seconds=60.0,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    assert_one_history(run)
    assert saved_steps(run.folder / "checkpoints") == [STEPS - 2, STEPS - 1, STEPS]


@pytest.mark.tier("all")
def test_a_run_goes_on_with_two_ranks_where_one_was(task, ray_cluster, tmp_path):
    killed = KilledRun(tmp_path, tiny_config(task, max_steps=4, save_steps=2, cluster__num_devices_per_node=3))
    killed.finish()
    two_ranks = ["actor_train.device_mapping=[0,1]", "actor_infer.device_mapping=[2]"]
    run = killed.finish(f"max_steps={STEPS}", *two_ranks, address=ray_cluster)
    assert "the run goes on after step 4" in killed.output and "(harmless)" in killed.output
    assert_one_history(run)
    assert len(list((run.folder / "checkpoints" / f"step-{STEPS}" / "state" / "actor_train").iterdir())) == 2


def test_a_damaged_checkpoint_is_passed_over_and_one_of_another_task_refused(task, undisturbed, tmp_path):
    killed = KilledRun(tmp_path, tiny_config(task, max_steps=STEPS, save_steps=2))
    killed.kill_when(lambda out: newest_checkpoint(out) == 6)
    state = next((killed.out / "checkpoints" / "step-6" / "state" / "actor_train").iterdir())
    state.write_bytes(state.read_bytes()[:-100])
    killed.finish("rollout_batch_size=4", expect=2)
    assert "rollout_batch_size: was 8" in killed.output
    killed.finish("actor_train.training_args.learning_rate=0.5", expect=2)
    assert "learning_rate" in killed.output and "accept_config_changes" in killed.output
    other = tmp_path / "other.jsonl"
    other.write_text((task / "train.jsonl").read_text().replace("1+1", "1+3"))
    killed.finish(f"actor_train.data_args.file_name={other}", "accept_config_changes=true", expect=2)
    assert "other prompts" in killed.output
    run = killed.finish("logging_steps=2")
    assert "passed over" in killed.output and "the run goes on after step 4" in killed.output
    assert_one_history(run)
    assert same_weights(final_weights(run), final_weights(undisturbed))
    assert (run.folder / "checkpoints" / "abandoned-step-6").is_dir()


@pytest.mark.tier("all")
def test_a_killed_run_whose_weights_travel_as_files_goes_on_and_leaves_none(task, tmp_path):
    """The same versions are published again; those of the killed process are deleted, wherever they were."""
    config = tiny_config(task, max_steps=STEPS, save_steps=2, weight_update__transport="checkpoint")
    killed = KilledRun(tmp_path, config, beside=(shared := tmp_path / "shared"))
    shared.mkdir()
    killed.kill_when(lambda out: recorded_steps(out) >= 4 and any(out.glob("weights/*/version-*")))
    elsewhere = f"weight_update.checkpoint_dir={shared}"
    killed.kill_when(lambda out: any(out.with_name("shared").glob("*/version-*")), elsewhere)
    assert any(shared.glob("*/version-*")) and not (killed.out / "weights").exists()
    run = killed.finish(elsewhere)
    assert_one_history(run)
    assert list(shared.iterdir()) == [] and not (run.folder / "weights").exists()


def test_two_processes_never_work_on_one_run(task, tmp_path):
    killed = KilledRun(tmp_path, tiny_config(task, max_steps=1))
    killed.finish()
    with RunDirectory(killed.out).held():
        killed.finish("max_steps=2", expect=1)
        assert "another process works on the run" in killed.output
    killed.finish("max_steps=2")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.tier("all")
def test_a_folder_that_cannot_be_written_is_named_and_the_last_checkpoint_stays(task, tmp_path, monkeypatch):
    """When the run is to go on, and in the middle of it."""
    stages = {"advantage": "custom_parts:closes_folder"}
    killed = KilledRun(tmp_path, tiny_config(task, max_steps=STEPS, save_steps=2, stages=stages))
    killed.kill_when(lambda out: newest_checkpoint(out) == 2)
    before = contents(killed.out)
    killed.out.chmod(0o555)
    with obeying_permissions():
        killed.finish(expect=2)
    killed.out.chmod(0o755)
    assert f"no permission to write to {killed.out}" in killed.output and "nothing was started" in killed.output
    assert "Traceback" not in killed.output and contents(killed.out) == before
    shutil.copytree(killed.out, start := tmp_path / "start" / killed.out.name, symlinks=True)
    for closed in ("checkpoints", "."):
        folder = killed.out / closed
        with obeying_permissions(), monkeypatch.context() as patches:
            patches.setenv("CLOSED_FOLDER", str(folder))
            killed.finish(expect=1)
        folder.chmod(0o755)
        assert "Permission denied" in killed.output and str(folder.resolve()) in killed.output
        assert "Traceback" not in killed.output
        assert newest_checkpoint(killed.out) == 4
        assert read_checkpoint(checkpoint_folder(killed.out / "checkpoints", 4)).step == 4
        run = killed.finish()
        assert "the run goes on after step 4" in killed.output
        assert_one_history(run)
        killed.put_back(start)


@pytest.mark.tier("all")
def test_a_run_killed_at_random_moments_again_and_again_ends_like_any_other(task, tmp_path):
    dice = random.Random(5)
    killed = KilledRun(tmp_path, tiny_config(task, max_steps=STEPS, save_steps=1, async_generation_ratio=1))
    for _ in range(3):
        with killed.moments() as moments:
            killed.finish()
        killed.put_back(moments[dice.randrange(len(moments) - 2)])
    run = killed.finish()
    assert_one_history(run)
    assert run.summary["lag/max"] <= 1
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["resume_from_checkpoint"] is True
    assert json.loads((run.folder / "timeline.json").read_text())

"""Where a run goes on, and who may not: decided from files alone, before anything starts."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree, dump_config
from roll.pipeline.checkpoints import checkpoint_folder, saved_steps
from roll.pipeline.resume import find_resume_point, take_out_of_the_way
from roll.rollout.journal import RolloutProgress
from roll.tracking.files import JsonLines, read_json_lines
from roll.tracking.run_directory import RunDirectory


def config(**tree):
    return config_from_tree({"pretrain": "model", "resume_from_checkpoint": True} | tree)


def make_checkpoint(run: RunDirectory, step: int, source: str = "prompts") -> Path:
    folder = checkpoint_folder(run.checkpoints, step)
    (folder / "state" / "actor_train").mkdir(parents=True)
    (folder / "state" / "actor_train" / "rank-00000.safetensors").write_bytes(b"weights")
    facts = {
        "format": 1,
        "progress": asdict(RolloutProgress(step, step * 4, {}, (step,))),
        "source": source,
        "memory": {"kl_controller": {"coef": 0.5}},
        "files": {"state/actor_train/rank-00000.safetensors": 7},
    }
    (folder / "state" / "checkpoint.json").write_text(json.dumps(facts))
    return folder


@pytest.fixture
def run(tmp_path):
    made = RunDirectory.create(str(tmp_path / "run"), "addition")
    made.write_config(dump_config(config(output_dir=str(tmp_path / "run"))))
    return made


def refusal(*arguments) -> str:
    with pytest.raises(ConfigError) as refused:
        find_resume_point(*arguments)
    return str(refused.value)


def test_a_run_that_was_not_asked_to_or_has_not_begun_is_new(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_resume_point(config(resume_from_checkpoint=False), "prompts") is None
    assert find_resume_point(config(output_dir="nowhere"), "prompts") is None
    assert find_resume_point(config(exp_name="never"), "prompts") is None


def test_without_output_dir_the_latest_run_goes_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunDirectory.create(None, "addition").write_config(dump_config(config(exp_name="addition")))
    latest = RunDirectory.create(None, "addition")
    latest.write_config(dump_config(config(exp_name="addition")))
    point = find_resume_point(config(exp_name="addition"), "prompts")
    assert point.run.root == latest.root.resolve() and point.step == 0 and point.checkpoint is None
    assert point.progress == RolloutProgress.at_start() and point.role("actor_train") is None


def test_the_newest_whole_checkpoint_counts_and_damage_is_said(run):
    for step in (2, 10, 4):
        make_checkpoint(run, step)
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.step == 10 and point.progress.open_groups == (10,) and point.notes == []
    assert point.memory == {"kl_controller": {"coef": 0.5}}
    assert point.role("actor_train") == run.checkpoints / "step-10" / "state" / "actor_train"
    (point.role("actor_train") / "rank-00000.safetensors").write_bytes(b"we")
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.step == 4 and "has 2 bytes, not 7" in point.notes[0]


def test_if_no_checkpoint_is_whole_nothing_is_thrown_away_in_silence(run):
    (make_checkpoint(run, 2) / "state" / "checkpoint.json").unlink()
    assert "no checkpoint in" in refusal(config(output_dir=str(run.root)), "prompts")


def test_a_run_or_one_of_its_checkpoints_may_be_named(run):
    make_checkpoint(run, 2)
    make_checkpoint(run, 4)
    for named, step in ((run.root, 4), (run.checkpoints / "step-2", 2)):
        assert find_resume_point(config(resume_from_checkpoint=str(named)), "prompts").step == step
    assert "of these steps there are: 2, 4" in refusal(
        config(resume_from_checkpoint=str(run.checkpoints / "step-3")), "prompts"
    )
    assert "holds no run" in refusal(config(resume_from_checkpoint=str(run.root.parent / "other")), "prompts")
    elsewhere = config(resume_from_checkpoint=str(run.root), output_dir=str(run.root.parent / "other"))
    assert "goes on in its own folder" in refusal(elsewhere, "prompts")


@pytest.mark.parametrize("name", ["step-abc", "step-", "other"])
def test_an_odd_name_is_a_problem_of_the_configuration(run, name):
    assert "holds no run" in refusal(config(resume_from_checkpoint=str(run.checkpoints / name)), "prompts")


def test_a_latest_run_without_files_is_one_too(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    RunDirectory.create(None, "addition").metrics.unlink()
    assert "holds no run" in refusal(config(exp_name="addition"), "prompts")


def test_a_run_that_has_its_last_model_has_ended_also_without_states(run):
    (run.checkpoints / "step-7").mkdir()
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.has_ended(7) and not point.has_ended(8)
    make_checkpoint(run, 4)
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.step == 4 and point.has_ended(7) and point.has_ended(4) and not point.has_ended(5)
    point = find_resume_point(config(resume_from_checkpoint=str(run.checkpoints / "step-4")), "prompts")
    assert not point.has_ended(7) and point.has_ended(4), "who names a checkpoint wants to go on from there"


def test_a_run_without_a_checkpoint_begins_again_with_an_empty_record(run):
    (run.checkpoints / "step-7").mkdir()
    lines = JsonLines(run.metrics)
    lines.append({"step": 0})
    lines.append({"step": 1})
    lines.close()
    take_out_of_the_way(find_resume_point(config(output_dir=str(run.root)), "prompts"))
    assert read_json_lines(run.metrics) == []
    assert len(read_json_lines(run.root / "metrics-before.jsonl")) == 2
    assert [path.name for path in run.checkpoints.iterdir()] == ["abandoned-step-7"]


def test_other_prompts_are_refused(run):
    make_checkpoint(run, 2, source="earlier prompts")
    assert "other prompts" in refusal(config(output_dir=str(run.root), accept_config_changes=True), "prompts")


def test_changes_are_shown_and_judged(run):
    make_checkpoint(run, 2)
    changed = config(output_dir=str(run.root), logging_steps=7)
    assert find_resume_point(changed, "prompts").notes == ["changed: logging_steps: 1 -> 7 (harmless)"]
    changed = replace(changed, ppo_epochs=3, seed=9)
    text = refusal(changed, "prompts")
    assert "ppo_epochs: was 1" in text and "accept_config_changes=true" in text and "seed: was 42" in text
    assert "seed" in (text := refusal(replace(changed, accept_config_changes=True), "prompts"))
    assert "ppo_epochs" not in text
    accepted = replace(changed, accept_config_changes=True, seed=42)
    assert "changed: ppo_epochs: 1 -> 3 (needs confirmation)" in find_resume_point(accepted, "prompts").notes


def test_a_run_killed_in_its_first_moment_begins_again(tmp_path):
    run = RunDirectory.create(str(tmp_path / "run"), "addition")
    assert find_resume_point(config(output_dir=str(run.root)), "prompts").step == 0


def test_what_came_after_the_step_is_taken_out_of_the_way(run):
    for step in (2, 4, 6):
        make_checkpoint(run, step)
    for path in (run.metrics, run.samples):
        lines = JsonLines(path)
        for step in range(7):
            lines.append({"step": step})
        lines.close()
    run.timeline.write_text("[]")
    for name in ("timeline-before.json", "timeline-before-2.json"):
        point = find_resume_point(config(resume_from_checkpoint=str(run.checkpoints / "step-2")), "prompts")
        take_out_of_the_way(point)
        assert (run.root / name).exists()
        run.timeline.write_text("[]")
    assert saved_steps(run.checkpoints) == [2]
    assert sorted(path.name for path in run.checkpoints.iterdir()) == [
        "abandoned-step-4", "abandoned-step-6", "step-2",
    ]  # fmt: skip
    assert [record["step"] for record in read_json_lines(run.metrics)] == [0, 1, 2]
    assert [record["step"] for record in read_json_lines(run.samples)] == [0, 1, 2]

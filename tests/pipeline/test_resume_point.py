"""Where a run goes on, and who may not: decided from files alone, before anything starts."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from roll.cli.main import how_to_go_on
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree, dump_config
from roll.configs.run import RLVRConfig
from roll.data.records import Prompt
from roll.data.sources import REASONING_GYM_KEY
from roll.pipeline.checkpoints import checkpoint_folder, saved_steps
from roll.pipeline.preflight import RLVRPlan
from roll.pipeline.resume import PUT_ASIDE_KEPT, find_resume_point, look_again, take_out_of_the_way
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


def make_model(run: RunDirectory, step: int) -> Path:
    """What a run without `save_steps` leaves behind."""
    folder = checkpoint_folder(run.checkpoints, step)
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"weight": np.zeros(64, np.float32)}, folder / "model.safetensors")
    return folder


def write_steps(run: RunDirectory, *steps: int) -> None:
    for path in (run.metrics, run.samples):
        lines = JsonLines(path)
        for step in steps:
            lines.append({"step": step})
        lines.close()


def steps_of(path: Path) -> list[int]:
    return [record["step"] for record in read_json_lines(path)]


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
    assert point.run.root == latest.root.resolve() and point.step == 0
    assert point.state.progress == RolloutProgress.at_start() and point.checkpoint is None


def test_the_newest_whole_checkpoint_counts_and_damage_is_said(run):
    for step in (2, 10, 4):
        make_checkpoint(run, step)
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.step == 10 and point.state.progress.open_groups == (10,) and point.notes == []
    assert point.state.advantage_state == {"kl_controller": {"coef": 0.5}}
    assert point.checkpoint.role("actor_train") == run.checkpoints / "step-10" / "state" / "actor_train"
    (point.checkpoint.role("actor_train") / "rank-00000.safetensors").write_bytes(b"we")
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
    make_model(run, 7)
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.has_ended(7) and not point.has_ended(8)
    make_checkpoint(run, 4)
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.step == 4 and point.has_ended(7) and point.has_ended(4) and not point.has_ended(5)
    point = find_resume_point(config(resume_from_checkpoint=str(run.checkpoints / "step-4")), "prompts")
    assert not point.has_ended(7) and point.has_ended(4), "who names a checkpoint wants to go on from there"


def test_a_last_checkpoint_that_is_not_whole_is_no_end(run):
    for step in (4, 7):
        make_checkpoint(run, step)
    (run.checkpoints / "step-7" / "state" / "actor_train" / "rank-00000.safetensors").write_bytes(b"we")
    point = find_resume_point(config(output_dir=str(run.root), max_steps=7), "prompts")
    assert point.step == 4 and not point.has_ended(7)
    assert any("has 2 bytes, not 7" in note for note in point.notes)


def cut_short(model: Path) -> None:
    os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 8)


def lacking_a_part(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "model.safetensors cannot be read"),
        (lacking_a_part, "2.safetensors cannot be read"),
        (lambda model: (model / "model.safetensors").unlink(), "model.safetensors cannot be read"),
        (lambda model: (model / "config.json").write_text("{"), "no model that can be read"),
        (lambda model: (model / "config.json").unlink(), "no model that can be read"),
    ],
)
def test_a_last_model_that_cannot_be_read_is_no_end_and_is_said_to_be_made_again(run, damage, words):
    damage(make_model(run, 7))
    make_checkpoint(run, 4)
    point = find_resume_point(config(output_dir=str(run.root), max_steps=7), "prompts")
    assert point.step == 4 and not point.has_ended(7)
    (note,) = (note for note in point.notes if note.startswith("the last step is done again"))
    assert words in note
    take_out_of_the_way(point)
    assert (run.checkpoints / "abandoned-step-7").is_dir()


def test_what_another_process_did_before_the_run_was_held_counts(run):
    make_checkpoint(run, 2)
    asked = config(output_dir=str(run.root))
    point = find_resume_point(asked, "prompts")
    make_checkpoint(run, 4)
    assert look_again(point, asked, "prompts").step == 4
    asked = config(resume_from_checkpoint=str(run.checkpoints / "step-2"))
    point = find_resume_point(asked, "prompts")
    assert look_again(point, asked, "prompts").step == 2
    (run.checkpoints / "step-2").rename(run.checkpoints / "gone")
    with pytest.raises(ConfigError, match="of these steps there are: 4"):
        look_again(point, asked, "prompts")


def test_who_named_the_wrong_checkpoint_can_undo_it(run):
    for step in (2, 4, 6):
        make_checkpoint(run, step)
    write_steps(run, *range(8))
    take_out_of_the_way(find_resume_point(config(resume_from_checkpoint=str(run.checkpoints / "step-2")), "prompts"), 2)
    for path in (run.metrics, run.samples):
        aside = path.with_name(f"{path.stem}-before.jsonl")
        assert steps_of(path) == [0, 1, 2] and steps_of(aside) == [3, 4, 5, 6, 7]
        path.write_text(path.read_text() + aside.read_text())
    for step in (4, 6):
        (run.checkpoints / f"abandoned-step-{step}").rename(run.checkpoints / f"step-{step}")
    point = find_resume_point(config(output_dir=str(run.root)), "prompts")
    assert point.step == 6
    take_out_of_the_way(point, 2)
    assert steps_of(run.metrics) == steps_of(run.samples) == list(range(7))


def test_a_process_that_is_killed_while_it_cuts_is_followed_by_one_that_does_the_rest(run, monkeypatch):
    """At each of its changes of the folder, one after the other."""
    make_checkpoint(run, 2)
    for allowed in range(8):
        make_checkpoint(run, 4)
        lines = JsonLines(run.metrics)
        for step in range(len(read_json_lines(run.metrics)), 6):
            lines.append({"step": step, "turn": allowed})
        lines.close()
        run.timeline.write_text("[]")
        point = find_resume_point(config(resume_from_checkpoint=str(run.checkpoints / "step-2")), "prompts")
        replace_file, left = os.replace, iter(range(allowed))

        def replace_or_die(source, target, replace_file=replace_file, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            replace_file(source, target)

        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(os, "replace", replace_or_die)
            take_out_of_the_way(point, 1)
            raise KeyboardInterrupt  # all changes were allowed
        take_out_of_the_way(point, 1)
        take_out_of_the_way(point, 1)
        assert saved_steps(run.checkpoints) == [2] and steps_of(run.metrics) == [0, 1, 2]
        number = f"-{allowed + 1}" if allowed else ""
        assert read_json_lines(run.root / f"metrics-before{number}.jsonl") == [
            {"step": step, "turn": allowed} for step in (3, 4, 5)
        ]
        assert not (run.root / f"metrics-before-{allowed + 2}.jsonl").exists(), "once, whenever it was killed"
        assert not run.timeline.exists()


def test_what_was_put_aside_is_bounded_and_the_newest_stays(run):
    make_checkpoint(run, 2)
    for turn in range(9):
        abandoned = make_checkpoint(run, 4)
        os.utime(abandoned, (turn, turn))
        (abandoned / "turn").write_text(str(turn))
        os.utime(abandoned, (turn, turn))
        write_steps(run, 3, 10 + turn)
        run.timeline.write_text(str(turn))
        take_out_of_the_way(
            find_resume_point(config(resume_from_checkpoint=str(run.checkpoints / "step-2")), "prompts"), 2
        )
    turns = sorted((path / "turn").read_text() for path in run.checkpoints.glob("abandoned-step-*"))
    assert turns == ["7", "8"] and not list(run.checkpoints.glob(".*"))
    newest = [f"-{number}" for number in range(10 - PUT_ASIDE_KEPT, 10)]
    for path, read in ((run.metrics, steps_of), (run.samples, steps_of), (run.timeline, Path.read_text)):
        asides = [path.with_name(f"{path.stem}-before{number}{path.suffix}") for number in newest]
        assert set(run.root.glob(f"{path.stem}-before*")) == set(asides)
        assert [read(aside) for aside in asides] == [
            str(turn) if path == run.timeline else [3, 10 + turn] for turn in range(9 - PUT_ASIDE_KEPT, 9)
        ]
    make_checkpoint(run, 4)
    take_out_of_the_way(find_resume_point(config(resume_from_checkpoint=str(run.checkpoints / "step-2")), "prompts"), 0)
    assert len(list(run.checkpoints.glob("abandoned-step-*"))) == 3, "0: all stay"


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


def test_another_example_solution_of_the_same_task_is_no_corrected_answer():
    def answers(truth, **metadata):
        prompt = Prompt("p", "d", np.zeros(1, np.int32), "question", truth, metadata)
        return RLVRPlan(RLVRConfig(), [prompt], []).answers()

    task = {REASONING_GYM_KEY: {"dataset": "knight_swap", "config": {}}}
    assert answers({"answer": "one"}, **task) == answers({"answer": "two"}, **task)
    assert answers("one") != answers("two") and answers("one", level=1) != answers("one", level=2)


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
    for path in (run.metrics, run.samples, run.groups):
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
    assert [record["step"] for record in read_json_lines(run.groups)] == [0, 1, 2]


def test_an_interrupted_run_names_the_checkpoint_that_a_resume_would_take(tmp_path):
    run = RunDirectory.create(str(tmp_path / "run"), "x")
    assert "begins again there" in how_to_go_on(run)
    make_checkpoint(run, 2)
    make_checkpoint(run, 4)
    assert how_to_go_on(run) == f"to go on after step 4: the same command with resume_from_checkpoint={run.root}"
    (checkpoint_folder(run.checkpoints, 4) / "state" / "checkpoint.json").write_text("{")
    assert "after step 2" in how_to_go_on(run)
    (checkpoint_folder(run.checkpoints, 2) / "state" / "checkpoint.json").unlink()
    assert how_to_go_on(run) == "no checkpoint is whole: begin a new run in another folder"

"""A run that failed begins again by itself, from its newest checkpoint, as often as it is allowed."""

import json
import os
import re
import signal
from dataclasses import asdict, replace

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from tiny import tiny_config

from roll.cli.main import Ended, begin_again
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree, load_config
from roll.configs.run import RestartsConfig
from roll.pipeline.checkpoints import FACTS, FORMAT, STATE, checkpoint_folder
from roll.pipeline.preflight import prepare
from roll.pipeline.resume import Restarts, changes
from roll.rollout.journal import RolloutProgress
from roll.tracking.run_directory import RunDirectory
from roll.tracking.trackers import read_metrics

STEPS = 6


@pytest.fixture
def config(task):
    ahead = {"async_generation_ratio": 1.5, "max_staleness": 4, "staleness_policy": "drop"}
    tree = tiny_config(task, max_steps=9, save_steps=2, **ahead)
    return config_from_tree(tree)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(str(tmp_path / "run"), "tiny")


def saved(run, step):
    """A checkpoint as far as whoever looks for the newest whole one goes."""
    folder = checkpoint_folder(run.checkpoints, step)
    (folder / STATE).mkdir(parents=True)
    progress = asdict(RolloutProgress(step, 8 * step, {}, ()))
    facts = {"format": FORMAT, "files": {}, "progress": progress, "source": "prompts", "memory": {}}
    (folder / STATE / FACTS).write_text(json.dumps(facts))
    return folder


def allowed(config, **settings):
    return replace(config, restarts=RestartsConfig(**settings))


def test_a_run_stays_failed_unless_restarts_are_wanted(config, run):
    assert Restarts().after_failure(config, run) is None


def test_failures_in_a_row_are_counted_from_the_last_checkpoint_on(config, run):
    restarts, config = Restarts(), allowed(config, max_in_a_row=2, delay_seconds=0.0)
    assert restarts.after_failure(config, run) and restarts.after_failure(config, run)
    for step in (2, 4):
        saved(run, step)
        _, words = restarts.after_failure(config, run)
        assert f"after step {step} in 0 s (restart 1 of 2 " in words
    assert restarts.after_failure(config, run)
    assert restarts.after_failure(config, run) is None


def test_new_trainers_are_the_first_remedy_only_and_count_as_a_restart(config, run):
    restarts, config = Restarts(), allowed(config, max_in_a_row=2, delay_seconds=0.0)
    words = restarts.in_place(config, run)
    assert words.startswith("the trainers begin again after step 0 in 0 s (restart 1 of 2 ")
    assert restarts.in_place(config, run) is None, "they did not help"
    assert "(restart 2 of 2 " in restarts.after_failure(config, run)[1], "what was refused was not counted"
    assert restarts.after_failure(config, run) is None
    saved(run, 2)
    assert restarts.in_place(config, run)
    restarts.take_back()
    assert "(restart 1 of 2 " in restarts.after_failure(config, run)[1]


def test_new_trainers_are_no_remedy_where_none_is_allowed_or_the_mode_changes(config, run):
    assert Restarts().in_place(config, run) is None
    assert Restarts().in_place(allowed(config, max_in_a_row=1, synchronous_after=1), run) is None
    assert Restarts().in_place(allowed(config, max_in_a_row=2, synchronous_after=2), run) is not None
    saved(run, config.max_steps)
    assert Restarts().in_place(allowed(config, max_in_a_row=1), run) is None


def test_a_damaged_checkpoint_is_no_progress(config, run):
    restarts, config = Restarts(), allowed(config, max_in_a_row=1)
    saved(run, 2)
    assert "after step 2 " in restarts.after_failure(config, run)[1]
    (saved(run, 3) / STATE / FACTS).unlink()
    assert restarts.after_failure(config, run) is None


def test_a_run_that_failed_after_its_last_step_stays_failed(config, run):
    saved(run, config.max_steps)
    assert Restarts().after_failure(allowed(config, max_in_a_row=1), run) is None


def test_a_restart_goes_on_in_the_same_folder_with_the_same_settings(config, run):
    config = allowed(replace(config, resume_from_checkpoint=f"{run.root}/checkpoints/step-2"), max_in_a_row=1)
    again, words = Restarts().after_failure(config, run)
    assert again == replace(config, resume_from_checkpoint=str(run.root)) and "in 5 s" in words


def test_after_repeated_failures_nothing_is_generated_ahead_any_more(config, run):
    restarts, config = Restarts(), allowed(config, max_in_a_row=4, synchronous_after=2)
    first, words = restarts.after_failure(config, run)
    assert first.async_generation_ratio == 1.5 and "synchronous" not in words
    fallback, words = restarts.after_failure(first, run)
    assert "2 failures in a row" in words and "async_generation_ratio 1.5 -> 0" in words
    assert (fallback.async_generation_ratio, fallback.max_staleness, fallback.staleness_policy) == (0, None, "wait")
    saved(run, 2)
    third, words = restarts.after_failure(fallback, run)
    assert third.async_generation_ratio == 0 and "synchronous" not in words


def test_a_fallback_that_would_be_refused_is_refused_beforehand(task):
    """An uncorrected loss is allowed at ratio 1 and needs no permission at ratio 0; a knob of it may not work there."""
    settings = {"max_steps": 6, "save_steps": 2, "async_generation_ratio": 1}
    restarts = {"restarts": {"max_in_a_row": 2, "synchronous_after": 1}}
    uncorrected = {"actor_train__pg_variant": "vanilla", "allow_uncorrected_off_policy": True}
    prepare(config_from_tree(tiny_config(task, **settings, **uncorrected, **restarts)))
    several = {"actor_train__training_args": {"learning_rate": 1e-3, "gradient_accumulation_steps": 4}}
    recomputed = {"old_logprobs": "recompute", "allow_uncorrected_off_policy": True, **several}
    recomputed["actor_train__use_dynamic_batching_in_train"] = False
    prepare(config_from_tree(tiny_config(task, **settings, **recomputed)))
    with pytest.raises(ConfigError) as refusal:
        prepare(config_from_tree(tiny_config(task, **settings, **recomputed, **restarts)))
    assert [problem.path for problem in refusal.value.problems] == ["restarts.synchronous_after"]
    assert "allow_uncorrected_off_policy: true has no effect" in refusal.value.problems[0].message


@pytest.mark.parametrize(
    ("then", "exit_code"),
    [("refused", 1), ("failed", 1), ("interrupted", 1), ("well", 0)],
)
def test_an_attempt_that_is_refused_counts_as_a_failure(config, run, then, exit_code):
    config, attempts = allowed(config, max_in_a_row=2, delay_seconds=0.0), []
    ends = {"refused": Ended(2, refused=True), "failed": Ended(1, (config, run)), "interrupted": Ended(1)}

    def attempt(again):
        attempts.append(again.resume_from_checkpoint)
        return Ended(2, refused=True) if len(attempts) == 1 else ends.get(then, Ended(0))

    assert begin_again(config, run, attempt) == exit_code
    assert attempts == [str(run.root)] * 2


@pytest.mark.parametrize("moment", ["before it begins again", "in the next attempt"])
def test_an_interrupted_run_does_not_begin_again(config, run, monkeypatch, capsys, moment):
    """By a signal, as a job scheduler ends it."""
    config, attempts = allowed(config, max_in_a_row=9), []

    def terminated(*_):
        os.kill(os.getpid(), signal.SIGTERM)

    def attempt(again):
        attempts.append(again)
        try:
            terminated()
        except KeyboardInterrupt:  # a run ends in order
            return Ended(1)

    monkeypatch.setattr("time.sleep", terminated if moment == "before it begins again" else lambda seconds: None)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert begin_again(config, run, attempt) == 1
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    was_waiting = moment == "before it begins again"
    assert ("interrupted before it began again" in capsys.readouterr().err) == was_waiting
    assert len(attempts) == (not was_waiting)


def final_weights(run):
    return (checkpoint_folder(run / "checkpoints", STEPS) / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def undisturbed(task):
    """At ratio 0, so that weights can be compared to the bit."""
    return run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, max_steps=STEPS, save_steps=2))


def killed_trainer(task, steps):
    return tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        chaos={"enabled": True, "events": [{"kind": "kill", "role": "actor_train", "at_step": step} for step in steps]},
        restarts={"max_in_a_row": 2, "delay_seconds": 0},
    )


def assert_as_if_nothing_had_been(run, undisturbed, capsys, deaths):
    output = capsys.readouterr().out
    assert len(re.findall("the (?:run begins|trainers begin) again after step", output)) == deaths
    assert run.summary["status"] == "success" and run.summary["ledger"]["consumed"] == STEPS * 8
    assert [record["step"] for record in read_metrics(run.folder / "metrics.jsonl")] == list(range(STEPS + 1))
    assert final_weights(run.folder) == final_weights(undisturbed.folder)


def test_a_run_whose_trainer_dies_twice_goes_on_and_ends_as_if_nothing_had_been(task, undisturbed, capsys):
    run = run_pipeline(task, IN_THIS_PROCESS, killed_trainer(task, (3, 5)))
    assert_as_if_nothing_had_been(run, undisturbed, capsys, deaths=2)
    first, second = run.summary["resumed_at"]
    assert first in (0, 2) and second in (2, 4), "a checkpoint may have been on its way to the disk"


@pytest.mark.tier("all")
@pytest.mark.timeout(400)
def test_a_run_whose_trainers_process_is_killed_does_so_as_well(task, undisturbed, ray_cluster, capsys):
    run = run_pipeline(task, ray_cluster, killed_trainer(task, (3,)))
    assert_as_if_nothing_had_been(run, undisturbed, capsys, deaths=1)
    assert run.summary["resumed_at"][0] in (0, 2)


def test_a_run_that_fails_at_the_same_place_each_time_ends(task, capsys):
    tree = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        stages={"advantage": "custom_parts:fails_always"},
        restarts={"max_in_a_row": 1, "delay_seconds": 0},
    )
    run = run_pipeline(task, IN_THIS_PROCESS, tree, expect=1)
    output = capsys.readouterr().out
    assert output.count("the trainers begin again after step 2") == 1
    assert run.summary["status"] == "failed" and "one too many" in run.summary["error"]
    assert run.summary["resumed_at"] == [2]


def test_a_run_that_cannot_keep_up_goes_on_in_synchronous_mode_and_says_so(task, capsys):
    tree = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        async_generation_ratio=2,
        stages={"advantage": "custom_parts:fails_ahead"},
        restarts={"max_in_a_row": 3, "delay_seconds": 0, "synchronous_after": 2},
    )
    run = run_pipeline(task, IN_THIS_PROCESS, tree)
    output = capsys.readouterr().out
    assert "it goes on in synchronous mode: async_generation_ratio 2 -> 0" in output
    assert run.summary["status"] == "success" and run.summary["resumed_at"] == [2, 2]
    resolved = load_config(run.folder / "config.yaml")
    assert resolved.async_generation_ratio == 0
    assert all(step["lag/max"] == 0 for step in run.metrics if step["step"] > 2)
    ledger = run.summary["ledger"]
    dropped = sum(number for name, number in ledger.items() if name.startswith("dropped/"))
    assert ledger["consumed"] == STEPS * 8 and ledger["issued"] == ledger["consumed"] + dropped
    again = config_from_tree(tree | {"output_dir": str(run.folder), "resume_from_checkpoint": True})
    assert {change.judgement for change in changes(resolved, again)} == {"harmless"}, "the command may be repeated"
    other = config_from_tree(tree | {"async_generation_ratio": 3, "output_dir": str(run.folder)})
    unlike = changes(replace(resolved, max_staleness=1), other)
    assert "needs confirmation" in {change.judgement for change in unlike if change.path == "async_generation_ratio"}

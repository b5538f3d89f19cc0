"""A run that failed begins again by itself, from its newest checkpoint, as often as it is allowed."""

from dataclasses import replace

import pytest
from runs import run_pipeline
from tiny import make_task, tiny_config

from roll.configs.loader import config_from_tree, load_config
from roll.configs.schema import RestartsConfig
from roll.pipeline.checkpoints import STATE, checkpoint_folder
from roll.pipeline.restarts import Restarts
from roll.tracking.metrics import read_metrics
from roll.tracking.run_directory import RunDirectory

STEPS = 6

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    return folder


@pytest.fixture
def config(task):
    tree = tiny_config(task, save_steps=2, async_generation_ratio=1.5, max_staleness=4, staleness_policy="drop")
    return config_from_tree(tree)


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(str(tmp_path / "run"), "tiny")


def saved(run, step):
    (checkpoint_folder(run.checkpoints, step) / STATE).mkdir(parents=True)


def allowed(config, **settings):
    return replace(config, restarts=RestartsConfig(**settings))


def test_a_run_stays_failed_unless_restarts_are_wanted(config, run):
    assert Restarts().after_failure(config, run) is None


def test_failures_in_a_row_are_counted_from_the_last_checkpoint_on(config, run):
    restarts, config = Restarts(), allowed(config, max_in_a_row=2, delay_seconds=0.0)
    assert restarts.after_failure(config, run) and restarts.after_failure(config, run)
    for step in (2, 4):
        saved(run, step)
        again = restarts.after_failure(config, run)
        assert f"after step {step} in 0 s (restart 1 of 2 " in again.words
    assert restarts.after_failure(config, run)
    assert restarts.after_failure(config, run) is None


def test_a_restart_goes_on_in_the_same_folder_with_the_same_settings(config, run):
    config = allowed(replace(config, resume_from_checkpoint=f"{run.root}/checkpoints/step-2"), max_in_a_row=1)
    again = Restarts().after_failure(config, run)
    assert again.config == replace(config, resume_from_checkpoint=str(run.root)) and again.delay_seconds == 5


def test_after_repeated_failures_nothing_is_generated_ahead_any_more(config, run):
    restarts, config = Restarts(), allowed(config, max_in_a_row=4, synchronous_after=2)
    first = restarts.after_failure(config, run)
    assert first.config.async_generation_ratio == 1.5 and "synchronous" not in first.words
    second = restarts.after_failure(first.config, run)
    assert "2 failures in a row" in second.words and "async_generation_ratio 1.5 -> 0" in second.words
    fallback = second.config
    assert (fallback.async_generation_ratio, fallback.max_staleness, fallback.staleness_policy) == (0, None, "wait")
    saved(run, 2)
    third = restarts.after_failure(fallback, run)
    assert third.config.async_generation_ratio == 0 and "synchronous" not in third.words


def final_weights(run):
    return (checkpoint_folder(run.folder / "checkpoints", STEPS) / "model.safetensors").read_bytes()


def test_a_run_whose_trainer_is_killed_goes_on_and_ends_as_if_nothing_had_been(task, ray_cluster, capsys):
    """At ratio 0, so that the weights can be compared to the bit."""
    tree = tiny_config(task, max_steps=STEPS, save_steps=2)
    undisturbed = run_pipeline(task, ray_cluster, tree)
    killed = {"enabled": True, "events": [{"kind": "kill", "role": "actor_train", "at_step": step} for step in (3, 5)]}
    restarts = {"max_in_a_row": 2, "delay_seconds": 0}
    run = run_pipeline(task, ray_cluster, tree | {"chaos": killed, "restarts": restarts})
    assert run.summary["status"] == "success"
    first, second = run.summary["resumed_at"]
    assert first in (0, 2) and second in (2, 4), "a checkpoint may have been on its way to the disk"
    assert [record["step"] for record in read_metrics(run.folder / "metrics.jsonl")] == list(range(STEPS + 1))
    assert run.summary["ledger"]["consumed"] == STEPS * 8
    assert capsys.readouterr().out.count("the run begins again after step") == 2
    assert final_weights(run) == final_weights(undisturbed)


def test_a_run_that_fails_at_the_same_place_each_time_ends(task, ray_cluster, capsys):
    tree = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        stages={"advantage": "custom_parts:FailsAlways"},
        restarts={"max_in_a_row": 1, "delay_seconds": 0},
    )
    run = run_pipeline(task, ray_cluster, tree, expect=1)
    output = capsys.readouterr().out
    assert run.summary["status"] == "failed" and "one too many" in run.summary["error"]
    assert run.summary["resumed_at"] in ([2], [0, 2]), "the first failure may have come before the checkpoint was whole"
    assert output.count("the run begins again after step 2") == 1


def test_a_run_that_cannot_keep_up_goes_on_in_synchronous_mode_and_says_so(task, ray_cluster, capsys):
    tree = tiny_config(
        task,
        max_steps=STEPS,
        save_steps=2,
        async_generation_ratio=2,
        stages={"advantage": "custom_parts:FailsAhead"},
        restarts={"max_in_a_row": 3, "delay_seconds": 0, "synchronous_after": 2},
    )
    run = run_pipeline(task, ray_cluster, tree)
    output = capsys.readouterr().out
    assert "it goes on in synchronous mode: async_generation_ratio 2 -> 0" in output
    assert run.summary["status"] == "success" and len(run.summary["resumed_at"]) >= 2
    assert load_config(run.folder / "config.yaml").async_generation_ratio == 0
    last = run.summary["resumed_at"][-1]
    assert last in (0, 2) and all(step["lag/max"] == 0 for step in run.metrics if step["step"] > last)
    ledger = run.summary["ledger"]
    dropped = sum(number for name, number in ledger.items() if name.startswith("dropped/"))
    assert ledger["consumed"] == STEPS * 8 and ledger["issued"] == ledger["consumed"] + dropped

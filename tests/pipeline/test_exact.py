"""`roll check --exact`: a configuration as a run and as a plain loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial

import numpy as np
import psutil
import pytest
from fake_cluster import FakeCluster
from runs import TESTS
from test_agentic_runs import agentic_config
from test_critic_run import critic_config
from tiny import tiny_config, write_config

from roll.cli.main import attempt_run, main
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.pipeline import stages
from roll.pipeline.exact import NOTES, exact_config, first_difference
from roll.pipeline.preflight import prepare
from roll.tracking.run_directory import RunDirectory
from tests.tiers import quick

STEPS = 2


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Runs a configuration for two steps at ratio 0; returns its configuration and its folder."""
    monkeypatch.chdir(tmp_path)

    def run(tree):
        config = exact_config(config_from_tree(tree), STEPS)
        with FakeCluster():
            assert attempt_run("run.yaml", lambda: config, time.monotonic()).exit_code == 0
        return config, RunDirectory.latest(config.exp_name)

    return run


def difference_from_plain_loop(config, run):
    with FakeCluster():
        return asyncio.run(first_difference(prepare(config), run))


EVERYTHING = {
    "async_generation_ratio": 1,
    "adv_estimator": "grpo",
    "old_logprobs": "recompute",
    "train_infer_correction": {"weight": {"level": "token", "upper": 2.0}},
    "use_kl_loss": True,
    "kl_loss_coef": 0.01,
    "reference": {"device_mapping": [0]},
    "teacher": {"device_mapping": [0]},
    "distillation": {"use": "rewards", "coef": 0.1},
    "group_filter": "zero_variance",
    "ppo_epochs": 2,
    "weight_update__interval_steps": 2,
    "whiten_advantages": True,
}


ADAPTERS_ALONE = {
    "actor_train__model_args": {"lora_target": "all-linear", "lora_rank": 4},
    "actor_train__training_args__learning_rate": 1e-2,
    "weight_update__content": "adapter",
}


OWN_TEACHER = {
    "teacher": {"weights": "policy", "prompt": "{ground_truth}={prompt}"},
    "distillation": {"use": "loss", "reward_coef": 0},
}


RUNS = {
    "plain": tiny_config,
    "reference, teacher, correction, filter, two epochs": partial(tiny_config, **EVERYTHING),
    "critic": partial(critic_config, critic_warmup=1),
    "a teacher of its own": partial(tiny_config, **OWN_TEACHER),
    "agentic": partial(agentic_config, async_generation_ratio=2, adv_estimator="gigpo"),
    "adapters alone": partial(tiny_config, **ADAPTERS_ALONE),
}


@pytest.mark.parametrize("name", quick(RUNS, "plain", "agentic"))
def test_the_run_is_the_plain_loop_to_the_last_bit(task, run_of, name):
    config, run = run_of(RUNS[name](task))
    assert config.async_generation_ratio == 0 and config.max_steps == STEPS
    assert difference_from_plain_loop(config, run) is None
    assert len(list((run.root / NOTES).glob("step-*.npz"))) == STEPS


def test_the_first_tensor_of_a_run_that_computes_something_else_is_named(task, run_of, monkeypatch):
    def crooked(batch, settings):
        metrics = original(batch, settings)
        if batch.step == 1:
            batch.data.tokens["advantages"][3] += 0.25
        return metrics

    original = stages.add_advantages
    monkeypatch.setattr(stages, "add_advantages", crooked)
    found = difference_from_plain_loop(*run_of(tiny_config(task)))
    assert str(found) == f"step 2: `advantages` differs in 1 of {found.size:,} values, by at most 0.25"


@pytest.mark.tier("all")
def test_whatever_differs_is_found_where_it_is_computed_first(task, run_of):
    config, run = run_of(tiny_config(task))
    file = run.root / NOTES / "step-2.npz"
    with np.load(file) as noted:
        right = {name: noted[name] for name in noted.files}

    def told(**changes):
        np.savez(file, **{**right, **changes})
        return str(difference_from_plain_loop(config, run))

    nearly = np.nextafter(right["behaviour_logprobs"], np.float32(1))
    assert told(behaviour_logprobs=nearly).startswith("step 2: `behaviour_logprobs` differs in")
    assert told(token_ids=right["token_ids"][:-1]) == "step 2: `token_ids` has another shape"
    assert "step 2: `actor/loss` differs in 1 of 1 value" in told(**{"actor/loss": right["actor/loss"] + 1e-9})
    swapped = {"scores": right["scores"][::-1].copy(), "rewards": right["rewards"][::-1].copy()}
    assert told(**swapped).startswith("step 2: `scores` differs in")


def test_a_model_that_is_not_what_was_trained_is_noticed(task, run_of):
    config, run = run_of(tiny_config(task))
    model = run.checkpoints / f"step-{STEPS}" / "model.safetensors"
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    model.write_bytes(data)
    found = difference_from_plain_loop(config, run)
    assert found.where == f"the model after step {STEPS}" and found.differing == 1


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"stages": {"advantage": "custom_parts:halved_advantages"}}, "stages"),
        ({"actor_train__device_mapping": [0, 1]}, "actor_train.device_mapping"),
    ],
)
def test_what_the_plain_loop_does_not_have_is_refused(task, changes, path):
    with pytest.raises(ConfigError) as refusal:
        exact_config(config_from_tree(tiny_config(task, **changes)), STEPS)
    assert [problem.path for problem in refusal.value.problems] == [path] and refusal.value.problems[0].remedy


def command_line(*arguments):
    return [sys.executable, "-m", "roll.cli.main", "check", *arguments]


ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{TESTS.parents[1]}:{TESTS}"}


@pytest.mark.tier("all")
@pytest.mark.timeout(300)
def test_the_command_says_so(task, tmp_path, ray_cluster):
    file = str(write_config(tmp_path, tiny_config(task, cluster__address=ray_cluster)))
    same = subprocess.run(
        command_line(file, "--exact", "2"), cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=240
    )
    assert same.returncode == 0, same.stderr
    assert same.stdout.endswith("the run and the plain loop have computed the same in 2 steps, to the last bit\n")
    assert same.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none"], "is no number of steps"),
        (["2", "stages={advantage: 'custom_parts:halved_advantages'}"], "the plain loop has the built-in stages only"),
        (["1", "pretrain=nowhere"], "nothing was started"),
    ],
)
def test_what_it_cannot_compare_is_refused(task, tmp_path, capsys, arguments, words):
    file = str(write_config(tmp_path, tiny_config(task)))
    with pytest.raises(SystemExit) if arguments == ["none"] else nullcontext():
        assert main(["check", file, "--exact", *arguments]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.tier("soak")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("harm", "words"), [("interrupted", "interrupted"), ("killed", "the plain loop failed")])
def test_a_plain_loop_that_is_interrupted_or_killed_leaves_nothing_behind(task, tmp_path, ray_cluster, harm, words):
    file = str(write_config(tmp_path, tiny_config(task, cluster__address=ray_cluster)))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command_line(file, "--exact", "40"), cwd=tmp_path, env=ENVIRONMENT, **pipes)
    try:
        while "as a plain loop" not in running.stdout.readline():
            assert running.poll() is None
        children = psutil.Process(running.pid).children
        while not list(tmp_path.glob("output/*/*/logs/plain_loop.out")):
            assert running.poll() is None
            time.sleep(0.05)
        found = [each for each in children() if "spawn_main" in " ".join(each.cmdline())]
        running.send_signal(signal.SIGINT) if harm == "interrupted" else found[0].kill()
        _, errors = running.communicate(timeout=60)
    finally:
        running.kill()
    assert running.returncode == 1 and errors.startswith(words) and "Traceback" not in errors
    gone, alive = psutil.wait_procs(found, timeout=30)
    assert not alive

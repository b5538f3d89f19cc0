"""What the how-to pages have their reader write does what they say, beyond being loaded and looked up."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from tiny import make_task, tiny_config, write_config

from roll.algorithms.advantages.base import make_advantage_estimator
from roll.algorithms.losses.base import PolicyInputs, make_policy_loss
from roll.algorithms.objective import PolicyObjective
from roll.configs.loader import load_config
from roll.rewards.base import RewardInput
from roll.rewards.registry import checked_output, resolve_verifier
from roll.tracking.trackers import read_metrics
from roll.trainers.base import build_trainer
from roll.trainers.state import SavedState, write_state
from tests.docs.pages import ROOT, page
from tests.pipeline.in_process import train_in_process
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import trainer_setup

ALGORITHMS = {
    "adv_estimator": "my_advantages:best_or_nothing",
    "actor_train__pg_variant": "my_losses:logistic",
}


def test_the_rewards_of_the_page_judge(sit_down):
    folder = sit_down(page("docs/howto/reward.md"))
    rewards = load_config(folder / "my_words.yaml").rewards
    words = resolve_verifier(rewards["words"], "rewards.words")
    answers = {text: words(RewardInput("1", "", text, "3")) for text in ("one two three", "one", "a b c d e f g")}
    assert [checked_output("words", answer).score for answer in answers.values()] == [1.0, 1 / 3, 1 / 5]
    assert answers["one"]["missed"] == 2
    short = resolve_verifier(rewards["short"], "rewards.short")
    ended, cut = RewardInput("1", "", "", response_tokens=9), RewardInput("1", "", "", finish_reason="length")
    assert short.is_async and [asyncio.run(short(each)) for each in (ended, cut)] == [1.0, 0.0]


def test_the_loss_of_the_page_fades_with_distance_and_ignores_what_is_masked(sit_down):
    sit_down(page("docs/howto/algorithm.md"))
    loss = make_policy_loss("my_losses:logistic", {"sharpness": 2.0})
    current = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.0, -4.0, float("nan")]])
    mask = torch.tensor([[True, True, False]])
    losses, metrics = loss(PolicyInputs(current, behaviour, torch.ones(1, 3), mask))
    losses.sum().backward()
    fresh, stale, outside = (-current.grad[0]).tolist()
    assert fresh == 1.0 and 0 < stale < 0.01 and outside == 0.0
    assert metrics["clip_fraction"].tolist() == [[0.0, 1.0, 0.0]]


def test_the_estimator_of_the_page_tells_best_from_worst(sit_down):
    sit_down(page("docs/howto/algorithm.md"))
    estimator = make_advantage_estimator("my_advantages:best_or_nothing")
    scores = torch.tensor([3.0, 1.0, 2.0, 5.0, 5.0])
    rewards = torch.stack([torch.zeros(5), scores], dim=1)
    found = estimator(rewards, torch.ones(5, 2, dtype=torch.bool), [0, 0, 0, 1, 1])
    assert found[:, 0].tolist() == [1.0, -1.0, 0.0, 0.0, 0.0] and torch.equal(found[:, 0], found[:, 1])


def test_the_algorithms_of_the_page_train(sit_down):
    folder = sit_down(page("docs/howto/algorithm.md"))
    make_task(folder)
    tree = tiny_config(folder, max_steps=2, async_generation_ratio=1, **ALGORITHMS)
    steps = train_in_process(folder, tree, lambda response, truth: float(len(response)))
    assert all(np.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    assert {abs(step["advantage/max"]) for step in steps} == {1.0}


@pytest.mark.tier("all")
def test_a_loss_reaches_a_process_that_has_never_heard_of_it(sit_down):
    """As trainers get it: they find the function by the name of its module."""
    folder = sit_down(page("docs/howto/algorithm.md"))
    (folder / "objective.bin").write_bytes(pickle.dumps(PolicyObjective(8, "my_losses:logistic")))
    found = subprocess.run(
        [sys.executable, "-c", "import pickle; print(pickle.load(open('objective.bin', 'rb')).policy_loss.function)"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "function logistic" in found.stdout, found.stderr


def test_the_trainer_of_the_page_learns_and_goes_on_from_its_state(sit_down):
    folder = sit_down(page("docs/howto/strategy.md"))
    model = write_model(folder / "tiny")

    def steps(trainer, seeds):
        return [trainer.train_step(make_batch(seed), OBJECTIVE, 1.0)["loss"] for seed in seeds]

    trainer = build_trainer("fsdp2_train", trainer_setup(model), "fsdp2_radam:Fsdp2RAdamTrainStrategy")
    trainer.initialize()
    try:
        before = weights_of(trainer)
        steps(trainer, range(6))  # RAdam's first steps are plain momentum
        assert any(not np.array_equal(before[name], weight) for name, weight in weights_of(trainer).items())
        write_state(folder / "state", 0, trainer.snapshot())
        undisturbed = steps(trainer, (6, 7))
        trainer.restore(SavedState(folder / "state"))
        assert steps(trainer, (6, 7)) == pytest.approx(undisturbed, abs=1e-6)
        assert type(trainer.optimizer) is torch.optim.RAdam
    finally:
        trainer.shutdown()


@pytest.mark.tier("all")
def test_a_run_takes_a_stage_a_worker_and_algorithms_from_the_folder_where_it_is_started(sit_down, ray_cluster):
    """`roll train` as a console command calls it: nothing puts the working folder on the import path (`-P`). Relative
    paths are relative to it also for workers of a cluster that was started elsewhere."""
    folder = sit_down(page("docs/howto/algorithm.md"))
    for name in ("docs/howto/stage.md", "docs/howto/strategy.md"):
        for file, text in page(name).saved_files().items():
            (folder / file).write_text(text)
    make_task(folder)
    (folder / "reward_functions.py").write_text((ROOT / "tests" / "pipeline" / "reward_functions.py").read_text())
    parts = {
        "stages": {
            "advantage": "my_stages:surprised_advantages",
            "keep_hard": {"after": "rollout", "use": "my_stages:keep_hard"},
        },
        "actor_train__worker_cls": "my_workers:CountingTrainWorker",
        "actor_train__strategy_args__strategy_cls": "fsdp2_radam:Fsdp2RAdamTrainStrategy",
        "cluster__address": ray_cluster,
    }
    config = tiny_config(folder, max_steps=2, response_length=2, **parts, **ALGORITHMS)
    write_config(folder, config | {"output_dir": "out"}, "run.yaml")
    command = "import sys; from roll.cli.main import main; sys.exit(main(['train', 'run.yaml']))"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((folder / "out" / "summary.json").read_text())["status"] == "success"
    steps = [step for step in read_metrics(folder / "out" / "metrics.jsonl") if step["step"] > 0]
    assert [step["actor/samples"] for step in steps] == [32.0, 32.0]
    assert all(0 <= step[name] <= 1 for step in steps for name in ("advantage/sure_share", "hard/share"))

"""The package of plug-ins is installed as a user installs it, and adds one of every kind."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from tiny import make_task, tiny_config

import roll
from roll.agentic.registry import ENVIRONMENTS, make_env
from roll.agentic.tools.base import TOOLS, Answer, Deadline
from roll.algorithms.registry import ADVANTAGE_ESTIMATORS, POLICY_LOSSES
from roll.configs.rewards import VERIFIERS
from roll.configs.run import TRACKERS
from roll.pipeline.stages import STAGES

PACKAGE = Path(__file__).parents[2] / "examples" / "plugin_package"
KINDS = (POLICY_LOSSES, ADVANTAGE_ESTIMATORS, VERIFIERS, ENVIRONMENTS, TOOLS, STAGES, TRACKERS)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    copy = tmp_path_factory.mktemp("package")
    for file in ("pyproject.toml", "roll_plugin_example.py"):
        (copy / file).write_text((PACKAGE / file).read_text())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(copy)], check=True, timeout=200)
    return folder


@pytest.fixture(autouse=True)
def on_the_path(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    yield
    sys.modules.pop("roll_plugin_example", None)


def test_there_is_one_of_every_kind_that_a_user_can_name():
    given = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(given) == {kind.group for kind in KINDS}
    for kind in KINDS:
        (name,) = given[kind.group]
        assert name in kind.names() and callable(kind.load(name, "here"))


def test_a_run_uses_loss_estimator_verifier_stage_and_tracker(tmp_path):
    make_task(tmp_path)
    tree = tiny_config(
        tmp_path,
        max_steps=2,
        adv_estimator="centred",
        actor_train__pg_variant="soft",
        actor_train__pg_variant_args={"strength": 0.5},
        rewards__addition__verifier="short",
        rewards__addition__verifier_args={"longest": 2},
        stages={"count_groups": {"after": "rollout", "use": "count_groups"}},
        track_with=["lines"],
        tracker_kwargs={"lines": {"path": str(tmp_path / "lines.txt")}},
    )
    run = run_pipeline(tmp_path, IN_THIS_PROCESS, tree)
    assert [step["my/groups"] for step in run.metrics] == [8.0, 8.0]
    for sample in run.samples:
        assert sample["score"] == float(len(sample["response"]) <= 2)
    tracked = [line.split() for line in (tmp_path / "lines.txt").read_text().splitlines()]
    assert [(step, float(reward)) for step, reward in tracked if step != "0"] == [
        (str(step["step"]), step["reward/mean"]) for step in run.metrics
    ]
    wrong = {**tree, "actor_train": {**tree["actor_train"], "pg_variant_args": {"strenght": 1.0}}}
    (problem,) = roll.check(wrong).problems
    assert problem.path == "actor_train.pg_variant_args.strenght" and "did you mean `strength`?" in problem.remedy


def test_the_environment_and_the_tool_work():
    env = make_env("echo", {})
    said, _ = env.reset(seed=3)
    assert env.step(said)[1:3] == (1.0, True)
    tool = TOOLS.load("upper", "here")()
    assert tool.call({"text": "ab"}, Deadline.after(1)) == Answer("AB")

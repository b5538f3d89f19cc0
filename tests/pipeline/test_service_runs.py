"""Whole runs with what stands beside a run: servers, simulated users, tools of MCP servers, environments of packages.

Those of packages that cannot be installed beside a run have an interpreter of their own, which `make soak` installs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from test_agentic_runs import agentic_config, gain

from roll.agentic.base import observation_from
from roll.agentic.library.openenv import OpenEnvEnv

HERE = Path(__file__).parent
AGENTIC = HERE.parent / "agentic"
OPENENV = [sys.executable, str(AGENTIC / "openenv_server.py"), "{port}"]

tier = pytest.mark.tier


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = children()
    yield
    assert children() <= before


def children() -> set[str]:
    """Command lines of the processes that this one has started."""
    command = ["ps", "-o", "args=", "--ppid", str(os.getpid())]
    found = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return {line for line in found if not line.startswith("ps -o")}


@pytest.fixture
def importable(monkeypatch):
    """What is in this folder and the stand-ins can be imported by programs that runs start."""

    def make(*folders: Path) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(each) for each in folders]))

    return make


def played(task, env, steps=2, groups=8, episodes=4, **changes):
    env = {
        "max_steps": 4,
        "max_tokens_per_step": 1,
        "reset_timeout_seconds": 300.0,
        "step_timeout_seconds": 300.0,
        **env,
    }
    config = agentic_config(
        task,
        {"copy": env},
        max_steps=steps,
        rollout_batch_size=groups,
        train_env_manager__group_size=episodes,
        **changes,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    ledger = run.summary["ledger"]
    assert ledger["consumed"] == steps * groups
    if changes["async_generation_ratio"] == 0:
        assert all(step["mismatch/abs_mean"] < 1e-5 for step in run.metrics)
    return run


@pytest.mark.needs("websockets")
@tier("all")
def test_a_run_plays_in_an_openenv_server(task):
    env = {"env_type": "openenv", "env_config": {"command": OPENENV, "observation_key": "text"}}
    run = played(task, env, async_generation_ratio=0, val_env_manager={"num_env_groups": 4}, eval_steps=2)
    for step in run.metrics:
        assert step["env/copy/turns"] == 2 and step["response/tokens"] == 8 * 4 * 2 and step["reward/max"] > 0
    assert run.summary["ledger"]["dropped/failed"] == 0


@pytest.mark.needs("openai")
@tier("all")
def test_a_run_talks_to_a_simulated_user(task, tmp_path):
    lines = [json.dumps({"turns": [str(first), str((first + 1) % 3)]}) for first in range(3)]
    (tmp_path / "talks.jsonl").write_text("\n".join(lines))
    options = {"tasks": str(tmp_path / "talks.jsonl"), "verifier": "copy_services:repeated"}
    run = played(task, {"env_type": "dialogue", "env_config": options}, async_generation_ratio=0)
    for step in run.metrics:
        assert step["env/copy/turns"] == step["env/copy/turns_said"] == 2
        assert step["reward/max"] in (0.5, 1.0)
    assert run.summary["ledger"]["dropped/failed"] == 0


@pytest.mark.needs("mcp")
@tier("all")
def test_a_run_calls_the_tools_of_an_mcp_server(task):
    env = {"env_type": "copy_services:Adding"}  # each environment starts a server
    run = played(task, env, groups=2, episodes=2, async_generation_ratio=0, response_length=40)
    assert all(step["env/copy/tool_errors"] == 0 for step in run.metrics)
    assert sum(step["env/copy/tool_calls"] for step in run.metrics) > 1
    assert run.summary["ledger"]["dropped/failed"] == 0


VERIFIERS = {"env_type": "verifiers", "env_config": {"environment": "plays", "python": sys.executable}}


@pytest.mark.needs("openai", "aiohttp")
@tier("all")
def test_a_run_trains_in_an_environment_of_a_program_beside_it(task, importable):
    """What `verifiers` needs of a run, with a stand-in for the package and OpenAI's own client."""
    importable(AGENTIC / "stand_in")
    env = {**VERIFIERS, "env_config": {**VERIFIERS["env_config"], "args": {"training": ["0", "1", "2"]}}}
    run = played(task, env, async_generation_ratio=0)
    for step in run.metrics:
        assert step["env/copy/turns"] == 2 and step["response/tokens"] == 8 * 4 * 2
    assert run.summary["ledger"]["dropped/failed"] == 0


@pytest.fixture(scope="module")
def interpreter(tmp_path_factory):
    """A function that returns an interpreter with some packages, in a folder of its own."""

    def make(*packages: str) -> str:
        folder = tmp_path_factory.mktemp("venv")
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
        return python

    return make


@tier("soak")
def test_a_run_learns_in_real_environments_of_verifiers(task, importable, interpreter):
    python = interpreter("verifiers==0.1.14")
    importable(HERE)

    def env(name: str, **changes):
        return {
            "env_type": "verifiers",
            "env_config": {"environment": f"real_verifiers:{name}", "python": python},
        } | changes

    changes = {"async_generation_ratio": 1, "val_env_manager": {"num_env_groups": 4}, "eval_steps": 40}
    run = played(task, env("once"), 40, actor_train__training_args__learning_rate=5e-3, **changes)
    assert gain(run) > 0.25 and run.summary["ledger"]["dropped/failed"] == 0
    run = played(task, env("twice"), async_generation_ratio=0)
    for step in run.metrics:  # verifiers ends a rollout at an empty answer, which it does not count as a turn
        counted = step["env/copy/num_turns"] + step["env/copy/odd_answers"]
        assert 1 < step["env/copy/turns"] == pytest.approx(counted)
    assert run.summary["ledger"]["dropped/failed"] == 0
    run = played(task, env("unlucky"), async_generation_ratio=0, max_group_retries=0, max_consecutive_refunds=100)
    assert run.summary["ledger"]["dropped/failed"] > 0
    assert "out of luck" in (run.folder / "logs" / "driver.log").read_text()
    run = played(task, env("twice", max_steps=1), async_generation_ratio=0)
    assert all(step["env/copy/turns"] == 1 for step in run.metrics), "a limit ends the episode, which counts"


@tier("soak")
def test_a_run_trains_on_a_task_set_of_verifiers_0_4(task, importable, interpreter):
    python = interpreter("verifiers==0.4.0", "uv")
    importable(HERE)
    options = {"environment": "real_taskset", "args": {"digits": 3}, "python": python}
    env = {"env_type": "verifiers", "env_config": options}
    run = played(task, env, 1, groups=4, async_generation_ratio=0)
    assert run.summary["ledger"]["dropped/failed"] == 0


@tier("soak")
@pytest.mark.parametrize("package", ["openenv-core==0.3.0", "openenv==0.10.0"])
def test_a_run_plays_in_a_real_openenv_server(task, importable, interpreter, package):
    python = interpreter(package)
    importable(HERE)
    command = [python, "-m", "uvicorn", "real_openenv:app", "--port", "{port}"]
    env = {"env_type": "openenv", "env_config": {"command": command, "start_timeout_seconds": 250.0}}
    run = played(task, env, async_generation_ratio=0)
    assert all(step["env/copy/turns"] == 2 for step in run.metrics)
    assert run.summary["ledger"]["dropped/failed"] == 0
    game = OpenEnvEnv(command=command, start_timeout_seconds=250.0)
    assert game.reset(seed=2)[0] == "1"
    text, reward, terminated, truncated, info = game.step("1")
    assert observation_from(text, info, reward=reward, terminated=terminated, truncated=truncated).reward == 1.0
    with pytest.raises(RuntimeError, match="boom"):
        game.step("boom")
    game.close()
    moves = OpenEnvEnv(command=command, action_key="mesage", start_timeout_seconds=250.0)
    moves.reset(seed=2)
    told, *_, info = moves.step("1")
    assert info["action_is_valid"] is False and "mesage" in told
    moves.close()

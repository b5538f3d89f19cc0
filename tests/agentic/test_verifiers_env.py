"""Environments of verifiers: what a seed chooses, what counts as a failure, and that nothing is left of the program."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from roll.agentic.base import Unavailable, observation_from
from roll.agentic.library.agent import AgentStopped
from roll.agentic.library.verifiers_env import VerifiersEnv
from roll.agentic.registry import check_env_type
from tests.tiers import need

need("openai")
pytestmark = pytest.mark.tier("all")  # each starts an interpreter
ADDRESS = json.dumps({"base_url": "http://127.0.0.1:9/e/7/v1", "api_key": "secret"})
NOT_LONG = 30.0


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    folder = str(Path(__file__).with_name("stand_in"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))


def made(*training, **args) -> VerifiersEnv:
    return VerifiersEnv("plays", {**args, "training": training or ["play"]}, python=sys.executable)


def played(env, seed=2):
    env.reset(seed=seed)
    text, reward, terminated, truncated, info = env.step(ADDRESS)
    return observation_from(text, info, reward=reward, terminated=terminated, truncated=truncated)


def program_of(env) -> int:
    return env._program._process.pid


def until_gone(pid: int) -> bool:
    deadline = time.monotonic() + NOT_LONG
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return not Path(f"/proc/{pid}").exists()


def test_even_seeds_choose_training_rows_and_odd_ones_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("TEARDOWN", str(tmp_path / "torn"))
    env = made("a", "b", "c", evaluation=["d"])
    told = {seed: json.loads(env.reset(seed=seed)[0]) for seed in range(60)}
    assert {told[seed] for seed in told if seed % 2 == 0} == {"a", "b", "c"}
    assert {told[seed] for seed in told if seed % 2} == {"d"}
    assert told == {seed: json.loads(env.reset(seed=seed)[0]) for seed in range(60)}
    last = played(env)
    assert (last.reward, last.success, last.terminated) == (0.75, True, True)
    assert last.metrics == {
        "key": len("secret"), "url": len("http://127.0.0.1:9/e/7/v1/"), "failed_rewards": 0, "odd_answers": 0,
    }  # fmt: skip
    pid = program_of(env)
    env.close()
    env.close()
    assert until_gone(pid) and (tmp_path / "torn").read_text() == "torn down\n"


def test_an_error_of_a_rollout_is_a_failure_and_no_reward_of_0():
    env = made("tool")
    with pytest.raises(RuntimeError, match="ended by an error.*no tool"):
        played(env)
    env.close()
    env = made("raise")
    with pytest.raises(RuntimeError, match="KeyError.*no such thing"):
        played(env)
    env.close()


def test_what_the_policy_causes_counts():
    """An empty answer, and an answer that a reward function cannot read: left out, they would cost nothing."""
    env = made("empty")
    last = played(env)
    assert last.reward == 0.75 and last.metrics["odd_answers"] == 1
    env.close()
    envs = [made("reward"), made("reward")]
    lasts = [None, None]

    def play(index: int) -> None:
        lasts[index] = played(envs[index])

    threads = [threading.Thread(target=play, args=[index]) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(NOT_LONG)
    assert [last.metrics["failed_rewards"] for last in lasts] == [1, 1], "each counts its own"
    for env in envs:
        env.close()


def test_one_program_runs_the_rollouts_of_all_and_survives_one_that_is_closed():
    waiting, other = made("wait"), made("wait", evaluation=["play"])
    beside = made("wait")
    waiting.reset(seed=2)
    beside.reset(seed=2)
    assert program_of(waiting) == program_of(beside) and waiting._program is beside._program
    other.reset(seed=2)
    assert program_of(other) != program_of(waiting), "other arguments, another program"

    async def close_while_it_runs() -> None:
        running = asyncio.create_task(asyncio.to_thread(waiting.step, ADDRESS))
        while waiting._running is None:
            await asyncio.sleep(0.01)
        waiting.close()
        with pytest.raises(AgentStopped):
            await running

    asyncio.run(close_while_it_runs())
    assert beside.reset(seed=2)[0] == '"wait"'
    pid = program_of(beside)
    for env in (beside, other):
        env.close()
    assert until_gone(pid)


def test_a_program_that_dies_costs_its_episode_and_is_replaced():
    env = made("die")
    with pytest.raises(RuntimeError, match="program that holds the environment has ended"):
        played(env)
    assert env.reset(seed=2)[0] == '"die"'
    env.close()


def test_a_killed_worker_takes_its_program_along():
    program = (
        "import sys, time\n"
        "from roll.agentic.library.verifiers_env import VerifiersEnv\n"
        "env = VerifiersEnv('plays', python=sys.executable); env.reset(seed=2)\n"
        "print(env._program._process.pid, flush=True); time.sleep(3600)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    pid = int(worker.stdout.readline())
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    assert until_gone(pid)


def test_a_worker_that_is_killed_while_its_environment_loads_leaves_nothing(tmp_path):
    told = tmp_path / "pid"
    program = (
        "import sys\n"
        "from roll.agentic.library.verifiers_env import VerifiersEnv\n"
        f"VerifiersEnv('plays', {{'loading': {str(told)!r}}}, python=sys.executable).reset(seed=2)\n"
    )
    worker = subprocess.Popen([sys.executable, "-c", program])
    deadline = time.monotonic() + NOT_LONG
    while not (told.exists() and told.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)
    pid = int(told.read_text())
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    assert until_gone(pid)


def in_place_of_python(tmp_path, text: str) -> str:
    path = tmp_path / "program"
    path.write_text(f"#!{sys.executable}\n{text}")
    path.chmod(0o755)
    return str(path)


def test_an_answer_that_breaks_off_is_the_end_of_the_program(tmp_path):
    """Killed while it wrote. Whoever waits would wait for ever, since rollouts have no limit of their own."""
    cut = """import sys
print('{"result": null}', flush=True)
sys.stdin.readline()
print('{"id": 1, "res', end="")
"""
    env = VerifiersEnv("plays", python=in_place_of_python(tmp_path, cut))
    failure = []

    def reset() -> None:
        with pytest.raises(RuntimeError, match="program that holds the environment has ended"):
            env.reset(seed=2)
        failure.append(True)

    thread = threading.Thread(target=reset, daemon=True)
    thread.start()
    thread.join(NOT_LONG)
    assert failure == [True]
    env.close()


def test_an_interpreter_that_greets_is_told_and_ended(tmp_path):
    greeting = f"import os, time\nprint('hello', os.getpid(), flush=True)\ntime.sleep({10 * NOT_LONG})\n"
    env = VerifiersEnv("plays", python=in_place_of_python(tmp_path, greeting))
    with pytest.raises(Unavailable, match="wrote .*hello") as told:
        env.reset(seed=2)
    assert until_gone(int(re.search(r"hello (\d+)", str(told.value))[1]))


@pytest.mark.parametrize(
    ("environment", "args", "words"),
    [
        ("player", {}, "Could not import 'player'"),
        ("plays", {"rows": 1}, "unexpected keyword argument 'rows'"),
        ("no.such:function", {}, "No module named 'no'"),
        ("json:dumps", {"obj": 1}, "no verifiers.Environment"),
        ("plays", {"group": True}, "whole group"),
    ],
)
def test_what_cannot_be_loaded_is_said(environment, args, words):
    with pytest.raises(Unavailable, match=words):
        VerifiersEnv(environment, args, python=sys.executable).reset(seed=2)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({}, "environment"),
        ({"environment": "x", "python": "no-such-python"}, "python"),
        ({"environment": "x", "python": "python3", "tool_parser": "hermse"}, "tool_parser"),
        ({"environment": "x", "python": "python3", "arguments": {}}, "arguments"),
    ],
)
def test_wrong_options_are_found_before_a_run(options, option):
    (found,) = check_env_type("mine", "verifiers", options)
    assert found.path == f"custom_envs.mine.env_config.{option}" and found.remedy


def test_the_remedy_for_a_package_that_is_missing_names_its_requirements(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (found,) = check_env_type("mine", "verifiers", {"environment": "x"})
    assert "requirements/verifiers.txt" in found.remedy

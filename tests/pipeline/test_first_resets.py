"""The first reset of an environment, before a run: what goes wrong is a problem of the configuration, told in time."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from roll.configs.run import CustomEnvConfig
from roll.pipeline.agentic_plan import _template_problems
from tests.tiers import need

need("websockets")
SERVER = str(Path(__file__).parents[1] / "agentic" / "openenv_server.py")


def problem_of(command, limit=60.0, **options):
    env = CustomEnvConfig("openenv", {"command": command, **options}, reset_timeout_seconds=limit)
    template = SimpleNamespace(prompt=lambda messages, tools: pytest.fail("there is nothing to write"))
    (found,) = _template_problems(SimpleNamespace(custom_envs={"far": env}), template)
    return found


def test_an_environment_that_fails_at_its_first_reset_says_why():
    found = problem_of([sys.executable, SERVER, "{port}"], observation_key="txt")
    assert found.path == "custom_envs.far.env_config" and "has no `txt` (observation_key); it has" in found.message


def test_an_environment_that_never_answers_is_given_up_in_time():
    before = threading.active_count()
    begun = time.monotonic()
    found = problem_of([sys.executable, SERVER, "{port}", "--silent"], limit=3.0)
    assert found.path == "custom_envs.far.reset_timeout_seconds" and "longer than 3 s" in found.message
    assert time.monotonic() - begun < 15
    while threading.active_count() > before and time.monotonic() - begun < 30:
        time.sleep(0.01)
    assert threading.active_count() <= before, "the reset ended when the environment was closed"

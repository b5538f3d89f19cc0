"""A server of the package `openenv` (or `openenv-core`): the game of tests/agentic/openenv_server.py."""

from __future__ import annotations

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    message: str


class Seen(Observation):
    text: str


class Copying(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.digit, self.steps = "", 0

    def reset(self, seed=None, episode_id=None, **options):
        self.digit, self.steps = str((seed or 0) // 2 % 3), 0
        return Seen(text=self.digit)

    def step(self, action, timeout_s=None, **options):
        if action.message == "boom":
            raise RuntimeError("it went boom")
        self.steps += 1
        return Seen(text=self.digit, reward=float(action.message == self.digit), done=self.steps == 2)

    @property
    def state(self):
        return State(step_count=self.steps)


app = create_app(Copying, Say, Seen, env_name="copying", max_concurrent_envs=100)

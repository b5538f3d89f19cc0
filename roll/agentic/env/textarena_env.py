"""Single-player games of the package TextArena (`pip install textarena`), imported when the environment is made.

TextArena draws from Python's and numpy's global random generators. Each episode here has generators of its own, put
in place of the global ones during a call and taken out after it, one call at a time in a process; so equal seeds give
equal episodes also where many run at once, and nobody else's random numbers change.

TextArena repeats the whole dialogue in every observation; a policy that has read it once needs only what is new, so its
observation wrappers are taken off.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gymnasium
import numpy as np

from roll.agentic.env.base import AnyText, BadOption
from roll.data.names import nearest_name_hint

_one_call_at_a_time = threading.Lock()


class TextArenaEnv(gymnasium.Env[str, str]):
    """Actions and the way to write them are what the game's own prompt says, usually ``[action]``."""

    metadata = {"render_modes": ["ansi"]}

    def __init__(
        self,
        game: str,
        game_args: Mapping[str, Any] | None = None,
        success_reward: float = 1.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """``game``: TextArena's id, for example ``GuessTheNumber-v0``. ``game_args``: arguments of its class.
        ``success_reward``: an outcome of at least this much is a success. Raises `BadOption`."""
        import textarena

        registered = textarena.envs.registration.ENV_REGISTRY
        if game not in registered:
            raise BadOption("game", f"TextArena has no game `{game}`", nearest_name_hint(game, registered))
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.render_mode = render_mode
        self._textarena = textarena
        self._random = _Generators()
        try:
            with self._random.in_place():
                made = textarena.make(game, **dict(game_args or {}))
        except TypeError as cause:
            remedy = "use what the game's class takes"
            raise BadOption("game_args", f"`{game}` refuses them ({cause})", remedy) from cause
        while isinstance(made, textarena.Wrapper):
            made = made.env
        self._game = made
        self._name = game
        self._success_reward = success_reward
        self._shown: list[str] = []
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**32))
        self._random = _Generators(drawn)
        with self._random.in_place():
            try:
                self._game.reset(num_players=1, seed=drawn)
            except AssertionError as cause:
                raise BadOption("game", f"`{self._name}` is not for one player ({cause})", "a 1-player game") from cause
            text, _ = self._news()
        self._shown, self._is_over = [text], False
        return text, {"state": self._state(), "success": False}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        with self._random.in_place():
            try:
                done, _ = self._game.step(action=action)
            except Exception as cause:
                return self._given_up(cause)
            text, is_refused = self._news()
            rewards, game_info = self._game.close() if done else ({}, {})
        self._is_over = bool(done)
        reward = float((rewards or {}).get(0, 0.0))
        outcome = game_info.get(0, {})
        self._shown += [action, text]
        info = {
            "action_is_valid": not is_refused and not outcome.get("invalid_move", False),
            "success": self._is_over and reward >= self._success_reward,
            "state": self._state(),
            "metrics": {"game_failed": False},
        }
        return text or str(outcome.get("reason", "")), reward, self._is_over, False, info

    def _given_up(self, cause: Exception) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Some games raise on odd actions. These are the policy's, so they end the episode without reward and are
        counted, rather than fail the environment; the game is not trusted until its next reset."""
        self._is_over = True
        info = {
            "action_is_valid": False,
            "success": False,
            "state": self._state(),
            "metrics": {"game_failed": True},
        }
        return f"The game could not go on with that ({type(cause).__name__}).", 0.0, False, True, info

    def render(self) -> str:
        return self._shown[-1] if self._shown else ""

    def _news(self) -> tuple[str, bool]:
        """What the game has said since the last time, and whether it refused the action."""
        _, messages = self._game.get_observation()
        kinds = self._textarena.ObservationType
        said = [text for _, text, kind in messages if kind is not kinds.PLAYER_ACTION]
        return "\n".join(said).strip(), any(kind is kinds.GAME_ADMIN for _, _, kind in messages)

    def _state(self) -> str:
        """Of a game nobody knows the rules of: all that has been said."""
        return "\n".join(self._shown)


class _Generators:
    """The states of Python's and numpy's global generators that belong to one episode."""

    def __init__(self, seed: int | None = None) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with _one_call_at_a_time:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)

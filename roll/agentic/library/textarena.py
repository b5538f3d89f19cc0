"""Single-player games of the package TextArena (`pip install textarena`), imported when the environment is made.

TextArena draws from the global random generators of Python and numpy. Here each episode has its own generators. They
replace the global ones during a call, one call at a time per process. So equal seeds give equal episodes even when many
run at once, and no other code's random numbers change.

TextArena repeats the whole dialogue in every observation. A policy that has read it once needs only the new part, so
TextArena's observation wrappers are removed.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from roll.agentic.base import BadOption, ResetAnswer, StepAnswer, TextGame
from roll.configs.errors import nearest_name_hint

_one_call_at_a_time = threading.Lock()


class TextArenaEnv(TextGame):
    """A TextArena game. Its own prompt says which actions exist and how to write them, usually ``[action]``."""

    def __init__(
        self,
        game: str,
        game_args: Mapping[str, Any] | None = None,
        success_reward: float = 1.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """Make the game and check that one player can play it.

        ``game``: TextArena's id, for example ``GuessTheNumber-v0``. ``game_args``: arguments of its class.
        ``success_reward``: an outcome of at least this much is a success. Raises `BadOption`, also for a game that is
        not for one player or whose word lists are not on this machine.
        """
        import textarena

        registered = textarena.envs.registration.ENV_REGISTRY
        if game not in registered:
            raise BadOption("game", f"TextArena has no game `{game}`", nearest_name_hint(game, registered))
        super().__init__(render_mode)
        self._textarena = textarena
        self._random = _Generators()
        self._game = self._made(game, dict(game_args or {}))
        self._name = game
        self._success_reward = success_reward
        self._shown: list[str] = []

    def _begin(self, seed: int | None) -> ResetAnswer:
        drawn = int(self.np_random.integers(2**32))
        self._random = _Generators(drawn)
        with self._random.in_place():
            self._game.reset(num_players=1, seed=drawn)
            text, _ = self._news()
        self._shown = [text]
        return text, {"state": self._state(), "success": False}

    def _act(self, action: str) -> StepAnswer:
        with self._random.in_place():
            try:
                done, _ = self._game.step(action=action)
            except Exception as cause:
                return self._given_up(cause)
            text, is_refused = self._news()
            rewards, game_info = self._game.close() if done else ({}, {})
        reward = float((rewards or {}).get(0, 0.0))
        outcome = game_info.get(0, {})
        self._shown += [action, text]
        info = {
            "action_is_valid": not is_refused and not outcome.get("invalid_move", False),
            "success": bool(done) and reward >= self._success_reward,
            "state": self._state(),
            "metrics": {"game_failed": False},
        }
        return text or str(outcome.get("reason", "")), reward, bool(done), False, info

    def _made(self, game: str, game_args: dict[str, Any]) -> Any:
        """Return the game after one reset: only then does it report that it needs more players or lacks something."""
        try:
            with self._random.in_place():
                try:
                    made = self._textarena.make(game, **game_args)
                except TypeError as cause:
                    remedy = "use what the game's class takes"
                    raise BadOption("game_args", f"`{game}` refuses them ({cause})", remedy) from cause
                while isinstance(made, self._textarena.Wrapper):
                    made = made.env
                try:
                    made.reset(num_players=1, seed=0)
                except AssertionError as cause:
                    message = f"`{game}` is not for one player ({cause})"
                    raise BadOption("game", message, "name a 1-player game") from cause
                return made
        except LookupError as cause:
            # NLTK's word lists are not part of TextArena: a game that needs them downloads them when it is made.
            resource = re.search(r"nltk\.download\('([^']+)'\)", str(cause))
            if resource is None:
                raise
            message = f"`{game}` needs NLTK's `{resource[1]}`, which this machine lacks and could not download"
            remedy = f"where there is a network, run `python -m nltk.downloader {resource[1]}` once"
            raise BadOption("game", message, remedy) from cause

    def _given_up(self, cause: Exception) -> StepAnswer:
        """End the episode without reward after a game has raised on an odd action, and count the failure.

        The action is the policy's, so the environment does not fail. The game is not trusted until its next reset.
        """
        metrics = {"game_failed": True}
        info = {"action_is_valid": False, "success": False, "state": self._state(), "metrics": metrics}
        return f"The game could not go on with that ({type(cause).__name__}).", 0.0, False, True, info

    def render(self) -> str:
        return self._shown[-1] if self._shown else ""

    def _news(self) -> tuple[str, bool]:
        """Return what the game has said since the last call, and True if it refused the action."""
        _, messages = self._game.get_observation()
        kinds = self._textarena.ObservationType
        said = [text for _, text, kind in messages if kind is not kinds.PLAYER_ACTION]
        return "\n".join(said).strip(), any(kind is kinds.GAME_ADMIN for _, _, kind in messages)

    def _state(self) -> str:
        """Return the whole dialogue, because nothing else is known about a game's state."""
        return "\n".join(self._shown)


class _Generators:
    """The states of Python's and numpy's global generators for one episode."""

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

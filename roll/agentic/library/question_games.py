"""Text games: guessing a number, tasks of reasoning-gym, and single-player games of TextArena.

The seed of the reset selects the number, the task or the course of the game, identically in every process. The packages
reasoning-gym and textarena are imported when their environment is created.
"""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from pydantic import validate_call

from roll.agentic.base import (
    ActionFormat,
    BadOption,
    Count,
    ResetAnswer,
    StepAnswer,
    TextGame,
    answer_in,
    as_answer,
    how_to_answer,
)
from roll.configs.errors import nearest_name_hint
from roll.configs.roles import ReasoningGymSource
from roll.data.sources import reasoning_gym_dataset

NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


class NumberGuessingEnv(TextGame):
    """Guess a number within a limited number of attempts."""

    @validate_call
    def __init__(
        self,
        low: int = 1,
        high: int = 100,
        max_guesses: Count = 7,
        instructions: bool = True,
        action_format: ActionFormat = "answer_tag",
        success_reward: float = 1.0,
        guess_reward: float = 0.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """Store the options, which docs/environments.md explains. Raises `BadOption`."""
        if not -(10**18) < low < high < 10**18:
            raise BadOption("high", f"from {low} to {high} there is nothing to guess", "`low` below `high`")
        super().__init__(render_mode)
        self._low, self._high, self._max_guesses = low, high, max_guesses
        self._instructions, self._format = instructions, action_format
        self._success_reward, self._guess_reward = success_reward, guess_reward
        self._number = low
        self._guesses: list[int] = []

    @property
    def example_actions(self) -> tuple[str, ...]:
        """Three guesses: the lowest, the middle and the highest number."""
        guesses = (self._low, (self._low + self._high) // 2, self._high)
        return tuple(as_answer(str(guess), self._format) for guess in guesses)

    def _begin(self, seed: int | None) -> ResetAnswer:
        self._number = int(self.np_random.integers(self._low, self._high, endpoint=True))
        self._guesses = []
        info = self._info()
        if not self._instructions:
            return f"{self._low} to {self._high}", info
        info["system"] = f"You guess a number. {how_to_answer('your guess', self._format)}"
        return f"The number is from {self._low} to {self._high}. You have {self._max_guesses} guesses.", info

    def _act(self, action: str) -> StepAnswer:
        answer = answer_in(action, self._format)
        guess = int(answer) if answer is not None and NUMBER.fullmatch(answer) else None
        if guess is None or not self._low <= guess <= self._high:
            how = how_to_answer("your guess", self._format)
            complaint = f"That was no whole number from {self._low} to {self._high}. {how}"
            info = self._info(action_is_valid=False, guesses=len(self._guesses))
            return complaint if self._instructions else "?", 0.0, False, False, info
        self._guesses.append(guess)
        is_right = guess == self._number
        is_over = is_right or len(self._guesses) == self._max_guesses
        reward = self._success_reward if is_right else self._guess_reward
        info = self._info(success=is_right, guesses=len(self._guesses))
        return self._verdict(guess), reward, is_over, False, info

    def render(self) -> str:
        guesses = ", ".join(str(guess) for guess in self._guesses) or "none"
        return f"number: {self._number}\nguesses: {guesses}\nknown: {self._state()}"

    def _state(self) -> str:
        """Return all that a policy can know: the remaining range, and the remaining number of guesses."""
        low = max((guess + 1 for guess in self._guesses if guess < self._number), default=self._low)
        high = min((guess - 1 for guess in self._guesses if guess > self._number), default=self._high)
        if self._number in self._guesses:
            low = high = self._number
        return f"{low} to {high}, {self._max_guesses - len(self._guesses)} guesses left"

    def _verdict(self, guess: int) -> str:
        word = "right" if guess == self._number else "higher" if guess < self._number else "lower"
        if not self._instructions:
            return word
        if word == "right":
            return f"{guess} is right."
        left = self._max_guesses - len(self._guesses)
        return f"The number is {word} than {guess}. Guesses left: {left}."


class ReasoningGymEnv(TextGame):
    """A reasoning-gym task. The reward is the last attempt's score; reaching ``success_score`` ends the episode."""

    @validate_call
    def __init__(
        self,
        dataset: str,
        config: Mapping[str, Any] | None = None,
        size: int = 1_000_000_000,
        max_attempts: Count = 1,
        success_score: float = 1.0,
        instructions: bool = True,
        action_format: ActionFormat = "answer_tag",
        render_mode: str | None = "ansi",
    ) -> None:
        """Load the data set. docs/environments.md explains the options. Raises `BadOption` and `ConfigError`."""
        if config is not None and "seed" in config:
            raise BadOption("config.seed", "the seed of each episode chooses its task", "leave it out of `config`")
        super().__init__(render_mode)
        self._tasks = reasoning_gym_dataset(ReasoningGymSource(dataset, size, config=dict(config or {})), "")
        self._size = size
        self._max_attempts, self._success_score = max_attempts, success_score
        self._instructions, self._format = instructions, action_format
        self._entry: dict[str, Any] | None = None
        self._answers: list[str] = []

    @property
    def example_actions(self) -> tuple[str, ...]:
        """The right answer to the current task, and two that are very likely wrong."""
        right = [str(self._entry["answer"])] if self._entry is not None else []
        return tuple(as_answer(answer, self._format) for answer in [*right, "0", "yes"])

    def _begin(self, seed: int | None) -> ResetAnswer:
        self._entry = self._tasks[int(self.np_random.integers(self._size))]
        self._answers = []
        info = self._info()
        if self._instructions:
            attempts = f" You have {self._max_attempts} attempts." if self._max_attempts > 1 else ""
            info["system"] = f"You solve a task. {how_to_answer('your final answer', self._format)}{attempts}"
        return str(self._entry["question"]), info

    def _act(self, action: str) -> StepAnswer:
        answer = answer_in(action, self._format)
        self._answers.append(answer or "")
        score, scorer_failed = self._score(answer)
        success = score >= self._success_score
        left = self._max_attempts - len(self._answers)
        is_over = success or left == 0
        metrics = {"score": score, "attempts": len(self._answers), "scorer_failed": scorer_failed}
        info = self._info(action_is_valid=bool(answer), success=success, **metrics)
        text = "That is right." if success else f"That is not right (score {score:.2f}). Attempts left: {left}."
        return text, score if is_over else 0.0, is_over, False, info

    def render(self) -> str:
        if self._entry is None:
            return ""
        given = "\n".join(f"answer: {answer}" for answer in self._answers)
        return f"{self._entry['question']}\n{given}\nright answer: {self._entry['answer']}"

    def _state(self) -> str:
        assert self._entry is not None
        return "\n".join([str(self._entry["question"]), *self._answers])

    def _score(self, answer: str | None) -> tuple[float, bool]:
        """Return the score, and True if the scorer raised.

        Some data sets raise on unexpected answers. An answer of the policy must not make the environment fail.
        """
        if not answer:
            return 0.0, False
        try:
            return float(self._tasks.score_answer(answer, self._entry)), False
        except Exception:
            return 0.0, True


class TextArenaEnv(TextGame):
    """A TextArena game. Its own prompt explains the actions and their format, usually ``[action]``.

    TextArena repeats the whole dialogue in every observation. The policy has read the earlier part already, so
    TextArena's observation wrappers are removed.
    """

    def __init__(
        self,
        game: str,
        game_args: Mapping[str, Any] | None = None,
        success_reward: float = 1.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """Create the game. docs/environments.md explains the options.

        Raises `BadOption`, also for multi-player games and for games whose word lists are not on this machine.
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
        return text, self._info()

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
        info = self._info(
            action_is_valid=not is_refused and not outcome.get("invalid_move", False),
            success=bool(done) and reward >= self._success_reward,
            game_failed=False,
        )
        return text or str(outcome.get("reason", "")), reward, bool(done), False, info

    def _made(self, game: str, game_args: dict[str, Any]) -> Any:
        """Return the game after one reset, which reveals whether it needs more players or missing files."""
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
            # TextArena does not include NLTK's word lists: a game that needs them downloads them when it is created.
            resource = re.search(r"nltk\.download\('([^']+)'\)", str(cause))
            if resource is None:
                raise
            message = f"`{game}` needs NLTK's `{resource[1]}`, which this machine lacks and could not download"
            remedy = f"where there is a network, run `python -m nltk.downloader {resource[1]}` once"
            raise BadOption("game", message, remedy) from cause

    def _given_up(self, cause: Exception) -> StepAnswer:
        """End the episode without reward after the game raised on an action, and count the failure.

        The policy chose the action, so the environment does not fail. The game is not used again until its next reset.
        """
        info = self._info(action_is_valid=False, game_failed=True)
        return f"The game could not go on with that ({type(cause).__name__}).", 0.0, False, True, info

    def render(self) -> str:
        return self._shown[-1] if self._shown else ""

    def _news(self) -> tuple[str, bool]:
        """Return the game's new messages, and True if it rejected the action."""
        _, messages = self._game.get_observation()
        kinds = self._textarena.ObservationType
        said = [text for _, text, kind in messages if kind is not kinds.PLAYER_ACTION]
        return "\n".join(said).strip(), any(kind is kinds.GAME_ADMIN for _, _, kind in messages)

    def _state(self) -> str:
        """Return the whole dialogue, because nothing else is known about a game's state."""
        return "\n".join(self._shown)


class _Generators:
    """The states of Python's and numpy's global random generators for one episode.

    TextArena draws from the global generators. These states replace the global ones during a call, one call at a time
    per process. So equal seeds give equal episodes even if many run at once, and the random numbers of other code are
    unaffected.
    """

    _one_call_at_a_time = threading.Lock()

    def __init__(self, seed: int | None = None) -> None:
        self._python = random.Random(seed).getstate()
        self._numpy = np.random.RandomState(seed).get_state()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with self._one_call_at_a_time:
            python, numpy = random.getstate(), np.random.get_state()
            random.setstate(self._python)
            np.random.set_state(self._numpy)
            try:
                yield
            finally:
                self._python, self._numpy = random.getstate(), np.random.get_state()
                random.setstate(python)
                np.random.set_state(numpy)

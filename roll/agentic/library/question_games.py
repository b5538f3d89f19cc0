"""Games of questions and answers: guessing a number, and the tasks of reasoning-gym.

The seed of the reset selects the number or the task, so equal seeds ask the same question in every process. The package
reasoning-gym is imported when its environment is made.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from roll.agentic.base import (
    ActionFormat,
    BadOption,
    ResetAnswer,
    StepAnswer,
    TextGame,
    answer_in,
    as_answer,
    check_action_format,
    how_to_answer,
)
from roll.configs.errors import nearest_name_hint

NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


class NumberGuessingEnv(TextGame):
    """A reward for the right guess within a limited number of guesses."""

    def __init__(
        self,
        low: int = 1,
        high: int = 100,
        max_guesses: int = 7,
        instructions: bool = True,
        action_format: ActionFormat = "answer_tag",
        success_reward: float = 1.0,
        guess_reward: float = 0.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """Check and keep the options. Raises `BadOption`.

        The number is from ``low`` to ``high``, both included. ``guess_reward``: reward of each wrong guess.
        ``instructions``: add a system message and use whole sentences; without it, answers are only `higher`, `lower`
        and `right`. A text that is not a guess does not use one up.
        """
        if not -(10**18) < low < high < 10**18:
            raise BadOption("high", f"from {low} to {high} there is nothing to guess", "`low` below `high`")
        if max_guesses < 1:
            raise BadOption("max_guesses", f"{max_guesses} guesses are no game", "at least 1")
        check_action_format(action_format)
        super().__init__(render_mode)
        self._low, self._high, self._max_guesses = low, high, max_guesses
        self._instructions, self._format = instructions, action_format
        self._success_reward, self._guess_reward = success_reward, guess_reward
        self._number = low
        self._known = (low, high)
        self._guesses: list[int] = []

    @property
    def example_actions(self) -> tuple[str, ...]:
        """Three guesses: the lowest, the middle and the highest number."""
        guesses = (self._low, (self._low + self._high) // 2, self._high)
        return tuple(as_answer(str(guess), self._format) for guess in guesses)

    def _begin(self, seed: int | None) -> ResetAnswer:
        self._number = int(self.np_random.integers(self._low, self._high, endpoint=True))
        self._known, self._guesses = (self._low, self._high), []
        info = {"state": self._state(), "success": False}
        if not self._instructions:
            return f"{self._low} to {self._high}", info
        info["system"] = f"You guess a number. {how_to_answer('your guess', self._format)}"
        return f"The number is from {self._low} to {self._high}. You have {self._max_guesses} guesses.", info

    def _act(self, action: str) -> StepAnswer:
        answer = answer_in(action, self._format)
        guess = int(answer) if answer is not None and NUMBER.fullmatch(answer) else None
        if guess is None or not self._low <= guess <= self._high:
            return self._complaint(), 0.0, False, False, self._info(action_is_valid=False, success=False)
        self._guesses.append(guess)
        is_right = guess == self._number
        is_over = is_right or len(self._guesses) == self._max_guesses
        self._narrow(guess)
        reward = self._success_reward if is_right else self._guess_reward
        return self._verdict(guess), reward, is_over, False, self._info(action_is_valid=True, success=is_right)

    def render(self) -> str:
        guesses = ", ".join(str(guess) for guess in self._guesses) or "none"
        return f"number: {self._number}\nguesses: {guesses}\nknown: {self._state()}"

    def _narrow(self, guess: int) -> None:
        low, high = self._known
        if guess <= self._number:
            low = max(low, min(guess + 1, self._number))
        if guess >= self._number:
            high = min(high, max(guess - 1, self._number))
        self._known = (low, high)

    def _state(self) -> str:
        """Return all that a policy can know: the range left for the number, and the number of guesses left."""
        return f"{self._known[0]} to {self._known[1]}, {self._max_guesses - len(self._guesses)} guesses left"

    def _verdict(self, guess: int) -> str:
        word = "right" if guess == self._number else "higher" if guess < self._number else "lower"
        if not self._instructions:
            return word
        if word == "right":
            return f"{guess} is right."
        left = self._max_guesses - len(self._guesses)
        return f"The number is {word} than {guess}. Guesses left: {left}."

    def _complaint(self) -> str:
        if not self._instructions:
            return "?"
        how = how_to_answer("your guess", self._format)
        return f"That was no whole number from {self._low} to {self._high}. {how}"

    def _info(self, *, action_is_valid: bool, success: bool) -> dict[str, Any]:
        return {
            "action_is_valid": action_is_valid,
            "success": success,
            "state": self._state(),
            "metrics": {"guesses": len(self._guesses)},
        }


class ReasoningGymEnv(TextGame):
    """A reasoning-gym task. The reward is the last attempt's score; a score of ``success_score`` ends the episode."""

    def __init__(
        self,
        dataset: str,
        config: Mapping[str, Any] | None = None,
        size: int = 1_000_000_000,
        max_attempts: int = 1,
        success_score: float = 1.0,
        instructions: bool = True,
        action_format: ActionFormat = "answer_tag",
        render_mode: str | None = "ansi",
    ) -> None:
        """Check the options and load the data set. Raises `BadOption`.

        ``config``: arguments of the data set. ``size``: number of different tasks; lower it for a data set that
        generates all of them at once. ``instructions``: add a system message on how to answer.
        """
        if max_attempts < 1:
            raise BadOption("max_attempts", f"{max_attempts} attempts are no task", "at least 1")
        check_action_format(action_format)
        super().__init__(render_mode)
        self._tasks = _data_set(dataset, dict(config or {}), size)
        self._size = size
        self._max_attempts, self._success_score = max_attempts, success_score
        self._instructions, self._format = instructions, action_format
        self._entry: dict[str, Any] | None = None
        self._answers: list[str] = []

    @property
    def example_actions(self) -> tuple[str, ...]:
        """The right answer to the current task, and two that are most probably wrong."""
        right = [str(self._entry["answer"])] if self._entry is not None else []
        return tuple(as_answer(answer, self._format) for answer in [*right, "0", "yes"])

    def _begin(self, seed: int | None) -> ResetAnswer:
        self._entry = self._tasks[int(self.np_random.integers(self._size))]
        self._answers = []
        info: dict[str, Any] = {"state": self._state(), "success": False}
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
        info = {
            "action_is_valid": bool(answer),
            "success": success,
            "state": self._state(),
            "metrics": {"score": score, "attempts": len(self._answers), "scorer_failed": scorer_failed},
        }
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
        """Return the score, and True if the scorer failed.

        Some data sets raise on answers that they do not expect. A policy's answer must not make the environment fail.
        """
        if not answer:
            return 0.0, False
        try:
            return float(self._tasks.score_answer(answer, self._entry)), False
        except Exception:
            return 0.0, True


def _data_set(name: str, config: dict[str, Any], size: int) -> Any:
    from reasoning_gym.factory import DATASETS, create_dataset

    if name not in DATASETS:
        raise BadOption("dataset", f"reasoning-gym has no data set `{name}`", nearest_name_hint(name, DATASETS))
    known = {field.name for field in dataclasses.fields(DATASETS[name][1])} - {"size", "seed"}
    for key in config:
        if key not in known:
            raise BadOption("config", f"`{name}` has no argument `{key}`", nearest_name_hint(key, known))
    try:
        return create_dataset(name, **config, size=size, seed=0)
    except (AssertionError, TypeError, ValueError) as cause:
        message = f"`{name}` refuses its arguments ({type(cause).__name__}: {cause})"
        raise BadOption("config", message, "use values that this data set accepts") from cause

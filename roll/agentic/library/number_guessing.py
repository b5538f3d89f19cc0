"""A game: guess a number. Each answer says whether the number is higher or lower."""

from __future__ import annotations

import re
from typing import Any

import gymnasium

from roll.agentic.base import ActionFormat, AnyText, BadOption, answer_in, as_answer, how_to_answer

NUMBER = re.compile(r"[+-]?[0-9]{1,18}")


class NumberGuessingEnv(gymnasium.Env[str, str]):
    """A reward for the right guess within a limited number of guesses."""

    metadata = {"render_modes": ["ansi"]}

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
        if action_format not in ("answer_tag", "plain"):
            raise BadOption("action_format", f"{action_format!r} is no format of actions", "`answer_tag` or `plain`")
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.render_mode = render_mode
        self._low, self._high, self._max_guesses = low, high, max_guesses
        self._instructions, self._format = instructions, action_format
        self._success_reward, self._guess_reward = success_reward, guess_reward
        self._number = low
        self._known = (low, high)
        self._guesses: list[int] = []
        self._is_over = True

    @property
    def example_actions(self) -> tuple[str, ...]:
        """Three guesses: the lowest, the middle and the highest number."""
        guesses = (self._low, (self._low + self._high) // 2, self._high)
        return tuple(as_answer(str(guess), self._format) for guess in guesses)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._number = int(self.np_random.integers(self._low, self._high, endpoint=True))
        self._known, self._guesses, self._is_over = (self._low, self._high), [], False
        info = {"state": self._state(), "success": False}
        if not self._instructions:
            return f"{self._low} to {self._high}", info
        info["system"] = f"You guess a number. {how_to_answer('your guess', self._format)}"
        return f"The number is from {self._low} to {self._high}. You have {self._max_guesses} guesses.", info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        answer = answer_in(action, self._format)
        guess = int(answer) if answer is not None and NUMBER.fullmatch(answer) else None
        if guess is None or not self._low <= guess <= self._high:
            return self._complaint(), 0.0, False, False, self._info(action_is_valid=False, success=False)
        self._guesses.append(guess)
        is_right = guess == self._number
        self._is_over = is_right or len(self._guesses) == self._max_guesses
        self._narrow(guess)
        reward = self._success_reward if is_right else self._guess_reward
        return self._verdict(guess), reward, self._is_over, False, self._info(action_is_valid=True, success=is_right)

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

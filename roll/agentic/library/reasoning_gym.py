"""A reasoning-gym task as an episode: a question, some attempts, and the data set's own score.

The package is imported when the environment is made. The seed of the reset selects the task, so equal seeds ask the
same question in every process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import gymnasium

from roll.agentic.base import ActionFormat, AnyText, BadOption, answer_in, as_answer, how_to_answer
from roll.configs.errors import nearest_name_hint


class ReasoningGymEnv(gymnasium.Env[str, str]):
    """A reasoning-gym task. The reward is the last attempt's score; a score of ``success_score`` ends the episode."""

    metadata = {"render_modes": ["ansi"]}

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
        if action_format not in ("answer_tag", "plain"):
            raise BadOption("action_format", f"{action_format!r} is no format of actions", "`answer_tag` or `plain`")
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.render_mode = render_mode
        self._tasks = _data_set(dataset, dict(config or {}), size)
        self._size = size
        self._max_attempts, self._success_score = max_attempts, success_score
        self._instructions, self._format = instructions, action_format
        self._entry: dict[str, Any] | None = None
        self._answers: list[str] = []
        self._is_over = True

    @property
    def example_actions(self) -> tuple[str, ...]:
        """The right answer to the current task, and two that are most probably wrong."""
        right = [str(self._entry["answer"])] if self._entry is not None else []
        return tuple(as_answer(answer, self._format) for answer in [*right, "0", "yes"])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._entry = self._tasks[int(self.np_random.integers(self._size))]
        self._answers, self._is_over = [], False
        info: dict[str, Any] = {"state": self._state(), "success": False}
        if self._instructions:
            attempts = f" You have {self._max_attempts} attempts." if self._max_attempts > 1 else ""
            info["system"] = f"You solve a task. {how_to_answer('your final answer', self._format)}{attempts}"
        return str(self._entry["question"]), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        answer = answer_in(action, self._format)
        self._answers.append(answer or "")
        score, scorer_failed = self._score(answer)
        success = score >= self._success_score
        left = self._max_attempts - len(self._answers)
        self._is_over = success or left == 0
        info = {
            "action_is_valid": bool(answer),
            "success": success,
            "state": self._state(),
            "metrics": {"score": score, "attempts": len(self._answers), "scorer_failed": scorer_failed},
        }
        text = "That is right." if success else f"That is not right (score {score:.2f}). Attempts left: {left}."
        return text, score if self._is_over else 0.0, self._is_over, False, info

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

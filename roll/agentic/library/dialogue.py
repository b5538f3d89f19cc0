"""Dialogues with a simulated user, who follows a script or is played by a language model with a goal.

The policy answers the user's messages. The dialogue ends when the script is finished, when the user says the stop word,
or after `max_turns` answers; then a verifier or a judge gives the reward. The policy's reasoning (the text before
`</think>`, or an unfinished thought) reaches neither the user nor the judge.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import ConfigDict

from roll.agentic.base import BadOption, Count, ResetAnswer, StepAnswer, TextGame
from roll.agentic.endpoint.tool_calls import THOUGHT_BEGIN, THOUGHT_END
from roll.agentic.library.agent import Task, read_result, require_function, tasks_of
from roll.configs.plugins import require

if TYPE_CHECKING:
    from openai import OpenAI

USER_PROMPT = (
    "You play a person who talks to an assistant. Your goal: {goal}\n"
    "Write only the person's next message: short, natural, and no more of the goal than it needs now. When the goal is "
    "reached, or you see that it will not be, write {stop_word} and nothing else."
)
JUDGE_PROMPT = (
    "A person with this goal has talked to an assistant: {goal}\n"
    "The dialogue, as JSON: {dialogue}\n"
    "How well did the assistant reach the goal? Think about it, then end with `Score: x`, x from 0 (not at all) to 1."
)
_BEGIN = "(The conversation begins. Write your first message.)"
_SCORE = re.compile(r"score[\s*_`\"]*:[\s*_`\"]*([^\s*_`\"]*(?:\s*/\s*\S+)?)", re.IGNORECASE)
_NUMBER = re.compile(r"\d*\.?\d+")
_JUDGE_ATTEMPTS = 3


@dataclass(frozen=True)
class Speaker:
    """A language model behind an OpenAI-compatible API."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    base_url: str
    model: str
    api_key_env: str | None = None
    """Environment variable that holds the API key."""
    prompt: str | None = None
    temperature: float = 1.0
    max_tokens: int = 1024
    timeout_seconds: float = 60.0

    def client(self, option: str) -> OpenAI:
        """Return a client. Raises `BadOption` and `ConfigError`, which name the ``option``."""
        require(["openai"], "dialogue", option)
        from openai import OpenAI

        if urlsplit(self.base_url).scheme not in ("http", "https"):
            raise BadOption(f"{option}.base_url", f"{self.base_url!r} is no address", "write `http://host:port/v1`")
        key = "none" if self.api_key_env is None else os.environ.get(self.api_key_env)
        if not key:
            raise BadOption(f"{option}.api_key_env", f"{self.api_key_env} is not set", "set it where the run starts")
        return OpenAI(base_url=self.base_url, api_key=key, timeout=self.timeout_seconds, max_retries=4)

    def says(self, client: OpenAI, messages: Sequence[Mapping[str, str]]) -> str:
        """Return the model's next message. Raises the client's errors after its retries."""
        answer = client.chat.completions.create(
            model=self.model,
            messages=list(messages),  # type: ignore[arg-type]  # they are dicts of texts
            temperature=self.temperature,
            max_completion_tokens=self.max_tokens,
        )
        return _without_thought(answer.choices[0].message.content or "")


class DialogueEnv(TextGame):
    """A dialogue about a task that the seed selects. docs/environments.md explains tasks and options."""

    def __init__(
        self,
        tasks: str,
        user: Speaker | None = None,
        verifier: str | None = None,
        judge: Speaker | None = None,
        system: str | None = None,
        stop_word: str = "[DONE]",
        max_turns: Count = 10,
        render_mode: str | None = "ansi",
    ) -> None:
        """Read the tasks and resolve the options. Raises `BadOption` and `ConfigError`."""
        super().__init__(render_mode)
        if (verifier is None) == (judge is None):
            raise BadOption("verifier", "a dialogue needs what gives its reward", "set one of `verifier` and `judge`")
        if not stop_word:
            raise BadOption("stop_word", "it is empty, and in every message", "write a word that nobody says otherwise")
        self._tasks = tasks_of(tasks)
        for number, task in enumerate(self._tasks, 1):
            if wrong := _problem(task, user is not None):
                remedy = "see docs/environments.md for what a task needs"
                raise BadOption("tasks", f"{tasks}, task {number}: {wrong}", remedy)
        self._user, self._judge = user, judge
        self._verifier: Callable[..., Any] | None = None
        if verifier is not None:
            self._verifier = require_function("verifier", verifier, ("task", "messages"))
        self._clients = {name: each.client(name) for name, each in (("user", user), ("judge", judge)) if each}
        self._system, self._stop_word, self._max_turns = system, stop_word, max_turns
        self._task: Task = {}
        self._said: list[dict[str, str]] = []
        self._left: list[Any] = []
        """Turns of the script that are still to come."""

    @property
    def longest(self) -> int:
        """Largest number of answers in a dialogue."""
        scripted = [len(task["turns"]) for task in self._tasks] if self._user is None else []
        return min(self._max_turns, max(scripted, default=self._max_turns))

    def render(self) -> str:
        """Return the dialogue so far."""
        return "\n".join(f"{message['role']}: {message['content']}" for message in self._said)

    def close(self) -> None:
        """Close the connections to the models."""
        for client in self._clients.values():
            client.close()

    def _begin(self, seed: int | None) -> ResetAnswer:
        self._task = copy.deepcopy(self._tasks[int(self.np_random.integers(len(self._tasks)))])
        self._said = []
        self._left = list(self._task.get("turns", ()))
        opening = self._task.get("opening")
        text = opening if self._user is not None and opening is not None else self._next("")
        if text is None:
            raise RuntimeError("the user ended the dialogue before it began")
        self._said.append({"role": "user", "content": text})
        info: dict[str, Any] = {"state": self._state()}
        return text, info if self._system is None else info | {"system": self._system}

    def _act(self, text: str) -> StepAnswer:
        self._said.append({"role": "assistant", "content": text})
        is_last = sum(message["role"] == "assistant" for message in self._said) >= self._max_turns
        told = None if is_last else self._next(_without_thought(text))
        if told is not None:
            self._said.append({"role": "user", "content": told})
            return told, 0.0, False, False, {"state": self._state()}
        reward, info = read_result(self._result())
        return "", reward, True, False, {"state": self._state(), **info}

    def _next(self, answer: str) -> str | None:
        """Return the user's reply to an answer; None ends the dialogue."""
        if self._user is None:
            for index, turn in enumerate(self._left):
                say, wanted = (turn, None) if isinstance(turn, str) else (turn["say"], turn.get("if"))
                if wanted is None or re.search(wanted, answer):
                    del self._left[index]
                    return str(say)
            return None
        told = self._user.says(self._clients["user"], self._seen_by_user())
        if not told:
            silent = f"the model {self._user.model} said nothing as the user, outside of thoughts"
            raise RuntimeError(f"{silent}; perhaps its answer was cut (`max_tokens: {self._user.max_tokens}`)")
        return None if self._stop_word in told else told

    def _seen_by_user(self) -> list[dict[str, str]]:
        """Return the prompt of the model that plays the user; its own messages have the role `assistant`."""
        assert self._user is not None
        prompt = _filled(self._user.prompt or USER_PROMPT, goal=self._task["goal"], stop_word=self._stop_word)
        messages = [{"role": "system", "content": prompt}]
        if "opening" not in self._task:
            messages.append({"role": "user", "content": _BEGIN})
        other = {"user": "assistant", "assistant": "user"}
        return messages + [
            {"role": other[message["role"]], "content": _without_thought(message["content"])} for message in self._said
        ]

    def _result(self) -> Any:
        if self._verifier is not None:
            return self._verifier(self._task, [dict(message) for message in self._said])
        assert self._judge is not None
        said = [message | {"content": _without_thought(message["content"])} for message in self._said]
        goal, dialogue = str(self._task.get("goal", "")), json.dumps(said, ensure_ascii=False)
        prompt = _filled(self._judge.prompt or JUDGE_PROMPT, goal=goal, dialogue=dialogue)
        for _ in range(_JUDGE_ATTEMPTS):
            told = self._judge.says(self._clients["judge"], [{"role": "user", "content": prompt}])
            score = _score_in(told)
            if score is not None:
                return score
        raise RuntimeError(
            f"the judge gave no `Score:` from 0 to 1 in {_JUDGE_ATTEMPTS} answers; the last: {told[-200:]!r}"
        )


def _score_in(told: str) -> float | None:
    """Return the last score in a judge's answer; None without one from 0 to 1 (`1/10` is none)."""
    (last,) = _SCORE.findall(told)[-1:] or [""]
    last = last.rstrip(".,;:!)]}")
    score = float(last) if _NUMBER.fullmatch(last) else math.inf
    return score if score <= 1 else None


def _problem(task: Task, has_model: bool) -> str | None:
    """Return what is wrong with a task, or None. ``has_model``: the user is played by a model."""
    if has_model:
        wrong = [
            key for key in ("goal", "opening") if not isinstance(task.get(key, "" if key == "opening" else None), str)
        ]
        return f"`{wrong[0]}` is no text" if wrong else None
    turns = task.get("turns")
    if not isinstance(turns, list) or not turns:
        return "a script needs `turns`, a list that is not empty"
    if isinstance(turns[0], dict) and "if" in turns[0]:
        return "the first turn has an `if`, and there is no answer before it"
    for turn in turns:
        say, wanted = (turn.get("say"), turn.get("if", "")) if isinstance(turn, dict) else (turn, "")
        if not isinstance(say, str) or not isinstance(wanted, str):
            return f"a turn is a text, or an object with the texts `say` and `if`, not {json.dumps(turn)[:80]}"
        try:
            re.compile(wanted)
        except re.error as cause:
            return f"`if` is no regular expression: {cause}"
    return None


def _filled(prompt: str, **texts: str) -> str:
    """Replace the named placeholders of a prompt. Braces in the inserted texts are left alone."""
    return re.sub("|".join(f"{{{name}}}" for name in texts), lambda found: texts[found[0][1:-1]], prompt)


def _without_thought(text: str) -> str:
    """Return what was said after the thoughts; nothing if a thought was cut off."""
    return text.rpartition(THOUGHT_END)[2].partition(THOUGHT_BEGIN)[0].strip()

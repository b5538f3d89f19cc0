"""Text environments: their interface, and the parsing of actions.

An environment is a `gymnasium.Env` that exchanges text: `reset(seed=, options=) -> (text, info)` and `step(text) ->
(text, reward, terminated, truncated, info)`; `render()` returns a frame as text, for people. An environment's answers
are not trusted: `observation_from` checks the types of all values. `INFO_KEYS` lists the keys of `info` that have a
meaning; others are ignored. A text without an action is not an error: parsing it returns None, in time linear in the
length of the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any, Final, Literal, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from pydantic import Field

from roll.agentic.episode import Message, Observation

ActionFormat = Literal["answer_tag", "plain"]
"""``answer_tag``: the text between the last ``<answer>`` and ``</answer>``; ``plain``: the whole text, stripped."""

Count = Annotated[int, Field(ge=1)]
"""Type of options that are counts, at least 1."""

OPENING, CLOSING = "<answer>", "</answer>"


def answer_in(text: str, action_format: ActionFormat) -> str | None:
    """Extract the answer from a text; None if there is no pair of tags.

    The last pair counts, because models reason first and correct themselves.
    """
    if action_format == "plain":
        return text.strip()
    end = text.rfind(CLOSING)
    start = text.rfind(OPENING, 0, end) if end >= 0 else -1
    return text[start + len(OPENING) : text.find(CLOSING, start)].strip() if start >= 0 else None


def as_answer(answer: str, action_format: ActionFormat) -> str:
    """Format an answer as the policy has to write it."""
    return answer if action_format == "plain" else f"{OPENING}{answer}{CLOSING}"


def how_to_answer(what: str, action_format: ActionFormat) -> str:
    """Return one sentence of instructions for the policy. ``what`` names the answer, for example ``your guess``."""
    if action_format == "plain":
        return f"Answer with {what} and nothing else."
    return f"Give {what} as {OPENING}...{CLOSING}."


@dataclass(frozen=True)
class ActionReader:
    """Parses action names, ignoring case. ``names`` are in the order of the environment's actions."""

    names: tuple[str, ...]
    action_format: ActionFormat

    def read(self, text: str) -> int | None:
        """Return the index of the action that the text names; None if it names none."""
        answer = answer_in(text, self.action_format)
        folded = [name.casefold() for name in self.names]
        return folded.index(answer.casefold()) if answer is not None and answer.casefold() in folded else None

    def examples(self) -> tuple[str, ...]:
        """Return a well-formed answer for each action."""
        return tuple(as_answer(name, self.action_format) for name in self.names)

    def instructions(self) -> str:
        """Return a short instruction to the policy: the actions and the format."""
        return f"Actions: {', '.join(self.names)}. {how_to_answer('one action', self.action_format)}"

    def complaint(self) -> str:
        """Return the message to a policy whose answer contained no action."""
        return f"That was no action. {self.instructions()}"


def action_reader(
    default_names: Sequence[str], action_names: Sequence[str] | None, action_format: ActionFormat
) -> ActionReader:
    """Return a reader for the default action names, or for the user's own. Raises `BadOption`."""
    formats = get_args(ActionFormat)
    if action_format not in formats:
        listed = ", ".join(f"`{each}`" for each in formats)
        raise BadOption("action_format", f"there is no format `{action_format}`", f"use one of {listed}")
    names = tuple(str(name) for name in (default_names if action_names is None else action_names))
    if len(names) != len(default_names):
        message = f"{len(names)} names for {len(default_names)} actions"
        raise BadOption("action_names", message, f"name these, in this order: {', '.join(default_names)}")
    if len({name.casefold() for name in names}) < len(names):
        message = f"{', '.join(names)} are not all different (upper and lower case are the same)"
        raise BadOption("action_names", message, "a name of its own for each action")
    if any(not name or name != name.strip() or CLOSING in name for name in names):
        raise BadOption("action_names", "a name is empty or begins or ends with a space", "use words or letters")
    return ActionReader(names, action_format)


INFO_KEYS: Final = ("action_is_valid", "success", "state", "metrics", "messages", "system", "tools")
"""Keys of `info` that have a meaning; see docs/environments.md."""
RESET_KEYS: Final = ("system", "tools")
LARGEST_REWARD: Final = 1e30
"""Rewards are trained on in single precision; this leaves room for the sums of long episodes."""

_A_RESET: Final = object()


class BadAnswer(ValueError):
    """An environment returned a value of a wrong type. The message names the value and the right type."""


class BadOption(ValueError):
    """An option of an environment has an invalid value. The registry converts this to a `ConfigError` with the path."""

    def __init__(self, option: str, message: str, remedy: str) -> None:
        super().__init__(f"`{option}`: {message}; {remedy}")
        self.option = option
        self.message = message
        self.remedy = remedy


class Unavailable(RuntimeError):
    """A program or service that an environment needs cannot be started or reached. The message says why."""


class AnyText(spaces.Space[str]):
    """The space of all strings. (`gymnasium.spaces.Text` has a fixed character set and a length limit.)"""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=str)

    @property
    def is_np_flattenable(self) -> bool:
        """Always False, because strings have no fixed size."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return up to 20 random printable characters."""
        return "".join(chr(code) for code in self.np_random.integers(32, 127, size=self.np_random.integers(0, 21)))

    def contains(self, x: Any) -> bool:
        """Return True if ``x`` is a string."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)


ResetAnswer = tuple[str, dict[str, Any]]
StepAnswer = tuple[str, float, bool, bool, dict[str, Any]]


class TextGame(gymnasium.Env[str, str]):
    """Base class of text environments: spaces, render mode, and an error for steps after the end of the episode.

    Subclasses implement `render`, and `_begin` and `_act`, which return what `reset` and `step` return.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, render_mode: str | None = "ansi") -> None:
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.render_mode = render_mode
        self._is_over = True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> ResetAnswer:
        super().reset(seed=seed)
        self._is_over = True  # stays so if `_begin` raises
        answer = self._begin(seed)
        self._is_over = False
        return answer

    def step(self, action: str) -> StepAnswer:
        if self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        answer = self._act(action)
        self._is_over = answer[2] or answer[3]
        return answer

    def _begin(self, seed: int | None) -> ResetAnswer:
        raise NotImplementedError

    def _act(self, action: str) -> StepAnswer:
        raise NotImplementedError

    def _state(self) -> str:
        """Return the key of the current state; by default the frame."""
        return str(self.render())

    def _info(self, *, action_is_valid: bool = True, success: bool = False, **metrics: float) -> dict[str, Any]:
        return {"action_is_valid": action_is_valid, "success": success, "state": self._state(), "metrics": metrics}


def observation_from(
    text: Any,
    info: Any,
    *,
    reward: Any = _A_RESET,
    terminated: Any = False,
    truncated: Any = False,
    frame: Any = None,
) -> Observation:
    """Convert an environment's return values to an `Observation`.

    Without ``reward`` they are those of a reset, otherwise those of a step. ``frame`` is the result of `render`. Raises
    `BadAnswer`.
    """
    is_reset = reward is _A_RESET
    text = _text("the observation", text)
    if not isinstance(info, Mapping):
        raise _bad("info", info, "a dict")
    for key in () if is_reset else RESET_KEYS:
        if key in info:
            raise BadAnswer(f"info[{key!r}] came with a step; it is understood at a reset only")
    return Observation(
        messages=_messages(text, info),
        reward=0.0 if is_reset else _number("the reward", reward, LARGEST_REWARD),
        terminated=_flag("terminated", terminated),
        truncated=_flag("truncated", truncated),
        action_is_valid=_flag("info['action_is_valid']", info.get("action_is_valid", True)),
        success=_flag("info['success']", info["success"]) if "success" in info else None,
        state=_text("info['state']", info["state"]) if "state" in info else text,
        metrics=_metrics(info.get("metrics", {})),
        tools=tuple(_tools(info.get("tools", ()))),
        frame=None if frame is None else _text("the rendered frame", frame),
    )


def _messages(text: str, info: Mapping[str, Any]) -> tuple[Message, ...]:
    system = [{"role": "system", "content": _text("info['system']", info["system"])}] if "system" in info else []
    if "messages" not in info:
        return (*system, {"role": "user", "content": text})
    messages = info["messages"]
    if not _is_list(messages):
        raise _bad("info['messages']", messages, "a list of dicts with `role` and `content`")
    if not messages:
        raise BadAnswer("info['messages'] is empty; leave it out, or give what the policy reads")
    return (*system, *(_message(f"info['messages'][{index}]", each) for index, each in enumerate(messages)))


def _message(name: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise _bad(name, message, "a dict with `role` and `content`")
    for key in ("role", "content"):
        if key not in message:
            raise BadAnswer(f"{name} has no {key!r}; a message has a `role` and a `content`")
        _text(f"{name}[{key!r}]", message[key])
    return dict(message)


def _metrics(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        raise _bad("info['metrics']", metrics, "a dict of numbers")
    values = {}
    for key, value in metrics.items():
        name = _text("a key of info['metrics']", key)
        is_flag = isinstance(value, bool | np.bool_)
        values[name] = float(value) if is_flag else _number(f"info['metrics'][{name!r}]", value)
    return values


def _tools(tools: Any) -> Iterator[dict[str, Any]]:
    if not _is_list(tools):
        raise _bad("info['tools']", tools, "a list of JSON schemas")
    for index, schema in enumerate(tools):
        if not isinstance(schema, Mapping):
            raise _bad(f"info['tools'][{index}]", schema, "a JSON schema (a dict)")
        yield dict(schema)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, "a str")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise BadAnswer(f"{name} is no text that can be written: {cause.reason} at character {cause.start}") from None
    return str(value)


def _number(name: str, value: Any, largest: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _bad(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadAnswer(f"{name} is {number}; it has to be finite")
    if abs(number) > largest:
        raise BadAnswer(f"{name} is {number}; it has to be between {-largest:g} and {largest:g}")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _bad(name, value, "a bool")
    return bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _bad(name: str, value: Any, right: str) -> BadAnswer:
    shown = " ".join(repr(value).split())  # errors are told by their first line
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return BadAnswer(f"{name} is {shown} ({type(value).__name__}); it has to be {right}")

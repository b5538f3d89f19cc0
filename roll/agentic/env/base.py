"""The environment interface: a `gymnasium.Env` that speaks text, and the conversion of its answers to records.

`reset(seed=, options=) -> (text, info)` and `step(text) -> (text, reward, terminated, truncated, info)`; `render()`
returns a frame of text for people. An environment's answers are not trusted: `observation_from` reports values of a
wrong type. `INFO_KEYS` lists the keys of `info` that have a meaning; all others are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Final

import numpy as np
from gymnasium import spaces

from roll.agentic.episode import Message, Observation

INFO_KEYS: Final = {
    "action_is_valid": "bool: False if the text held no action that could be carried out (default True)",
    "success": "bool: whether the episode's goal is reached (left out: the environment does not say)",
    "state": "str: key of the state that the next turn acts in, equal for equal states (default: the observation text)",
    "metrics": "dict of str to number: figures of the episode; the last value of each counts",
    "messages": "list of {'role': str, 'content': str, ...}: what the policy reads in place of the observation text",
    "system": "str, at a reset only: becomes the first message, of role system",
    "tools": "list of JSON schemas, at a reset only: the tools that may be called, for the chat template",
}
RESET_KEYS: Final = ("system", "tools")

_A_RESET: Final = object()


class BadAnswer(ValueError):
    """An environment's answer has a wrong type. The message names the part, its value and what is right."""


class BadOption(ValueError):
    """An environment's option has a value that cannot work. The registry makes it a `ConfigError` with the path."""

    def __init__(self, option: str, message: str, remedy: str) -> None:
        super().__init__(f"`{option}`: {message}; {remedy}")
        self.option = option
        self.message = message
        self.remedy = remedy


class AnyText(spaces.Space[str]):
    """The space of all texts. (`gymnasium.spaces.Text` has a closed set of characters and a length limit.)"""

    def __init__(self) -> None:
        super().__init__(shape=None, dtype=str)

    @property
    def is_np_flattenable(self) -> bool:
        """False: texts have no fixed size."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> str:
        """Return up to 20 random printable characters."""
        return "".join(chr(code) for code in self.np_random.integers(32, 127, size=self.np_random.integers(0, 21)))

    def contains(self, x: Any) -> bool:
        """Return True if ``x`` is a text."""
        return isinstance(x, str)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AnyText)


def observation_from(
    text: Any,
    info: Any,
    *,
    reward: Any = _A_RESET,
    terminated: Any = False,
    truncated: Any = False,
    frame: Any = None,
) -> Observation:
    """Convert an environment's answer to a record.

    The answer is that of a reset if ``reward`` is left out, else that of a step. ``frame`` is the result of `render`.
    Raises `BadAnswer`.
    """
    is_reset = reward is _A_RESET
    text = _text("the observation", text)
    if not isinstance(info, Mapping):
        raise _bad("info", info, "a dict")
    if not is_reset:
        for key in RESET_KEYS:
            if key in info:
                raise BadAnswer(f"info[{key!r}] came with a step; it is understood at a reset only")
    return Observation(
        messages=_messages(text, info),
        reward=0.0 if is_reset else _number("the reward", reward),
        terminated=_flag("terminated", terminated),
        truncated=_flag("truncated", truncated),
        action_is_valid=_flag("info['action_is_valid']", info.get("action_is_valid", True)),
        success=_flag("info['success']", info["success"]) if "success" in info else None,
        state=_text("info['state']", info["state"]) if "state" in info else text,
        metrics=_metrics(info.get("metrics", {})),
        tools=_tools(info.get("tools", ())),
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


def _tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if not _is_list(tools):
        raise _bad("info['tools']", tools, "a list of JSON schemas")
    for index, schema in enumerate(tools):
        if not isinstance(schema, Mapping):
            raise _bad(f"info['tools'][{index}]", schema, "a JSON schema (a dict)")
    return tuple(dict(schema) for schema in tools)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _bad(name, value, "a str")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as cause:
        raise BadAnswer(f"{name} is no text that can be written: {cause.reason} at character {cause.start}") from None
    return str(value)


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _bad(name, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise BadAnswer(f"{name} is {number}; it has to be finite")
    return number


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise _bad(name, value, "a bool")
    return bool(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _bad(name: str, value: Any, right: str) -> BadAnswer:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return BadAnswer(f"{name} is {shown} ({type(value).__name__}); it has to be {right}")

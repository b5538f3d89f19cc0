"""What crosses between the languages of clients (`dialects.py`), the episodes behind the endpoint (`session.py`) and
its server.

A client's request is read into one form, whatever language it speaks: messages as a chat template takes them, with the
arguments of tool calls as objects and contents as text. The answer is made from sampled tokens and written back in the
client's language.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from roll.agentic.episode import Message


class RequestRefused(ValueError):
    """A request that cannot be served; its words go back to the client."""

    def __init__(self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None) -> None:
        """``message`` says what is wrong and what to do; ``status``: of HTTP; ``field``: name of the refused field;
        ``code``: the word by which clients know the error, such as `context_length_exceeded`."""
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code


@dataclass(frozen=True)
class ModelRequest:
    """A request to the policy."""

    messages: tuple[Message, ...]
    """Roles `system`, `user`, `assistant`, `tool`; contents are text; empty if there is a ``prompt``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions, each as `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    may_call: bool = True
    """False if the client wants no tool calls: then the tools stay in the prompt, and what is written is text."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue, in place of messages."""
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """True if a stream ends with the numbers of tokens."""
    thoughts: bool = True
    """False if the client wants no thoughts in the answer."""
    form: str | None = None
    """Name of the field that asks for an answer of a given form; None if none does."""
    temperature: float | None = None
    """Of a model that is served; in training sampling belongs to the run, and this and the next three are None."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    without_effect: tuple[str, ...] = ()
    """Names of the fields that were taken and change nothing, such as a temperature."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wrote."""

    name: str
    arguments: str
    """A JSON object as text."""
    id: str


@dataclass(frozen=True)
class ModelAnswer:
    """The policy's answer to a request."""

    id: str
    created: int
    """Seconds since 1970."""
    text: str
    """Without thoughts, tool calls, stop strings and special tokens."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_token_ids: np.ndarray
    """int32 ``[prompt]``."""
    token_ids: np.ndarray
    """int32 ``[sampled]``."""
    logprobs: np.ndarray
    """float32 ``[sampled]``."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())

"""Records that the APIs (`dialects.py`), the sessions (`session.py`) and the server exchange.

A request has the same form whatever API it came through: messages in the format of chat templates, with text contents
and decoded arguments of tool calls. The answer is built from sampled tokens, and written in the client's API.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from roll.agentic.episode import Message


class RequestRefused(ValueError):
    """A request that is not served. The message is returned to the client."""

    def __init__(self, message: str, *, status: int = 400, field: str | None = None, code: str | None = None) -> None:
        """``message`` says what is wrong and how to fix it. ``status``: HTTP status. ``field``: path of the refused
        field. ``code``: error code known to clients, such as `context_length_exceeded`."""
        super().__init__(message)
        self.status = status
        self.field = field
        self.code = code


@dataclass(frozen=True)
class ModelRequest:
    """A request to the policy."""

    messages: tuple[Message, ...]
    """Messages with the roles `system`, `user`, `assistant`, `tool` and text contents; empty with a ``prompt``."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Functions, each as `{"type": "function", "function": {"name", "description", "parameters"}}`."""
    may_call: bool = True
    """False if the client wants no tool calls: the tools stay in the prompt, but all of the answer is text."""
    prompt: str | tuple[int, ...] | None = None
    """Text or token ids to continue, instead of messages."""
    model: str = ""
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    """True to end a stream with token counts."""
    thoughts: bool = True
    """False to omit the reasoning from the answer."""
    form: str | None = None
    """Path of the field that demands structured output, or None."""
    temperature: float | None = None
    """Of a model that is served; in training sampling belongs to the run, and this and the next three are None."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: bool = False
    return_token_ids: bool = False
    without_effect: tuple[str, ...] = ()
    """Names of accepted fields that have no effect, such as a temperature in training."""

    def require_no_form(self, remedy: str) -> None:
        """Raise `RequestRefused` if structured output is demanded. ``remedy``: what the client can do."""
        if self.form is not None:
            raise RequestRefused(
                f"`{self.form}` is not served: no form is forced on the model, so {remedy}", field=self.form
            )


@dataclass(frozen=True)
class ToolCall:
    """A tool call in the policy's answer."""

    name: str
    arguments: str
    """JSON object, encoded."""
    id: str


@dataclass(frozen=True)
class ModelAnswer:
    """The policy's answer to a request."""

    id: str
    created: int
    """Seconds since the epoch."""
    text: str
    """Text without reasoning, tool calls, stop strings and special tokens."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_token_ids: np.ndarray
    """int32 ``[prompt]``."""
    token_ids: np.ndarray
    """int32 ``[sampled]``."""
    logprobs: np.ndarray
    """float32 ``[sampled]``."""
    reasoning: str | None = None
    tool_calls: tuple[ToolCall, ...] = field(default=())


Tell = Callable[[ModelAnswer], None]
"""Sends the part of an unfinished answer that cannot change any more."""
Pause = Callable[[], Awaitable[None]]
"""Lets the event loop take a turn."""


async def no_pause() -> None:
    """Return at once."""


class Answerer(Protocol):
    """An episode or a served model, which answers the requests to one address."""

    keeps_answers: bool
    """True if a repeated request gets its first answer again, even if its client disconnected meanwhile. False: each
    request has an answer of its own, which ends when its client disconnects."""
    failure: BaseException | None
    """The first error of the policy."""

    @property
    def room(self) -> int:
        """Maximum tokens of prompt and answer together."""

    async def respond(self, request: ModelRequest, *, tell: Tell | None = None, pause: Pause = no_pause) -> ModelAnswer:
        """Return the answer to a request. Raises `RequestRefused`.

        ``tell`` may be called with what is certain of the answer while it is sampled. ``pause`` is awaited between
        sampling and what is made of it.
        """

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises `RequestRefused`."""

    def leave_out(self, answer_id: str, cause: str) -> None:
        """Leave an answer out of training that did not reach the client."""

    def close(self) -> None:
        """Refuse further requests."""

"""A model served behind the endpoint, without training. Requests are independent, and nothing is stored.

Each conversation is rendered whole by the chat template; the engine's prefix cache makes long ones cheap. The client
chooses the sampling parameters. Answers can be streamed while they are sampled, and stop when the client disconnects.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, Pause, RequestRefused, Tell, no_pause
from roll.agentic.endpoint.session import LONG_PROMPT
from roll.agentic.endpoint.turns import TurnReader
from roll.agentic.episode import SampledTurn

TELL_SECONDS = 0.05
"""Minimum time between two updates of a streamed answer."""
TELL_SHARE = 0.2
"""Maximum share of the event loop's time for the updates of all streams. Each update decodes all tokens so far."""


@dataclass(frozen=True)
class ServedSampling:
    """Default sampling parameters of a served model."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    max_tokens: int | None = None
    """Longest answer, whatever a client asks for; None: what the sequence has room for."""
    seed: int | None = None
    """None: another one for each answer."""


class ServedPolicy(Protocol):
    """Samples the answers of a served model."""

    async def __call__(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_new_tokens: int,
        stop_strings: tuple[str, ...],
        sampling: ServedSampling,
        on_tokens: Callable[[np.ndarray], None],
    ) -> SampledTurn:
        """Continue ``prompt_token_ids`` (int32). Calls ``on_tokens`` with new tokens as they are sampled."""


class ServedModel:
    """Answers the requests to a served model."""

    keeps_answers = False

    def __init__(self, reader: TurnReader, policy: ServedPolicy, sampling: ServedSampling, room: int) -> None:
        """``policy`` runs in the current event loop. ``room``: maximum tokens of prompt and answer together."""
        self._reader = reader
        self._policy = policy
        self._sampling = sampling
        self.room = room
        self._home = asyncio.get_running_loop()
        self._streams = 0
        self.failure: BaseException | None = None
        """The first error of the policy."""

    async def respond(self, request: ModelRequest, *, tell: Tell | None = None, pause: Pause = no_pause) -> ModelAnswer:
        """Return the answer. While it is sampled, ``tell`` is called with the part that is certain so far. ``pause`` is
        awaited before the whole is written. Raises `RequestRefused`."""
        request.require_no_form("ask for it in the prompt")
        prompt = await self._prompt(request)
        left = self._room_behind(len(prompt))
        answer_id, created = uuid.uuid4().hex, int(time.time())
        here, sampled, next_at = asyncio.get_running_loop(), list[int](), 0.0

        def told() -> None:
            nonlocal next_at
            begun = time.monotonic()
            if tell is not None:
                tell(self._reader.begun_answer(request, prompt, list(sampled), answer_id=answer_id, created=created))
            ended = time.monotonic()
            next_at = ended + max(TELL_SECONDS, (ended - begun) * self._streams / TELL_SHARE)

        def on_tokens(token_ids: np.ndarray) -> None:
            nonlocal next_at
            sampled.extend(token_ids.tolist())
            if tells and time.monotonic() >= next_at:
                next_at = math.inf  # until this update is sent
                here.call_soon_threadsafe(told)

        # Log-probabilities and token ids are not streamed, as they do not split where the text does.
        tells = tell is not None and not request.logprobs and not request.return_token_ids
        limits = (left, self._sampling.max_tokens, request.max_tokens)
        call = self._policy(
            prompt,
            max_new_tokens=min(limit for limit in limits if limit is not None),
            stop_strings=request.stop,
            sampling=self._asked(request),
            on_tokens=on_tokens,
        )
        self._streams += tells
        try:
            turn = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(call, self._home))
        except Exception as error:
            self.failure = self.failure or error
            raise RequestRefused(f"the model failed: {error}", status=503, code="model_failed") from error
        finally:
            self._streams -= tells
        await pause()
        if turn.finish_reason == "abort":
            raise RequestRefused("the answer was stopped before its end; ask again", status=503, code="aborted")
        return self._reader.answer(request, prompt, turn, answer_id=answer_id, created=created, calls_id=answer_id)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens of the prompt. Raises `RequestRefused`."""
        return len(await self._prompt(request))

    def leave_out(self, answer_id: str, cause: str) -> None:
        """Do nothing: no answer is trained on."""

    def close(self) -> None:
        """Do nothing: nothing is stored."""

    async def _prompt(self, request: ModelRequest) -> np.ndarray:
        length = len(request.prompt or ()) + sum(len(message["content"]) for message in request.messages)
        return await asyncio.to_thread(self._read, request) if length > LONG_PROMPT else self._read(request)

    def _read(self, request: ModelRequest) -> np.ndarray:
        if request.prompt is not None:
            return self._reader.encoded(request.prompt)
        return self._reader.begun(request.messages, request).prompt_token_ids

    def _room_behind(self, tokens: int) -> int:
        """Return the maximum length of an answer to a prompt of ``tokens`` tokens. Raises `RequestRefused`."""
        if tokens == 0:
            raise RequestRefused("the prompt is empty; write something", field="prompt")
        if tokens >= self.room:
            long = f"the prompt has {tokens} tokens, and the model has room for {self.room - 1}: send less"
            raise RequestRefused(long, code="context_length_exceeded")
        return self.room - tokens

    def _asked(self, request: ModelRequest) -> ServedSampling:
        usual = self._sampling
        return ServedSampling(
            usual.temperature if request.temperature is None else request.temperature,
            usual.top_p if request.top_p is None else request.top_p,
            usual.top_k if request.top_k is None else request.top_k,
            seed=request.seed,
        )

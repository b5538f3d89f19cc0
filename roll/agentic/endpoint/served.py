"""A finished model behind the endpoint: each request is answered by itself, and nothing of it is kept.

Conversations are rendered whole, as the chat template does; the engine's cache of prefixes is what makes a long one
cheap. The client says how to sample. An answer is told while it is sampled, and ends when its client goes away.
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

from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, RequestRefused
from roll.agentic.endpoint.session import LONG_PROMPT
from roll.agentic.endpoint.turns import TurnReader
from roll.agentic.episode import SampledTurn

TELL_SECONDS = 0.05
"""Shortest time between two parts of an answer that is told while it is sampled."""
TELL_SHARE = 0.2
"""Largest share of the loop's time that all streams together take for telling. A part is made of all tokens so far."""


@dataclass(frozen=True)
class ServedSampling:
    """Sampling settings of a served model, for what a client leaves open."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all tokens."""
    max_tokens: int | None = None
    """Longest answer, whatever a client asks for; None: what the sequence has room for."""
    seed: int | None = None
    """None: another one for each answer."""


class ServedPolicy(Protocol):
    """The sampler of a model that is served."""

    async def __call__(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_new_tokens: int,
        stop_strings: tuple[str, ...],
        sampling: ServedSampling,
        on_tokens: Callable[[np.ndarray], None],
    ) -> SampledTurn:
        """Continue ``prompt_token_ids`` (int32). ``on_tokens`` is called with the new ones as they come."""


class ServedModel:
    """The answers of a model."""

    def __init__(self, reader: TurnReader, policy: ServedPolicy, sampling: ServedSampling, room: int) -> None:
        """``policy`` is called in the loop that is running now. ``room``: tokens of a prompt and its answer."""
        self._reader = reader
        self._policy = policy
        self._sampling = sampling
        self.room = room
        self._home = asyncio.get_running_loop()
        self._streams = 0
        self.failure: BaseException | None = None
        """What was raised first instead of an answer."""

    async def respond(self, request: ModelRequest, tell: Callable[[ModelAnswer], None] | None = None) -> ModelAnswer:
        """Return the answer. ``tell`` is called with what is certain of it while it is sampled.

        Raises `RequestRefused`.
        """
        if request.form is not None:
            unforced = f"`{request.form}` is not served: no form is forced on the model, so ask for it in the prompt"
            raise RequestRefused(unforced, field=request.form)
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
                next_at = math.inf  # until this part is told
                here.call_soon_threadsafe(told)

        # The numbers of tokens in a stream would have to be cut where its texts are.
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
        if turn.finish_reason == "abort":
            raise RequestRefused("the answer was stopped before its end; ask again", status=503, code="aborted")
        return self._reader.answer(request, prompt, turn, answer_id=answer_id, created=created, calls_id=answer_id)

    async def count_tokens(self, request: ModelRequest) -> int:
        """Return the number of tokens of a request's prompt. Raises `RequestRefused`."""
        return len(await self._prompt(request))

    def leave_out(self, answer_id: str, cause: str) -> None:
        """Nothing is trained on."""

    def close(self) -> None:
        """Nothing is kept."""

    async def _prompt(self, request: ModelRequest) -> np.ndarray:
        length = len(request.prompt or ()) + sum(len(message["content"]) for message in request.messages)
        return await asyncio.to_thread(self._read, request) if length > LONG_PROMPT else self._read(request)

    def _read(self, request: ModelRequest) -> np.ndarray:
        if request.prompt is not None:
            return self._reader.encoded(request.prompt)
        return self._reader.begun(request.messages, request).prompt_token_ids

    def _room_behind(self, tokens: int) -> int:
        """Return the length of the longest answer to a prompt of so many tokens. Raises `RequestRefused`."""
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

"""A response assembled from the output of several engines. An engine's death loses no token that it had reported.

Each attempt requests what is still missing: the prompt plus the tokens so far, at the next position of the request's
random stream, from an engine whose weights are at least as new as those of the last token. Versions therefore never
decrease along a response, every token is at least as new as the request demands, and a continued response is sampled
exactly like an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll.strategies.infer.base import Completion, FinishReason, GenerateRequest, TokenChunk


class PartialResponse:
    """The tokens of one request so far: those of finished attempts, and the known ones of the current attempt."""

    def __init__(self, request: GenerateRequest, *, min_version: int | None, max_length: int) -> None:
        """Start without tokens. ``max_length``: tokens that an engine holds, prompt plus response."""
        self._request = request
        self._min_version = min_version
        room = max_length - len(request.prompt_token_ids)
        self._limit = max(1, min(request.sampling.max_new_tokens, room))
        self._settled: list[TokenChunk] = []
        self._attempt: list[TokenChunk] = []
        self._finish_reason: FinishReason | None = None

    @property
    def request_id(self) -> str:
        """The request id that the caller chose."""
        return self._request.request_id

    @property
    def attempt_tokens(self) -> int:
        """Number of known tokens of the current attempt."""
        return _count(self._attempt)

    @property
    def min_version(self) -> int | None:
        """Oldest weight version that may continue the response; None if any may."""
        newest = max((int(chunk.versions.max()) for chunk in self._settled if len(chunk.versions)), default=None)
        return max((version for version in (self._min_version, newest) if version is not None), default=None)

    def remaining(self) -> GenerateRequest:
        """Return the request for the missing part."""
        tokens = [chunk.token_ids for chunk in self._settled]
        count = _count(self._settled)
        return replace(
            self._request,
            prompt_token_ids=np.concatenate([self._request.prompt_token_ids, *tokens]).astype(np.int32),
            sampling=replace(self._request.sampling, max_new_tokens=self._request.sampling.max_new_tokens - count),
            first_token_index=self._request.first_token_index + count,
        )

    def add(self, chunk: TokenChunk) -> None:
        """Append the next tokens of the current attempt."""
        if len(chunk.token_ids) or chunk.finish_reason is not None:
            self._attempt.append(chunk)

    def cut_off(self) -> int:
        """Keep the known tokens of an attempt whose engine is gone, begin the next attempt, and return their number."""
        kept, self._attempt = self._attempt, []
        self._settled += kept
        self._finish_reason = kept[-1].finish_reason if kept else None
        if self._finish_reason is None and _count(self._settled) >= self._limit:
            self._finish_reason = "length"
        return _count(kept)

    @property
    def completion(self) -> Completion | None:
        """The whole response if the interrupted attempts already contain all of it, else None."""
        if self._finish_reason is not None and self._finish_reason != "abort":
            return self._completion(self._settled, self._finish_reason)
        return None

    def joined_to(self, completion: Completion) -> Completion:
        """Return the whole response, where ``completion`` is the part that the current attempt generated."""
        rest = TokenChunk(completion.token_ids, completion.logprobs, completion.versions)
        return self._completion([*self._settled, rest], completion.finish_reason)

    def _completion(self, chunks: Sequence[TokenChunk], finish_reason: FinishReason) -> Completion:
        return Completion(
            request_id=self._request.request_id,
            token_ids=np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int32),
            logprobs=np.concatenate([chunk.logprobs for chunk in chunks]).astype(np.float32),
            versions=np.concatenate([chunk.versions for chunk in chunks]).astype(np.int32),
            finish_reason=finish_reason,
        )


def _count(chunks: Sequence[TokenChunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in chunks)

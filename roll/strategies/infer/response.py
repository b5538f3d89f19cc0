"""The response to one request inside an engine process, as its tokens arrive.

The engine reports a few tokens at a time. It reports which weights produced which tokens only when the request
ends; until then each token carries a version that is never too new. Stop strings are matched here, token by token and
across the seam of a continued response, as in every other engine of this project.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np

from roll.strategies.infer.base import (
    Completion,
    EngineFailed,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from roll.strategies.infer.stop_strings import StopStringMatcher


@dataclass(frozen=True)
class VersionSpan:
    """Tokens ``start`` to ``end`` (exclusive) of a response, produced by one version."""

    version: int
    start: int
    end: int


@dataclass
class Response:
    """The tokens of a request so far."""

    request: GenerateRequest
    engine_id: str
    """Name of the request inside the engine."""
    matcher: StopStringMatcher | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    """True once an abort was requested."""
    begins_again: bool = False
    """True if the request must enter the engine again: it had no token when weights were replaced under cached
    prompts."""
    _last_version: int | None = None
    """Version that the engine held at the last message."""

    def take(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        version: int,
        spans: Sequence[VersionSpan] = (),
        finish_reason: FinishReason | None = None,
    ) -> bool:
        """Add new tokens from an engine that holds ``version``. Return True if a stop string ends the request before
        the engine does.

        ``spans`` give the versions of the whole response once it has ended. Engines hold a few tokens back, so the
        first message after an update may contain tokens of the version before. All tokens of that message count as
        older until the request ends and the engine reports the spans. Raises `EngineFailed` if the spans do not cover
        the tokens.
        """
        self.token_ids += token_ids
        self.logprobs += logprobs
        oldest = version if self._last_version is None else self._last_version
        self.versions += [oldest] * len(token_ids)
        self._last_version = version
        if spans:
            self.versions = versions_of(spans, len(self.token_ids))
        if finish_reason is not None:
            self.finish_reason = finish_reason
        return self._stop_at_string(len(token_ids))

    def chunk(self, known: int, finish_reason: FinishReason | None = None) -> TokenChunk:
        """Return the tokens beyond the first ``known``."""
        return TokenChunk(*self._arrays(known), finish_reason=finish_reason)

    def completion(self) -> Completion:
        """Return the whole response."""
        return Completion(self.request.request_id, *self._arrays(0), finish_reason=self.finish_reason or "abort")

    def _arrays(self, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logprobs = np.array(self.logprobs[start:], dtype=np.float32)
        return (
            np.array(self.token_ids[start:], dtype=np.int32),
            np.zeros_like(logprobs) if is_greedy(self.request.sampling) else logprobs,
            np.array(self.versions[start:], dtype=np.int32),
        )

    def _stop_at_string(self, new: int) -> bool:
        if self.matcher is None or not new:
            return False
        for end in range(len(self.token_ids) - new + 1, len(self.token_ids) + 1):
            if self.matcher.push([self.token_ids[end - 1]]):
                going_on = self.finish_reason is None
                del self.token_ids[end:], self.logprobs[end:], self.versions[end:]
                self.finish_reason = "stop"
                return going_on
        return False


def is_greedy(sampling: SamplingParams) -> bool:
    """Return True if the sampling distribution is a point."""
    return sampling.temperature == 0 or sampling.top_k == 1


def versions_of(spans: Sequence[VersionSpan], count: int) -> list[int]:
    """Return the version of each of ``count`` tokens. Raises `EngineFailed` if the spans do not cover them."""
    versions = [span.version for span in spans for _ in range(span.start, span.end)]
    if len(versions) != count:
        raise EngineFailed(f"the engine tells the weight versions of {len(versions)} tokens out of {count}")
    return versions


async def completion_of(responses: AsyncGenerator[Response, None], request: GenerateRequest) -> Completion:
    """Consume a request's successive states and return its completion; an empty one if the request never began."""
    last: Response | None = None
    async with aclosing(responses):
        async for response in responses:
            last = response
    return nothing(request) if last is None else last.completion()


async def chunks_of(
    responses: AsyncGenerator[Response, None], request: GenerateRequest
) -> AsyncGenerator[TokenChunk, None]:
    """Yield a request's tokens a few at a time; the last chunk carries the finish reason.

    Leaving the iteration early closes ``responses``.
    """
    known = 0
    async with aclosing(responses):
        async for response in responses:
            ended = response.finish_reason
            if ended is not None or len(response.token_ids) > known:
                yield response.chunk(known, ended)
            known = len(response.token_ids)
            if ended is not None:
                return
    empty = nothing(request)
    yield TokenChunk(empty.token_ids, empty.logprobs, empty.versions, "abort")


def new_tokens(running: Iterable[Response], known: Mapping[str, int]) -> dict[str, TokenChunk]:
    """Return the tokens of each request beyond the first ``known[id]``; requests without new tokens are left out."""
    chunks = {}
    for response in running:
        name = response.request.request_id
        first = known.get(name, 0)
        if len(response.token_ids) > first:
            chunks[name] = response.chunk(first, response.finish_reason)
    return chunks


def nothing(request: GenerateRequest) -> Completion:
    """Return the empty completion of a request that was aborted before it began."""
    empty = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32), np.zeros(0, dtype=np.int32))
    return Completion(request.request_id, *empty, finish_reason="abort")

"""One request inside vLLM, as its tokens arrive.

vLLM reports a few tokens at a time and says which weights made which of them when the request ends; until then a
version that is never too new stands in. Stop strings are looked for here, token by token and over the seam of a
continued response, as every other engine of this project does it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from roll.strategies.infer.base import Completion, EngineFailed, GenerateRequest, TokenChunk
from roll.strategies.infer.stop_strings import StopStringMatcher

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput, WeightVersionSpan

FinishReason = Literal["stop", "length", "abort"]


@dataclass
class Response:
    """The tokens of a request so far."""

    request: GenerateRequest
    engine_id: str
    """Its name inside vLLM."""
    matcher: StopStringMatcher | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    aborted: bool = False
    """Somebody asked for its end."""
    begins_again: bool = False
    """It had no token when weights were replaced under cached prompts, and is to enter vLLM anew."""
    _last_version: int | None = None
    """What the engine held at the last message."""

    def add(self, output: CompletionOutput, version: int) -> bool:
        """Take new tokens in, the engine holding ``version``. True if a stop string ends the request in vLLM's place.

        vLLM holds a few tokens back, so the first message after an update may bring some of the version before: until
        the request ends and vLLM tells which, all of them count as older. Raises `EngineFailed` if vLLM gave the
        request up.
        """
        self.token_ids += output.token_ids
        self.logprobs += _sampled_logprobs(output)
        oldest = version if self._last_version is None else self._last_version
        self.versions += [oldest] * len(output.token_ids)
        self._last_version = version
        if output.weight_versions:
            self.versions = versions_of(output.weight_versions, len(self.token_ids))
        if output.finish_reason is not None:
            self.finish_reason = _finish_reason(output.finish_reason, self.request.request_id)
        return self._stop_at_string(len(output.token_ids))

    def chunk(self, known: int, finish_reason: str | None = None) -> TokenChunk:
        """The tokens beyond the first ``known``."""
        return TokenChunk(*self._arrays(known), finish_reason=finish_reason)

    def completion(self) -> Completion:
        """The whole response."""
        return Completion(self.request.request_id, *self._arrays(0), finish_reason=self.finish_reason or "abort")

    def _arrays(self, start: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        greedy = self.request.sampling.temperature == 0
        logprobs = np.array(self.logprobs[start:], dtype=np.float32)
        return (
            np.array(self.token_ids[start:], dtype=np.int32),
            np.zeros_like(logprobs) if greedy else logprobs,
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


def versions_of(spans: Sequence[WeightVersionSpan], count: int) -> list[int]:
    """Version of each of ``count`` tokens. Raises `EngineFailed` if the spans do not cover them."""
    versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
    if len(versions) != count:
        raise EngineFailed(f"vLLM tells the weight versions of {len(versions)} tokens out of {count}")
    return versions


def _sampled_logprobs(output: CompletionOutput) -> list[float]:
    """Log-probability of each new token; asked for without alternatives, vLLM gives one number per position."""
    if not output.token_ids:
        return []
    logprobs = output.logprobs.logprobs if output.logprobs is not None else []
    if len(logprobs) != len(output.token_ids):
        raise EngineFailed(f"vLLM gave {len(logprobs)} log-probabilities for {len(output.token_ids)} tokens")
    if any(math.isnan(logprob) for logprob in logprobs):
        raise EngineFailed("vLLM's logits are NaN: there is no distribution to sample from")
    return logprobs


def _finish_reason(reason: str, request_id: str) -> FinishReason:
    if reason not in ("stop", "length", "abort"):
        raise EngineFailed(f"vLLM ended request {request_id!r} with {reason!r}")
    return reason

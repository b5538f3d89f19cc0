"""A response that is continued on another engine if its engine dies.

Each attempt requests the missing part: its prompt is the original prompt plus the tokens so far, and the random stream
resumes at the next position. So a continued response takes the random numbers of an uninterrupted one; its caches are
computed anew, which may change the last bits of its log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roll.engines.base import Completion, GenerateRequest, TokenChunk, no_tokens


class PartialResponse:
    """The tokens of one request so far: those of earlier attempts, and those reported by the current attempt."""

    def __init__(self, request: GenerateRequest, *, min_version: int | None, max_length: int) -> None:
        """Start without tokens. ``min_version``: oldest weight version that may serve the request. ``max_length``:
        maximum length of prompt plus response."""
        self._request = request
        self._min_version = min_version
        room = max_length - len(request.prompt_token_ids)
        self._limit = max(1, min(request.sampling.max_new_tokens, room))
        self._settled = no_tokens()
        self._attempt: list[TokenChunk] = []

    @property
    def request_id(self) -> str:
        """The original request id."""
        return self._request.request_id

    @property
    def attempt_tokens(self) -> int:
        """Number of tokens reported by the current attempt."""
        return sum(len(chunk.token_ids) for chunk in self._attempt)

    @property
    def kept_tokens(self) -> int:
        """Number of tokens kept from earlier attempts."""
        return len(self._settled.token_ids)

    @property
    def min_version(self) -> int | None:
        """Oldest weight version that may continue the response: at least that of its last token. None: any."""
        newest = self._settled.versions[-1:].tolist()
        return max(newest if self._min_version is None else [self._min_version, *newest], default=None)

    def remaining(self) -> GenerateRequest:
        """Return the request for the missing part."""
        request, count = self._request, len(self._settled.token_ids)
        prompt = np.asarray(request.prompt_token_ids, dtype=np.int32)
        if not count and prompt is request.prompt_token_ids:
            return request
        return replace(
            request,
            prompt_token_ids=np.concatenate([prompt, self._settled.token_ids]),
            sampling=replace(request.sampling, max_new_tokens=request.sampling.max_new_tokens - count),
            first_token_index=request.first_token_index + count,
        )

    def add(self, chunk: TokenChunk) -> None:
        """Append the next tokens of the current attempt."""
        self._attempt.append(chunk)

    def cut_off(self) -> int:
        """End the current attempt after its engine died. Keep its reported tokens, and return their number.

        An image is generated again from the same seed, because its latents are lost with the engine. With recorded
        experts the last token is not kept.
        """
        if self._request.picture is not None:
            self._attempt = []
        kept = self.attempt_tokens
        self._settled = _joined([self._settled, *self._attempt])
        self._attempt = []
        if self._request.with_routing and kept:
            # Engines tell the experts of all tokens when they end a response, so one must compute its end.
            self._settled = self._settled.before_last()
            kept -= 1
        return kept

    @property
    def completion(self) -> Completion | None:
        """The complete response, if earlier attempts already contain all of it, else None."""
        reason = self._settled.finish_reason
        if reason is None or reason == "abort":
            if len(self._settled.token_ids) < self._limit:
                return None
            reason = "length"
        return self._settled.completion(self.request_id, reason)

    def joined_to(self, completion: Completion) -> Completion:
        """Return the complete response: earlier attempts' tokens plus ``completion``, the current attempt's result."""
        if not len(self._settled.token_ids):
            return replace(completion, request_id=self.request_id)
        whole = _joined([self._settled, completion.after(0)]).completion(self.request_id, completion.finish_reason)
        return replace(whole, text=completion.text, routed_experts=completion.routed_experts)


def _joined(chunks: Sequence[TokenChunk]) -> TokenChunk:
    return TokenChunk(
        np.concatenate([chunk.token_ids for chunk in chunks]).astype(np.int32),
        np.concatenate([chunk.logprobs for chunk in chunks]).astype(np.float32),
        np.concatenate([chunk.versions for chunk in chunks]).astype(np.int32),
        chunks[-1].finish_reason,
    )

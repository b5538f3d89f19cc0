"""Stop strings: detects token by token when a response contains one, without decoding the whole text again.

A tokenizer decodes a token differently at the start of a text than inside it, and a character may be spread over
several tokens. A few earlier tokens are therefore decoded along with the new ones, and unfinished characters are
decoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from roll.strategies.infer.base import GenerateRequest

_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """The part of a tokenizer that matching needs."""

    def decode(self, token_ids: list[int]) -> str:
        """Return the text of the tokens."""


class StopStringMatcher:
    """Watches one response for its stop strings."""

    def __init__(self, decoder: Decoder, stop_strings: Iterable[str]) -> None:
        self._decoder = decoder
        self._stop_strings = tuple(stop_strings)
        self._tail_length = max(len(text) for text in self._stop_strings) - 1
        self._token_ids: list[int] = []
        self._context_start = 0
        self._settled = 0
        self._tail = ""

    def push(self, token_ids: Iterable[int]) -> bool:
        """Add tokens. Return True if the text now contains a stop string that it did not contain before."""
        self._token_ids.extend(token_ids)
        context = self._decoder.decode(self._token_ids[self._context_start : self._settled])
        text = self._decoder.decode(self._token_ids[self._context_start :])
        recent = self._tail + text[len(context) :]
        matched = any(stop in recent for stop in self._stop_strings)
        if not text.endswith(_UNFINISHED):
            self._context_start, self._settled = self._settled, len(self._token_ids)
            self._tail = recent[max(len(recent) - self._tail_length, 0) :]
        return matched


class StopStrings:
    """Makes the matchers of an engine's requests. The tokenizer is loaded for the first request that needs it."""

    def __init__(self, load_tokenizer: Callable[[], Decoder]) -> None:
        self._load_tokenizer = load_tokenizer
        self._tokenizer: Decoder | None = None

    def matcher(self, request: GenerateRequest) -> StopStringMatcher | None:
        """Return a matcher that has seen the tokens of earlier attempts; None if no stop string may end the response.

        Raises ``ValueError`` if the model has no tokenizer.
        """
        if not request.sampling.watches_text:
            return None
        if self._tokenizer is None:
            try:
                self._tokenizer = self._load_tokenizer()
            except OSError as error:
                raise ValueError(
                    f"request {request.request_id!r} has stop strings, but the model's tokenizer cannot be loaded: "
                    f"{error}"
                ) from error
        matcher = StopStringMatcher(self._tokenizer, request.sampling.stop_strings)
        if request.first_token_index:
            matcher.push(request.prompt_token_ids[-request.first_token_index :].tolist())
        return matcher

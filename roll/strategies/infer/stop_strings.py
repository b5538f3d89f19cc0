"""Does a response's text contain a stop string yet? Decided token by token, without decoding the text again and again.

A tokenizer decodes a token differently at the start of a text than inside it, and a character may be spread over
several tokens; so a few tokens before the new ones are decoded along, and unfinished characters are decoded again.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, token_ids: list[int]) -> str:
        """Text of the tokens."""


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
        """Add tokens; true if the text, up to and with them, contains a stop string that it did not contain before."""
        self._token_ids.extend(token_ids)
        context = self._decoder.decode(self._token_ids[self._context_start : self._settled])
        text = self._decoder.decode(self._token_ids[self._context_start :])
        recent = self._tail + text[len(context) :]
        matched = any(stop in recent for stop in self._stop_strings)
        if not text.endswith(_UNFINISHED):
            self._context_start, self._settled = self._settled, len(self._token_ids)
            self._tail = recent[max(len(recent) - self._tail_length, 0) :]
        return matched

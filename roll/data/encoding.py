"""Texts to tokens. Contents never become control tokens: in a message ``<|im_end|>`` is ten characters.

A chat template joins its own control tokens and the contents of messages into one text, and a tokenizer cannot tell
them apart. So before rendering, each control token's text in a content is replaced by a stand-in. In the rendered text
the tokenizer finds the template's own ones; what stands between them is put back and encoded by a copy of the tokenizer
that encodes control tokens as plain text. A text without stand-ins is encoded as ever.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Value = TypeVar("Value")

BEGIN, END = "\ue000", "\ue001"
"""Characters of Unicode's private use, which no template writes, on both sides of a stand-in's number."""
_STAND_IN = re.compile(f"{BEGIN}([0-9]+){END}")


def tokenise(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Return token ids of each text, int32 ``[length]``, without added special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return [np.asarray(token_ids, dtype=np.int32) for token_ids in encoded["input_ids"]]


class ControlTokensRefused(ValueError):
    """A text spells control tokens, and the tokenizer cannot encode them as plain text."""


class ContentEncoder:
    """The encoder of rendered conversations of one tokenizer, safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def shielded(self, value: Value) -> Value:
        """Return a message, or any structure of texts, with stand-ins in its texts for what they spell."""
        if isinstance(value, str):
            return self._spelled.sub(lambda match: f"{BEGIN}{self._numbers[match[0]]}{END}", value)  # type: ignore[return-value]
        if isinstance(value, Mapping):
            return {key: self.shielded(each) for key, each in value.items()}  # type: ignore[return-value]
        if isinstance(value, list | tuple):
            return type(value)(map(self.shielded, value))
        return value

    @staticmethod
    def is_shielded(text: str) -> bool:
        """Return True if a text rendered from shielded contents has stand-ins."""
        return BEGIN in text

    def restored(self, text: str) -> str:
        """Undo `shielded` in a rendered text."""
        return _STAND_IN.sub(lambda match: self._texts[int(match[1])], text)

    def encode(self, text: str) -> np.ndarray:
        """Return token ids (int32) of a text rendered from shielded contents, without added tokens.

        Raises `ControlTokensRefused`.
        """
        if not self.is_shielded(text):
            return tokenise([text], self._tokenizer)[0]
        found, place = list[int](), 0
        whole = self._own.encode(text, add_special_tokens=False)
        for token_id, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            if token_id in self._control:
                found += [*self._plain(text[place:start], is_first=place == 0), token_id]
                place = end
        return np.array(found + self._plain(text[place:], is_first=place == 0), dtype=np.int32)

    def _plain(self, text: str, *, is_first: bool) -> list[int]:
        """Return the ids of a text of contents only."""
        if not text:
            return []
        contents = self.restored(text)
        ids = (self._plain_first if is_first else self._plain_later).encode(contents, add_special_tokens=False).ids
        for token_id in (self._control.keys() & ids) - self._unknown:
            raise ControlTokensRefused(
                f"a content spells {self._control[token_id]!r}, which is a control token, and the vocabulary of this "
                "tokenizer has no other way to write it; take it out of the texts"
            )
        return ids

    @cached_property
    def _control(self) -> dict[int, str]:
        """Id of each control token -> its text."""
        added = {
            number: token.content for number, token in self._tokenizer.added_tokens_decoder.items() if token.special
        }
        named = zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True)
        return {**dict(named), **added}

    @cached_property
    def _unknown(self) -> set[int | None]:
        """The id of what the vocabulary does not have, which may be a control token's."""
        model = json.loads(self._own.to_str())["model"]
        named = model.get("unk_token")
        return {model.get("unk_id"), None if named is None else self._own.token_to_id(named)}

    @cached_property
    def _texts(self) -> list[str]:
        """Texts with a stand-in, by its number. `BEGIN` is one of them, so that a content cannot spell a stand-in."""
        return [BEGIN, *sorted(filter(None, self._control.values()), key=len, reverse=True)]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {text: number for number, text in enumerate(self._texts)}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._texts)))

    @cached_property
    def _own(self) -> Tokenizer:
        return self._copy()

    @cached_property
    def _plain_first(self) -> Tokenizer:
        return _without_control_tokens(self._copy())

    @cached_property
    def _plain_later(self) -> Tokenizer:
        """The encoder of what does not begin a text, where some tokenizers write no space in front."""
        from tokenizers import Tokenizer

        settings = json.loads(self._plain_first.to_str())
        pre_tokenizer = settings.get("pre_tokenizer") or {}
        for step in [pre_tokenizer, *pre_tokenizer.get("pretokenizers", [])]:
            if step.get("prepend_scheme") == "first":
                step["prepend_scheme"] = "never"
        return _without_control_tokens(Tokenizer.from_str(json.dumps(settings)))

    def _copy(self) -> Tokenizer:
        """Return the tokenizer that does the work, as an object of its own: its settings are shared between threads."""
        from tokenizers import Tokenizer

        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ControlTokensRefused(
                "a content spells a control token, and a tokenizer without `tokenizer.json` would take it for one; "
                "take it out of the texts"
            )
        copy = Tokenizer.from_str(backend.to_str())
        copy.no_truncation()
        copy.no_padding()
        return copy


def _without_control_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True
    return tokenizer

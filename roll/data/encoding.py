"""Encoding of texts. Contents never become control tokens: in a message, ``<|im_end|>`` is ten plain characters.

A chat template joins its own control tokens and the contents of messages into one text, and a tokenizer cannot tell
them apart. So before rendering, each control token's text in a content is replaced by a stand-in. In the rendered text
the tokenizer finds only the template's own control tokens. The texts between them get their contents back, and are
encoded by a copy of the tokenizer that treats control tokens as plain text. A text without stand-ins is encoded as
usual.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerBase

Value = TypeVar("Value")

BEGIN, END = "\ue000", "\ue001"
"""Characters around the number of a stand-in: Unicode's private use, which no template writes."""
FRAMES = re.compile(r"(?!</?(think|thinking|thought|reasoning|answer)>)(?=.*\w)(?=.*[^\w\s])\S+")
"""Added tokens that may frame turns without being special: marks around a word, except the tags of thoughts and
answers, which the policy writes itself."""
_STAND_IN = re.compile(f"{BEGIN}([0-9]+){END}")
LONG_TEXT = 2**12
"""Number of characters (or tokens) above which encoding (or decoding) releases the interpreter lock."""


def tokenise(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[np.ndarray]:
    """Return token ids of each text, int32 ``[length]``, without added special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)
    return [np.asarray(token_ids, dtype=np.int32) for token_ids in encoded["input_ids"]]


def decoded(token_ids: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of token ids ``[length]``, special tokens included."""
    backend = _backend_of(tokenizer, "decode", "_decode") if len(token_ids) > LONG_TEXT else None
    if backend is None or tokenizer.clean_up_tokenization_spaces:
        return tokenizer.decode(token_ids.tolist(), skip_special_tokens=False)
    return backend.decode_batch([token_ids.tolist()], skip_special_tokens=False)[0]


class ControlTokensRefused(ValueError):
    """A text spells control tokens, and the tokenizer cannot encode them as plain text."""


class ContentEncoder:
    """Encoder of rendered conversations for one tokenizer. It may be used from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def shielded(self, value: Value) -> Value:
        """Return a message, or any structure of texts, with stand-ins for the control tokens that its texts spell."""
        if isinstance(value, str):
            return self._shielded_text(value)  # type: ignore[return-value]
        if isinstance(value, Mapping):
            return {self.shielded(key): self.shielded(each) for key, each in value.items()}  # type: ignore[return-value]
        if isinstance(value, list | tuple):
            return type(value)(map(self.shielded, value))
        return value

    def spelled_in(self, value: Any) -> str | None:
        """Return the first control token that a text, or any structure of texts, spells; None if there is none."""
        if isinstance(value, str):
            return next((token for token in self._spelled.findall(value) if token != BEGIN), None)
        parts: Sequence[Any] = value if isinstance(value, list | tuple) else ()
        if isinstance(value, Mapping):
            parts = [*value, *value.values()]
        return next(filter(None, map(self.spelled_in, parts)), None)

    def _shielded_text(self, text: str) -> str:
        if self._begins.isdisjoint(text) and self._ends.isdisjoint(text[:1]):
            return text
        # Two contents may be joined directly, and spell a control token together.
        begun, ended = self._cut
        lengths = range(1, max(map(len, self._texts)))
        before = any(text[:length] in ended for length in lengths)
        behind = any(text[-length:] in begun for length in lengths)
        spelled = self._spelled.sub(lambda match: self._stand_ins[match[0]], text)
        return self._stand_ins[""] * before + spelled + self._stand_ins[""] * behind

    @staticmethod
    def is_shielded(text: str) -> bool:
        """Return True if a text rendered from shielded contents has stand-ins."""
        return BEGIN in text

    def restored(self, text: str) -> str:
        """Undo `shielded` in a rendered text."""
        return _STAND_IN.sub(lambda match: self._texts[int(match[1])], text)

    @cached_property
    def writes_prefix(self) -> bool:
        """True if the tokenizer prepends a space to some texts, so that encoding a part depends on what it follows."""
        return any(_prefixes(json.loads(self._copy().to_str()))) if self._backend is not None else False

    def encode(self, text: str, before: np.ndarray | None = None) -> np.ndarray:
        """Return token ids (int32) of a text rendered from shielded contents, without added tokens.

        ``before``: the token ids that the text follows; None: it begins a sequence. Raises `ControlTokensRefused`.
        """
        if self._is_harmless(text):
            text = self.restored(text)
            if before is None or not self.writes_prefix:
                if len(text) > LONG_TEXT or self._alone is None:
                    return tokenise([text], self._tokenizer)[0]
                return np.array(_encoded(text, self._alone).ids, dtype=np.int32)
            return np.array(_encoded(text, self._encoder(before)).ids, dtype=np.int32)
        found, place, behind = list[int](), 0, before
        whole = _encoded(text, self._encoder(None))
        for token_id, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            if token_id in self._control:
                found += [*self._plain(text[place:start], behind), token_id]
                place, behind = end, np.array([token_id])
        return np.array(found + self._plain(text[place:], behind), dtype=np.int32)

    def _is_harmless(self, text: str) -> bool:
        """Return True if the contents in a rendered text add no control token to it, not even where they meet."""
        if not self.is_shielded(text):
            return True
        restored = self.restored(text)
        return len(self._spelled.findall(restored)) == len(self._spelled.findall(_STAND_IN.sub(BEGIN, text))) - len(
            _STAND_IN.findall(text)
        )

    def _plain(self, text: str, before: np.ndarray | None) -> list[int]:
        """Return the ids of a text that consists of contents only and follows the token ids ``before``."""
        if not text:
            return []
        ids = _encoded(self.restored(text), self._encoder(before, plain=True)).ids
        for token_id in (self._control.keys() & ids) - self._unknown:
            raise ControlTokensRefused(
                f"a content spells {self._control[token_id]!r}, which is a control token, and the vocabulary of this "
                "tokenizer has no other way to write it; take it out of the texts"
            )
        return ids

    @cached_property
    def _control(self) -> dict[int, str]:
        """Id of each control token -> its text: special tokens, and others that frame turns in the chat template."""
        added = {
            number: token.content
            for number, token in self._tokenizer.added_tokens_decoder.items()
            if token.special or (token.content in self._frame and FRAMES.fullmatch(token.content))
        }
        named = zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True)
        return {**dict(named), **added}

    @cached_property
    def _frame(self) -> str:
        """Text that the chat template writes for plain contents; empty if there is no template, or if it fails."""
        asked, answered = ({"role": role, "content": "word"} for role in ("user", "assistant"))
        try:
            return self._tokenizer.apply_chat_template(
                [asked, answered, asked], tokenize=False, add_generation_prompt=True
            )
        except Exception:  # a template is a program and may raise anything
            return ""

    @cached_property
    def _unknown(self) -> set[int | None]:
        """Ids of the tokenizer's unknown token, which may be a control token as well."""
        own = self._encoder(None)
        model = json.loads(own.to_str())["model"]
        named = model.get("unk_token")
        return {model.get("unk_id"), None if named is None else own.token_to_id(named)}

    @cached_property
    def _texts(self) -> list[str]:
        """Texts that have a stand-in, by its number: the empty text, `BEGIN` (so that no content can spell a stand-in),
        and the control tokens."""
        return ["", BEGIN, *sorted(filter(None, self._control.values()), key=len, reverse=True)]

    @cached_property
    def _stand_ins(self) -> dict[str, str]:
        return {text: f"{BEGIN}{number}{END}" for number, text in enumerate(self._texts)}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._texts[1:])))

    @cached_property
    def _cut(self) -> tuple[set[str], set[str]]:
        """Proper prefixes and proper suffixes of control tokens."""
        cuts = [(text[:cut], text[cut:]) for text in self._control.values() for cut in range(1, len(text))]
        return {begun for begun, _ in cuts}, {ended for _, ended in cuts}

    @cached_property
    def _begins(self) -> set[str]:
        """First characters of the texts that have a stand-in."""
        return {text[0] for text in self._texts if text}

    @cached_property
    def _ends(self) -> set[str]:
        """First characters of the suffixes of control tokens."""
        return {text[0] for text in self._cut[1]}

    def _encoder(self, before: np.ndarray | None, *, plain: bool = False) -> Tokenizer:
        """Return the encoder of a text that follows these token ids. If ``plain``, it treats control tokens as text."""
        place = "first" if before is None else "control" if len(before) and int(before[-1]) in self._control else "text"
        return self._encoders[place, plain]

    @cached_property
    def _encoders(self) -> dict[tuple[str, bool], Tokenizer]:
        """Encoders by the position of a text (first, after a control token, after text) and by ``plain``.

        Some tokenizers prepend a space to every text, others to every text but one after a control token.
        """
        from tokenizers import Tokenizer

        encoders = {}
        for place in ("first", "control", "text"):
            settings = json.loads(self._copy().to_str())
            for token in settings["added_tokens"]:
                token["special"] = token["special"] or token["id"] in self._control
            for step in _prefixes(settings):
                if place == "text" or (place == "control" and step.get("prepend_scheme") == "first"):
                    _take_away(step)
            for plain in (False, True):
                encoders[place, plain] = Tokenizer.from_str(json.dumps(settings))
                encoders[place, plain].encode_special_tokens = plain
        return encoders

    @cached_property
    def _alone(self) -> Tokenizer | None:
        """Backend of the tokenizer, for short texts, where the library around it costs most of the time; None if that
        library encodes in a way of its own."""
        is_usual = _backend_of(self._tokenizer, "__call__", "_encode_plus") is not None
        return self._copy() if is_usual and not self._tokenizer.split_special_tokens else None

    @cached_property
    def _backend(self) -> Tokenizer | None:
        return _backend_of(self._tokenizer)

    def _copy(self) -> Tokenizer:
        """Return a copy of the tokenizer's backend, whose settings would otherwise be shared between threads."""
        from tokenizers import Tokenizer

        if self._backend is None:
            raise ControlTokensRefused(
                "a content spells a control token, and a tokenizer without `tokenizer.json` would take it for one; "
                "take it out of the texts"
            )
        copy = Tokenizer.from_str(self._backend.to_str())
        copy.no_truncation()
        copy.no_padding()
        return copy


def _backend_of(tokenizer: PreTrainedTokenizerBase, *methods: str) -> Tokenizer | None:
    """Return a tokenizer's backend; None if it has none, or if its class overrides one of ``methods``."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    backend = getattr(tokenizer, "backend_tokenizer", None)
    is_usual = all(getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name) for name in methods)
    return backend if isinstance(backend, Tokenizer) and is_usual else None


def _encoded(text: str, encoder: Tokenizer) -> Encoding:
    # Only a batch releases the interpreter lock, but for a short text its overhead is larger than the work.
    if len(text) > LONG_TEXT:
        return encoder.encode_batch([text], add_special_tokens=False)[0]
    return encoder.encode(text, add_special_tokens=False)


def _prefixes(settings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a tokenizer (`tokenizer.json`) that prepend a space to a text."""
    for key, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = settings.get(key) or {}
        for each in [step, *step.get(inner, [])]:
            has_prefix = each.get("prepend_scheme", "never") != "never" or each.get("add_prefix_space", False)
            if has_prefix or (each.get("type") == "Prepend" and each.get("prepend")):
                yield each


def _take_away(step: dict[str, Any]) -> None:
    """Change a step so that it prepends no space."""
    if step.get("type") == "Prepend":
        step.clear()
        step.update({"type": "Sequence", "normalizers": []})
    elif "prepend_scheme" in step:
        step["prepend_scheme"] = "never"
    else:
        step["add_prefix_space"] = False

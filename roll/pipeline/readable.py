"""Conversion of groups to the readable records of `samples.jsonl`: texts, and the version and advantage of tokens.

The functions are pure. Decoding token by token takes some milliseconds per sample, so they are called in a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from roll.data.records import Group, Sample, SampleBatch
from roll.pipeline.validation import ValidationResult
from roll.tracking.samples import ReadableSample, ReadableTokens

FIRST_TOKENS, LAST_TOKENS = 384, 128
"""Number of tokens kept from the beginning and the end of a longer response."""
LONGEST_CHARACTER = 8
"""Most tokens of one character. Byte-level tokenizers spread a character over several tokens."""
UNFINISHED = "\ufffd"


class TokenDecoder(Protocol):
    """The part of a tokenizer that turns tokens into text."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, without special tokens if asked for."""


def readable(
    groups: Sequence[Group], data: SampleBatch, step: int, count: int, decoder: TokenDecoder
) -> list[ReadableSample]:
    """Return the first sample of the first groups, with the advantages of its tokens; of an episode all turns."""
    offsets = data.offsets
    samples, first_row = [], 0
    for group in groups[:count]:
        parts = group.episodes[0]
        rows = [slice(offsets[row], offsets[row + 1]) for row in range(first_row, first_row + len(parts))]
        advantages = [data.tokens["advantages"][row] for row in rows]
        of_first = advantages[0][parts[0].response_mask]
        mean = float(of_first.mean()) if len(of_first) else 0.0
        tokens = readable_tokens(parts, advantages, decoder)
        samples.append(_readable(group, step, "train", mean, parts[0].oldest_version, tokens))
        first_row += len(group.samples)
    return samples


def readable_validation(result: ValidationResult, count: int, decoder: TokenDecoder) -> list[ReadableSample]:
    """Return the first sample of the first groups of a validation."""
    return [
        _readable(
            group, result.version, "val", None, result.version, readable_tokens(group.episodes[0], None, decoder)
        )
        for group in result.groups[:count]
    ]


def readable_tokens(
    parts: Sequence[Sample], advantages: Sequence[np.ndarray] | None, decoder: TokenDecoder
) -> ReadableTokens:
    """Return the tokens of an episode's samples, from the first sampled one on.

    Later samples include the tokens that they were given. ``advantages``: float ``[length]`` of each sample.
    """
    first = parts[0].response_mask
    start = int(np.argmax(first)) if first.any() else len(first)

    def joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[start:]

    token_ids, sampled = joined([part.token_ids for part in parts]), joined([part.response_mask for part in parts])
    versions = joined([part.versions for part in parts])
    kept = _kept(len(token_ids))

    def told(values: np.ndarray, where: np.ndarray) -> list[Any]:
        pairs = zip(values[kept].tolist(), where[kept].tolist(), strict=True)
        return [value if here else None for value, here in pairs]

    nothing, nowhere = np.zeros(len(token_ids)), np.zeros(len(token_ids), dtype=bool)
    has_turns = parts[0].turns is not None
    turns = joined([part.turns for part in parts if part.turns is not None]) if has_turns else nothing
    left_out = len(token_ids) - len(kept)
    stretches = [kept[:FIRST_TOKENS], kept[FIRST_TOKENS:]] if left_out else [kept]
    return ReadableTokens(
        texts=[text for stretch in stretches for text in token_texts(token_ids[stretch].tolist(), decoder)],
        versions=told(versions, sampled),
        advantages=told(joined(advantages), sampled) if advantages is not None else told(nothing, nowhere),
        turns=told(turns, sampled if has_turns else nowhere),
        left_out=left_out,
        left_out_after=FIRST_TOKENS if left_out else 0,
    )


def token_texts(token_ids: Sequence[int], decoder: TokenDecoder) -> list[str]:
    """Return the text that each token adds. The last token of a multi-token character has its text.

    Each token is decoded after the one before it, because some tokenizers write a leading space only then.
    """
    texts: list[str] = []
    before: list[int] = []
    pending: list[int] = []
    for token_id in token_ids:
        pending.append(token_id)
        known = decoder.decode(before, skip_special_tokens=False)
        text = decoder.decode(before + pending, skip_special_tokens=False)[len(known) :]
        if text.endswith(UNFINISHED) and len(pending) < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(text)
        before, pending = pending, []
    if pending:
        texts[-1] = decoder.decode(pending, skip_special_tokens=False)
    return texts


def _kept(length: int) -> np.ndarray:
    """Return the positions of the tokens that are kept."""
    places = np.arange(length)
    if length <= FIRST_TOKENS + LAST_TOKENS:
        return places
    return np.concatenate([places[:FIRST_TOKENS], places[-LAST_TOKENS:]])


def _readable(
    group: Group, step: int, split: Any, advantage: float | None, oldest: int, tokens: ReadableTokens
) -> ReadableSample:
    sample = group.samples[0]
    newest = int(sample.versions[sample.response_mask].max(initial=oldest))
    return ReadableSample(
        step=step,
        group_id=group.group_id,
        prompt=group.prompt.text,
        response=sample.response_text,
        score=sample.score,
        advantage=advantage,
        versions=(oldest, newest),
        finish_reason=sample.finish_reason,
        domain=group.prompt.domain,
        split=split,
        tokens=tokens,
    )

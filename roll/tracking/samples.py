"""`samples.jsonl`: a few readable rollouts per step and per validation, for users to read.

Each sample also has a bounded number of single tokens, with their policy versions and advantages. Equal neighbouring
values are written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from roll.tracking.files import JsonLines, json_number, read_json_lines


@dataclass(frozen=True)
class ReadableTokens:
    """Single tokens, starting at the first one that the policy sampled; lists of equal length."""

    texts: Sequence[str]
    """Texts that join to the whole text; a token that is part of a character may be empty."""
    versions: Sequence[int | None]
    """Policy version that sampled the token; None for a token that was given (by an environment)."""
    advantages: Sequence[float | None]
    """Advantage of the token; None for a given token, and in validation."""
    turns: Sequence[int | None]
    """Turn of the episode; None for a given token, and outside episodes."""
    left_out: int = 0
    """Number of tokens left out, after the first ``left_out_after``, to keep the record short."""
    left_out_after: int = 0


@dataclass(frozen=True)
class ReadableSample:
    """One response as text, with its score and advantage."""

    step: int
    group_id: int
    prompt: str
    response: str
    score: float
    """Raw verifier output."""
    advantage: float | None
    """Mean over the response's tokens; ``None`` in validation."""
    versions: tuple[int, int]
    """Oldest and newest policy version among the sampled tokens."""
    finish_reason: str
    domain: str = ""
    split: Literal["train", "val"] = "train"
    tokens: ReadableTokens | None = None
    """Tokens of the sample. For an episode whose turns are separate samples: of all of them, in order."""


class SampleLog:
    """Writer of readable samples, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, samples: Iterable[ReadableSample]) -> None:
        """Append samples. Raises `OSError` with the path."""
        for sample in samples:
            self._lines.append(_as_record(sample))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_samples(path: Path) -> list[dict[str, Any]]:
    """Return the samples of a run in order; a last line torn by a crash is left out."""
    return read_json_lines(path)


def _as_record(sample: ReadableSample) -> dict[str, Any]:
    oldest, newest = sample.versions
    record = {
        "step": int(sample.step),
        "split": sample.split,
        "domain": sample.domain,
        "group_id": int(sample.group_id),
        "prompt": sample.prompt,
        "response": sample.response,
        "score": json_number(sample.score),
        "advantage": None if sample.advantage is None else json_number(sample.advantage),
        "versions": [int(oldest), int(newest)],
        "finish_reason": sample.finish_reason,
    }
    return record if sample.tokens is None else {**record, "tokens": _tokens_record(sample.tokens)}


def _tokens_record(tokens: ReadableTokens) -> dict[str, Any]:
    """Return the tokens with versions, advantages and turns as pairs of run length and value."""
    advantages = [None if value is None else json_number(value) for value in tokens.advantages]
    return {
        "texts": list(tokens.texts),
        "versions": _run_lengths(tokens.versions),
        "advantages": _run_lengths(advantages),
        "turns": _run_lengths(tokens.turns),
        "left_out": tokens.left_out,
        "left_out_after": tokens.left_out_after,
    }


def _run_lengths(values: Sequence[Any]) -> list[list[Any]]:
    return [[len(list(equal)), value] for value, equal in groupby(values)]

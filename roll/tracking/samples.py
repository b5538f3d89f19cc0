"""`samples.jsonl`: a few readable rollouts per step and per validation, for the eye of whoever trains.

Of each sample there is also a bounded number of single tokens, with the policy version that sampled each and what the
training made of it; what neighbours share is written once.
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
    """Single tokens, from the first that the policy sampled on; lists of equal length."""

    texts: Sequence[str]
    """Joined they read as the text; a token that is a part of a character may be empty."""
    versions: Sequence[int | None]
    """Policy version that sampled the token; None: it was given (by an environment), not sampled."""
    advantages: Sequence[float | None]
    """None where it was given, and in validation."""
    turns: Sequence[int | None]
    """Turn of the episode; None where it was given, and outside episodes."""
    left_out: int = 0
    """Tokens that are missing, for shortness, after the first ``left_out_after``."""
    left_out_after: int = 0


@dataclass(frozen=True)
class ReadableSample:
    """One response as text, with what the training made of it."""

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
    """Of an episode whose turns are samples of their own: of all of them, one after the other."""


class SampleLog:
    """Appends readable samples, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, samples: Iterable[ReadableSample]) -> None:
        """Append samples. `OSError` names the path."""
        for sample in samples:
            self._lines.append(_as_record(sample))

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of a run in order; a last line torn by a crash is left out."""
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
    """Versions, advantages and turns as ``[how many tokens, value]``."""
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

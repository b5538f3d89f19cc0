"""`samples.jsonl`: a few readable rollouts per step and per validation, for the eye of whoever trains."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from roll.tracking.files import JsonLines, json_number, read_json_lines


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


class SampleLog:
    """Appends readable samples, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def write(self, samples: Iterable[ReadableSample]) -> None:
        """Append samples. `OSError` names the path."""
        for sample in samples:
            self._lines.append(_as_record(sample))

    def close(self) -> None:
        self._lines.close()


def read_samples(path: Path) -> list[dict[str, Any]]:
    """The samples of a run in order; a last line torn by a crash is left out."""
    return read_json_lines(path)


def _as_record(sample: ReadableSample) -> dict[str, Any]:
    oldest, newest = sample.versions
    return {
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

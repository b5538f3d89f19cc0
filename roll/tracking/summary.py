"""`summary.json`, the state of the run in one small file, and `samples.jsonl`, a few readable rollouts per step.

The summary is true at any time: its status is ``running`` from the start, so a run that is killed never looks like a
success, and a recorded failure never becomes a success.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from roll.tracking.files import JsonLines, json_number, write_atomically
from roll.tracking.logs import redact


@dataclass(frozen=True)
class ReadableTokens:
    """Data of the single tokens of a sample, from the first sampled one on. All lists have one entry per token."""

    texts: Sequence[str]
    """Text of each token; they join to the whole text. A token that is only part of a character may be empty."""
    versions: Sequence[int | None]
    """Policy version that sampled the token; None for a token from an environment."""
    advantages: Sequence[float | None]
    """Advantage of the token; None for a token from an environment, and in validation."""
    turns: Sequence[int | None]
    """Turn of the episode; None for a token from an environment, and outside of episodes."""
    left_out: int = 0
    """Number of tokens left out to keep the record short."""
    left_out_after: int = 0
    """Number of tokens before those left out."""


@dataclass(frozen=True)
class ReadableSample:
    """One response as text, with its score and advantage."""

    step: int
    split: Literal["train", "val"]
    domain: str
    group_id: int
    prompt: str
    response: str
    """If the turns of an episode are separate samples: those of all, in order, on lines of their own."""
    score: float
    """Raw verifier output."""
    advantage: float | None
    """Mean over the tokens of the response; None in validation."""
    versions: tuple[int, int]
    """Oldest and newest policy version among the sampled tokens."""
    finish_reason: str
    tokens: ReadableTokens | None = None
    """Tokens of the sample. If the turns of an episode are separate samples: the tokens of all turns, in order."""
    pictures: Sequence[str] = ()
    """Names of the files of the pictures in the prompt, in order."""


class SampleLog(JsonLines):
    """Writer of readable samples, one JSON object per line."""

    def write(self, samples: Iterable[ReadableSample]) -> None:
        """Append samples. Raises `OSError` with the path."""
        for sample in samples:
            self.append(_as_record(sample))


def _as_record(sample: ReadableSample) -> dict[str, Any]:
    record = {**vars(sample), "score": json_number(sample.score), "advantage": _known_number(sample.advantage)}
    tokens = record.pop("tokens")
    if not sample.pictures:
        del record["pictures"]
    return record if tokens is None else {**record, "tokens": _tokens_record(tokens)}


def _tokens_record(tokens: ReadableTokens) -> dict[str, Any]:
    """Return the tokens as JSON; versions, advantages and turns are run-length encoded as [length, value] pairs."""
    advantages = [_known_number(value) for value in tokens.advantages]
    columns = {"versions": tokens.versions, "advantages": advantages, "turns": tokens.turns}
    pairs = {name: [[len(list(equal)), value] for value, equal in groupby(column)] for name, column in columns.items()}
    return {**vars(tokens), **pairs}


def _known_number(value: float | None) -> float | int | None:
    return None if value is None else json_number(value)


def validation_accuracy(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return domain -> value of the metric ``val/<domain>/accuracy``."""
    pattern = re.compile("val/(.+)/accuracy")
    return {match[1]: value for name, value in metrics.items() if (match := pattern.fullmatch(name))}


VALIDATION_LOSS = "val/loss"
"""Validation metric of supervised fine-tuning. The summary has its first and its last value."""


def describe_error(error: BaseException) -> str:
    """Return an error as text: type, message and cause. An exception group becomes one line per error inside it."""
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(describe_error(inner) for inner in error.exceptions)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} (caused by {describe_error(error.__cause__)})" if error.__cause__ else text


_KINDS = {
    "ledger": (dict, "JSON object"),
    "val/first": (dict, "JSON object"),
    "val/last": (dict, "JSON object"),
    "resumed_at": (list, "list"),
    "seconds": (int | float, "number"),
    "first_step_seconds": (int | float, "number"),
}


def read_summary(path: Path) -> dict[str, Any]:
    """Return the content of a `summary.json`. Raises `ValueError` if it is damaged."""
    summary = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    if not isinstance(summary, dict):
        raise ValueError("it is no JSON object")
    for name, (kind, said) in _KINDS.items():
        if summary.get(name) is not None and not isinstance(summary[name], kind):
            raise ValueError(f"its {name} is no {said}")
    return summary


def fail_unfinished(path: Path, reason: str) -> None:
    """Set the status of a run to failed if it is still ``running``, on behalf of a process that no longer can."""
    summary = read_summary(path)
    if summary["status"] == "running":
        text = json.dumps(summary | {"status": "failed", "error": redact(reason)}, indent=2, ensure_ascii=False)
        write_atomically(path, text + "\n")


_NOTHING_YET: Mapping[str, Any] = {"steps": 0, "val/first": {}, "val/last": {}, "lag/max": None}
"""Content that is derived from the metrics of the steps, before the first step."""


class Summary:
    """Writer of `summary.json`. It replaces the whole file at the start, at each update and at the end.

    ``clock`` returns seconds; ``started`` is its value when the run began (default: now).
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        earlier: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the first summary. ``earlier``: for a resumed run, the records of `metrics.jsonl` that stay valid."""
        self._path = path
        self._clock = clock
        self._started = clock() if started is None else started
        self._content: dict[str, Any] = {
            "status": "running",
            **_NOTHING_YET,
            "seconds": 0.0,  # of all processes of the run together
            "first_step_seconds": None,
            "ledger": {},
            "resumed_at": [],
            "error": None,
        }
        if earlier is not None and path.exists():
            before = json.loads(path.read_text())
            self._started -= before["seconds"]
            self._take_over(before, earlier)
        self._write()

    def go_back(self, earlier: Sequence[Mapping[str, Any]]) -> None:
        """Record a resume within this process. ``earlier``: the records of `metrics.jsonl` that stay valid."""
        before = self._content
        kept = {name: value for name, value in before.items() if not name.startswith(VALIDATION_LOSS)}
        self._content = {**kept, **_NOTHING_YET}
        self._take_over(before, earlier)
        self._write()

    def _take_over(self, before: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]]) -> None:
        for record in earlier:
            self._note({name: value for name, value in record.items() if value is not None}, record["step"])
        self._content["first_step_seconds"] = before["first_step_seconds"]
        self._content["resumed_at"] = [*before["resumed_at"], self._content["steps"]]

    def update(self, metrics: Mapping[str, float], step: int, ledger: Mapping[str, Any] | None = None) -> None:
        """Update the summary from the metrics of a step: ``val/<domain>/accuracy`` and ``lag/max``.

        ``step`` is the number of training steps completed (0: the validation before the first one). ``ledger``, if
        given, replaces the previous one.
        """
        if step > 0 and self._content["first_step_seconds"] is None:
            self._content["first_step_seconds"] = self._elapsed()
        self._note(metrics, step)
        if ledger is not None:
            self._content["ledger"] = dict(ledger)
        self._write()

    def _note(self, metrics: Mapping[str, float], step: int) -> None:
        content = self._content
        content["steps"] = max(content["steps"], step)
        accuracy = {domain: json_number(value) for domain, value in validation_accuracy(metrics).items()}
        content["val/first"] = {**accuracy, **content["val/first"]}
        content["val/last"] = {**content["val/last"], **accuracy}
        if VALIDATION_LOSS in metrics:
            loss = json_number(metrics[VALIDATION_LOSS])
            content.setdefault(f"{VALIDATION_LOSS}/first", loss)
            content[f"{VALIDATION_LOSS}/last"] = loss
        if "lag/max" in metrics:
            content["lag/max"] = json_number(max(metrics["lag/max"], content["lag/max"] or 0))

    def finish(
        self,
        status: Literal["success", "failed", "interrupted"],
        error: BaseException | str | None = None,
        ledger: Mapping[str, Any] | None = None,
    ) -> None:
        """Record how the run ended.

        A later call can replace a success by a failure or an interruption; after either, the status stays.
        """
        if self._content["status"] in ("running", "success"):
            text = describe_error(error) if isinstance(error, BaseException) else error
            self._content |= {"status": status, "error": None if text is None else redact(text)}
        if ledger is not None:
            self._content["ledger"] = dict(ledger)
        self._write()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file, with ``seconds`` up to now."""
        return {**self._content, "seconds": self._elapsed()}

    def _elapsed(self) -> float:
        return round(self._clock() - self._started, 3)

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

"""`summary.json`: the state of the run in one small file that is true at every moment.

It says ``running`` from the start, so a run that is killed at once never looks like a success. Once a failure is
recorded, nothing turns it into a success.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roll.tracking.files import json_number, write_atomically
from roll.tracking.logs import redact

Status = Literal["running", "success", "failed", "interrupted"]

_ACCURACY = re.compile(r"val/(?P<domain>.+)/accuracy")


def validation_accuracy(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics ``val/<domain>/accuracy`` by domain."""
    matches = {name: _ACCURACY.fullmatch(name) for name in metrics}
    return {match["domain"]: metrics[name] for name, match in matches.items() if match}


def describe_error(error: BaseException) -> str:
    """Return one line per root failure: type, message and cause.

    An exception group (of a `TaskGroup`, for example) is shown as the failures inside it.
    """
    if isinstance(error, BaseExceptionGroup):
        return "\n".join(describe_error(inner) for inner in error.exceptions)
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return f"{text} (caused by {describe_error(error.__cause__)})" if error.__cause__ else text


def fail_unfinished(path: Path, reason: str) -> None:
    """Record a run as failed on behalf of a process that no longer can. An end that is on record stays."""
    summary = json.loads(path.read_text())
    if summary["status"] == "running":
        text = json.dumps(summary | {"status": "failed", "error": redact(reason)}, indent=2, ensure_ascii=False)
        write_atomically(path, text + "\n")


@dataclass
class _State:
    status: Status = "running"
    steps: int = 0
    first_step_seconds: float | None = None
    first_accuracy: dict[str, float] = field(default_factory=dict)
    last_accuracy: dict[str, float] = field(default_factory=dict)
    lag_max: float | None = None
    ledger: dict[str, Any] = field(default_factory=dict)
    resumed_at: list[int] = field(default_factory=list)
    error: str | None = None


class Summary:
    """Writer of `summary.json`: at the start, at each update and at the end, each time as a whole.

    ``clock`` counts seconds; ``started`` is its value when the run began (default: now).
    """

    def __init__(
        self,
        path: Path,
        clock: Callable[[], float] = time.monotonic,
        started: float | None = None,
        earlier: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Write the first summary.

        ``earlier``: for a resumed run, the records of `metrics.jsonl` that still count. Seconds are those of all
        processes of the run together.
        """
        self._path = path
        self._clock = clock
        self._started = clock() if started is None else started
        self._state = _State()
        if earlier is not None and path.exists():
            self._take_over(earlier)
        self._write()

    def _take_over(self, earlier: Sequence[Mapping[str, Any]]) -> None:
        before = json.loads(self._path.read_text())
        state = self._state
        state.first_step_seconds = before["first_step_seconds"]
        self._started -= before["seconds"]
        for record in earlier:
            metrics = {name: value for name, value in record.items() if value is not None}
            self._note(metrics, record["step"])
        state.resumed_at = [*before["resumed_at"], state.steps]

    def update(self, metrics: Mapping[str, float], step: int, ledger: Mapping[str, Any] | None = None) -> None:
        """Update the summary from the metrics of a step: ``val/<domain>/accuracy`` and ``lag/max``.

        ``step`` is the number of training steps completed (0: the validation before the first one). ``ledger``, if
        given, replaces the previous one.
        """
        state = self._state
        if step > 0 and state.first_step_seconds is None:
            state.first_step_seconds = self._elapsed()
        self._note(metrics, step)
        if ledger is not None:
            state.ledger = dict(ledger)
        self._write()

    def _note(self, metrics: Mapping[str, float], step: int) -> None:
        state = self._state
        state.steps = max(state.steps, step)
        accuracy = validation_accuracy(metrics)
        state.first_accuracy = {**accuracy, **state.first_accuracy}
        state.last_accuracy = {**state.last_accuracy, **accuracy}
        if "lag/max" in metrics:
            state.lag_max = max(metrics["lag/max"], state.lag_max or 0)

    def finish(
        self,
        status: Literal["success", "failed", "interrupted"],
        error: BaseException | str | None = None,
        ledger: Mapping[str, Any] | None = None,
    ) -> None:
        """Record the end. The first failure or interruption stays; a success may still turn into a failure."""
        state = self._state
        if state.status in ("running", "success"):
            state.status = status
            text = describe_error(error) if isinstance(error, BaseException) else error
            state.error = None if text is None else redact(text)
        if ledger is not None:
            state.ledger = dict(ledger)
        self._write()

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file (``seconds`` up to now)."""
        state = self._state
        return {
            "status": state.status,
            "steps": state.steps,
            "seconds": round(self._elapsed(), 3),
            "first_step_seconds": None if state.first_step_seconds is None else round(state.first_step_seconds, 3),
            "val/first": {domain: json_number(value) for domain, value in state.first_accuracy.items()},
            "val/last": {domain: json_number(value) for domain, value in state.last_accuracy.items()},
            "lag/max": None if state.lag_max is None else json_number(state.lag_max),
            "ledger": state.ledger,
            "resumed_at": state.resumed_at,
            "error": state.error,
        }

    def _elapsed(self) -> float:
        return self._clock() - self._started

    def _write(self) -> None:
        write_atomically(self._path, json.dumps(self.as_dict(), indent=2, ensure_ascii=False, allow_nan=False) + "\n")

"""`metrics.jsonl`: one JSON object per step, valid JSON for any metric values, readable after any crash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from roll.tracking.files import JsonLines, json_number, read_json_lines

NON_FINITE = "metrics/non_finite"
"""Number of values of a step that were NaN or infinite (written as null); absent if all were finite."""


class MetricsLog:
    """A tracker (see `trackers.Tracker`) that appends to `metrics.jsonl`."""

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the step; the line is in the file when this returns.

        Raises `TypeError` naming a metric that is no number, `ValueError` for a metric called ``step``, and `OSError`
        with the path if the file cannot be written.
        """
        self._lines.append(_as_record(metrics, step))

    def sync(self) -> None:
        """Wait until all steps are on the disk."""
        self._lines.sync()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the steps of a `metrics.jsonl` in order, each with ``step`` and its metrics (``None`` where not finite).

    A last line torn by a crash is left out. Raises `ValueError` naming any other broken line.
    """
    return read_json_lines(path)


def _as_record(metrics: Mapping[str, float], step: int) -> dict[str, float | int | None]:
    if "step" in metrics:
        raise ValueError("a metric may not be called 'step': the key holds the training step")
    values = {name: _number(name, value) for name, value in metrics.items()}
    record = {"step": int(step), **values}
    non_finite = sum(value is None for value in values.values())
    return {**record, NON_FINITE: non_finite} if non_finite else record


def _number(name: str, value: float) -> float | int | None:
    try:
        return json_number(value)
    except TypeError as error:
        raise TypeError(f"metric {name!r}: {error}") from error

"""`metrics.jsonl` and TensorBoard: the trackers that run in the driver. `log` returns when the file is written.

TensorBoard events are written with TensorBoard's own writer, so that the driver does not need torch. Libraries that may
hang or fail run in processes of their own, see `roll.tracking.plugins`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from roll.tracking.files import JsonLines, json_number, naming, read_json_lines

NON_FINITE = "metrics/non_finite"
"""Metric with the number of values of a step that were NaN or infinite and written as null; left out if it is 0."""


class MetricsLog(JsonLines):
    """Writer that appends to `metrics.jsonl`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Append the metrics of a step. The line is in the file when this returns.

        Names of metrics are paths such as ``reward/mean``. Raises `TypeError` naming a metric that is no number,
        `ValueError` for a metric named ``step``, and `OSError` with the path if the file cannot be written.
        """
        if "step" in metrics:
            raise ValueError("a metric may not be called 'step': the key holds the training step")
        values: dict[str, float | int | None] = {}
        for name, value in metrics.items():
            try:
                values[name] = json_number(value)
            except TypeError as error:
                raise TypeError(f"metric {name!r}: {error}") from error
        non_finite = sum(value is None for value in values.values())
        self.append({"step": int(step), **values, **({NON_FINITE: non_finite} if non_finite else {})})


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a `metrics.jsonl` in order: ``step`` and its metrics, None for values that are not finite.

    An incomplete last line is ignored. Raises `ValueError` naming any other invalid line.
    """
    return read_json_lines(path)


class TensorBoardTracker:
    """Writer of a TensorBoard event file in ``folder``. ``clock`` returns the wall time of an event in seconds.

    Every method raises `OSError` with the folder if the file cannot be written.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, after_step: int | None = None) -> None:
        """Open the event file. ``after_step``: for a resumed run, its last valid step; later events are hidden."""
        # Imported here, because the import takes half a second and only some runs use TensorBoard.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        self._clock = clock
        self._new_event, self._new_summary = Event, Summary
        with naming(folder):
            self._writer = EventFileWriter(str(folder))
        if after_step is not None:
            self._write(after_step + 1, session_log=SessionLog(status=SessionLog.START))

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step; values may be NaN or infinite."""
        values = [{"tag": name, "simple_value": float(value)} for name, value in metrics.items()]
        self._write(step, summary=self._new_summary(value=values))

    def picture(self, name: str, path: Path, step: int) -> None:
        """Write a GIF or a PNG, shown under images; a GIF is animated."""
        data = path.read_bytes()
        if path.suffix == ".png":
            # Width and height are at the start of the first chunk, after the signature and the chunk's length and name.
            width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
        else:
            # Width and height follow the signature of six bytes.
            width, height = (int.from_bytes(data[start : start + 2], "little") for start in (6, 8))
        image = {"height": height, "width": width, "colorspace": 3, "encoded_image_string": data}
        self._write(step, summary=self._new_summary(value=[{"tag": name, "image": image}]))

    def _write(self, step: int, **content: Any) -> None:
        with naming(self._folder):
            self._writer.add_event(self._new_event(wall_time=self._clock(), step=step, **content))
            self._writer.flush()

    def close(self) -> None:
        """Close the event file. Safe to call twice."""
        with naming(self._folder):
            self._writer.close()

"""`metrics.jsonl` and TensorBoard: the trackers that the driver writes itself, on disk when `log` returns.

`metrics.jsonl` has one JSON object per step, valid JSON for any metric values, readable after any crash. TensorBoard
events are written with TensorBoard's own writer, so the driver needs no torch. Libraries that may hang or fail are run
by `roll.tracking.plugins`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from roll.tracking.files import JsonLines, json_number, naming, read_json_lines

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


class Tracker(Protocol):
    """A receiver of metrics."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Take the metrics of a step. A name is a path such as ``reward/mean``; values may be NaN or infinite."""

    def close(self) -> None:
        """Write out what is pending. Safe to call twice."""


@runtime_checkable
class PictureTracker(Protocol):
    """A tracker that also takes pictures."""

    def picture(self, name: str, path: Path, step: int) -> None:
        """Take a GIF, which may be animated."""


class TensorBoardTracker:
    """Scalars in a TensorBoard event file under ``folder``. ``clock`` gives the wall time of a point in seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time, after_step: int | None = None) -> None:
        """Open the event file. ``after_step``: last step that counts in a resumed run; later events are hidden."""
        # Imported here, because it takes half a second that a run without TensorBoard need not spend.
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = folder
        self._clock = clock
        with naming(folder):
            self._writer = EventFileWriter(str(folder))
        if after_step is not None:
            self._forget_after(after_step)

    def _forget_after(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        start = SessionLog(status=SessionLog.START)
        with naming(self._folder):
            self._writer.add_event(Event(wall_time=self._clock(), step=step + 1, session_log=start))
            self._writer.flush()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step; see `Tracker.log`. Raises `OSError` with the folder."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        with naming(self._folder):
            self._writer.add_event(Event(wall_time=self._clock(), step=step, summary=Summary(value=values)))
            self._writer.flush()

    def picture(self, name: str, path: Path, step: int) -> None:
        """Write a GIF, shown under images and animated."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        data = path.read_bytes()
        # Width and height follow the six letters of the format's name and version.
        width, height = (int.from_bytes(data[start : start + 2], "little") for start in (6, 8))
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=data)
        values = [Summary.Value(tag=name, image=image)]
        with naming(self._folder):
            self._writer.add_event(Event(wall_time=self._clock(), step=step, summary=Summary(value=values)))
            self._writer.flush()

    def close(self) -> None:
        """Close the event file; see `Tracker.close`."""
        with naming(self._folder):
            self._writer.close()


class Trackers:
    """Several trackers as one. A tracker that fails to log stops the run. Closing reaches all of them in any case."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = list(trackers)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Pass the metrics of a step to all trackers; see `Tracker.log`."""
        for tracker in self._trackers:
            tracker.log(metrics, step)

    def picture(self, name: str, path: Path, step: int) -> None:
        """Pass a GIF to the trackers that take pictures."""
        for tracker in self._trackers:
            if isinstance(tracker, PictureTracker):
                tracker.picture(name, path, step)

    def close(self) -> None:
        """Close all trackers, even if one fails; see `Tracker.close`."""
        with ExitStack() as stack:
            for tracker in self._trackers:
                stack.callback(tracker.close)

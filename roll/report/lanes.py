"""The timeline as lanes of limited size: one lane per stage or worker, with its states over time.

Shares are computed from all spans. The latest spans, as many as fit, are drawn exactly. The time before them is divided
into short intervals, and each lane has the share of each state in each interval.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_SPANS = 16_000
"""Largest number of spans that are drawn exactly."""
BINS = 600
"""Number of intervals for the time before these spans."""

BUSY_STATES = ("busy", "running")
STAGES = ("rollout", "reference", "teacher", "value", "advantage", "critic", "train", "param_update")
_ROLES = ("actor_infer", "actor_train", "actor_logp", "reference", "teacher", "critic")


@dataclass(frozen=True)
class LaneSpan:
    """A span of time in one state. Times are in microseconds since the timeline began."""

    start: int
    end: int
    state: str


@dataclass
class Lane:
    """One stage, or one worker of a role. Its spans are in order and do not overlap."""

    kind: str
    """``stages`` or ``roles``."""
    name: str
    spans: list[LaneSpan] = field(default_factory=list)

    @property
    def label(self) -> str:
        """Name on the page."""
        return self.name.removeprefix("stage/").removesuffix("/all")

    def shares(self, window: tuple[int, int]) -> dict[str, float]:
        """Return state -> its share (0 to 1) of a window, for states that occur in the window."""
        start, end = window
        total: dict[str, float] = defaultdict(float)
        for span in self.spans:
            inside = min(span.end, end) - max(span.start, start)
            if inside > 0:
                total[span.state] += inside / (end - start)
        return dict(total)

    def busy_share(self, window: tuple[int, int]) -> float:
        """Return the share (0 to 1) of a window in which the lane was busy."""
        return sum(share for state, share in self.shares(window).items() if state in BUSY_STATES)


@dataclass(frozen=True)
class Trace:
    """A whole timeline."""

    lanes: list[Lane]

    @property
    def end(self) -> int:
        """End of the last span of all lanes."""
        return max((lane.spans[-1].end for lane in self.lanes if lane.spans), default=0)

    @property
    def training_window(self) -> tuple[int, int]:
        """Time from the first span of a stage to the end. The processes start before that."""
        starts = [lane.spans[0].start for lane in self.lanes if lane.name.startswith("stage/") and lane.spans]
        return min(starts, default=0), self.end

    def lane(self, name: str) -> Lane | None:
        """Return the lane of this name; None if there is none."""
        return next((lane for lane in self.lanes if lane.name == name), None)

    def step_ends(self) -> list[int]:
        """Return the end times of the training steps of this process, in order: the ends of their weight updates."""
        lane = self.lane("stage/param_update")
        return [span.end for span in lane.spans if span.state == "running"] if lane is not None else []


def read_trace(path: Path) -> Trace:
    """Read a `timeline.json`. Lines that are incomplete, because the file is being written or was damaged, are skipped.

    Raises `ValueError` if the file has no span.
    """
    lanes: dict[tuple[int, int], Lane] = {}
    kinds: dict[int, str] = {}
    for event in _events(path):
        pid, track = event["pid"], (event["pid"], event["tid"])
        if event["name"] == "process_name" and event["ph"] == "M":
            kinds[pid] = str(event["args"]["name"])
        elif event["ph"] == "M":
            lanes[track] = Lane(kinds.get(pid, "stages"), str(event["args"]["name"]))
        elif track in lanes:
            lanes[track].spans.append(LaneSpan(event["ts"], event["ts"] + event["dur"], str(event["name"])))
    found = [lane for lane in lanes.values() if lane.spans]
    if not found:
        raise ValueError("nothing has been recorded in it yet")
    for lane in found:
        lane.spans.sort(key=lambda span: span.start)
    return Trace(sorted(found, key=_order))


def _events(path: Path) -> Iterable[dict[str, Any]]:
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            text = line.strip().rstrip(",")
            if text in ("[", "]", ""):
                continue
            try:
                event = json.loads(text)
            except ValueError:
                continue  # incomplete: it is being written, or its process died while writing
            if isinstance(event, dict) and event.get("ph") in ("M", "X"):  # M: name of a track; X: span
                yield event


def _order(lane: Lane) -> tuple[int, int, str, str]:
    """Return the sort key of a lane: roles before stages, each in the order in which a batch passes them."""
    names, name = (_ROLES, lane.name.rpartition("/")[0]) if lane.kind == "roles" else (STAGES, lane.label)
    known = names.index(name) if name in names else len(names)
    return int(lane.kind != "roles"), known, name, lane.name


def drawn_lanes(trace: Trace, first_step: int = 1, max_spans: int = MAX_SPANS, bins: int = BINS) -> dict[str, Any]:
    """Return the lanes as JSON data for the page.

    Each lane has its spans as flat lists, in milliseconds (with fractions). If there are too many spans, it also has
    the shares of states in ``bins`` intervals before ``detail_from``. ``first_step``: number of the first training step
    of this process. In the result, ``step_first`` is the number of the step that ends at the first of ``step_ends``.
    """
    spans = [span for lane in trace.lanes for span in lane.spans]
    states, ends = sorted({span.state for span in spans}), sorted(span.end for span in spans)
    detail_from = 0 if len(ends) <= max_spans else ends[-max_spans - 1]
    window, step_ends = trace.training_window, trace.step_ends()
    drawn_ends = [end / 1e3 for end in step_ends if end >= detail_from]
    return {
        "states": states,
        "end": trace.end / 1e3,
        "window": [window[0] / 1e3, window[1] / 1e3],
        "detail_from": detail_from / 1e3,
        "bins": bins if detail_from else 0,
        "spans_recorded": len(spans),
        "step_ends": drawn_ends,
        "step_first": first_step + len(step_ends) - len(drawn_ends),
        "lanes": [_drawn(lane, states, window, detail_from, bins) for lane in trace.lanes],
    }


def _drawn(lane: Lane, states: Sequence[str], window: tuple[int, int], detail_from: int, bins: int) -> dict[str, Any]:
    exact = [span for span in lane.spans if span.end > detail_from]
    return {
        "kind": lane.kind,
        "name": lane.name,
        "label": lane.label,
        "start": [span.start / 1e3 for span in exact],
        "length": [(span.end - span.start) / 1e3 for span in exact],
        "state": [states.index(span.state) for span in exact],
        "shares": lane.shares(window),
        "busy": lane.busy_share(window),
        "bins": _binned(lane, states, detail_from, bins) if detail_from else {},
    }


def _binned(lane: Lane, states: Sequence[str], until: int, bins: int) -> Mapping[int, list[int]]:
    """Return index of a state -> its share, in per mille, of each of ``bins`` intervals between 0 and ``until``."""
    edges = [until * index // bins for index in range(bins + 1)]
    filled: dict[str, list[float]] = defaultdict(lambda: [0.0] * bins)
    for span in lane.spans:
        start, end = span.start, min(span.end, until)
        index = max(0, bisect_right(edges, start) - 1)
        while start < end and index < bins:
            stop = min(end, edges[index + 1])
            filled[span.state][index] += stop - start
            start, index = stop, index + 1
    widths = [max(1, right - left) for left, right in zip(edges, edges[1:], strict=False)]
    return {
        states.index(state): [round(1000 * part / width) for part, width in zip(parts, widths, strict=True)]
        for state, parts in filled.items()
    }

"""The timeline: spans without gaps or overlaps, exact idle shares, a file that is whole after every write."""

import json
import math
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.tracking.timeline import BusyIntervals, Timeline
from tests.tiers import examples


class Clock:
    def __init__(self, now=100.0):
        self.now = now

    def __call__(self):
        return self.now


def trace(path):
    """The events of a trace file that is strictly valid JSON."""
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


def assert_no_overlap(events):
    ends = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], e["dur"])):
        track = event["pid"], event["tid"]
        assert event["dur"] >= 0
        assert event["ts"] >= ends.get(track, -math.inf)
        ends[track] = event["ts"] + event["dur"]


def track_names(events):
    return {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}


def spans(path):
    """Track, name, beginning and duration in seconds, and details of each span of a trace file."""
    events = trace(path)
    names = track_names(events)
    return [
        (names[e["pid"], e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6, e.get("args", {}))
        for e in events
        if e["ph"] == "X"
    ]


def test_a_transition_ends_the_span_before_it(tmp_path):
    clock = Clock()
    timeline = Timeline(tmp_path / "t.json", clock=clock)
    timeline.transition("train", "WAITING_INPUT")
    clock.now = 103.0
    timeline.transition("train", "RUNNING", step=4)
    timeline.transition("train", "IDLE", at=104.5)
    assert timeline.last_states()["train"].state == "IDLE"
    assert spans(tmp_path / "t.json") == [
        ("train", "WAITING_INPUT", 0.0, 3.0, {}),
        ("train", "RUNNING", 3.0, 1.5, {"step": 4}),
    ]


def test_repeating_a_state_keeps_since_when_but_new_details_begin_a_new_span(tmp_path):
    timeline = Timeline(tmp_path / "t.json", clock=Clock(0.0))
    timeline.transition("train", "RUNNING", at=1.0, step=1)
    timeline.transition("train", "RUNNING", at=2.0, step=1)
    assert timeline.last_states()["train"].since == 1.0
    timeline.transition("train", "RUNNING", at=3.0, step=2)
    assert spans(tmp_path / "t.json") == [("train", "RUNNING", 1.0, 2.0, {"step": 1})]


def test_a_clock_set_back_gives_neither_negative_nor_overlapping_spans(tmp_path):
    timeline = Timeline(tmp_path / "t.json", clock=Clock())
    for at, state in [(10.0, "A"), (5.0, "B"), (7.0, "C"), (12.0, "D")]:
        timeline.transition("stage", state, at=at)
    timeline.close(at=0.0)
    assert_no_overlap(trace(tmp_path / "t.json"))


def test_the_trace_has_named_tracks_microseconds_and_details(tmp_path):
    timeline = Timeline(tmp_path / "t.json", clock=Clock(100.0))
    timeline.transition("generate", "RUNNING", at=100.5, step=3, loss=math.nan)
    timeline.busy("actor_infer", 101.0, 101.25, worker=1)
    timeline.close(at=102.0)
    events = trace(tmp_path / "t.json")
    names = track_names(events)
    spans = {names[e["pid"], e["tid"]]: e for e in events if e["ph"] == "X"}
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"stages", "roles"}
    generate, infer = spans["generate"], spans["actor_infer/1"]
    assert (generate["name"], generate["ts"], generate["dur"]) == ("RUNNING", 500_000, 1_500_000)
    assert generate["args"] == {"step": 3, "loss": "nan"}
    assert (infer["ts"], infer["dur"]) == (1_000_000, 250_000)
    assert generate["pid"] != infer["pid"]


def test_the_file_is_whole_json_after_every_write_and_nobody_needs_to_close_it(tmp_path):
    path = tmp_path / "t.json"
    timeline = Timeline(path, clock=Clock())
    assert trace(path) == []
    for index in range(200):
        timeline.transition("stage", f"state é {index}", at=100.0 + index)
        assert len([e for e in trace(path) if e["ph"] == "X"]) == index


def test_spans_reach_the_file_without_a_flush_once_a_second_or_64_at_a_time(tmp_path):
    path = tmp_path / "t.json"
    timeline = Timeline(path, clock=Clock(0.0))
    timeline.transition("stage", "A", at=0.0)
    timeline.transition("stage", "B", at=0.5)
    assert trace(path) == []
    timeline.transition("stage", "C", at=1.1)
    assert len([e for e in trace(path) if e["ph"] == "X"]) == 2
    for index in range(70):
        timeline.transition("stage", f"{index}", at=1.2)
    assert len([e for e in trace(path) if e["ph"] == "X"]) >= 64


def test_memory_is_bounded_and_the_file_is_complete(tmp_path):
    timeline = Timeline(tmp_path / "t.json", clock=Clock(0.0), remembered=10)
    for index in range(1000):
        timeline.transition("stage", f"{index}", at=float(index))
        timeline.busy("role", index, index + 0.5)
    timeline.close(at=1000.0)
    events = trace(tmp_path / "t.json")
    assert timeline.idle_share("role", (0.0, 1000.0)) == pytest.approx(1 - 5.0 / 10.5), "the last ten are remembered"
    assert len([e for e in events if e["ph"] == "X"]) == 2000
    assert_no_overlap(events)


def test_closing_ends_open_spans_and_may_be_done_twice(tmp_path):
    timeline = Timeline(tmp_path / "t.json", clock=Clock(0.0))
    timeline.transition("stage", "RUNNING", at=0.0)
    timeline.close(at=2.0)
    timeline.close(at=9.0)
    timeline.transition("stage", "DONE", at=10.0)
    (event,) = [e for e in trace(tmp_path / "t.json") if e["ph"] == "X"]
    assert (event["name"], event["dur"]) == ("RUNNING", 2_000_000)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_disk_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "timeline.json").symlink_to("/dev/full")
    with pytest.raises(OSError, match="timeline.json"):
        Timeline(tmp_path / "timeline.json", clock=Clock())


def test_idle_share_counts_overlapping_work_once_and_cuts_at_the_window():
    timeline = Timeline(clock=Clock())
    timeline.busy("trainer", 4.0, 5.0)
    timeline.busy("trainer", 0.0, 6.0)
    timeline.busy("trainer", 8.0, 20.0)
    assert timeline.idle_share("trainer", (0.0, 10.0)) == pytest.approx(0.2)
    assert timeline.idle_share("trainer", (2.0, 4.0)) == 0.0
    assert timeline.idle_share("trainer", (6.0, 8.0)) == 1.0


def test_idle_share_is_the_mean_over_workers():
    timeline = Timeline(clock=Clock())
    timeline.busy("infer", 0.0, 10.0, worker=0)
    timeline.busy("infer", 0.0, 5.0, worker=1)
    assert timeline.idle_share("infer", (0.0, 10.0)) == pytest.approx(0.25)


def test_idle_share_of_a_role_that_never_worked_and_of_an_empty_window():
    timeline = Timeline(clock=Clock())
    assert timeline.idle_share("reference", (0.0, 1.0)) == 1.0
    assert timeline.idle_share("reference", (1.0, 1.0)) == 0.0


def test_idle_share_leaves_forgotten_time_out_of_the_window():
    timeline = Timeline(clock=Clock(), remembered=2)
    for start in (0.0, 10.0, 20.0, 30.0):
        timeline.busy("role", start, start + 5.0)
    assert timeline.idle_share("role", (0.0, 35.0)) == pytest.approx(0.5)


@pytest.mark.parametrize("starts", [(0, 1, 2), (2, 1, 0), (0, 2, 1)])
def test_intervals_that_touch_are_remembered_as_one(starts):
    known = BusyIntervals(remembered=10)
    for start in starts:
        known.add(start, start + 1)
    assert known.add(0, 3) == [] and known.share_within(0, 6) == 0.5


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=25), st.integers(0, 30), st.integers(0, 30))
def test_busy_intervals_are_the_union_of_what_was_added(intervals, window_start, window_end):
    union, known = set(), BusyIntervals(remembered=1000)
    for start, end in intervals:
        pieces = {tick for left, right in known.add(start, end) for tick in range(left, right)}
        assert pieces == set(range(start, end)) - union
        union |= set(range(start, end))
    assert {tick for tick in range(31) if known.share_within(tick, tick + 1)} == union
    window = set(range(window_start, window_end))
    share = len(union & window) / len(window) if window else 0.0
    assert known.share_within(window_start, window_end) == share


@settings(max_examples=examples(40))
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("XYZ"), st.floats(0, 50)), max_size=30),
    st.lists(st.tuples(st.sampled_from("rs"), st.floats(0, 50), st.floats(0, 50)), max_size=30),
)
def test_no_track_of_a_trace_ever_overlaps(tmp_path_factory, transitions, intervals):
    path = tmp_path_factory.mktemp("trace") / "t.json"
    timeline = Timeline(path, clock=Clock(0.0))
    for actor, state, at in transitions:
        timeline.transition(actor, state, at=at)
    for role, start, end in intervals:
        timeline.busy(role, start, end)
    timeline.close(at=60.0)
    assert_no_overlap(trace(path))

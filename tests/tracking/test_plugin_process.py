"""A plug-in tracker that hangs, dies or complains costs a run neither time nor steps, and is told of once."""

import errno
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from roll.tracking.plugins import process as tracker_process
from roll.tracking.plugins.process import Ending, PlugIns, TrackerProcess, TrackerRun
from roll.tracking.status import look_at

HERE = Path(__file__).resolve().parent
SUCCESS = Ending("success", {"status": "success", "steps": 3})
BEGIN_SECONDS = 60.0
"""For a process to start on a busy machine."""


@pytest.fixture(autouse=True)
def odd_plug_ins(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


def tracker(kind, folder, capacity=1000, **options):
    run = TrackerRun("sums", "a" * 21, str(folder / "files"), False, {"seed": 1})
    return TrackerProcess("diary", f"odd_plug_ins:{kind}", run, options, folder / "tracker_diary.out", capacity)


def diary(folder):
    path = folder / "files" / "diary.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(what, seconds=BEGIN_SECONDS):
    """Another process gets there on its own time."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def steps(folder):
    return [record["step"] for record in diary(folder) if "step" in record]


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_everything_arrives_in_order_and_the_end_last(tmp_path, caplog):
    plug_ins = PlugIns([tracker("Diary", tmp_path)], BEGIN_SECONDS)
    plug_ins.log({"reward/mean": 0.5, "actor/kl": math.nan, "lag/max": np.float32(2)}, 1)
    plug_ins.log({"reward/mean": math.inf, "lag/max": 3}, 2)
    plug_ins.end(SUCCESS)
    plug_ins.end(SUCCESS)
    beginning, first, second, ending = diary(tmp_path)
    assert beginning["run"]["config"] == {"seed": 1} and beginning["run"]["name"] == "sums"
    assert first["reward/mean"] == 0.5 and math.isnan(first["actor/kl"]) and first["lag/max"] == 2.0
    assert (second["step"], second["reward/mean"], second["lag/max"]) == (2, math.inf, 3)
    assert ending["ending"]["summary"]["steps"] == 3 and ending["exit_code"] == 0
    assert first["pid"] != os.getpid()
    assert warnings(caplog) == []


def test_what_the_library_prints_goes_to_the_log_of_the_tracker(tmp_path, capfd):
    plug_ins = PlugIns([tracker("Talks", tmp_path)], BEGIN_SECONDS)
    plug_ins.log({}, 1)
    plug_ins.end(SUCCESS)
    said = (tmp_path / "tracker_diary.out").read_text()
    assert "buy our service" in said and "native greetings" in said
    assert capfd.readouterr() == ("", "")


def test_a_tracker_that_hangs_costs_nothing_and_what_is_left_out_is_counted_and_said_once(tmp_path, caplog):
    hanging = tracker("Hangs", tmp_path, capacity=5, after=1)
    hanging.log({"a": 1.0}, 1)
    until(lambda: steps(tmp_path) == [1])
    padding = {f"metric/{number}": 0.5 for number in range(1000)}
    for step in range(2, 52):  # more than a pipe and the queue hold together
        hanging.log(padding, step)  # would wait for ever, if it waited
    assert warnings(caplog) == ["tracker diary does not keep up: metrics are left out from here on, and counted"]
    PlugIns([hanging], 1.0).end(SUCCESS)
    said = warnings(caplog)[1:]
    assert said[0] == "tracker diary was not done in time and is ended"
    assert len(said) == 2 and "did not get " in said[1] and "metrics.jsonl" in said[1]
    assert 40 < hanging.dropped <= 50
    until(lambda: look_at(diary(tmp_path)[1]["pid"]) is None)


@pytest.mark.parametrize("kind", ["EndsForEver", "BeginsForEver"])
def test_the_end_of_a_run_waits_until_its_deadline_only(tmp_path, caplog, kind):
    late = tracker(kind, tmp_path)
    started = time.monotonic()
    PlugIns([late], 1.0).end(SUCCESS)
    assert time.monotonic() - started >= 1.0
    assert [text for text in warnings(caplog) if "in time" in text] == [
        "tracker diary was not done in time and is ended"
    ]


def test_trackers_share_the_time_at_the_end():
    class Late:
        def end(self, ending):
            deadlines.append(None)

        def wait(self, deadline):
            deadlines.append(deadline)

    deadlines = []
    before = time.monotonic()
    PlugIns([Late(), Late()], 1000.0).end(SUCCESS)
    assert deadlines[:2] == [None, None], "all are told before one is waited for"
    assert deadlines[2] == deadlines[3] and before + 1000 <= deadlines[2] <= time.monotonic() + 1000


def test_a_tracker_that_cannot_begin_is_named_with_its_cause_and_without_its_secrets(tmp_path, caplog):
    broken = tracker("NeverBegins", tmp_path)
    until(lambda: warnings(caplog))
    broken.log({"a": 1.0}, 1)
    PlugIns([broken], BEGIN_SECONDS).end(SUCCESS)
    cannot, lost = warnings(caplog)
    assert "cannot begin: ConnectionError: no such project; api_key=***" in cannot and "tracker_diary.out" in cannot
    assert "did not get 1 or more records" in lost


@pytest.mark.parametrize(("kind", "code"), [("Dies", -signal.SIGSEGV), ("LeavesPython", 3)])
def test_a_tracker_that_dies_is_told_of_once_and_the_run_goes_on(tmp_path, caplog, kind, code):
    dying = tracker(kind, tmp_path, after=2)
    for step in (1, 2):
        dying.log({"a": 1.0}, step)
    until(lambda: warnings(caplog))
    for step in range(3, 10):
        dying.log({"a": 1.0}, step)
    PlugIns([dying], BEGIN_SECONDS).end(SUCCESS)
    ended, lost = warnings(caplog)
    assert f"ended before the run did (exit code {int(code)})" in ended
    assert "did not get" in lost


def test_a_record_that_is_refused_costs_that_record(tmp_path, caplog):
    refusing = tracker("Refuses", tmp_path, after=2)
    for step in (1, 2, 3):
        refusing.log({"a": 1.0}, step)
    PlugIns([refusing], BEGIN_SECONDS).end(Ending("failed", {}, "EngineFailed"))
    assert steps(tmp_path) == [1] and diary(tmp_path)[-1]["exit_code"] == 1
    assert warnings(caplog) == [
        "tracker diary refused the metrics of step 2: ValueError: too many points (said once)",
        "tracker diary did not get 2 or more records of metrics; `metrics.jsonl` has them all",
    ]


def test_a_log_that_cannot_be_written_is_named(tmp_path, caplog):
    run = TrackerRun("sums", "a" * 21, str(tmp_path), False, {})
    lost = TrackerProcess("diary", "odd_plug_ins:Diary", run, {}, tmp_path / "nowhere" / "x.out")
    PlugIns([lost], BEGIN_SECONDS).end(SUCCESS)
    assert "nowhere/x.out" in warnings(caplog)[0]


@pytest.mark.parametrize("refusals", [2, 3])
def test_a_start_that_the_system_refuses_is_tried_again(tmp_path, caplog, monkeypatch, refusals):
    asked, really = [], tracker_process._open

    def refused_at_first(*call):
        asked.append(call)
        if len(asked) <= refusals:
            raise OSError(errno.EFAULT, "Bad address")
        return really(*call)

    monkeypatch.setattr(tracker_process, "_open", refused_at_first)
    plug_ins = PlugIns([tracker("Diary", tmp_path)], BEGIN_SECONDS)
    plug_ins.log({}, 1)
    plug_ins.end(SUCCESS)
    assert len(asked) == 3
    if refusals == 2:
        assert steps(tmp_path) == [1] and warnings(caplog) == []
    else:
        assert warnings(caplog)[0] == "tracker diary cannot start: [Errno 14] Bad address"


def test_nothing_starts_after_a_run_that_ended_while_starts_were_refused(tmp_path, caplog, monkeypatch):
    asked, ended = [], threading.Event()

    def refused(*call):
        asked.append(call)
        assert ended.wait(BEGIN_SECONDS)
        raise OSError(errno.EFAULT, "Bad address")

    monkeypatch.setattr(tracker_process, "_open", refused)
    late = tracker("Diary", tmp_path)
    late.log({}, 1)
    PlugIns([late], 0.0).end(SUCCESS)
    assert late.dropped == 1 and "was not done in time" in warnings(caplog)[0]
    ended.set()
    late._thread.join(BEGIN_SECONDS)
    assert len(asked) == 1 and len(warnings(caplog)) == 2


DRIVER = """
import sys, time
from pathlib import Path
from roll.tracking.plugins.process import TrackerRun
from roll.tracking.plugins.process import TrackerProcess
sys.path.insert(0, sys.argv[1])
folder = Path(sys.argv[2])
run = TrackerRun("sums", "a" * 21, str(folder / "files"), False, {})
TrackerProcess("diary", "odd_plug_ins:Diary", run, {}, folder / "out").log({"a": 1.0}, 1)
time.sleep(3600)
"""


def test_a_run_that_is_killed_is_told_as_failed_and_leaves_no_process(tmp_path):
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, str(HERE), str(tmp_path)])
    try:
        until(lambda: steps(tmp_path) == [1])
    finally:
        driver.kill()
        driver.wait()
    until(lambda: "ending" in diary(tmp_path)[-1])
    assert diary(tmp_path)[-1]["exit_code"] == 1
    until(lambda: look_at(diary(tmp_path)[1]["pid"]) is None)


def test_the_queue_is_bounded_by_default(tmp_path):
    assert tracker_process.CAPACITY <= 10_000
    begun = tracker("BeginsForEver", tmp_path)
    assert begun._queue.maxsize == tracker_process.CAPACITY
    PlugIns([begun], 0.0).end(SUCCESS)

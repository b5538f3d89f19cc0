import asyncio
import json
import threading
import time
from dataclasses import replace

import pytest

from roll.tracking.status import (
    STUCK_SECONDS,
    DriverStatus,
    DriverWatch,
    RunStatus,
    StageStatus,
    StatusFile,
    read_status,
)
from roll.tracking.waits import Wait

PATIENCE_SECONDS = 60


def status(**changes):
    now = time.time()
    return RunStatus(DriverStatus(1, "host", 5), "running", now, now, now, 10.0, **changes)


class Looks(DriverWatch):
    """Tells of each."""

    def __init__(self, limit):
        super().__init__(limit)
        self.done = threading.Semaphore(0)

    def look(self, *seen):
        decision = super().look(*seen)
        self.done.release()
        return decision


def wait_for_file(path, condition):
    give_up = time.monotonic() + PATIENCE_SECONDS
    while (found := read_status(path)) is None or not condition(found):
        assert time.monotonic() < give_up, found
    return found


def test_the_file_says_what_was_last_known_and_that_the_run_has_ended(tmp_path):
    path = tmp_path / "status.json"
    waits = (Wait("stage/a", "worker/b", "call", 3.0),)
    with StatusFile(path, DriverWatch(100.0)) as file:
        file.update(status(waits=waits, groups_by_wait={"gate": 3}, step=4), at_once=True)
    written = read_status(path)
    assert (written.phase, written.step, written.waits) == ("ended", 4, waits)
    assert written.groups_by_wait == {"gate": 3}


def test_an_event_loop_that_is_stuck_too_long_is_placed_and_interrupted(tmp_path):
    interrupted, watch = threading.Event(), DriverWatch(0.5)
    with StatusFile(tmp_path / "status.json", watch, interrupted.set) as file:
        file.update(status())
        assert interrupted.wait(PATIENCE_SECONDS)
        assert "event loop was stuck for " in file.stuck_because and "test_status.py" in file.stuck_because
        watch.stuck = 10 * STUCK_SECONDS
        wait_for_file(tmp_path / "status.json", lambda found: found.loop_place is not None)


def test_one_that_comes_round_is_not_interrupted_although_its_clock_was_set(tmp_path):
    """Wall-clock times are for the file: NTP, or a process that was stopped for an hour, must not end a run."""
    interrupted, looks = threading.Event(), Looks(60.0)
    with StatusFile(tmp_path / "status.json", looks, interrupted.set) as file:
        seen = 0
        while seen < 2:
            file.update(replace(status(), loop_beat=time.time() - 3600))
            seen += looks.done.acquire(timeout=0.05)
    assert not interrupted.is_set() and looks.stuck == 0


def test_an_end_that_takes_too_long_is_given_its_reason(tmp_path):
    """What asyncio waits for when it closes a loop: a thread that hangs."""
    ended, reasons, hang = threading.Event(), [], threading.Event()

    def end(reason):
        reasons.append(reason)
        hang.set()
        ended.set()

    async def scenario(file):
        asyncio.get_running_loop().run_in_executor(None, hang.wait)
        file.update(status())
        file.ending()

    with StatusFile(tmp_path / "status.json", DriverWatch(100.0, ending_seconds=0.5), end=end) as file:
        asyncio.run(scenario(file))
        assert ended.is_set(), "asyncio.run came back, so it was ended before"
    assert "had not come to its end" in reasons[0] and "asyncio_0 in" in reasons[0]


def test_the_reason_belongs_to_the_phase_that_was_looked_at(tmp_path):
    """The end of a run may begin between the decision and its reason."""
    interrupted = threading.Event()

    class EndBegins(DriverWatch):
        def look(self, *seen):
            file.ending()
            self.stuck = 11.0
            return "interrupt" if seen[0] == "running" else "go on"

    with StatusFile(tmp_path / "status.json", EndBegins(10.0), interrupted.set) as file:
        while not interrupted.wait(0.05):
            file.update(status())
    assert "event loop was stuck for 11 s" in file.stuck_because


def test_what_holds_up_the_end_is_in_the_file(tmp_path):
    watch = DriverWatch(100.0)
    with StatusFile(tmp_path / "status.json", watch) as file:
        file.update(status())
        file.ending()
        watch.ending = 2 * STUCK_SECONDS
        found = wait_for_file(tmp_path / "status.json", lambda found: found.ending_threads)
        file.ending()
        assert watch.ending < 2 * STUCK_SECONDS, "the next thing that is ended has its own time"
    assert found.phase == "ending" and found.ending_since is not None
    assert any("MainThread in" in thread for thread in found.ending_threads)


def test_no_file_and_a_damaged_one_are_told_apart(tmp_path):
    assert read_status(tmp_path / "status.json") is None
    (tmp_path / "status.json").write_text('{"phase": "running"}')
    with pytest.raises(ValueError, match="status.json"):
        read_status(tmp_path / "status.json")


def test_a_text_that_utf8_cannot_hold_does_not_end_the_file(tmp_path):
    stage = StageStatus("stage/a", "failed", 1.0, {"error": "half a pair: \ud83d", "object": object()})
    with StatusFile(tmp_path / "status.json", DriverWatch(100.0)) as file:
        file.update(status(stages=(stage,)), at_once=True)
    assert "half a pair: ?" in read_status(tmp_path / "status.json").stages[0].details["error"]
    assert json.loads((tmp_path / "status.json").read_text())["phase"] == "ended"


def test_a_file_that_cannot_be_written_is_said_once_and_harms_nobody(tmp_path, caplog):
    with StatusFile(tmp_path / "nowhere" / "status.json", DriverWatch(100.0)) as file:
        file.update(status(), at_once=True)
    assert len([record for record in caplog.records if "roll doctor" in record.message]) == 1

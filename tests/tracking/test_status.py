import threading
import time

import pytest

from roll.tracking.status import DamagedStatus, DriverStatus, RunStatus, StatusFile, read_status
from roll.tracking.waits import Wait

PATIENCE_SECONDS = 20


def status(**changes):
    now = time.time()
    return RunStatus(DriverStatus(1, "host", 5), "running", now, changes.pop("loop_beat", now), now, 10.0, **changes)


def test_the_file_says_what_was_last_known_and_that_the_run_has_ended(tmp_path):
    path = tmp_path / "status.json"
    waits = (Wait("stage/a", "worker/b", "call", 3.0),)
    with StatusFile(path, 100.0) as file:
        file.update(status(waits=waits, groups_by_wait={"gate": 3}, step=4), at_once=True)
    written = read_status(path)
    assert (written.phase, written.step, written.waits) == ("ended", 4, waits)
    assert written.groups_by_wait == {"gate": 3}


def test_an_event_loop_that_is_stuck_too_long_is_placed_and_interrupted_twice(tmp_path):
    interrupts = threading.Semaphore(0)
    with StatusFile(tmp_path / "status.json", 100.0, interrupts.release) as file:
        for _ in range(2):
            file.update(status(loop_beat=time.time() - 11), at_once=True)
            assert interrupts.acquire(timeout=PATIENCE_SECONDS)
        assert "stuck for 11 s" in file.stuck_because and "test_status.py" in file.stuck_because
        assert "test_status.py" in read_status(tmp_path / "status.json").loop_place
        file.update(status(loop_beat=time.time() - 12, step=7), at_once=True)
        give_up = time.monotonic() + PATIENCE_SECONDS
        while read_status(tmp_path / "status.json").step != 7:
            assert time.monotonic() < give_up
        file.update(status(loop_beat=time.time() - 13), at_once=True)
        assert not interrupts.acquire(timeout=0.2)


def test_a_run_that_is_ending_or_stuck_for_a_moment_only_is_not_interrupted(tmp_path):
    with StatusFile(tmp_path / "status.json", 100.0, lambda: pytest.fail("interrupted")) as file:
        file.update(status(loop_beat=time.time() - 6), at_once=True)
        file.update(status(loop_beat=time.time() - 60))
        file.ending()
    assert file.stuck_because is None


def test_no_file_and_a_damaged_one_are_told_apart(tmp_path):
    assert read_status(tmp_path / "status.json") is None
    (tmp_path / "status.json").write_text('{"phase": "running"}')
    with pytest.raises(DamagedStatus, match="status.json"):
        read_status(tmp_path / "status.json")


def test_a_file_that_cannot_be_written_is_said_once_and_harms_nobody(tmp_path, caplog):
    with StatusFile(tmp_path / "nowhere" / "status.json", 100.0) as file:
        file.update(status(), at_once=True)
    assert len([record for record in caplog.records if "roll doctor" in record.message]) == 1

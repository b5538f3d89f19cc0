"""How a run ends is on record before anything can hang, and a process that hangs is ended with a reason."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time

import pytest
from runs import ROOT

from roll.cli.main import to_its_end
from roll.configs.run import RLVRConfig
from roll.pipeline.recorder import RunRecorder
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import DriverWatch, StatusFile
from roll.tracking.summary import Summary, fail_unfinished


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(str(tmp_path / "run"), "x")


def summary_of(run):
    return json.loads(run.summary.read_text())


def ended(run, scenario):
    """How ``scenario``, the work of a run, came to its end."""
    recorder = RunRecorder(RLVRConfig(track_with=[]), run, started=time.monotonic(), decoder=None)
    with StatusFile(run.status, DriverWatch(100.0)) as file:
        return asyncio.run(to_its_end(scenario(), recorder, file))[0]


def test_a_role_that_fails_while_others_start_has_failed_and_was_not_interrupted(run):
    async def fails():
        raise OSError("no such model")

    async def start():
        async with asyncio.TaskGroup() as roles:
            roles.create_task(asyncio.sleep(100))
            roles.create_task(fails())

    assert ended(run, start) == "failed"
    assert "no such model" in summary_of(run)["error"] and "signal" not in summary_of(run)["error"]


@pytest.mark.parametrize(
    ("error", "stuck", "expected"),
    [
        (OSError("the disk is gone"), None, ("failed", "OSError: the disk is gone")),
        (asyncio.CancelledError(), None, ("interrupted", "interrupted by a signal")),
        (asyncio.CancelledError(), "it was stuck", ("failed", "it was stuck")),
    ],
)
def test_a_failure_is_on_record_although_a_thread_keeps_the_event_loop_from_closing(run, error, stuck, expected):
    hang, on_record = threading.Event(), []
    recorder = RunRecorder(RLVRConfig(track_with=[]), run, started=time.monotonic(), decoder=None)

    async def fails():
        asyncio.get_running_loop().run_in_executor(None, hang.wait)
        raise error

    async def scenario(file):
        outcome = await to_its_end(fails(), recorder, file)
        on_record.append((summary_of(run)["status"], summary_of(run)["error"]))
        hang.set()
        return outcome

    with StatusFile(run.status, DriverWatch(100.0)) as file:
        file.stuck_because = stuck
        status, _ = asyncio.run(scenario(file))
    recorder.close("success")
    assert on_record == [expected] and status == expected[0]
    assert summary_of(run)["status"] == "failed" or expected[0] == "interrupted"


def test_what_goes_wrong_while_an_interrupted_run_ends_is_no_failure_of_the_run(run):
    recorder = RunRecorder(RLVRConfig(track_with=[]), run, started=time.monotonic(), decoder=None)

    begun = asyncio.Event()

    async def ends_badly():
        begun.set()
        try:
            await asyncio.sleep(100)
        finally:
            raise OSError("the disk is gone")

    async def scenario(file):
        ending = asyncio.create_task(to_its_end(ends_badly(), recorder, file))
        await begun.wait()
        ending.cancel()
        return await ending

    with StatusFile(run.status, DriverWatch(100.0)) as file:
        assert asyncio.run(scenario(file))[0] == "interrupted"
    assert summary_of(run)["error"] == "interrupted by a signal; then OSError: the disk is gone"


def test_what_runs_to_its_end_is_well_only_when_all_is_closed(run):
    recorder = RunRecorder(RLVRConfig(track_with=[]), run, started=time.monotonic(), decoder=None)

    async def scenario(file):
        return await to_its_end(asyncio.sleep(0), recorder, file), summary_of(run)["status"]

    with StatusFile(run.status, DriverWatch(100.0)) as file:
        assert asyncio.run(scenario(file)) == (("success", None), "running")
    recorder.close("success")
    assert summary_of(run)["status"] == "success"


def test_a_cause_that_is_on_record_stands(run):
    Summary(run.summary).finish("failed", "the first cause")
    fail_unfinished(run.summary, "it did not end")
    assert summary_of(run)["error"] == "the first cause"


def test_a_process_that_ends_never_is_ended_with_its_reason(run):
    """Its main thread is stuck in native code, which hears no signal until it returns."""
    Summary(run.summary)
    code = f"""
import signal, threading
from pathlib import Path
from roll.cli.main import end_process
from roll.tracking.run_directory import RunDirectory
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT, signal.SIGTERM])
threading.Thread(target=end_process, args=(RunDirectory(Path({str(run.root)!r})), "it hung")).start()
signal.sigwait([signal.SIGINT])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == -signal.SIGKILL and "it hung; the process is ended" in done.stderr
    assert (summary_of(run)["status"], summary_of(run)["error"]) == ("failed", "it hung")

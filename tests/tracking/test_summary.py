"""summary.json is true at every moment: running until it is over, and a failure stays one."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from roll.tracking.summary import VALIDATION_LOSS, Summary, describe_error


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "summary.json"


def test_it_says_running_from_the_start(path):
    Summary(path)
    assert json.loads(path.read_text())["status"] == "running"


def test_a_killed_run_says_running(path):
    code = (
        "import os, signal; from pathlib import Path; from roll.tracking.summary import Summary\n"
        f"summary = Summary(Path({str(path)!r})); summary.update({{'lag/max': 1}}, 3)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code], timeout=120)
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["steps"]) == ("running", 3)


def test_the_whole_story_of_a_success(path):
    clock = Clock()
    summary = Summary(path, clock=clock, started=990.0)
    summary.update({"val/addition/accuracy": 0.31}, 0)
    clock.now = 1005.5
    summary.update({"lag/max": 2, "reward/mean": 0.4}, 1)
    clock.now = 1010.0
    summary.update({"lag/max": np.int64(1), "val/addition/accuracy": np.float32(0.5), "val/other/accuracy": 0.25}, 2)
    clock.now = 1020.0
    summary.finish("success", ledger={"issued": 128, "consumed": 120, "dropped": {"failed": 8}})
    assert json.loads(path.read_text()) == {
        "status": "success",
        "steps": 2,
        "seconds": 30.0,
        "first_step_seconds": 15.5,
        "val/first": {"addition": 0.31, "other": 0.25},
        "val/last": {"addition": 0.5, "other": 0.25},
        "lag/max": 2,
        "ledger": {"issued": 128, "consumed": 120, "dropped": {"failed": 8}},
        "resumed_at": [],
        "error": None,
    }


def test_a_failure_is_not_turned_into_a_success_by_what_comes_after(path):
    summary = Summary(path)
    summary.finish("failed", RuntimeError("engine replica 1 died"))
    summary.finish("success")
    summary.update({}, 5)
    read = json.loads(path.read_text())
    assert (read["status"], read["error"]) == ("failed", "RuntimeError: engine replica 1 died")


def test_a_success_whose_shutdown_fails_is_a_failure(path):
    summary = Summary(path)
    summary.finish("success")
    summary.finish("failed", OSError("disk full"))
    assert json.loads(path.read_text())["status"] == "failed"


def test_an_interruption_stands_against_the_errors_of_the_shutdown(path):
    summary = Summary(path)
    summary.finish("interrupted")
    summary.finish("failed", RuntimeError("worker gone"))
    assert json.loads(path.read_text())["status"] == "interrupted"


def test_an_accuracy_that_is_nan_leaves_valid_json(path):
    Summary(path).update({"val/a/accuracy": math.nan}, 0)
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["val/first"] == {"a": None}


def test_a_secret_in_an_error_is_masked(path, monkeypatch):
    monkeypatch.setenv("HUB_TOKEN", "hub_s3cr3t")
    Summary(path).finish("failed", "cannot log in with hub_s3cr3t")
    assert json.loads(path.read_text())["error"] == "cannot log in with ***"


def test_errors_are_described_by_their_roots_and_causes():
    engine = RuntimeError("out of memory")
    stage = ValueError("generate failed")
    stage.__cause__ = engine
    group = BaseExceptionGroup("stages", [stage, ExceptionGroup("inner", [TimeoutError()])])
    assert describe_error(group) == (
        "ValueError: generate failed (caused by RuntimeError: out of memory)\nTimeoutError"
    )


def test_a_resumed_run_goes_on_with_what_counts_of_the_earlier_one(path):
    clock = Clock()
    first = Summary(path, clock)
    clock.now += 30
    first.update({"val/a/accuracy": 0.1}, 0)
    first.update({"val/a/accuracy": 0.2, "lag/max": 3}, 1)
    clock.now += 30
    first.update({"val/a/accuracy": 0.9, "lag/max": 5}, 2)
    earlier = [
        {"step": 0, "val/a/accuracy": 0.1, "odd": None},
        {"step": 1, "val/a/accuracy": 0.2, "lag/max": 3},
    ]
    later = Clock()
    second = Summary(path, later, earlier=earlier)
    later.now += 10
    second.update({"val/a/accuracy": 0.5, "lag/max": 1}, 2)
    summary = json.loads(path.read_text())
    assert (summary["status"], summary["steps"], summary["seconds"]) == ("running", 2, 70)
    assert summary["first_step_seconds"] == 30 and summary["resumed_at"] == [1]
    assert summary["val/first"] == {"a": 0.1} and summary["val/last"] == {"a": 0.5} and summary["lag/max"] == 3
    third = Summary(path, Clock(), earlier=earlier)
    assert third.as_dict()["resumed_at"] == [1, 1] and third.as_dict()["val/last"] == {"a": 0.2}


def test_a_run_that_goes_back_in_its_own_process_says_what_its_records_say(path):
    clock = Clock()
    summary = Summary(path, clock=clock)
    records = [{"step": 0, "val/addition/accuracy": 0.25}, {"step": 1, "lag/max": 1.0, "reward/mean": None}]
    for record in [*records, {"step": 2, "lag/max": 3.0, "val/addition/accuracy": 0.5}]:
        summary.update({name: value for name, value in record.items() if name != "step"}, record["step"])
    clock.now += 30
    summary.go_back(records)
    said = json.loads(path.read_text())
    assert (said["steps"], said["lag/max"], said["val/last"], said["resumed_at"]) == (1, 1, {"addition": 0.25}, [1])
    assert (said["status"], said["seconds"], said["first_step_seconds"]) == ("running", 30.0, 0.0)
    summary.go_back([])
    said = json.loads(path.read_text())
    assert (said["steps"], said["lag/max"], said["val/first"], said["resumed_at"]) == (0, None, {}, [1, 0])


def test_a_run_that_goes_back_forgets_the_losses_of_later_validations(path):
    summary = Summary(path)
    summary.update({VALIDATION_LOSS: 2.0}, 3)
    summary.go_back([{"step": 2, "actor/loss": 1.0}])
    assert not [name for name in json.loads(path.read_text()) if name.startswith(VALIDATION_LOSS)]
    summary.update({VALIDATION_LOSS: 1.5}, 3)
    assert json.loads(path.read_text())[f"{VALIDATION_LOSS}/first"] == 1.5

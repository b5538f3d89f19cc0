"""What `roll doctor` says of real runs, asked from another process; and what `chaos` does to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from runs import ROOT, run_pipeline, start_command
from tiny import tiny_config

from roll.pipeline.checkpoints import saved_steps
from roll.tracking.metrics import read_metrics
from roll.tracking.status import read_status

PATIENCE_SECONDS = 120


@pytest.fixture
def start(task):
    """Runs as commands of their own, ended with the test."""
    started = []

    def begin(**changes):
        process, out = start_command(task, tiny_config(task, max_steps=5000, **changes))
        started.append(process)
        return process, out

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def doctor(run, *options):
    """Exit code and what it says."""
    command = [sys.executable, "-m", "roll.pipeline.cli", "doctor", str(run), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout + done.stderr


def wait_until(condition, process=None):
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process is None or process.poll() is None, process.stdout.read()
        assert time.monotonic() < give_up
        time.sleep(0.2)


def steps_of(out):
    path = out / "metrics.jsonl"
    return max((record["step"] for record in read_metrics(path)), default=0) if path.exists() else 0


def findings(out):
    code, text = doctor(out, "--json")
    return code, json.loads(text)


def pid_of(out, name):
    return next(worker.pid for worker in read_status(out / "status.json").workers if worker.name == name)


def test_a_run_is_well_then_without_its_trainer_then_well_again_and_in_the_end_dead(start):
    process, out = start(save_steps=5)
    wait_until(lambda: steps_of(out) >= 6, process)
    code, found = findings(out)
    assert (code, found["verdict"]) == (0, "working")
    pid = pid_of(out, "actor_train/0")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: "stage/train" in findings(out)[1]["headline"], process)
    code, found = findings(out)
    assert (code, found["verdict"]) == (1, "worker in trouble")
    assert found["culprit"] == f"worker actor_train/0: process {pid} was stopped by a signal"
    assert found["advice"] == f"kill -CONT {pid}"
    os.kill(pid, signal.SIGCONT)
    before = steps_of(out)
    wait_until(lambda: steps_of(out) > before, process)
    assert findings(out)[1]["verdict"] == "working"
    wait_until(lambda: any((out / "checkpoints").glob("step-*")), process)
    process.kill()
    process.wait()
    code, found = findings(out)
    assert (code, found["verdict"]) == (1, "killed")
    assert f"process {process.pid}" in found["culprit"]
    checkpoint = max(int(path.name.partition("-")[2]) for path in (out / "checkpoints").glob("step-*"))
    assert f"goes on after step {checkpoint}" in found["advice"]


def test_a_deadlock_is_explained_before_the_run_ends_itself_with_the_same_words(start):
    process, out = start(
        stages={"advantage": "custom_parts:GraspingAdvantages"},
        actor_infer__device_mapping=[0],
        async_generation_ratio=1,
        stall_timeout_seconds=25,
    )
    wait_until(lambda: (out / "status.json").exists() and findings(out)[1]["verdict"] == "deadlock", process)
    code, found = findings(out)
    assert code == 1
    assert "stage/advantage" in found["headline"] and "stage/train" in found["headline"]
    expected = "stage/advantage keeps the devices of actor_infer+actor_train while it waits for stage/train"
    assert found["culprit"] == expected
    ring = "\n".join(found["findings"])
    assert "stage/advantage waits for stage/train (the end of training step 1)" in ring
    assert "stage/train waits for the devices of actor_infer+actor_train" in ring
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1 and expected in output
    code, found = findings(out)
    assert (code, found["verdict"]) == (1, "failed") and expected in found["culprit"]


def test_a_stuck_event_loop_is_named_with_its_line_and_ended(start):
    process, out = start(stages={"advantage": "custom_parts:BlockingAdvantages"}, stall_timeout_seconds=25)
    wait_until(lambda: (out / "status.json").exists() and findings(out)[1]["verdict"] == "driver in trouble", process)
    assert "custom_parts.py" in findings(out)[1]["culprit"]
    output, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1
    assert "event loop was stuck" in output and "custom_parts.py" in output
    assert findings(out)[1]["verdict"] == "failed"


def test_chaos_does_each_thing_once_and_the_run_says_what_it_was(task, ray_cluster):
    events = [
        {"kind": "delay_publication", "at_step": 1, "seconds": 1.5},
        {"kind": "kill", "role": "actor_infer", "at_step": 2},
        {"kind": "freeze", "role": "actor_train", "at_step": 4, "seconds": 1.5},
        {"kind": "corrupt_bucket", "at_step": 6},
    ]
    config = tiny_config(task, max_steps=7, chaos={"enabled": True, "events": events})
    run = run_pipeline(task, ray_cluster, config, expect=1)
    assert "the content of 'model.embed_tokens.weight' differs from what was published" in run.summary["error"]
    assert [json.loads(line)["kind"] for line in (run.folder / "chaos.jsonl").read_text().splitlines()] == [
        event["kind"] for event in events
    ]
    seconds = {record["step"]: record["time/step"] for record in run.metrics}
    assert seconds[1] > 1.5 and seconds[4] + seconds[5] > 1.5, "held back, and frozen once step 4 was trained"
    assert run.metrics[-1]["engine/restarts"] == 1


def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint(task, ray_cluster):
    events = [{"kind": "fill_disk", "role": "actor_train", "at_step": 5}]
    config = tiny_config(task, max_steps=8, save_steps=2, chaos={"enabled": True, "events": events})
    run = run_pipeline(task, ray_cluster, config, expect=1)
    assert "File too large" in run.summary["error"]
    code, found = findings(run.folder)
    assert (code, found["verdict"]) == (1, "failed") and "File too large" in found["culprit"]
    # That of step 2 was on the disk before the one of step 4 was taken; that one may just have made it.
    last = saved_steps(run.folder / "checkpoints")[-1]
    assert last in (2, 4) and f"goes on after step {last}" in found["advice"]

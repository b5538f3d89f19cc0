"""What `roll doctor` says of real runs; and what `chaos` does to them."""

from __future__ import annotations

import io
import json
import os
import signal
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
from fake_cluster import IN_THIS_PROCESS
from killed_runs import KilledRun, newest_checkpoint, recorded_steps
from runs import run_pipeline, start_command
from tiny import tiny_config

from roll.cli import main as cli
from roll.pipeline import main as pipeline
from roll.pipeline.status import RunStalled
from roll.tracking.status import read_status
from roll.tracking.trackers import read_metrics

PATIENCE_SECONDS = 120


def findings(out):
    """Exit code and what it says."""
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        code = cli.main(["doctor", "--json", str(out)])
    return code, json.loads(said.getvalue())


def wait_until(condition, process):
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < give_up
        time.sleep(0.2)


def pid_of(out, name):
    return next(worker.pid for worker in read_status(out / "status.json").workers if worker.name == name)


@pytest.mark.tier("all")
def test_a_run_is_well_then_without_its_trainer_then_well_again_and_in_the_end_dead(task, warm):
    process, out = start_command(task, tiny_config(task, max_steps=5000, save_steps=5))
    try:
        wait_until(lambda: recorded_steps(out) >= 6 and newest_checkpoint(out), process)
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
        before = recorded_steps(out)
        wait_until(lambda: recorded_steps(out) > before, process)
        assert findings(out)[1]["verdict"] == "working"
    finally:
        process.kill()
        process.communicate()
    code, found = findings(out)
    assert (code, found["verdict"]) == (1, "killed")
    assert f"process {process.pid}" in found["culprit"]
    assert f"goes on after step {newest_checkpoint(out)}" in found["advice"]


@pytest.fixture
def run_until_stuck(task, monkeypatch):
    """A run that ends itself because nothing moves, and what the doctor says of it at that moment and afterwards."""

    def run(stage, **changes):
        folders, before = [], []

        def look(*_):
            before.append(findings(folders[0]))

        watch, interrupt = pipeline.watch_for_stall, cli._interrupt

        async def watch_and_look(*arguments):
            try:
                await watch(*arguments)
            except RunStalled:
                look()
                raise

        monkeypatch.setattr(pipeline, "watch_for_stall", watch_and_look)
        monkeypatch.setattr(cli, "_interrupt", lambda: (look(), interrupt()))
        stages = {"advantage": f"custom_parts:{stage}"}
        limits = {"stall_timeout_seconds": 6, "rewards__addition__timeout_seconds": 2}
        config = tiny_config(task, stages=stages, **limits, **changes)
        ended = run_pipeline(task, IN_THIS_PROCESS, config, expect=1, before=folders.append)
        return before[0], findings(ended.folder), ended.summary["error"]

    return run


@pytest.mark.tier("all")
def test_a_deadlock_is_explained_before_the_run_ends_itself_with_the_same_words(run_until_stuck):
    (code, found), (code_afterwards, afterwards), error = run_until_stuck(
        "grasping_advantages", actor_infer__device_mapping=[0], async_generation_ratio=1
    )
    assert (code, found["verdict"]) == (1, "deadlock")
    assert "stage/advantage" in found["headline"] and "stage/train" in found["headline"]
    expected = "stage/advantage keeps the devices of actor_infer+actor_train while it waits for stage/train"
    assert found["culprit"] == expected
    ring = "\n".join(found["findings"])
    assert "stage/advantage waits for stage/train (the end of training step 1)" in ring
    assert "stage/train waits for the devices of actor_infer+actor_train" in ring
    assert expected in error
    assert (code_afterwards, afterwards["verdict"]) == (1, "failed") and expected in afterwards["culprit"]


@pytest.mark.tier("all")
def test_a_stuck_event_loop_is_named_with_its_line_and_ended(run_until_stuck):
    (_, found), (_, afterwards), error = run_until_stuck("blocking_advantages")
    assert found["verdict"] == "driver in trouble" and "custom_parts.py" in found["culprit"]
    assert "event loop was stuck" in error and "custom_parts.py" in error
    assert afterwards["verdict"] == "failed"


@pytest.mark.tier("all")
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


@pytest.mark.tier("all")
def test_a_full_disk_ends_the_run_and_leaves_the_last_checkpoint_to_go_on_from(task, ray_cluster, tmp_path):
    events = [{"kind": "fill_disk", "role": "actor_train", "at_step": 5}]
    run = KilledRun(tmp_path, tiny_config(task, max_steps=8, save_steps=2, chaos={"enabled": True, "events": events}))
    run.finish(expect=1, address=ray_cluster)
    assert "File too large" in run.output
    code, found = findings(run.out)
    assert (code, found["verdict"]) == (1, "failed") and "File too large" in found["culprit"]
    # That of step 2 was on the disk before the one of step 4 was taken; that one may just have made it.
    last = newest_checkpoint(run.out)
    assert last in (2, 4) and f"goes on after step {last}" in found["advice"]
    done = run.finish()
    assert done.summary["resumed_at"] == [last] and done.summary["ledger"]["consumed"] == 64
    assert [record["step"] for record in read_metrics(run.out / "metrics.jsonl")] == list(range(9))

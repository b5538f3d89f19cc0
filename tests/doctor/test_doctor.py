"""The diagnosis, from evidence made by hand."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from roll.cli.main import main
from roll.doctor.diagnosis import (
    LAST_BYTES,
    LAST_LINES,
    NEEDED_GROUPS,
    Evidence,
    diagnose,
    gather_evidence,
    how_to_resume,
    wait_graph,
)
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import (
    ENDING_SECONDS,
    ChannelStatus,
    DriverStatus,
    ProcessFacts,
    RunStatus,
    SchedulerStatus,
    StageStatus,
    WorkerStatus,
)
from roll.tracking.summary import Summary
from roll.tracking.waits import PUBLICATION_MEMORY, PUBLISHER, PUBLISHING, STAGE_VALIDATION, VALIDATION, Wait
from roll.weights.buffers import NEWEST

NOW = 1000.0
HERE = "this-host"
THERE = ProcessFacts(started=5, stopped=False)


def status(**changes):
    """Of a run on this host whose driver is process 1, and in which something moved a moment ago."""
    driver = DriverStatus(1, HERE, 5)
    stages = tuple(StageStatus(f"stage/{name}", "running", NOW - 30) for name in ("rollout", "train", "param_update"))
    fields = {"stages": stages, "step": 3, "max_steps": 9, **changes}
    moved = fields.pop("moved_at", NOW - 1)
    return RunStatus(driver, fields.pop("phase", "running"), NOW, NOW, moved, stall_timeout_seconds=100, **fields)


def evidence(found, **changes):
    processes = {1: THERE} | changes.pop("processes", {})
    known = Evidence(Path("run"), NOW + 1, HERE, found, {"status": "running", "steps": 3, "error": None}, processes)
    return replace(known, **changes)


def wait(who, on, what="something", since=NOW - 20):
    return Wait(who, on, what, since)


WORKER = WorkerStatus("actor_train/0", 7, True, NOW - 1)
TWO_LOCKS = {
    "waits": (wait("stage/train", "devices/b"), wait("stage/rollout", "devices/a")),
    "holdings": (wait("stage/train", "devices/a", "as x"), wait("stage/rollout", "devices/b", "as y")),
}


def test_a_run_that_moves_is_well():
    found = diagnose(evidence(status()))
    assert (found.verdict, found.is_well) == ("working", True)
    assert "3 of 9 steps" in found.headline


def test_two_locks_taken_in_opposite_order_are_a_deadlock_whoever_else_moves():
    found = diagnose(evidence(status(**TWO_LOCKS)))
    assert (found.verdict, found.is_well) == ("deadlock", False)
    assert "stage/train keeps the devices of a while it waits for stage/rollout" in found.culprit
    assert "stage/rollout keeps the devices of b while it waits for stage/train" in found.culprit
    assert "kill 1" in found.advice


def test_a_wait_that_has_just_begun_is_no_deadlock_yet():
    young = (TWO_LOCKS["waits"][0], wait("stage/rollout", "devices/a", since=NOW - 0.5))
    assert diagnose(evidence(status(**TWO_LOCKS | {"waits": young}))).verdict == "working"


def test_who_waits_for_several_things_needs_all_of_them():
    also = (*TWO_LOCKS["waits"], wait("stage/train", "worker/actor_train/0"))
    assert diagnose(evidence(status(**TWO_LOCKS | {"waits": also}))).verdict == "deadlock"


def test_a_ring_of_channels_is_a_deadlock():
    channels = (
        ChannelStatus("forth", "stage/rollout", "stage/train", 1, 1),
        ChannelStatus("back", "stage/train", "stage/rollout", 1, 1),
    )
    waits = (wait("stage/rollout", "room/forth"), wait("stage/train", "room/back"))
    found = diagnose(evidence(status(waits=waits, channels=channels)))
    assert found.verdict == "deadlock" and "stage/rollout and stage/train" in found.headline


def test_who_waits_for_any_of_several_is_not_deadlocked_with_one_of_them():
    """One group hangs on its batch's own stage, another one runs: the batch may still come."""
    scheduler = SchedulerStatus(in_flight=2, buffered=0, refusal="budget", holding_up=())
    waits = (
        wait("stage/rollout", "scheduler"),
        wait("group/1", "stage/rollout"),
        wait("group/2", "worker/actor_infer/0"),
    )
    any_group = status(waits=waits, scheduler=scheduler)
    assert wait_graph(any_group).cycle() == []
    just_one = replace(any_group, scheduler=replace(scheduler, holding_up=("group/1",)))
    ring = {edge.who for edge in wait_graph(just_one).cycle()}
    assert ring == {"stage/rollout", "scheduler", NEEDED_GROUPS, "group/1"}


def test_a_group_that_is_not_listed_may_still_finish_and_one_that_is_needed_may_not_be_missing():
    """A status lists the oldest waits only; the batch needs any group, or each of some."""
    scheduler = SchedulerStatus(in_flight=2, buffered=0, refusal="budget", holding_up=())
    waits = (wait("stage/rollout", "scheduler"), wait("group/1", "stage/rollout"))
    one_computes = status(waits=waits, scheduler=scheduler, groups_by_wait={"stage/rollout": 1})
    assert wait_graph(one_computes).cycle() == []
    one = replace(scheduler, in_flight=1)
    cut = status(waits=waits, scheduler=one, groups_by_wait={"stage/rollout": 1, "gate": 1})
    assert wait_graph(cut).cycle() == []
    whole = replace(cut, groups_by_wait={"stage/rollout": 1})
    assert "group/1" in {edge.who for edge in wait_graph(whole).cycle()}
    needed = replace(one_computes, scheduler=replace(scheduler, holding_up=("group/1", "group/2")))
    assert "group/1" in {edge.who for edge in wait_graph(needed).cycle()}, "group 2 alone is not enough"


def test_a_reward_model_answers_through_any_of_its_processes():
    waits = (
        wait("stage/rollout", "rewards.chat"),
        wait("rewards.chat/0", "devices/a"),
        wait("rewards.chat/1", "worker/rewards.chat/1", "score"),
    )
    serving = tuple(wait(f"rewards.chat/{index}", "rewards.chat", "to score") for index in (0, 1))
    holdings = (*serving, wait("stage/rollout", "devices/a", "as actor_infer"))
    two = status(waits=waits, holdings=holdings)
    assert wait_graph(two).cycle() == []
    just_one = status(waits=waits[:2], holdings=(holdings[0], holdings[2]))
    found = diagnose(evidence(just_one))
    assert found.verdict == "deadlock"
    assert "rewards.chat/0 and stage/rollout wait for each other" in found.headline
    worker = WorkerStatus("rewards.chat/1", 7, True, NOW - 60)
    found = diagnose(evidence(replace(two, workers=(worker,)), processes={7: THERE}))
    assert found.verdict == "worker in trouble" and "stage/rollout" in found.headline


@pytest.mark.parametrize(("refusal", "whose"), [("budget", "stage/train"), ("version", "stage/param_update")])
def test_a_batch_without_groups_waits_for_whoever_lets_them_start(refusal, whose):
    scheduler = SchedulerStatus(in_flight=0, buffered=0, refusal=refusal, holding_up=())
    graph = wait_graph(status(waits=(wait("stage/rollout", "scheduler"),), scheduler=scheduler))
    assert graph.chain("stage/rollout")[-1].on == whose


def test_the_memory_of_a_publication_comes_free_by_whoever_publishes():
    busy = status(waits=(wait("stage/train", PUBLICATION_MEMORY),), memory_holders=(NEWEST, PUBLISHING))
    assert wait_graph(busy).chain("stage/train")[-1].on == PUBLISHER
    for holder, whose in ((STAGE_VALIDATION, PUBLISHER), (VALIDATION, VALIDATION)):
        measured = replace(busy, memory_holders=(NEWEST, holder))
        assert wait_graph(measured).chain("stage/train")[-1].on == whose
    taking = replace(busy, memory_holders=("worker/actor_infer/0",))
    assert wait_graph(taking).chain("stage/train")[-1].on == "worker/actor_infer/0"


@pytest.mark.parametrize(
    ("worker", "process", "culprit", "advice"),
    [
        (WORKER, ProcessFacts(9, stopped=True), "process 7 was stopped by a signal", "kill -CONT 7"),
        (WORKER, None, "process 7 is gone", "replaces it"),
        (replace(WORKER, started=8), ProcessFacts(9, stopped=False), "process 7 is gone", "replaces it"),
        (replace(WORKER, asked_since=NOW - 60), THERE, "no sign of life for 60 s", "host"),
        (replace(WORKER, loop_lag=50.0, place="a.py:3 f"), THERE, "stuck for 50 s in a.py:3 f", "thread"),
    ],
)
def test_a_worker_that_is_not_well_is_named_with_those_who_wait_for_it(worker, process, culprit, advice):
    waits = (wait("stage/train", "worker/actor_train/0", "train"), wait("stage/rollout", "stage/train"))
    found = diagnose(evidence(status(waits=waits, workers=(worker,)), processes={7: process}))
    assert found.verdict == "worker in trouble" and culprit in found.culprit and advice in found.advice
    assert "stage/train and stage/rollout cannot go on without actor_train/0" in found.headline


def test_a_run_that_is_ending_is_well_although_its_processes_are_killed_until_that_takes_too_long():
    waits = (wait("stage/train", "worker/actor_train/0", "train"),)
    ending = status(waits=waits, workers=(WORKER,), phase="ending", ending_since=NOW - 30)
    found = diagnose(evidence(ending, processes={7: None}))
    assert (found.verdict, found.is_well) == ("working", True) and "ending, 30 s" in found.headline
    long = replace(ending, ending_since=NOW - ENDING_SECONDS / 2 - 1, ending_threads=("asyncio_0 in a.py:3 f > fsync",))
    found = diagnose(evidence(long, processes={7: None}))
    assert found.verdict == "driver in trouble" and "a.py:3 f > fsync" in found.culprit


def test_a_worker_that_has_not_answered_yet_is_not_said_to_have_nothing_to_do():
    new = replace(WORKER, has_answered=False, asked_since=NOW - 5)
    text = "\n".join(diagnose(evidence(status(workers=(new,)), processes={7: THERE})).findings)
    assert "has not answered yet, asked 5 s before" in text and "nothing to do" not in text
    assert "had nothing to do" in "\n".join(diagnose(evidence(status(workers=(WORKER,)))).findings)


def test_a_worker_of_another_host_is_judged_by_its_signs_of_life_only():
    elsewhere = replace(WORKER, on_driver_host=False)
    assert diagnose(evidence(status(workers=(elsewhere,)))).verdict == "working"


def test_a_long_silence_is_explained_by_the_end_of_the_longest_chain():
    waits = (wait("stage/rollout", "stage/train"), wait("stage/train", "worker/actor_train/0", "train"))
    quiet = status(waits=waits, workers=(replace(WORKER, place="fsdp2.py:9 step"),), moved_at=NOW - 60)
    found = diagnose(evidence(quiet, processes={7: THERE}))
    assert (found.verdict, found.is_well) == ("quiet", False)
    assert "worker actor_train/0 (train)" in found.culprit and "fsdp2.py:9 step" in found.culprit
    assert "in 40 s" in found.advice
    starting = replace(quiet, phase="starting")
    assert diagnose(evidence(starting, processes={7: THERE})).verdict == "working", "models may take long to load"


def test_a_driver_that_is_stopped_silent_or_stuck_is_told_apart():
    stopped = diagnose(evidence(status(), processes={1: replace(THERE, stopped=True)}))
    assert "kill -CONT 1" in stopped.advice
    silent = diagnose(evidence(status(), now=NOW + 100))
    assert silent.verdict == "driver in trouble" and "disk" in silent.culprit
    stuck = diagnose(evidence(replace(status(), loop_beat=NOW - 50, loop_place="mine.py:4 f")))
    assert stuck.verdict == "driver in trouble" and "mine.py:4 f" in stuck.culprit and "50 s" in stuck.headline
    far = replace(status(), driver=DriverStatus(1, "other-host", 5))
    assert diagnose(evidence(far)).verdict == "working"
    assert diagnose(evidence(far, now=NOW + 100)).verdict == "out of sight"


@pytest.mark.parametrize("process", [None, ProcessFacts(started=6, stopped=False)])
def test_a_driver_that_is_gone_or_another_process_by_now_is_dead(process):
    resume = how_to_resume(Path("runs/mine"), 4, ["step-6 is torn"], finished=16, in_flight=2)
    found = diagnose(evidence(status(), processes={1: process}, resume=resume, last_words=("the last line",)))
    assert found.verdict == "killed" and "process 1" in found.culprit
    assert "after step 4, with 16 finished groups; 2 that were" in found.advice and "step-6 is torn" in found.advice
    # Another run may be the latest one, with which `true` would go on.
    assert "resume_from_checkpoint=runs/mine" in found.advice
    assert any("the last line" in line for line in found.findings)


def test_a_run_whose_checkpoints_are_all_damaged_is_not_promised_to_go_on():
    advice = how_to_resume(Path("mine"), None, ["step-6 is torn"], finished=3, in_flight=0)
    assert advice == "step-6 is torn; no checkpoint is whole: begin a new run in another folder"
    assert diagnose(evidence(status(), processes={1: None}, resume=advice)).advice == advice


def test_what_is_known_of_a_dead_run_comes_from_its_folder(tmp_path):
    run = RunDirectory.create(str(tmp_path), "x")
    (run.checkpoints / "step-6" / "state").mkdir(parents=True)
    (run.logs / "driver.log").write_text("".join(f"line {number}\n" for number in range(LAST_BYTES)))
    found = diagnose(gather_evidence(run))
    assert "step-6 has no state/" in found.advice and "no checkpoint is whole" in found.advice
    assert found.findings[-1] == f"line {LAST_BYTES - 1}" and len(found.findings) == LAST_LINES


def test_what_a_run_said_at_its_end_is_the_culprit():
    ended = replace(status(), phase="ended")
    summary = {"status": "failed", "steps": 3, "error": "worker actor_train/0 died"}
    found = diagnose(evidence(ended, summary=summary, resume=how_to_resume(Path("mine"), None, [], 0, 0)))
    assert (found.verdict, found.culprit) == ("failed", "worker actor_train/0 died")
    assert "begins again" in found.advice
    well = diagnose(evidence(ended, summary={"status": "success", "steps": 9, "error": None}))
    assert well.is_well


def test_the_command_looks_at_a_folder_and_ends_with_a_code_that_tells(tmp_path, capsys):
    assert main(["doctor", str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err
    run = RunDirectory.create(str(tmp_path / "run"), "x")
    assert main(["doctor", str(run.root)]) == 1
    assert "before it had begun" in capsys.readouterr().out
    Summary(run.summary).finish("success")
    assert main(["doctor", "--json", str(run.root)]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "ended"
    run.status.write_text("{")
    assert main(["doctor", str(run.root)]) == 2
    assert "cannot be understood" in capsys.readouterr().err

"""What a run takes over from the process before it, and how its end is told when the journal fails too."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import os
import shutil

import pytest
from test_journal_keeper import SETTINGS, finished
from tiny import make_task, tiny_config, write_config

from roll.cli import main as cli
from roll.configs.loader import config_from_tree
from roll.data.records import Group
from roll.pipeline.context import resume_rollouts
from roll.pipeline.journal import JournalKeeper, forget_other_rollouts, journal_of
from roll.pipeline.resume import ResumePoint
from roll.rollout.clock import run_virtual
from roll.rollout.journal import RolloutProgress, read_journal
from roll.rollout.scheduler import RolloutScheduler, SchedulePlan
from roll.runtime.workers import WorkerDied
from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import describe_error

BATCH, STEPS = 2, 4


@pytest.fixture
def run(tmp_path):
    return RunDirectory.create(str(tmp_path / "run"), "addition")


class NoState:
    """Advantage settings that keep nothing between batches."""

    def load_state_dict(self, state):
        assert state == {}


def earlier_process(run: RunDirectory) -> None:
    """Before the first checkpoint: groups 0 and 1 are finished, 2 is dropped, 3 in flight, 4 finished."""
    keeper = JournalKeeper(run.journal)
    keeper.made_with(SETTINGS)
    for group_id in (0, 1, 4):
        keeper.group_finished(finished(group_id, 0, versions=(0,)))
    keeper.group_dropped(2, "filtered", 0)
    keeper.close()


def rolled_out_by_the_next(run: RunDirectory, settings) -> tuple[list[int], list[list[int]], list[str]]:
    """Groups that are rolled out, those of each batch, and what its owner is told; the ledger is checked throughout."""
    made, batches, told = [], [], []

    async def rollout(request) -> Group:
        made.append(request.group_id)
        await asyncio.sleep(1)
        return finished(request.group_id, request.start_version, versions=(0,)).result

    async def main():
        keeper = JournalKeeper(run.journal)
        plan = SchedulePlan(batch_size=BATCH, max_steps=STEPS, ratio=2.0, max_staleness=2)
        scheduler = RolloutScheduler(plan, itertools.count(), rollout, observer=keeper)
        resume_rollouts(ResumePoint(run, None), scheduler, NoState(), keeper, settings, told.append)
        keeper.made_with(settings)
        running = asyncio.create_task(scheduler.run())
        for step in range(STEPS):
            batches.append([group.group_id for group in await scheduler.next_batch()])
            scheduler.ledger.check()
            scheduler.training_step_done(step + 1)
            scheduler.weights_published(step + 1)
        await running
        keeper.close()
        counts = scheduler.ledger.counts()
        dropped = sum(number for name, number in counts.items() if name.startswith("dropped/"))
        assert counts["consumed"] == BATCH * STEPS == counts["issued"] - dropped

    run_virtual(main())
    trained_on = [group_id for batch in batches for group_id in batch]
    assert len(set(trained_on)) == len(trained_on)
    return made, batches, told


def test_with_the_same_settings_finished_groups_are_taken_over(run):
    earlier_process(run)
    made, batches, told = rolled_out_by_the_next(run, SETTINGS)
    assert sorted(made) == [3, 5, 6, 7, 8] and told == []
    assert {0, 1, 4} <= {group_id for batch in batches for group_id in batch}


def test_with_other_settings_every_group_is_made_again_and_that_is_said(run):
    earlier_process(run)
    warm = {**SETTINGS, "actor_infer.generating_args.temperature": 2.0}
    made, batches, told = rolled_out_by_the_next(run, warm)
    assert sorted(made) == list(range(BATCH * STEPS)), "the dropped one, which other settings may keep, as well"
    assert sorted(group_id for batch in batches for group_id in batch) == sorted(made)
    assert told == [
        "4 groups of after step 0 are made again, for these have changed: actor_infer.generating_args.temperature"
    ]
    assert rolled_out_by_the_next(run, warm)[2] == [], "once"


def test_a_beginning_takes_over_rollouts_of_the_same_model_and_prompts_only(run):
    made_of = "prompts model"
    forget_other_rollouts(run, made_of)
    earlier_process(run)
    records = list(read_journal(run.journal))
    forget_other_rollouts(run, made_of)
    assert len(records) == 5 and list(read_journal(run.journal)) == records
    forget_other_rollouts(run, "prompts other-model")
    assert list(read_journal(run.journal)) == []
    earlier_process(run)
    forget_other_rollouts(run, "prompts other-model")
    assert list(read_journal(run.journal)) == records


def test_rollouts_of_which_nobody_noted_the_model_are_not_taken_over(run):
    earlier_process(run)
    forget_other_rollouts(run, "prompts model")
    assert list(read_journal(run.journal)) == []


def lose_the_journal(run: RunDirectory, journal: JournalKeeper) -> None:
    """Its folder is gone, as with a disk that is."""
    shutil.rmtree(run.journal)
    journal.prune(RolloutProgress.at_start())


def test_a_journal_that_fails_at_the_end_does_not_hide_why_the_run_ended(run):
    config = config_from_tree({"pretrain": "model", "save_steps": 2})
    with pytest.raises(OSError, match="journal") as unwritten, journal_of(config, run) as journal:
        lose_the_journal(run, journal)
        raise WorkerDied("actor_train/0", "it was killed")
    text = describe_error(unwritten.value)
    assert "worker actor_train/0 died: it was killed" in text and str(run.journal) in text


def test_a_journal_whose_failure_ended_the_run_is_told_once(run):
    config = config_from_tree({"pretrain": "model", "save_steps": 2})
    with pytest.raises(ExceptionGroup) as failed, journal_of(config, run) as journal:
        lose_the_journal(run, journal)
        journal._thread.submit(lambda: None).result()
        try:
            journal.group_finished(finished(1, 0))
        except OSError as error:
            raise ExceptionGroup("stages", [error]) from None
    assert describe_error(failed.value).count("cannot write") == 1


def test_a_journal_that_fails_after_all_went_well_is_a_failure(run):
    config = config_from_tree({"pretrain": "model", "save_steps": 2})
    with pytest.raises(OSError, match="journal"), journal_of(config, run) as journal:
        lose_the_journal(run, journal)


def test_a_run_that_another_process_ends_before_this_one_holds_it_is_left_as_it_is(tmp_path, monkeypatch, capsys):
    """The lock is free again when it is asked for; what was found before that is old."""
    make_task(tmp_path)
    config = tiny_config(tmp_path, output_dir=str(tmp_path / "run"), resume_from_checkpoint=True)
    run = RunDirectory.create(str(tmp_path / "run"), "tiny")
    run.metrics.write_text('{"step": 1}\n')
    lock = fcntl.flock

    def lock_after_the_others_end(descriptor, operation):
        assert os.readlink(f"/proc/self/fd/{descriptor}") == str(run.root / ".lock")
        shutil.copytree(tmp_path / "model", run.checkpoints / "step-3")
        run.metrics.write_text('{"step": 3}\n')
        lock(descriptor, operation)

    monkeypatch.setattr("fcntl.flock", lock_after_the_others_end)
    assert cli.main(["--config", str(write_config(tmp_path, config))]) == cli.SUCCESS
    assert f"the run in {run.root} has all its 3 steps" in capsys.readouterr().out
    assert run.metrics.read_text() == '{"step": 3}\n' and (run.checkpoints / "step-3").is_dir()


def test_what_changed_is_said_also_of_a_run_that_has_ended(tmp_path, capsys):
    make_task(tmp_path)
    config = tiny_config(tmp_path, output_dir=str(tmp_path / "run"), resume_from_checkpoint=True)
    run = RunDirectory.create(str(tmp_path / "run"), "tiny")
    run.write_config(write_config(tmp_path, config).read_text())
    shutil.copytree(tmp_path / "model", run.checkpoints / "step-3")
    path = write_config(tmp_path, {**config, "logging_steps": 7})
    assert cli.main(["--config", str(path)]) == cli.SUCCESS
    printed = capsys.readouterr().out
    assert "changed: logging_steps: 1 -> 7 (harmless)" in printed and "has all its 3 steps" in printed

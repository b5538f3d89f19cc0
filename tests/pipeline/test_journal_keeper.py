"""What the scheduler tells becomes what a later process reads."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from roll.data.records import Group, Prompt, Sample
from roll.pipeline import journal as journal_keeper
from roll.pipeline.journal import ANSWERS, NOT_ON_RECORD, JournalKeeper, finished_again, other_settings
from roll.rollout.buffer import FinishedGroup
from roll.rollout.journal import RolloutProgress, read_journal, recover


def finished(group_id: int, start_version: int, versions=(3, 4)) -> FinishedGroup:
    tokens = np.array([7, *range(len(versions))], np.int32)
    sample = Sample(
        tokens,
        np.array([False, *[True] * len(versions)]),
        np.zeros(len(tokens), np.float32),
        np.array([-1, *versions], np.int32),
        "stop",
        score=1.5,
    )
    prompt = Prompt("p", "d", tokens[:1], "text")
    return FinishedGroup(group_id, "item", Group(group_id, prompt, [sample]), start_version)


def test_a_group_comes_back_as_the_scheduler_had_it(tmp_path):
    keeper = JournalKeeper(tmp_path / "journal")
    group = finished(5, 3)
    keeper.group_finished(group)
    group.result.samples[0].score = -1.0  # training changes samples after they were handed over
    keeper.group_dropped(6, "filtered", 4)
    keeper.went_back(2)
    keeper.close()
    kept, dropped, marker = read_journal(tmp_path / "journal")
    assert (kept.group_id, kept.version) == (5, 4), "its newest token is of version 4"
    again = finished_again(5, "item", kept.payload)
    assert (again.start_version, again.item, again.result.samples[0].score) == (3, "item", 1.5)
    assert (dropped.group_id, dropped.version, dropped.payload) == (6, 4, b"filtered")
    assert marker.version == 2


def test_a_group_comes_back_with_its_whole_prompt(tmp_path):
    """The journal leaves out what only scoring needs, and a stage of the user's own may read it."""
    group = finished(5, 3)
    whole = replace(group.result.prompt, ground_truth="7", metadata={"level": 2}, messages=[{"content": "text"}])
    group.result.prompt = whole
    keeper = JournalKeeper(tmp_path / "journal")
    keeper.group_finished(group)
    keeper.close()
    (kept,) = read_journal(tmp_path / "journal")
    assert finished_again(5, whole, kept.payload).result.prompt is whole


def test_a_picture_that_newer_weights_have_ended_goes_with_them(tmp_path):
    keeper = JournalKeeper(tmp_path / "journal")
    group = finished(5, 3, versions=(3, 3))
    group.result.samples[0].newest_version = 4
    keeper.group_finished(group)
    keeper.close()
    (kept,) = records = list(read_journal(tmp_path / "journal"))
    assert kept.version == 4
    assert finished_again(5, "item", kept.payload).result.samples[0].newest_version == 4
    back = [RolloutProgress(steps, 6, {}, (5,)) for steps in (3, 4)]
    assert [list(recover(records, each).finished) for each in back] == [[], [5]]


SETTINGS = {"actor_infer.generating_args.temperature": 1.0, "response_length": 8}


def open_journal(folder, settings, *groups) -> None:
    keeper = JournalKeeper(folder)
    keeper.made_with(settings)
    for group_id in groups:
        keeper.group_finished(finished(group_id, 0, versions=(0,)))
    keeper.close()


def counted(folder) -> list[int]:
    return sorted(recover(read_journal(folder), RolloutProgress.at_start()).finished)


def test_groups_count_as_long_as_the_settings_that_they_were_made_with_are_the_same(tmp_path):
    open_journal(tmp_path, SETTINGS, 0, 1)
    assert other_settings(tmp_path, SETTINGS) == []
    open_journal(tmp_path, SETTINGS, 2)
    assert counted(tmp_path) == [0, 1, 2]
    cold = {**SETTINGS, "actor_infer.generating_args.temperature": 0.5, "group_filter": "zero_variance"}
    assert other_settings(tmp_path, cold) == ["actor_infer.generating_args.temperature", "group_filter"]
    open_journal(tmp_path, cold, 3)
    assert counted(tmp_path) == [3], "also for a third process that is killed before its first checkpoint"
    open_journal(tmp_path, cold, 4)
    assert counted(tmp_path) == [3, 4]
    open_journal(tmp_path, SETTINGS)
    assert counted(tmp_path) == [], "what was made before the change does not come back with the settings"


def test_a_record_from_before_answers_were_in_it_is_still_good_and_gets_them(tmp_path):
    open_journal(tmp_path, SETTINGS, 0)
    assert other_settings(tmp_path, SETTINGS | {ANSWERS: "a"}) == []
    open_journal(tmp_path, SETTINGS | {ANSWERS: "a"}, 1)
    assert counted(tmp_path) == [0, 1]
    corrected = SETTINGS | {ANSWERS: "b"}
    assert other_settings(tmp_path, corrected) == [ANSWERS]
    open_journal(tmp_path, corrected, 2)
    assert counted(tmp_path) == [2]


def test_a_process_that_is_killed_before_it_noted_other_settings_is_followed_by_one_that_does(tmp_path, monkeypatch):
    open_journal(tmp_path, SETTINGS, 0)
    colder = {**SETTINGS, "response_length": 4}

    def killed(*_):
        raise KeyboardInterrupt

    keeper = JournalKeeper(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(journal_keeper, "write_atomically", killed)
        keeper.made_with(colder)
        keeper._thread.shutdown()
    assert counted(tmp_path) == [] and other_settings(tmp_path, colder) == ["response_length"]
    open_journal(tmp_path, colder, 0)
    assert counted(tmp_path) == [0] and other_settings(tmp_path, colder) == []


def test_groups_of_which_nobody_noted_how_they_were_made_are_made_again(tmp_path):
    keeper = JournalKeeper(tmp_path)
    keeper.group_finished(finished(0, 0, versions=(0,)))
    keeper.close()
    assert other_settings(tmp_path, SETTINGS) == [NOT_ON_RECORD]
    open_journal(tmp_path, SETTINGS)
    assert counted(tmp_path) == []


def test_a_group_without_tokens_counts_from_its_start(tmp_path):
    keeper = JournalKeeper(tmp_path)
    keeper.group_finished(finished(1, 3, versions=()))
    keeper.close()
    assert next(read_journal(tmp_path)).version == 3


def test_a_disk_that_does_not_keep_up_ends_the_run_before_memory_does(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_keeper, "MOST_BYTES_BEHIND", 500)
    keeper = JournalKeeper(tmp_path)
    answers = threading.Event()
    keeper._thread.submit(answers.wait)
    with pytest.raises(OSError, match="does not keep up.*GiB of groups wait") as failure:
        for group_id in range(20):
            keeper.group_finished(finished(group_id, 3))
    assert failure.value.filename == str(tmp_path)
    answers.set()
    keeper._thread.submit(lambda: None).result()
    keeper.group_finished(finished(99, 3))
    keeper.close()
    kept = [record.group_id for record in read_journal(tmp_path)]
    assert kept[-1] == 99 and 2 <= len(kept) < 20


def test_what_could_not_be_written_is_raised_at_the_next_group_and_at_the_end(tmp_path):
    keeper = JournalKeeper(tmp_path / "journal")
    keeper.prune(RolloutProgress.at_start())
    keeper._thread.submit(lambda: None).result()
    (tmp_path / "journal").rename(tmp_path / "gone")
    keeper.prune(RolloutProgress.at_start())
    keeper._thread.submit(lambda: None).result()
    with pytest.raises(OSError, match="journal"):
        keeper.group_finished(finished(1, 0))
    with pytest.raises(OSError, match="journal"):
        keeper.close()


def test_a_full_disk_is_named_at_the_end_too(tmp_path):
    keeper = JournalKeeper(tmp_path)
    keeper._journal._file.close()
    keeper._journal._file = open("/dev/full", "wb")
    keeper.group_finished(finished(1, 0))
    with pytest.raises(OSError, match="No space left on device") as full:
        keeper.close()
    assert full.value.filename == str(tmp_path)


def test_the_version_of_a_greedy_baseline_counts(tmp_path):
    keeper = JournalKeeper(tmp_path)
    group = finished(1, 3)
    group.result.baseline_score, group.result.baseline_version = 0.5, 9
    keeper.group_finished(group)
    keeper.close()
    (record,) = read_journal(tmp_path)
    assert record.version == 9 and finished_again(1, None, record.payload).result.baseline_version == 9


def test_pruning_reaches_the_files(tmp_path):
    keeper = JournalKeeper(tmp_path)
    keeper.group_finished(finished(0, 3))
    keeper.prune(RolloutProgress(5, 1, {}, ()))
    keeper.group_finished(finished(1, 5))
    keeper.close()
    assert list(recover(read_journal(tmp_path), RolloutProgress(5, 1, {}, ())).finished) == [1]


def test_whoever_waits_finds_everything_on_the_disk_or_gets_the_error(tmp_path, monkeypatch):
    async def scenario():
        keeper = JournalKeeper(tmp_path / "journal")
        for group_id in range(20):
            keeper.group_finished(finished(group_id, 0, versions=(0,)))
        await keeper.written()
        assert counted(tmp_path / "journal") == list(range(20))

        def fail(record):
            raise OSError("no space left")

        monkeypatch.setattr(keeper._journal, "append", fail)
        keeper.group_finished(finished(20, 0, versions=(0,)))
        with pytest.raises(OSError, match="no space left"):
            await keeper.written()

    asyncio.run(scenario())

"""`groups.jsonl` has the lengths and times of every group that was trained on or filtered."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from types import SimpleNamespace

import numpy as np
from tiny import tiny_config

from roll.configs.loader import config_from_tree
from roll.configs.run import RLVRConfig
from roll.data.records import Group, Prompt, Sample
from roll.pipeline.context import build_scheduler, paced
from roll.pipeline.groups import GroupLog, group_record
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.resume import ResumePoint, take_out_of_the_way
from roll.pipeline.stages import groups_of_steps
from roll.rollout.clock import run_virtual
from roll.rollout.journal import JournalRecord, RecordKind, RolloutProgress, dropped_record, recover, went_back_record
from roll.tracking.files import read_json_lines
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import WaitBoard


def sample(prompt, response, score=1.0, **more):
    mask = np.arange(prompt + response) >= prompt
    tokens = np.ones(prompt + response, np.int32)
    return Sample(tokens, mask, np.zeros(len(mask), np.float32), np.where(mask, 0, -1), "stop", score=score, **more)


def group(number, samples, **more):
    return Group(number, Prompt("p", "sums", np.ones(1, np.int32), "text"), samples, **more)


def test_groups_get_their_times_as_they_pass_and_filtered_ones_are_told(tmp_path):
    config = config_from_tree(
        tiny_config(tmp_path, rollout_batch_size=2, max_steps=2, async_generation_ratio=0, group_filter="zero_variance")
    )
    filtered = []

    async def make(asked):
        await asyncio.sleep(0)
        scores = (1.0, 1.0) if asked.group_id == 1 else (0.0, 1.0)
        return group(asked.group_id, [sample(3, 5, score) for score in scores], times={"generated": 1.0})

    async def main():
        side = SimpleNamespace(source=count)
        scheduler = build_scheduler(config, side, paced(make, 2, WaitBoard()), None, filtered.append)
        run = SimpleNamespace(scheduler=scheduler, config=config, first_step=0, least_groups=2)
        ended = asyncio.create_task(scheduler.run())
        made = []
        async for part in groups_of_steps(run):
            made += [each.result for each in part.groups]
            scheduler.training_step_done(part.step + 1)
            scheduler.weights_published(part.step + 1)
        await ended
        return made

    consumed = run_virtual(main())
    assert [each.group_id for each in filtered] == [1] and "consumed" not in filtered[0].times
    log = GroupLog(tmp_path / "groups.jsonl")
    log.write([*consumed, *filtered], step=2)
    log.close()
    lines = {line["group"]: line for line in read_json_lines(tmp_path / "groups.jsonl")}
    assert sorted(lines) == [0, 1, 2, 3, 4] and lines[1]["consumed"] is None
    for line in (lines[0], lines[4]):
        assert line["issued"] <= line["judged"] <= line["consumed"] and line["generated"] == 1.0
        assert (line["step"], line["prompt"], line["responses"]) == (2, 3.0, [5, 5]) and "waits" not in line


def test_an_episode_counts_all_its_samples_and_its_turns():
    turns = [np.array([-1, -1, 0, 0, 0], np.int32), np.array([-1, 1], np.int32)]
    parts = [sample(2, 3, episode=0, turns=turns[0]), sample(1, 1, episode=0, turns=turns[1]), sample(2, 4, episode=1)]
    record = group_record(group(7, parts, waits=[0.25, 1.5], times={"issued": 1.0}), step=3)
    assert record["responses"] == [4, 4] and record["prompt"] == 2.5
    assert record["turns"] == [2, 1] and record["waits"] == [0.25, 1.5]
    assert record["issued"] == 1.0 and record["generated"] is record["consumed"] is None


def test_a_filtered_group_is_in_the_file_once_after_a_kill_and_a_resume(tmp_path):
    """Killed in step 3, with a checkpoint of step 1: of the filtered groups, 1 was dropped before it; of 4 and 5 only 4
    may stay dropped, since 5 used newer weights; 6 was dropped as the process was killed: it is not in the journal."""
    run = RunDirectory.create(str(tmp_path / "run"), "test")
    recorder = RunRecorder(RLVRConfig(track_with=[], max_steps=9), run, started=time.monotonic(), decoder=None)

    def filtered(*numbers):
        for number in numbers:
            recorder.filtered(group(number, [sample(3, 5)]))

    def steps():
        return [(line["group"], line["step"]) for line in read_json_lines(run.groups)]

    def trained(step, *numbers):
        recorder._groups.write([group(each, [sample(3, 5)], times={"consumed": 1.0}) for each in numbers], step)
        recorder._steps_done = step

    filtered(1)
    trained(1, 0, 2)
    filtered(4)
    trained(2, 3)
    filtered(5, 6)
    before = [(1, 1), (0, 1), (2, 1), (4, 2), (3, 2), (5, 3), (6, 3)]
    assert steps() == before, "at once, and not at the end of the step"

    progress = RolloutProgress(1, 4, {"filtered": 1}, (3,))
    journal = [dropped_record(1, 0, "filtered"), dropped_record(4, 1, "filtered"), dropped_record(5, 2, "filtered")]
    recovered = recover([*journal, JournalRecord(RecordKind.FINISHED, 7, 0)], progress)
    for _ in range(2):  # the process that goes back is killed, too
        recorder.go_back(1, lambda: take_out_of_the_way(point(run, progress)))
        recorder.made_again(recovered)
        assert steps() == [(1, 1), (0, 1), (2, 1), (4, 2)]
        filtered(5)
        assert steps()[-1] == (5, 2)
    recorder.made_again(recover([*journal, went_back_record(1), dropped_record(5, 1, "filtered")], progress))
    assert steps() == [(1, 1), (0, 1), (2, 1), (4, 2), (5, 2)]
    recorder.close("success")


def point(run, progress):
    return ResumePoint(run, SimpleNamespace(step=progress.steps_done, state=SimpleNamespace(progress=progress)))

import json
import math
import time
from functools import partial
from pathlib import Path

import pytest

from roll.configs.plugins import PlugIn
from roll.configs.run import TRACKERS, RLVRConfig
from roll.pipeline.recorder import RunRecorder
from roll.report.lanes import read_trace
from roll.runtime.usage import Usage
from roll.tracking.run_directory import RunDirectory
from roll.tracking.trackers import read_metrics


class Letters:
    """Token 1 is ``b``."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def test_work_that_still_goes_on_at_the_end_of_a_step_is_not_idle_time(tmp_path):
    config = RLVRConfig(track_with=[])
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    recorder = RunRecorder(config, directory, started=time.monotonic(), decoder=Letters())
    start = time.time()
    with recorder.busy("actor_train"):
        middle = start + 1.0
        assert recorder._rates([], (start, middle), ())["idle/actor_train"] < 0.2
    assert recorder._rates([], (start, middle), ())["idle/actor_train"] < 0.2
    recorder.close("success")


def test_a_clock_that_is_set_back_changes_no_length_of_a_step(tmp_path, monkeypatch):
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    recorder = RunRecorder(RLVRConfig(track_with=[]), directory, started=time.monotonic(), decoder=Letters())
    recorder.start_clock()
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600)
    time.sleep(0.01)
    metrics: dict[str, float] = {}
    recorder.supervised_step(metrics, 1, [Usage()])
    assert 0.01 <= metrics["time/step"] < 3600
    recorder.close("success")


def test_the_slowest_replica_of_a_step_is_recorded(tmp_path):
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    recorder = RunRecorder(RLVRConfig(track_with=[]), directory, started=time.monotonic(), decoder=Letters())

    def rates(*made):
        engines = [
            {"name": f"actor_infer/{number}", "generated_tokens": tokens, "busy_seconds": seconds}
            for number, (tokens, seconds) in enumerate(made)
        ]
        return recorder._rates(engines, (0.0, 1.0), ())

    first = rates((100, 1.0), (100, 1.0), (100, 4.0))
    assert (first["engine/slowest"], first["engine/slowest_speed"]) == (2.0, 0.25)
    # Of the next step alone; a replica that did nothing, or was started again, is not compared.
    second = rates((150, 2.0), (200, 2.0), (500, 4.5))
    assert (second["engine/slowest"], second["engine/slowest_speed"]) == (0.0, 50 / 450)
    assert "engine/slowest" not in rates((200, 3.0), (200, 2.0), (10, 0.1))
    recorder.close("success")


def test_work_of_other_processes_is_on_the_timeline_once(tmp_path):
    config = RLVRConfig(track_with=[])
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    recorder = RunRecorder(config, directory, started=time.monotonic(), decoder=Letters())
    start = time.time()
    recorder._draw({"actor_infer/1": [(start, start + 1)], "rewards.sums": [(start + 0.5, start + 1)]})
    recorder._draw({"actor_infer/1": [(start, start + 2), (start + 3, start + 4)], "rewards.sums": []})
    recorder.close("success")
    lanes = {lane.name: lane.spans for lane in read_trace(directory.timeline).lanes}
    assert {name: [round((span.end - span.start) / 1e6, 3) for span in spans] for name, spans in lanes.items()} == {
        "actor_infer/1": [1.0, 1.0, 1.0], "rewards.sums/all": [0.5],
    }  # fmt: skip


def test_a_reward_with_a_slash_in_its_name_is_not_idle_while_it_works(tmp_path):
    recorder = RunRecorder(RLVRConfig(track_with=[]), RunDirectory.create(str(tmp_path / "run"), "test"),
                           started=time.monotonic(), decoder=Letters())  # fmt: skip
    start = time.time()
    recorder._draw({"rewards.openai/gsm8k": [(start, start + 1)]})
    assert recorder.timeline.idle_share("rewards.openai/gsm8k", (start, start + 2)) == pytest.approx(0.5)
    recorder.close("success")


def test_a_plug_in_tracker_is_told_what_the_metrics_file_is_told_and_how_the_run_ended(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[1] / "tracking"))
    monkeypatch.setitem(TRACKERS.built_in, "diary", PlugIn("odd_plug_ins:Diary"))
    config = RLVRConfig(exp_name="sums", track_with="diary", tracker_kwargs={"diary": {"after": 7}})
    directory = RunDirectory.create(str(tmp_path / "run"), "sums")
    recorder = RunRecorder(config, directory, started=time.monotonic(), decoder=Letters())
    metrics = {"val/sums/accuracy": 0.25, "actor/kl": math.nan}
    recorder.show(metrics, 0)
    recorder.log(metrics, 0)
    assert recorder.close("failed", RuntimeError("engine gone; api_key=hush")) == "failed"
    (folder,) = [path for path in directory.trackers.iterdir() if path.is_dir()]
    begun, logged, ended = [json.loads(line) for line in (folder / "diary.jsonl").read_text().splitlines()]
    assert begun["run"]["config"]["tracker_kwargs"] == {"diary": {"after": 7}} and begun["run"]["name"] == "sums"
    (record,) = read_metrics(directory.metrics)
    assert {name: value for name, value in logged.items() if name != "pid"}.keys() == record.keys() - {
        "metrics/non_finite"
    }
    assert logged["step"] == 0 and math.isnan(logged["actor/kl"])
    assert ended["exit_code"] == 1 and ended["ending"]["error"] == "RuntimeError: engine gone; api_key=***"
    assert ended["ending"]["summary"]["val/last"] == {"sums": 0.25}
    assert list(directory.tensorboard.iterdir()), "TensorBoard is written in any case"


def test_an_end_that_cannot_be_written_is_told_and_no_success(tmp_path, capsys):
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    for status, error in (("success", None), ("failed", RuntimeError("the engine broke"))):
        recorder = RunRecorder(RLVRConfig(track_with=[]), directory, started=time.monotonic(), decoder=Letters())
        directory.summary.unlink()
        directory.summary.mkdir()  # nothing can take its place any more
        recorder.ended(status, error)
        assert recorder.close(status, error) == "failed"
        told = capsys.readouterr()
        assert ("the engine broke" if error else str(directory.summary)) in told.out + told.err
        directory.summary.rmdir()


def test_every_file_is_closed_though_one_cannot_be_completed(tmp_path, monkeypatch):
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    recorder = RunRecorder(RLVRConfig(), directory, started=time.monotonic(), decoder=Letters())
    closed = []

    def closes(name, problem=None):
        closed.append(name)
        if problem is not None:
            raise problem

    for name in ("_samples", "_metrics", "_events"):
        monkeypatch.setattr(getattr(recorder, name), "close", partial(closes, name))
    monkeypatch.setattr(recorder.timeline, "close", partial(closes, "timeline", OSError("disk full")))
    assert recorder.close("success") == "failed"
    assert set(closed) == {"timeline", "_samples", "_metrics", "_events"}
    assert "disk full" in json.loads(directory.summary.read_text())["error"]

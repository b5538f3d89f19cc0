import time

from roll.configs.schema import RLVRConfig
from roll.pipeline.recorder import RunRecorder
from roll.tracking.report.lanes import read_trace
from roll.tracking.run_directory import RunDirectory


class Letters:
    """Token 1 is ``b``."""

    def decode(self, token_ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + token_id) for token_id in token_ids)


def test_work_that_still_goes_on_at_the_end_of_a_step_is_not_idle_time(tmp_path):
    config = RLVRConfig(trackers=[])
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    recorder = RunRecorder(config, directory, started=time.monotonic(), decoder=Letters())
    start = time.time()
    with recorder.busy("actor_train"):
        middle = start + 1.0
        assert recorder._rates([], (start, middle), ())["idle/actor_train"] < 0.2
    assert recorder._rates([], (start, middle), ())["idle/actor_train"] < 0.2
    recorder.close("success")


def test_work_of_other_processes_is_on_the_timeline_once(tmp_path):
    config = RLVRConfig(trackers=[])
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


def test_an_end_that_cannot_be_written_is_told_and_no_success(tmp_path, capsys):
    directory = RunDirectory.create(str(tmp_path / "run"), "test")
    for status, error in (("success", None), ("failed", RuntimeError("the engine broke"))):
        recorder = RunRecorder(RLVRConfig(trackers=[]), directory, started=time.monotonic(), decoder=Letters())
        directory.summary.unlink()
        directory.summary.mkdir()  # nothing can take its place any more
        recorder.ended(status, error)
        assert recorder.close(status, error) == "failed"
        told = capsys.readouterr()
        assert ("the engine broke" if error else str(directory.summary)) in told.out + told.err
        directory.summary.rmdir()

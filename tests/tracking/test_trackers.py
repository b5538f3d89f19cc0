"""TensorBoard reads back what was logged."""

import math
import subprocess
import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from roll.tracking.trackers import TensorBoardTracker


def scalars(folder):
    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(e.step, e.value, e.wall_time) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_back_every_step_before_the_tracker_is_closed(tmp_path):
    times = iter([100.0, 200.0])
    tracker = TensorBoardTracker(tmp_path / "tensorboard", clock=lambda: next(times))
    tracker.log({"reward/mean": 0.25, "lag/max": 1}, 1)
    tracker.log({"reward/mean": 0.5, "val/addition/accuracy": 0.75}, 2)
    assert scalars(tmp_path / "tensorboard") == {
        "reward/mean": [(1, 0.25, 100.0), (2, 0.5, 200.0)],
        "lag/max": [(1, 1.0, 100.0)],
        "val/addition/accuracy": [(2, 0.75, 200.0)],
    }
    tracker.close()
    tracker.close()


def test_tensorboard_takes_values_that_are_not_finite(tmp_path):
    tracker = TensorBoardTracker(tmp_path)
    tracker.log({"actor/kl": math.nan, "actor/loss": 1.0}, 1)
    tracker.close()
    read = scalars(tmp_path)
    assert math.isnan(read["actor/kl"][0][1]) and read["actor/loss"][0][1] == 1.0


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/tensorboard"):
        TensorBoardTracker(tmp_path / "file" / "tensorboard")


def test_writing_events_loads_neither_torch_nor_tensorflow(tmp_path):
    code = (
        "import sys; from pathlib import Path; from roll.tracking.trackers import TensorBoardTracker\n"
        f"tracker = TensorBoardTracker(Path({str(tmp_path)!r})); tracker.log({{'a': 1.0}}, 1); tracker.close()\n"
        "sys.exit(' '.join({'torch', 'tensorflow', 'ray'} & set(sys.modules)) or None)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_a_resumed_run_shows_each_step_once(tmp_path):
    for value, after_step, steps in ((1.0, None, range(1, 6)), (2.0, 3, range(4, 7))):
        tracker = TensorBoardTracker(tmp_path, after_step=after_step)
        for step in steps:
            tracker.log({"a": value}, step)
        tracker.close()
        time.sleep(1.1)  # TensorBoard reads files in the order of their names, which begin with the second
    assert [(step, value) for step, value, _ in scalars(tmp_path)["a"]] == [
        (1, 1.0), (2, 1.0), (3, 1.0), (4, 2.0), (5, 2.0), (6, 2.0),
    ]  # fmt: skip

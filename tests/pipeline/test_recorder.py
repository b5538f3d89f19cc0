import time

from roll.configs.schema import RLVRConfig
from roll.pipeline.recorder import RunRecorder
from roll.tracking.run_directory import RunDirectory


def test_work_that_still_goes_on_at_the_end_of_a_step_is_not_idle_time(tmp_path):
    config = RLVRConfig(trackers=[])
    recorder = RunRecorder(config, RunDirectory.create(str(tmp_path / "run"), "test"), started=time.monotonic())
    start = time.time()
    with recorder.busy("actor_train"):
        middle = start + 1.0
        assert recorder._rates([], (start, middle), False)["idle/actor_train"] < 0.2
    assert recorder._rates([], (start, middle), False)["idle/actor_train"] < 0.2
    recorder.close("success")

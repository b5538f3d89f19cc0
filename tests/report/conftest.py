"""A run's folder, written by the same classes that write real ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from roll.tracking.run_directory import RunDirectory
from roll.tracking.summary import ReadableSample, ReadableTokens, SampleLog, Summary
from roll.tracking.timeline import Timeline
from roll.tracking.trackers import MetricsLog

CONFIG = """\
pipeline: rlvr
exp_name: additions
max_steps: 3
async_generation_ratio: 1.0
actor_train:
  device_mapping: [0]
actor_infer:
  device_mapping: [1]
validation:
  mode: pause
"""


def metrics_of(step: int) -> dict[str, float]:
    """Of a training step in which the engine is mostly idle."""
    return {
        "reward/mean": 0.1 + step / 7,
        "reward/sums/mean": 0.1 + step / 7,
        "actor/loss": -1e-17 * step,
        "actor/grad_norm": 10.0**-step,
        "actor/lag_0/share": 0.25,
        "actor/lag_1/share": 0.75,
        "response/tokens": 30.0,
        "time/step": 2.0,
        "time/train": 1.8,
        "idle/actor_infer": 0.6,
        "idle/actor_train": 0.1,
        "tokens_per_second/actor_infer": 20.0,
        "weights/gather_seconds": 0.1 / 3,
        "weights/stall_seconds": 0.001,
        "ledger/issued": 10.0 * step,
        "ledger/consumed": 8.0 * step,
        "ledger/dropped/filtered": 2.0 * step,
        "my/own/metric": float(step),
    }


def sample_of(step: int, **changes) -> ReadableSample:
    tokens = ReadableTokens(["4", "6"], [step - 1, step - 1], [0.5, 0.5], [None, None])
    sample = ReadableSample(step, "train", "sums", 17, "12+34=", "46", 1.0, 0.5, (step - 1, step - 1), "stop", tokens)
    return replace(sample, **changes)


def draw(timeline: Timeline, steps: int) -> None:
    """Ten seconds of start, then steps of two seconds: rollout waits, train works 1.8 s of each."""
    timeline.transition("validation", "running", at=10.0)
    timeline.transition("validation", "idle", at=10.0)
    for step in range(steps):
        start = 10.0 + 2 * step
        timeline.transition("stage/rollout", "waiting for input", at=start)
        timeline.transition("stage/train", "waiting for input", at=start)
        timeline.transition("stage/train", "running", at=start + 0.2)
        timeline.busy("actor_infer", start, start + 0.8)
        timeline.busy("actor_train", start + 0.2, start + 2)
        timeline.transition("stage/param_update", "waiting for input", at=start)
        timeline.transition("stage/param_update", "running", at=start + 1.9)
    timeline.close(at=10.0 + 2 * steps)


@pytest.fixture
def make_run(tmp_path):
    """Writes a finished run of some steps; keywords change its parts."""

    def make(steps=3, metrics=metrics_of, samples=None, config=CONFIG, status="success", error=None):
        run = RunDirectory.create(str(tmp_path / "run"), "additions")
        run.write_config(config)
        summary = Summary(run.summary, clock=lambda: 75.5, started=0.0)
        log = MetricsLog(run.metrics)
        for step in range(steps + 1):
            record = metrics(step) if step else {"val/sums/accuracy": 0.25}
            if step == steps and step:
                record["val/sums/accuracy"] = 0.875
            log.log(record, step)
            if step in (0, 1, steps):
                summary.update(record, step)
        log.close()
        written = SampleLog(run.samples)
        written.write([sample_of(step) for step in range(1, steps + 1)] if samples is None else samples)
        written.close()
        draw(Timeline(run.timeline, clock=lambda: 0.0), steps)
        if status != "running":
            summary.finish(status, error, ledger={"issued": 10, "consumed": 8, "dropped/filtered": 2})
        (run.logs / "driver.log").write_text("the last words of the driver\n")
        return run

    return make


@pytest.fixture
def make_sample():
    return sample_of

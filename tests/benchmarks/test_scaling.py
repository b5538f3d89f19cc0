"""The tables of docs/scaling.md: efficiency against the base, and floors that a simulated step does not undercut."""

from __future__ import annotations

import pytest
from scaling import LONGEST, Row, configuration, floors, lines

from roll.simulation.costs import costs_of
from roll.simulation.inputs import read_inputs
from roll.simulation.run import simulate


def test_efficiency_is_the_work_of_a_gpu_over_that_of_the_base():
    def row(gpus, samples, seconds):
        return Row(gpus, samples, {(1.0, False): seconds}, {"driver": 1.0})

    weak = lines([row(8, 64, 10.0), row(32, 256, 20.0), row(128, 1024, 40.0)], "weak")
    assert [line.split(" | ")[2] for line in weak[2:]] == ["10.0 s, 2.00", "20.0 s, 1.00", "40.0 s, 0.50"]
    strong = lines([row(8, 64, 16.0), row(32, 64, 8.0)], "strong")
    assert strong[0] == "| GPUs | samples | ratio 1 | driver |" and strong[3] == "| 32 | 64 | 8.0 s, 0.50 | 1.0 s |"


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_no_step_is_shorter_than_its_floors(ratio):
    inputs = read_inputs(None, ["lengths.median=3000", "lengths.prompt=256", "driver.sample_seconds=0.1"])
    config = configuration(16, 32, ratio, streams=False)
    found, taken = floors(config, inputs), simulate(config, inputs).step_seconds
    assert found["driver"] == pytest.approx(0.1 * 32 * 8)
    assert found["longest response"] > LONGEST * costs_of(config, inputs).engine.step[1]
    assert taken > max(found["driver"], found["trainer"] * 0.9, 0.9 * found["longest response"] / (1 + ratio))

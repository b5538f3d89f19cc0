"""The settings of the comparison with CPU runs can work, and differ in what their names say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import simulation_on_cpu
from simulation_on_cpu import CALIBRATING, PREDICTED, WORLDS

from roll.check.config import _faults, read_config


@pytest.mark.parametrize("name", WORLDS)
def test_settings_can_work(name, tmp_path, monkeypatch):
    configs = {}

    def record(file, out, settings):
        configs[out.name] = read_config(file, [f"{key}={value}" for key, value in settings.items()])

    monkeypatch.setattr(simulation_on_cpu, "run_file", record)
    arguments = SimpleNamespace(steps=14, engine="hf_infer")
    for setting in (*CALIBRATING, *PREDICTED):
        out = tmp_path / f"{setting.replace(' ', '-')}-0"
        simulation_on_cpu.run(WORLDS[name], tmp_path, setting, out, arguments)
    ratios = {setting: config.async_generation_ratio for setting, config in configs.items()}
    assert ratios == {"ratio-0-0": 0, "ratio-1-0": 1, "ratio-0.5-0": 0.5, "ratio-2-0": 2, "half-the-batch-0": 1,
                      "streaming-0": 0}  # fmt: skip
    assert configs["streaming-0"].actor_train.stream_groups is True
    assert 2 * configs["half-the-batch-0"].rollout_batch_size == configs["ratio-1-0"].rollout_batch_size
    for config in configs.values():
        problems = [each for each in _faults(config) if str(tmp_path) not in each.message]
        assert not problems, problems
    assert Path(configs["ratio-0-0"].pretrain) == tmp_path / "model"


def test_the_last_steps_that_nothing_is_generated_for_are_left_out_and_whole_runs_are_known(tmp_path):
    seconds = [9.0, 9.0, 1.0, 2.0, 3.0, 0.5, 0.25]
    lines = [json.dumps({"step": number, "time/step": each}) for number, each in enumerate(seconds, 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert simulation_on_cpu.mean_step(tmp_path, 2) == 2.0
    assert simulation_on_cpu.mean_step(tmp_path, 0) == pytest.approx(1.35)
    assert not simulation_on_cpu.ended_well(tmp_path)
    for status in ("failed", "success"):
        (tmp_path / "summary.json").write_text(json.dumps({"status": status}))
        assert simulation_on_cpu.ended_well(tmp_path) == (status == "success")

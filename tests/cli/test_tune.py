"""`roll train --tune`: probes of a real system, here one that takes what a simulation says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from runs import placed
from tiny import make_task, tiny_config, write_config

from roll.check.config import read_config
from roll.cli import tune
from roll.cli.main import Ended, dotted_options, main
from roll.cli.tune import STEPS, Probe, TuneFailed, Tuning, is_shorter, measured, probe_config
from roll.configs.errors import ConfigError
from roll.pipeline.resume import changes
from roll.simulation.inputs import read_inputs
from roll.tracking.files import read_json_lines
from tests.simulation.test_advice import KNOWN, write_run
from tests.simulation.test_simulate import GPUS

FEW_ENGINES = {
    "pretrain": "Qwen/Qwen2.5-1.5B",
    "cluster": {"device": "cuda", "num_devices_per_node": 8},
    "actor_train__device_mapping": "0-5",
    "actor_infer__device_mapping": "6-7",
    "actor_infer__strategy_args": {"strategy_name": "vllm", "strategy_config": {"max_num_seqs": 4}},
    "async_generation_ratio": 0,
}
SLIGHT = np.linspace(0.99, 1.01, STEPS)
"""Tokens of the steps of a probe over their mean."""


@pytest.fixture(autouse=True)
def devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(tune, "DRAWS", 0)


class System:
    """What probes measure: a world in which the engine is slow. ``broken``: number of a probe that fails."""

    def __init__(self, broken=None, interrupted_at=None):
        self.truth = read_inputs(None, [*KNOWN, "engine.scale=4"])
        self.broken, self.interrupted_at = broken, interrupted_at
        self.probed = []

    def probe(self, config, steps):
        place = Path(config.output_dir)
        self.probed.append(config)
        if len(self.probed) in (self.broken, self.interrupted_at):
            place.mkdir(parents=True)
            (place / "summary.json").write_text(json.dumps({"error": "out of memory"}))
            if len(self.probed) == self.interrupted_at:
                raise KeyboardInterrupt
            return
        write_run(place, config, self.truth, factors=SLIGHT[:steps])


@pytest.fixture
def file(tmp_path):
    make_task(tmp_path)
    changes = {**GPUS, **FEW_ENGINES, "eval_steps": 2, "save_steps": 2, "track_with": ["tensorboard"],
               "validation": {"data_args": {"file_name": str(tmp_path / "val.jsonl")}}}  # fmt: skip
    return str(write_config(tmp_path, tiny_config(tmp_path, **changes)))


def tuning(file, system, max_lag=None, overrides=()):
    folder = Path(file).parent / "out" / "tune"
    folder.mkdir(parents=True, exist_ok=True)
    return Tuning(folder, file, overrides, read_config(file, overrides), max_lag, system.probe), folder


def test_what_measurably_helps_is_kept_and_what_is_learned_stays(file, capsys, monkeypatch):
    monkeypatch.setattr(tune, "DRAWS", 4)
    system = System()
    tuned, folder = tuning(file, system)
    best = tuned.best_of(3)
    lines = read_json_lines(folder / "probes.jsonl")
    assert 2 <= len(lines) == len(system.probed) <= 3
    first, second = lines[:2]
    assert first["overrides"] == [] and first["predicted"] is None and first["kept"]
    nominal, low, high = second["predicted"]
    assert low < nominal < high and nominal == pytest.approx(second["step_seconds"], rel=0.3)
    assert best.overrides and best.step_seconds < 0.9 * first["step_seconds"]
    own = probe_config(read_config(file), folder / "probe-1")
    for config in system.probed:
        assert {change.judgement for change in changes(own, config)} <= {"harmless"}
    assert "--max-lag" in capsys.readouterr().out


def test_a_lag_that_is_allowed_lets_the_ratio_change(file):
    system = System()
    best = tuning(file, system, max_lag=1)[0].best_of(3)
    assert any(config.async_generation_ratio > 0 for config in system.probed)
    assert any(each.startswith("async_generation_ratio=") for each in best.overrides)
    assert all(config.async_generation_ratio <= 1 for config in system.probed)


def test_a_probe_that_fails_is_named_and_skipped(file, capsys):
    tuned, folder = tuning(file, System(broken=2), max_lag=1)
    best = tuned.best_of(3)
    first, second, *others = read_json_lines(folder / "probes.jsonl")
    assert "out of memory" in second["failure"] and second["step_seconds"] is None and not second["kept"]
    assert "failed and skipped: out of memory" in capsys.readouterr().out
    assert best.number != 2
    assert others and all(other["overrides"] not in (first["overrides"], second["overrides"]) for other in others)


def test_a_first_probe_that_fails_ends_the_tuning(file):
    tuned, folder = tuning(file, System(broken=1))
    with pytest.raises(TuneFailed, match="out of memory"):
        tuned.best_of(2)
    assert not (folder / "probes.jsonl").exists()


def test_an_interrupted_tuning_goes_on_after_its_last_finished_probe(file):
    whole, folder = tuning(file, System())
    expected = whole.best_of(3)
    folder.rename(folder.with_name("other"))
    tuned, folder = tuning(file, System(interrupted_at=2))
    with pytest.raises(KeyboardInterrupt):
        tuned.best_of(3)
    assert len(read_json_lines(folder / "probes.jsonl")) == 1
    again = System()
    assert tuning(file, again)[0].best_of(3) == expected
    assert [Path(config.output_dir).name for config in again.probed][0] == "probe-2"


def test_probes_of_another_configuration_are_refused(file):
    system = System()
    tuning(file, system)[0].best_of(2)
    with pytest.raises(ConfigError, match="another configuration"):
        tuning(file, system, overrides=["response_length=512"])


def test_a_probe_is_without_what_belongs_to_the_run(file, tmp_path):
    config = probe_config(read_config(file), tmp_path / "probe-1")
    assert (config.save_steps, config.eval_steps, config.validation, config.track_with) == (0, 0, None, [])
    assert config.output_dir == str(tmp_path / "probe-1")
    assert config.max_steps > STEPS


def test_noise_is_no_gain():
    best = Probe(1, "as it is", [], None, step_seconds=1.0, error=0.05)
    assert is_shorter(Probe(2, "b", [], None, step_seconds=0.8, error=0.05), best)
    assert not is_shorter(Probe(2, "b", [], None, step_seconds=0.9, error=0.05), best)
    assert not is_shorter(Probe(2, "b", [], None, step_seconds=0.99, error=0.0), best)
    assert not is_shorter(Probe(2, "b", [], None, failure="it died"), best)


def test_a_probe_with_too_few_steps_has_failed(tmp_path):
    lines = [{"step": step, "time/step": 1.0} for step in range(1, STEPS)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "ended early" in measured(Probe(1, "as it is", [], None), tmp_path).failure


@pytest.fixture
def started(monkeypatch):
    """Configurations of the runs that the command starts."""
    configs = []

    def run(path, load, started, begins=None):
        configs.append(load())
        return Ended(0)

    monkeypatch.setattr(tune, "run_to_its_end", run)
    monkeypatch.setattr(tune, "end_in_order_on_signals", lambda: None)
    return configs


def test_the_run_starts_from_the_chosen_settings_and_nothing_else_changes(file, tmp_path, monkeypatch, started):
    system, out = System(), tmp_path / "out"
    monkeypatch.setattr(tune, "run_probe", system.probe)
    assert main(["train", file, f"output_dir={out}", "--tune", "2", "max_steps=5"]) == 0
    written = yaml.safe_load((out / "tune" / "chosen.yaml").read_text())
    (probe,) = [line for line in read_json_lines(out / "tune" / "probes.jsonl")[1:] if line["kept"]]
    assert written == dotted_options(probe["overrides"])
    assert started == [read_config(file, [f"output_dir={out}", "max_steps=5", *probe["overrides"]])]
    # What was tuned is not tuned again, neither before the run begins nor when it goes on.
    assert main(["train", file, f"output_dir={out}", "max_steps=5", "--tune", "3"]) == 0
    (out / "metrics.jsonl").touch()
    go_on = ["resume_from_checkpoint=true", f"output_dir={out}", "max_steps=5"]
    assert main(["train", file, *go_on, "--tune", "2"]) == 0
    assert len(system.probed) == 2
    assert started[1] == started[0]
    assert started[2] == read_config(file, [*go_on, *probe["overrides"]])


def test_without_a_folder_one_is_made_and_is_the_latest_once_the_run_begins(file, tmp_path, monkeypatch, started):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tune, "run_probe", System().probe)
    assert main(["train", file, "--tune", "2"]) == 0
    (place,) = (tmp_path / "output" / "tiny").iterdir()
    assert started[0].output_dir == str(Path("output") / "tiny" / place.name)
    assert (place / "tune" / "chosen.yaml").exists()


@pytest.mark.tier("all")
def test_a_whole_run_is_tuned_and_computes_what_it_would_without_probes(tmp_path, ray_cluster, monkeypatch):
    # Whatever the probes measure, a change is kept, but not streaming, where the order of events decides last digits.
    monkeypatch.setattr(tune, "is_shorter", lambda probe, best: "stream_groups" not in str(probe.overrides))
    make_task(tmp_path)
    tree = tiny_config(tmp_path, async_generation_ratio=0, save_steps=2, track_with=["tensorboard"])
    file = str(write_config(tmp_path, placed(tree, ray_cluster)))
    tuned, plain = tmp_path / "tuned", tmp_path / "plain"
    assert main(["train", file, f"output_dir={tuned}", "--tune", "2"]) == 0
    probes = read_json_lines(tuned / "tune" / "probes.jsonl")
    assert probes[0]["step_seconds"] > 0
    for probe in probes:
        place = tuned / "tune" / f"probe-{probe['number']}"
        assert not list((place / "checkpoints").iterdir()) and not (place / "tensorboard").exists()
    chosen = [probe for probe in probes if probe["kept"]][-1]["overrides"]
    assert main(["train", file, f"output_dir={plain}", *chosen]) == 0
    assert read_json_lines(tuned / "metrics.jsonl")[0]["step"] == 0
    for run in (tuned, plain):
        assert (run / "checkpoints" / "step-3").is_dir()
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        values = [[each.get(name) for each in read_json_lines(run / "metrics.jsonl")] for run in (tuned, plain)]
        assert values[0] == values[1] and any(values[0])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tune", "1"], "--tune"),
        (["--tune", "2", "--max-lag", "-1"], "--max-lag"),
        (["--tune", "2", "--max-lag", "1", "async_generation_ratio=2"], "2 versions old"),
        (["--tune", "2", "weight_update.mode=pull"], "not simulated"),
        (["--tune", "2", "resume_from_checkpoint=nowhere"], "resume_from_checkpoint"),
    ],
)
def test_what_cannot_be_tuned_is_refused_before_anything_starts(file, monkeypatch, started, capsys, arguments, told):
    monkeypatch.chdir(Path(file).parent)
    system = System()
    monkeypatch.setattr(tune, "run_probe", system.probe)
    assert main(["train", file, *arguments]) == 2
    assert told in capsys.readouterr().err
    assert not system.probed and not started
    assert not list(Path("output").glob("*/*")), "a folder is left"


def test_probes_are_not_made_for_a_folder_that_holds_a_run(file, tmp_path, monkeypatch, started, capsys):
    system, out = System(), tmp_path / "out"
    monkeypatch.setattr(tune, "run_probe", system.probe)
    out.mkdir()
    (out / "metrics.jsonl").touch()
    assert main(["train", file, f"output_dir={out}", "--tune", "2"]) == 2
    assert "resume_from_checkpoint: true" in capsys.readouterr().err
    assert not system.probed and not started


def test_what_was_found_with_a_larger_lag_is_not_taken_with_a_smaller_one(file, tmp_path, monkeypatch, started, capsys):
    monkeypatch.setattr(tune, "run_probe", System().probe)
    command = ["train", file, f"output_dir={tmp_path / 'out'}", "--tune", "3"]
    assert main([*command, "--max-lag", "1"]) == 0 and started[0].async_generation_ratio > 0
    for less in ([], ["--max-lag", "0"]):
        assert main([*command, *less]) == 2
        assert "--max-lag" in capsys.readouterr().err
    (tmp_path / "out" / "tune" / "chosen.yaml").unlink()
    assert main(command) == 2, "as many probes as are asked for were made"
    assert len(started) == 1


def test_a_lag_alone_is_refused(file):
    with pytest.raises(SystemExit) as ended:
        main(["train", file, "--max-lag", "1"])
    assert ended.value.code == 2

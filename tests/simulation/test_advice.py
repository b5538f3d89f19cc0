"""`roll advise`: what made a run slow on purpose is named, and the first advice helps when it is followed."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from roll.cli.main import main
from roll.cli.simulate import simulated_config
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.loader import dump_config, load_config
from roll.simulation import advice
from roll.simulation.calibration import calibrated
from roll.simulation.inputs import Inputs, ValidationInputs, overridden, read_inputs
from roll.simulation.run import simulate
from roll.simulation.workload import response_lengths
from tests.simulation.test_simulate import LAKE, gpus

FACTORS = np.linspace(0.7, 1.3, 12)
"""Tokens of the steps of a written run over their mean."""
USUAL = {
    "pretrain": "Qwen/Qwen2.5-1.5B",
    "cluster": {"device": "cuda", "num_devices_per_node": 8},
    "actor_train__device_mapping": "0-3",
    "actor_infer__device_mapping": "4-7",
    "async_generation_ratio": 1,
}
KNOWN = (
    "lengths.median=300", "lengths.sigma=0.3", "lengths.prompt=100", "trainer.step_seconds=0",
    "trainer.optimizer_seconds=0", "weight_update.gather_seconds=0.1", "weight_update.send_seconds=0.1",
    "weight_update.load_seconds=0.1", "rewards.seconds=0.01", "rewards.sigma=0", "rewards.workers=8",
    "driver.sample_seconds=0",
)  # fmt: skip
"""What is so in each of the runs, before something is made slow."""


def written_run(folder, truth, slow_replica=False, validated=0.0, **changes):
    """Write the files of a run of `USUAL` that took what a simulation says, and return its configuration."""
    config = gpus(folder, **{**USUAL, "rewards__addition__num_workers": truth.rewards.workers, **changes})
    write_run(folder / "run", config, truth, slow_replica, validated)
    return config


def write_run(run, config, truth, slow_replica=False, validated=0.0, factors=FACTORS):
    """Write the files of a run that took what a simulation says, with ``factors`` as many tokens in its steps."""
    outcome = simulate(config, replace(truth, validation=ValidationInputs()))
    step, samples = outcome.step_seconds, outcome.samples
    tokens = outcome.tokens * step
    busy = {role: (1 - share) * step for role, share in outcome.idle.items()}
    fixed = truth.trainer.micro_batch_seconds * samples / 4
    growing = busy["actor_train"] - fixed - truth.weight_update.gather_seconds
    judging = samples * truth.rewards.seconds / truth.rewards.workers
    records = []
    for number, factor in enumerate(factors, 1):
        more = (factor - 1) * growing
        whole = step + more
        record = {"step": number, "idle/actor_train": 1 - (busy["actor_train"] + more) / whole}
        if validated and number % config.eval_steps == 0:
            record |= {"val/addition/accuracy": 0.5, "time/param_update": validated + 0.6}
            whole += validated
            record["idle/actor_train"] = 1 - (busy["actor_train"] + more) / whole
        if slow_replica:
            record |= {"engine/slowest": 1.0, "engine/slowest_speed": 1 / truth.engine.slowest}
        records.append(
            {
                **record,
                "time/step": whole,
                "idle/actor_infer": 1 - busy["actor_infer"] / whole,
                "idle/rewards.addition": 1 - judging / whole,
                "response/tokens": tokens * factor,
                "tokens_per_second/actor_train": factor * (tokens + samples * truth.lengths.prompt) / whole,
                "weights/gather_seconds": 0.1,
                "weights/send_seconds": 0.1,
                "weights/load_seconds": 0.4,
            }
        )
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(dump_config(config))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lengths = response_lengths(truth.lengths, 2048, (250, 4), np.random.default_rng(1)).ravel().tolist()
    samples = [{"split": "train", "tokens": {"versions": [[int(each), 0]], "left_out": 0}} for each in lengths]
    (run / "samples.jsonl").write_text("".join(json.dumps(each) + "\n" for each in samples))


def advised(folder, slow=None, draws=0):
    """Return the trials for a written run, its causes and the changes that were tried."""
    file = str(folder / "run" / "config.yaml")
    config = simulated_config(file, [])
    inputs, _ = calibrated(config, Inputs(), [folder / "run"])
    trials = advice.Trials(lambda overrides: simulated_config(file, overrides), inputs, draws=draws)
    return trials, advice.causes(trials), advice.advise(trials, slow)


PARTS = (
    ("few engines", "generation", {"actor_train__device_mapping": "0-5", "actor_infer__device_mapping": "6-7",
     "actor_infer__strategy_args": {"strategy_name": "vllm", "strategy_config": {"max_num_seqs": 4}}},
     ["engine.scale=4"], ("engine",)),
    ("few reward workers", "rewards", {}, ["rewards.seconds=3", "rewards.workers=1"], ("reward workers",)),
    ("long validation", "validations",
     {"eval_steps": 3, "validation": {"data_args": {"file_name": "{folder}/val.jsonl"}}},
     ["validation.seconds=60"], ("validation",)),
    ("small micro-batches", "micro-batches", {"actor_train__use_dynamic_batching_in_train": False},
     ["trainer.micro_batch_seconds=2"], ("micro-batches",)),
    ("slow replica", "a slow replica", {}, ["engine.slowest=5", "engine.scale=2"], ("replica 1",)),
    ("long tail", "the longest responses", {"async_generation_ratio": 0},
     ["lengths.sigma=1.4", "lengths.median=60"], ("ratio", "streaming")),
)  # fmt: skip
MADE_SLOW = [pytest.param(*row, id=name, marks=pytest.mark.tier("all")) for name, *row in PARTS]


@pytest.mark.parametrize(("cause", "changes", "slower", "names"), MADE_SLOW)
def test_what_makes_a_run_slow_is_named_and_the_first_advice_helps(tmp_path, cause, changes, slower, names):
    truth = read_inputs(None, list({each.partition("=")[0]: each for each in [*KNOWN, *slower]}.values()))
    changes = json.loads(json.dumps(changes).replace("{folder}", str(tmp_path)))
    is_slow = truth.engine.slowest > 1
    config = written_run(tmp_path, truth, is_slow, truth.validation.seconds or 0.0, **changes)
    trials, saved, rows = advised(tmp_path, slow=1 if is_slow else None)
    assert advice.main_cause(saved) == cause, saved
    first = rows[0]
    assert first.sure and any(name in first.change.name for name in names), [row.change.name for row in rows]
    # Followed in the world that the run came from, which the advice knows by its files alone.
    made = simulated_config(str(tmp_path / "run" / "config.yaml"), first.change.overrides)
    after = simulate(made, overridden(truth, first.change.inputs)).step_seconds
    before = simulate(config, truth).step_seconds
    assert after < 0.9 * before
    assert first.gain == pytest.approx(before / after - 1, rel=0.35)


def test_roles_that_share_devices_are_told_if_they_wait_for_states_that_move(tmp_path):
    shared = {"actor_train__device_mapping": "0-7", "actor_infer__device_mapping": "0-7", "async_generation_ratio": 0}
    inputs = read_inputs(None, [*KNOWN, "weight_update.exchange_bandwidth=2e8"])

    def saved(**changes):
        config = gpus(tmp_path, **USUAL | changes)
        return advice.causes(advice.Trials(lambda overrides: config, inputs, draws=0))

    apart, together = saved(), saved(**shared)
    assert "moving states" not in apart
    assert advice.main_cause(together) == "moving states" and together["moving states"] > 0.5, together
    assert "moving states" in advice.SENTENCES


def test_turns_that_wait_for_messages_are_told_from_a_driver_or_environment_workers_that_are_slow():
    def load(overrides):
        few = ["rollout_batch_size=8", "train_env_manager.group_size=4", "val_env_manager=null"]
        return load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B", "async_generation_ratio=0", *few, *overrides])

    fast = (
        "lengths.median=20",
        "environments.turns=5",
        "environments.seconds=0.01",
        "engine.scale=0.01",
        "trainer.scale=0.01",
    )
    slow = {"driver.turn_seconds=5": "messages", "driver.sample_seconds=1": "the driver",
            "environments.cpu_seconds=0.5": "environments"}  # fmt: skip
    for slower, cause in slow.items():
        inputs = read_inputs(None, [*fast, slower])
        saved = advice.causes(advice.Trials(load, inputs, draws=0))
        assert advice.main_cause(saved) == cause and saved[cause] > 0.5, saved
        assert cause in advice.SENTENCES
        more = [each for change in advice.changes(load(()), inputs) for each in change if "env_workers" in str(each)]
        assert len(more) == (cause == "environments")
        for change in more:
            faster = simulate(load(change.overrides), inputs).step_seconds
            assert faster < 0.7 * simulate(load(()), inputs).step_seconds


def test_what_the_check_refuses_or_is_too_stale_is_never_advised(tmp_path):
    config = gpus(tmp_path, **USUAL, response_length=512)
    refused = []

    def configure(overrides):
        if any("async_generation_ratio=2" in each or "device_mapping" in each for each in overrides):
            refused.append(overrides)
            raise ConfigError([ConfigProblem("async_generation_ratio", "cannot work", "write another")])
        return simulated_config(str(tmp_path / "run.yaml"), overrides)

    (tmp_path / "run.yaml").write_text(dump_config(replace(config, async_generation_ratio=0.0)))
    trials = advice.Trials(configure, read_inputs(None, ["lengths.median=100"]), max_lag=0, draws=0)
    rows = advice.advise(trials)
    assert refused and {"ratio 2", "ratio 1"} <= trials.refused.keys()
    assert "lag 1" in trials.refused["ratio 1"] and "cannot work" in trials.refused["ratio 2"]
    assert not {row.change.name for row in rows} & trials.refused.keys()
    assert all(max(row.prediction.outcome.lags) == 0 for row in rows)


def test_time_that_is_over_ends_the_search(tmp_path):
    (tmp_path / "run.yaml").write_text(dump_config(gpus(tmp_path, **USUAL)))
    ticks = iter(range(0, 10_000, 3))
    trials = advice.Trials(
        lambda overrides: simulated_config(str(tmp_path / "run.yaml"), overrides), Inputs(), draws=0, seconds=10,
        clock=lambda: float(next(ticks)),
    )  # fmt: skip
    rows = advice.search(trials)
    assert trials.simulated <= 5 and len(rows) <= 4 and trials.unsimulated


def test_validations_stop_the_training_or_take_some_replicas(tmp_path):
    validation = {"data_args": {"file_name": str(tmp_path / "val.jsonl")}}

    def outcome(seconds, **changes):
        config = gpus(tmp_path, **USUAL, eval_steps=4, validation={**validation, **changes})
        return simulate(config, read_inputs(None, [*KNOWN, f"validation.seconds={seconds}"]))

    none = outcome(0)
    paused = outcome(20 * none.step_seconds)
    assert paused.step_seconds == pytest.approx(6 * none.step_seconds, rel=0.2)
    assert outcome(10 * none.step_seconds).step_seconds < paused.step_seconds
    # One of four replicas validates, and is done before the next validation.
    seconds = none.step_seconds * 0.8
    beside, held_up = outcome(seconds, mode="overlap"), outcome(seconds)
    assert beside.step_seconds < none.step_seconds + 0.1 * (held_up.step_seconds - none.step_seconds) + 0.05 * seconds
    # With one at a time, the next one waits for a validation that takes too long on its few replicas.
    assert outcome(20 * none.step_seconds, mode="overlap").step_seconds > paused.step_seconds
    rare = gpus(tmp_path, **USUAL, eval_steps=64, validation=validation)
    step = simulate(rare, read_inputs(None, [*KNOWN, "validation.seconds=640"])).step_seconds
    assert step - none.step_seconds == pytest.approx(10, rel=0.3)


@pytest.mark.tier("all")
def test_the_command_names_the_bottleneck_and_what_to_write(tmp_path, capsys):
    written_run(tmp_path, read_inputs(None, [*KNOWN[:-3], "rewards.sigma=0", "rewards.seconds=3", "rewards.workers=1"]))
    assert main(["advise", str(tmp_path / "run"), "--draws", "4", "--price", "2"]) == 0
    told = capsys.readouterr().out
    assert "bottleneck  responses wait for their reward" in told and "rewards.addition.num_workers=" in told
    for words in ("no help ", "not known ", "simulated ", "measured ", "fitted ", "default ", "device hours", "cost"):
        assert words in told, told


@pytest.mark.tier("all")
def test_the_best_settings_of_a_file_are_found(tmp_path, capsys):
    (tmp_path / "run.yaml").write_text(dump_config(gpus(tmp_path, **{**USUAL, "async_generation_ratio": 0})))
    words = ["simulation.lengths.median=400", "--draws", "0"]
    assert main(["advise", str(tmp_path / "run.yaml"), *words]) == 0
    table = capsys.readouterr().out.splitlines()
    assert "as it is" in table[1] and "async_generation_ratio=" in table[2] and "+" in table[2]
    assert main(["advise", str(tmp_path / "run.yaml"), *words, "--max-lag", "0"]) == 0
    assert "async_generation_ratio=1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["{folder}"], "there is no run in this folder"),
        (["{folder}/run.yaml", "--max-lag", "-1"], "--max-lag"),
        (["{folder}/run.yaml", "--price", "-2"], "-2 is no price"),
        (["{folder}/run.yaml", "--seed", "-1"], "-1 is no seed"),
        (["{folder}/run.yaml", "simulation.engine.scal=2"], "simulation.engine.scal: unknown key"),
        (["{folder}/run.yaml", "async_generation_rati=1"], "did you mean `async_generation_ratio`?"),
        (["{folder}/run.yaml", "--calibrate", "nowhere"], "there is no run in this folder"),
    ],
)
def test_a_wrong_or_missing_input_of_the_advice_is_named(tmp_path, capsys, words, told):
    (tmp_path / "run.yaml").write_text(dump_config(gpus(tmp_path, **USUAL)))
    assert main(["advise", *(word.format(folder=tmp_path) for word in words)]) == 2
    assert told in capsys.readouterr().err

"""Fits recover the inputs of simulated runs from their times, and what they leave unknown stays as it was."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tiny import tiny_config

from roll.configs.loader import config_from_tree, load_config
from roll.simulation.fit import Observed, busy_seconds, fitted, most_likely
from roll.simulation.inputs import read_inputs
from roll.simulation.run import simulate
from roll.simulation.workload import groups

LAKE = Path(__file__).parents[2] / "examples" / "frozen_lake-tiny-cpu" / "agentic.yaml"
KNOWN = (
    "host.cores=2", "engine.step_seconds=0.01", "engine.request_seconds=1e-4", "engine.prefill_token_seconds=1e-5",
    "trainer.token_seconds=1e-4", "trainer.step_seconds=0.02", "trainer.part_seconds=0.02",
    "trainer.optimizer_seconds=0.01", "driver.part_seconds=0.005", "weight_update.gather_seconds=0.01",
    "weight_update.send_seconds=0.01", "weight_update.load_seconds=0.01", "rewards.seconds=0.01",
    "lengths.median=20", "lengths.prompt=8",
)  # fmt: skip
HIDDEN = {"engine.scale": 1.6, "trainer.scale": 2.5, "driver.step_seconds": 0.08, "host.slowdown": 0.35}
TRUTH = read_inputs(None, [*KNOWN, *(f"{path}={value}" for path, value in HIDDEN.items())])
START = read_inputs(None, KNOWN)


def cpu(folder, **changes):
    usual = {
        "pretrain": "Qwen/Qwen2.5-0.5B",
        "rollout_batch_size": 16,
        "num_return_sequences_in_group": 4,
        "response_length": 60,
        "prompt_length": 8,
        "async_generation_ratio": 0,
    }
    return config_from_tree(tiny_config(folder, **{**usual, **changes}))


def works(config, number=160):
    return list(islice(groups(config, TRUTH, 0), number))


def timed(works, outcome):
    """Groups as a run that takes as long as its simulation records them."""
    return [replace(work, seconds=outcome.group_seconds) for work in works]


def observed(folder, **changes):
    """Times of a run that takes as long as its simulation with the truth."""
    config = cpu(folder, **changes)
    outcome = simulate(config, TRUTH, replayed=works(config))
    busy = {role: busy_seconds(outcome, role) for role in ("actor_infer", "actor_train")}
    return Observed(config, outcome.step_seconds, busy, timed(works(config), outcome))


def within(notes, percent):
    """Return true if each simulated step is so close to the measured one."""
    return all(abs(int(note.rpartition("(")[2][:-2])) <= percent for note in notes)


def test_two_runs_tell_speeds_the_driver_and_how_cores_slow_each_other_down(tmp_path):
    runs = [observed(tmp_path), observed(tmp_path, async_generation_ratio=1)]
    found, notes = fitted(START, runs)
    assert within(notes, 0), notes
    for path, value in HIDDEN.items():
        section, _, name = path.partition(".")
        assert vars(vars(found)[section])[name] == pytest.approx(value, rel=0.1), path
        assert found.origin(path) == "fitted"
    others = [
        {"async_generation_ratio": 0.5},
        {"async_generation_ratio": 1, "rollout_batch_size": 8},
        {"actor_train__stream_groups": True},
    ]
    for changes in others:
        config = cpu(tmp_path, **changes)
        wanted, simulated = (simulate(config, inputs, replayed=works(config)) for inputs in (TRUTH, found))
        assert simulated.step_seconds == pytest.approx(wanted.step_seconds, rel=0.03), changes


def test_runs_of_episodes_tell_the_wait_of_a_turn(tmp_path):
    keys = ["pretrain=Qwen/Qwen2.5-0.5B", "val_env_manager=null", "rollout_batch_size=8",
            "train_env_manager.group_size=4"]  # fmt: skip
    known = [*KNOWN, "environments.seconds=0.001", "environments.turns=6", "environments.turns_sigma=0.6"]
    truth = read_inputs(None, [*known, "engine.scale=1.6", "trainer.scale=2.5", "driver.turn_seconds=0.04",
                               "driver.sample_seconds=0.003", "host.slowdown=0.2"])  # fmt: skip
    start = read_inputs(None, [*known, "driver.sample_seconds=0.003"])

    def run(inputs, **changes):
        config = load_config(LAKE, [*keys, *(f"{key}={value}" for key, value in changes.items())])
        works = list(islice(groups(config, truth, 0), 8 * config.rollout_batch_size))
        outcome = simulate(config, inputs, replayed=works)
        busy = {role: busy_seconds(outcome, role) for role in ("actor_infer", "actor_train")}
        return Observed(config, outcome.step_seconds, busy, timed(works, outcome))

    found, notes = fitted(start, [run(truth, async_generation_ratio=ratio) for ratio in (0, 1)])
    assert within(notes, 1), notes
    assert found.driver.turn_seconds == pytest.approx(0.04, rel=0.25)
    assert found.origin("driver.turn_seconds") == "fitted"
    assert found.driver.step_seconds < 0.05 * run(truth).step_seconds
    for changes in ({"async_generation_ratio": 2}, {"async_generation_ratio": 1, "rollout_batch_size": 4}):
        wanted, simulated = (run(inputs, **changes).step_seconds for inputs in (truth, found))
        assert simulated == pytest.approx(wanted, rel=0.03), changes


def test_groups_that_wait_for_the_start_of_a_run_are_left_out(tmp_path):
    run = observed(tmp_path, async_generation_ratio=2)
    outcome = simulate(run.config, TRUTH, replayed=run.groups)
    at_once = 3 * run.config.rollout_batch_size
    slow = [replace(work, seconds=work.seconds + 20) for work in run.groups[:at_once]]
    assert replace(run, groups=[*slow, *run.groups[at_once:]]).errors(outcome) == pytest.approx(run.errors(outcome))
    long = simulate(run.config, TRUTH, replayed=works(run.config, 320)).group_seconds
    assert outcome.group_seconds == pytest.approx(long, rel=0.01), "simulated runs start with a queue too"


def test_what_a_run_does_not_tell_and_what_the_user_gave_stays(tmp_path):
    alone = observed(tmp_path)
    found, (note,) = fitted(START, [alone])
    assert within([note], 0) and found.host.slowdown == START.host.slowdown
    assert found.origin("host.slowdown") == "default" and found.origin("engine.scale") == "fitted"
    assert found.engine.scale == pytest.approx(HIDDEN["engine.scale"], rel=0.15)
    given = read_inputs(None, [*KNOWN, "trainer.scale=2", "driver.step_seconds=0.01"])
    kept, _ = fitted(given, [alone])
    assert kept.trainer.scale == 2 and kept.driver.step_seconds == 0.01
    assert kept.origin("trainer.scale") == "given"
    untouched, _ = fitted(START, [alone], rounds=0)
    assert untouched == START


def test_each_part_of_a_batch_costs_its_fixed_times(tmp_path):
    config = cpu(tmp_path, actor_train__stream_groups=True)
    free = replace(
        TRUTH, trainer=replace(TRUTH.trainer, part_seconds=0.0), driver=replace(TRUTH.driver, part_seconds=0.0)
    )
    trainer = replace(free, trainer=replace(free.trainer, part_seconds=0.1))
    driver = replace(free, driver=replace(free.driver, part_seconds=0.1))
    none, *dear = (simulate(config, inputs, replayed=works(config)).step_seconds for inputs in (free, trainer, driver))
    assert all(seconds > none + 0.1 for seconds in dear), (none, dear)
    whole = cpu(tmp_path)
    plain, with_part = (simulate(whole, inputs, replayed=works(whole)).step_seconds for inputs in (free, trainer))
    assert plain == with_part


def test_unknowns_share_what_is_told_by_their_uncertainty_and_one_of_which_nothing_is_told_stays():
    def errors(values):
        return [(values[0] + values[1] - 1.0) / 0.001]

    values = most_likely(errors, np.array([1.0, 2.0, 5.0]))
    assert values == pytest.approx([0.2, 0.8, 0.0], abs=1e-3)
    bounded = most_likely(lambda values: errors(-values), np.array([1.0, 2.0, 5.0]), np.array([-0.1, -9.0, 0.0]))
    assert bounded == pytest.approx([-0.1, -0.9, 0.0], abs=1e-3)

"""Latencies that a calibration measures: of rewards that are judged one by one or many at once, and of environments."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from roll.configs.loader import dump_config, load_config
from roll.simulation.calibration import NEEDED, calibrated
from roll.simulation.inputs import Inputs, read_inputs
from tests.simulation.test_simulate import gpus

LAKE = Path(__file__).parents[2] / "examples" / "frozen_lake-tiny-cpu" / "agentic.yaml"
STEPS = 50


def written(folder, config, groups, metrics):
    """Write the files of a run of `STEPS` steps. ``metrics``: those of a step, given its number."""
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(config))
    usual = dict.fromkeys(NEEDED, 0.5) | {"response/tokens": 500.0, "tokens_per_second/actor_train": 2000.0}
    lines = [json.dumps({"step": step, **usual, "time/step": 2.0, **metrics(step)}) for step in range(1, STEPS + 1)]
    (folder / "metrics.jsonl").write_text("\n".join([*lines, ""]))
    times = {"issued": 0.0, "generated": 1.0, "consumed": 99.0}
    usual = {"prompt": 3.0, "responses": [9, 9, 9, 9]}
    each = [
        json.dumps({**usual, **times, "step": 1 + number * STEPS // len(groups), "group": number, **group})
        for number, group in enumerate(groups)
    ]
    (folder / "groups.jsonl").write_text("\n".join([*each, ""]))
    return calibrated(config, Inputs(), [folder], rounds=0)[0]


def test_latencies_of_rewards_that_wait_at_once_follow_from_those_of_groups(tmp_path):
    config, random = gpus(tmp_path), np.random.default_rng(0)
    waits = 0.05 * np.exp(1.2 * random.standard_normal((8 * STEPS, 4)))
    groups = [{"judged": 1.0 + float(wait)} for wait in waits.max(axis=1)]
    taken = float(waits.sum()) / STEPS

    def metrics(step):
        return {"idle/rewards.addition": 0.7, "rewards/addition/seconds": taken * step}

    found = written(tmp_path / "run", config, groups, metrics)
    assert taken > 0.3 * 2.0
    assert found.rewards.seconds == pytest.approx(0.05, rel=0.15)
    assert found.rewards.sigma == pytest.approx(1.2, rel=0.1)
    assert found.rewards.workers is None and found.origin("rewards.sigma") == "measured"


def test_rewards_that_are_judged_one_by_one_take_the_time_of_their_workers(tmp_path):
    groups = [{"judged": 1.5}] * (8 * STEPS)

    def metrics(step):
        return {"idle/rewards.addition": 0.68, "rewards/addition/seconds": 0.1 * step}

    found = written(tmp_path / "run", gpus(tmp_path), groups, metrics)
    assert found.rewards.seconds == pytest.approx(0.32 * 2.0 / 32)
    assert found.rewards.sigma == 0 and found.rewards.workers == 1


def test_calls_between_steps_and_a_resumed_run_do_not_make_a_verifier_judge_many_at_once(tmp_path):
    """Its worker judges for 0.64 s of a step; for less at the beginning, and from step 40 on totals count anew."""

    def metrics(step):
        idle = 0.9 if step < 6 else 0.68
        return {"idle/rewards.addition": idle, "rewards/addition/seconds": 0.65 * (step if step < 40 else step - 39)}

    found = written(tmp_path / "run", gpus(tmp_path), [{"judged": 1.5}] * (8 * STEPS), metrics)
    assert found.rewards.sigma == 0 and found.rewards.workers == 1


TRAINED = {
    "idle/actor_train": 0.0,
    "seconds/actor_train/forward_backward": 1.2,
    "seconds/actor_train/optimizer": 0.1,
    "micro_batches/actor_train": 8.0,
    "time/rollout": 0.3,
    "time/advantage": 0.1,
    "cpu_seconds/driver": 0.5,
}


@pytest.mark.parametrize(
    ("changes", "of_call", "of_batch"),
    [
        ({}, 0.7, 0.4),
        ({"actor_train__stream_groups": "auto", "whiten_advantages": True}, 0.7, 0.4),
        ({"actor_train__stream_groups": True}, 0.7 / 8, 0.0),
        (
            {
                "async_generation_ratio": 1,
                "use_kl_loss": True,
                "reference": {"device_mapping": [8]},
                "cluster__num_devices_per_node": 9,
            },
            0.7,
            0.0,
        ),
    ],
    ids=["whole", "auto, whole", "streaming", "parts"],
)
def test_fixed_times_are_those_of_a_call_and_of_a_whole_batch(tmp_path, changes, of_call, of_batch):
    config = gpus(tmp_path, **changes)
    found = written(tmp_path / "run", config, [{"judged": 1.5}] * (8 * STEPS), lambda step: TRAINED)
    assert found.trainer.step_seconds == found.trainer.part_seconds == pytest.approx(of_call)
    assert found.driver.part_seconds == pytest.approx(of_batch)
    assert found.driver.sample_seconds == pytest.approx((0.5 - of_batch) / 32)


def test_turns_and_waits_of_environments_are_measured(tmp_path):
    config, random = load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B"]), np.random.default_rng(0)
    turns = random.integers(2, 9, (16 * STEPS, 8)).tolist()
    groups = [
        {"generated": None, "judged": 9.0, "responses": row, "turns": row,
         "waits": [0.04 * math.exp(0.5 * random.standard_normal()) * number for number in row]}
        for row in turns
    ]  # fmt: skip

    def metrics(step):
        """600 turns of a step take 0.3 s of the workers' processor time. Step 30 is the first after a resume, at step
        40 another process is started, and in the last step nothing is left to do."""
        own = {} if step == 30 else {"cpu_seconds/environments": {40: 4.0, STEPS: 0.0}.get(step, 0.3)}
        totals = {"steps": 600.0 * (step if step < 30 else step - 28), "restarts": float(step >= 40)}
        return own | {
            f"env_workers/{name}": total for name, total in {"retired": 1, "quarantined": 0, **totals}.items()
        }

    found = written(tmp_path / "run", config, groups, metrics)
    assert found.environments.cpu_seconds == pytest.approx(0.3 / 600)
    assert found.origin("environments.cpu_seconds") == "measured"
    assert found.environments.turns == round(np.exp(np.log(turns).mean()))
    assert found.environments.turns_sigma == pytest.approx(np.log(turns).std())
    assert found.environments.seconds == pytest.approx(0.04, rel=0.05)
    assert found.environments.sigma == pytest.approx(0.5, rel=0.05)


def test_the_cores_of_an_engine_do_not_count_validations_twice(tmp_path):
    """It occupies one core, for 1 s of a step and, in every second step, for a validation of 2.5 s."""
    config = load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B"])

    def metrics(step):
        validates = {"val/reward": 1.0, "time/param_update": 2.5} if step % 2 else {}
        busy = 3.5 if step % 2 else 1.0
        return {"time/step": 5.0, "idle/actor_infer": 1 - busy / 5, "cpu_seconds/actor_infer": busy, **validates}

    found = written(tmp_path / "run", config, [{"judged": 9.0, "responses": [9] * 8}] * (16 * STEPS), metrics)
    assert found.validation.seconds == pytest.approx(2.5)
    assert found.engine.threads == pytest.approx(1.0)


def test_on_a_cpu_the_cores_of_an_engine_are_those_of_the_run_in_which_it_waited_least(tmp_path):
    config = load_config(LAKE, ["pretrain=Qwen/Qwen2.5-0.5B"])
    groups = [{"judged": 9.0, "responses": [9] * 8}] * (16 * STEPS)
    runs = {"ratio-0": 1.4, "ratio-1": 1.2, "little": 0.6, "untold": None}  # it generates for 1 s of a step
    for name, seconds in runs.items():
        written(tmp_path / name, config, groups, lambda step, seconds=seconds: {"cpu_seconds/actor_infer": seconds})

    def threads(*names, given=()):
        found, _ = calibrated(config, read_inputs(None, given), [tmp_path / name for name in names], rounds=0)
        return found.engine.threads, found.origin("engine.threads")

    assert threads("ratio-0", "ratio-1") == (pytest.approx(1.4), "measured")
    assert threads("little") == (1.0, "measured"), "a core, even if the run did not always have it"
    assert threads("untold") == (1.0, "default")
    assert threads("ratio-0", given=["engine.threads=3"]) == (3.0, "given")
    beyond = gpus(tmp_path)
    own = written(
        tmp_path / "gpus", beyond, [{"judged": 1.5}] * (8 * STEPS), lambda step: {"cpu_seconds/actor_infer": 9}
    )
    assert own.origin("engine.threads") == "default", "on GPUs nobody waits for cores"

"""Training adapters as a whole run: the engine gets them, the reference is the base, checkpoints hold them only."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from safetensors import safe_open
from safetensors.torch import load_file
from tiny import make_task, tiny_config

from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.distribution import install_command
from roll.pipeline.preflight import prepare

LORA = {"lora_target": "all-linear", "lora_rank": 4}


def learned(step):
    """Metrics without times."""
    return {name: value for name, value in step.items() if name.startswith(("actor/", "reward/"))}


@pytest.mark.tier("all")
def test_the_reference_is_the_base_and_a_resumed_run_with_a_separate_one_is_equal_to_the_bit(tmp_path, ray_cluster):
    make_task(tmp_path)
    config = tiny_config(
        tmp_path,
        max_steps=4,
        save_steps=2,
        cluster__num_devices_per_node=3,
        actor_train__model_args=LORA,
        actor_train__training_args__learning_rate=1e-2,
        reference={},
        use_kl_loss=True,
        kl_loss_coef=0.1,
        weight_update__canary_interval=1,
    )
    run = run_pipeline(tmp_path, ray_cluster, config)
    kl = [step["actor/reference_kl"] for step in run.metrics]
    assert kl[0] < 1e-6 and kl[-1] > 1e-4
    assert all(step["mismatch/canary_max"] < 1e-3 and "idle/reference" in step for step in run.metrics)
    checkpoint = run.folder / "checkpoints" / "step-2"
    assert json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())["r"] == 4
    with safe_open(checkpoint / "state" / "actor_train" / "rank-00000.safetensors", "pt") as state:
        assert len(state.keys()) > 0 and all("lora_" in name for name in state.keys())

    def interrupted(folder):
        shutil.copytree(run.folder, folder)
        shutil.rmtree(folder / "checkpoints" / "step-4")

    separate = {**config, "resume_from_checkpoint": True, "reference": {"device_mapping": [2]}}
    resumed = run_pipeline(tmp_path, ray_cluster, separate, before=interrupted)
    assert len(resumed.metrics) == 4
    for before, after in zip(run.metrics, resumed.metrics, strict=True):
        assert learned(before) == learned(after) != {}
    model = "checkpoints/step-4/model.safetensors"
    assert (run.folder / model).read_bytes() == (resumed.folder / model).read_bytes()


def problems(folder):
    with pytest.raises(ConfigError) as refusal:
        prepare(config_from_tree(tiny_config(folder, actor_train__model_args={"lora_target": "q_porj"})))
    (problem,) = refusal.value.problems
    assert problem.path == "actor_train.model_args.lora_target"
    return problem


def test_unknown_targets_and_a_missing_package_are_refused_before_anything_loads(tmp_path, monkeypatch):
    make_task(tmp_path)
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "no module of this model" in problems(tmp_path).message
    assert "did you mean `q_proj`?" in problems(tmp_path).remedy
    monkeypatch.setitem(sys.modules, "peft", None)
    assert "peft, which is not installed" in problems(tmp_path).message
    assert problems(tmp_path).remedy == install_command("peft")


ADAPTED = [(32, 32), (32, 16), (32, 16), (32, 32), (32, 64), (32, 64), (64, 32)]
"""Inputs and outputs of a layer's linear layers, in the order q, k, v, o, gate, up, down."""


def adapters_alone(folder, **changes):
    settings = {
        "actor_train__model_args": LORA,
        "actor_train__training_args__learning_rate": 1e-2,
        "weight_update__content": "adapter",
        "weight_update__canary_interval": 1,
        "weight_update__canary_tolerance": 1e-5,
    }
    return tiny_config(folder, **settings | changes)


def test_a_run_with_adapters_alone_is_the_run_with_merged_weights_in_a_part_of_the_bytes(task):
    alone = run_pipeline(task, IN_THIS_PROCESS, adapters_alone(task))
    merged = run_pipeline(task, IN_THIS_PROCESS, adapters_alone(task, weight_update__content="full"))
    for mine, other in zip(alone.metrics, merged.metrics, strict=True):
        assert learned(mine) == pytest.approx(learned(other), rel=1e-3, abs=1e-5)
        assert mine["weights/bytes"] < 0.5 * other["weights/bytes"]
    assert [each["response"] for each in alone.samples] == [each["response"] for each in merged.samples] != []
    export = "checkpoints/step-3/model.safetensors"
    mine, other = load_file(alone.folder / export), load_file(merged.folder / export)
    assert all(torch.allclose(mine[name], other[name], atol=1e-5) for name in mine.keys() | other.keys())


@pytest.mark.tier("all")
def test_an_engine_that_dies_comes_back_with_the_adapter_and_a_resumed_run_goes_on_from_it(task):
    """In a precision in which merging them would lose most of what they add."""
    events = [{"kind": "kill", "at_step": 2, "role": "actor_infer", "rank": 0}]
    config = adapters_alone(
        task,
        max_steps=4,
        save_steps=2,
        async_generation_ratio=1,
        actor_infer__device_mapping=[1, 2],
        cluster__num_devices_per_node=3,
        chaos={"enabled": True, "events": events},
        actor_train__model_args={**LORA, "dtype": "bfloat16"},
        actor_infer__model_args__dtype="bfloat16",
        weight_update__canary_tolerance=0.05,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    assert run.metrics[-1]["engine/restarts"] == 1 and run.metrics[-1]["lag/max"] <= 1
    matrices = 2 * 2 * sum(4 * (inputs + outputs) for inputs, outputs in ADAPTED)
    assert all(matrices <= step["weights/bytes"] < 2 * matrices for step in run.metrics)
    before = run.metrics
    again = go_on_from(2, run, task, IN_THIS_PROCESS, config)
    assert [step["step"] for step in again.metrics] == [step["step"] for step in before] == [1, 2, 3, 4]
    assert all("mismatch/canary_max" in step for step in again.metrics)

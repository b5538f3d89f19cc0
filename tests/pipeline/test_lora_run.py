"""Training adapters as a whole run: the engine gets them, the reference is the base, checkpoints hold them only."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
from runs import run_pipeline
from safetensors import safe_open
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

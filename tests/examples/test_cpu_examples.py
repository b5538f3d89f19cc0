"""The examples for CPUs: model and data by their script, then their YAML, for two steps; one as its owner starts it."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import runpy
import subprocess
import sys
from dataclasses import astuple
from pathlib import Path

import pytest

from roll.cli.main import main
from roll.tracking.trackers import read_metrics
from tests.warm_workers import search_path

pytestmark = pytest.mark.tier("all")

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROMPTS = [
    "actor_train.data_args.file_name={made}/data/train.jsonl",
    "validation.data_args.file_name={made}/data/val.jsonl",
]
RUNS = {
    "quickstart/rlvr": ["rollout_batch_size=8", "val_batch_size=16", *PROMPTS],
    "quickstart/ppo_critic": ["rollout_batch_size=8", "val_batch_size=16", "critic_warmup=1", *PROMPTS],
    "quickstart/sft": ["train_batch_size=8", *PROMPTS],
    "frozen_lake-tiny-cpu/agentic": ["rollout_batch_size=4", "val_env_manager.num_env_groups=8"],
    "sokoban-tiny-cpu/agentic": ["rollout_batch_size=4", "val_env_manager.num_env_groups=8"],
    "agent-tool-cpu/agent": ["rollout_batch_size=4", "val_env_manager.num_env_groups=8"],
    "count-shapes-cpu/rlvr": ["rollout_batch_size=4", "val_batch_size=16", *PROMPTS],
    "image-shapes-cpu/image": [
        *("rollout_batch_size=4", "val_batch_size=4", "validation.generating_args.num_return_sequences=1"),
        "actor_train.data_args.file_name={made}/data/train.jsonl",
        "validation.data_args.file_name={made}/data/validation.jsonl",
    ],
}
HANG_SECONDS = 300.0


AS_ITS_OWNER = "quickstart/rlvr"
"""With its own command and its own Ray; the others on that of the tests."""


@pytest.mark.tier("quick")
def test_every_example_for_cpus_is_here():
    files = [path for script in EXAMPLES.glob("*/make_model.py") for path in script.parent.glob("*.yaml")]
    assert {f"{path.parent.name}/{path.stem}" for path in files} == RUNS.keys()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folder of an example -> what its script makes with a short warm-up."""
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            MAKERS.get(name, make_in_this_process)(name, folders[name])
        return folders[name]

    return make


def make_in_this_process(name, folder):
    """As its command does, but for the seconds that a new process takes to import torch and transformers."""
    out = folder if name in ("quickstart", "count-shapes-cpu", "image-shapes-cpu") else folder / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["make_model.py", "--out", str(out), "--steps", "4"])
        patch.setattr(sys, "path", [*sys.path])
        runpy.run_path(str(EXAMPLES / name / "make_model.py"), run_name="__main__")


def make_of_few_levels(name, folder):
    """Levels are most of what it takes to make this one."""
    spec = importlib.util.spec_from_file_location("make_model_of_few_levels", EXAMPLES / name / "make_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    module.LEVELS = module.EVALUATED_LEVELS = 40
    module.make(folder / "model", seed=0, steps=4)


MAKERS = {"sokoban-tiny-cpu": make_of_few_levels}


@pytest.mark.parametrize("name", RUNS)
def test_an_example_for_cpus_runs(made, name, tmp_path, ray_cluster, monkeypatch):
    folder = made(name.split("/")[0])
    arguments = [
        "--config", str(EXAMPLES / f"{name}.yaml"),
        f"pretrain={folder / 'model'}", f"output_dir={tmp_path / 'run'}", "max_steps=2",
        *(override.format(made=folder) for override in RUNS[name]),
    ]  # fmt: skip
    if name == AS_ITS_OWNER:
        start(arguments, tmp_path)
    else:
        monkeypatch.chdir(tmp_path)
        assert main([*arguments, f"cluster.address={ray_cluster}"]) == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("success", 2)
    if name == "quickstart/sft":
        assert 0 < summary["val/loss/last"] != summary["val/loss/first"]
    else:
        assert summary["val/first"].keys() == summary["val/last"].keys() != set()


def start(arguments, folder):
    """The script that the pages name, in the owner's folder."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "start_pipeline.py"), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": search_path(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_loop_in_one_file_is_the_run_of_the_quick_start_at_ratio_0(made, tmp_path, ray_cluster, monkeypatch):
    """To the last bit, also of the weights."""
    monkeypatch.chdir(tmp_path)
    folder = made("quickstart")
    file = EXAMPLES / "quickstart" / "rlvr.yaml"
    shape = ["rollout_batch_size=8", "max_steps=2", "cluster.cpu_threads_per_device=1"]
    overrides = [
        f"pretrain={folder / 'model'}",
        *shape,
        *(each.format(made=folder) for each in RUNS["quickstart/rlvr"]),
    ]
    loop = runpy.run_path(str(EXAMPLES / "grpo_in_one_file.py"))
    steps = asyncio.run(loop["train"](file, overrides, export=tmp_path / "model"))
    placed = [f"cluster.address={ray_cluster}", f"output_dir={tmp_path / 'run'}", "async_generation_ratio=0"]
    assert main(["--config", str(file), *overrides, *placed]) == 0
    run = [step for step in read_metrics(tmp_path / "run" / "metrics.jsonl") if step["step"] > 0]
    told = [(step["reward/mean"], step["actor/loss"], step["actor/grad_norm"]) for step in run]
    assert told == [astuple(step) for step in steps]
    one, other = (tmp_path / "model", tmp_path / "run" / "checkpoints" / "step-2")
    assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()

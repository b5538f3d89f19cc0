"""The examples for CPUs as their owner starts them: model and data by their script, then their YAML, for two steps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PROMPTS = [
    "actor_train.data_args.file_name={made}/data/train.jsonl",
    "validation.data_args.file_name={made}/data/val.jsonl",
]
RUNS = {
    "quickstart/rlvr": ["rollout_batch_size=8", "val_batch_size=16", *PROMPTS],
    "quickstart/ppo_critic": ["rollout_batch_size=8", "val_batch_size=16", "critic_warmup=1", *PROMPTS],
    "frozen_lake-tiny-cpu/agentic": ["rollout_batch_size=4", "val_env_manager.num_env_groups=8"],
    "sokoban-tiny-cpu/agentic": ["rollout_batch_size=4", "val_env_manager.num_env_groups=8"],
}
HANG_SECONDS = 300.0


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
            out = folders[name] if name == "quickstart" else folders[name] / "model"
            command = [sys.executable, str(EXAMPLES / name / "make_model.py"), "--out", str(out), "--steps", "4"]
            subprocess.run(command, check=True, timeout=HANG_SECONDS)
        return folders[name]

    return make


@pytest.mark.parametrize("name", RUNS)
def test_an_example_for_cpus_runs(made, name, tmp_path):
    folder = made(name.split("/")[0])
    command = [
        sys.executable, str(EXAMPLES / "start_pipeline.py"), "--config", str(EXAMPLES / f"{name}.yaml"),
        f"pretrain={folder / 'model'}", f"output_dir={tmp_path / 'run'}", "max_steps=2",
        *(override.format(made=folder) for override in RUNS[name]),
    ]  # fmt: skip
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("success", 2)
    assert summary["val/first"].keys() == summary["val/last"].keys() != set()

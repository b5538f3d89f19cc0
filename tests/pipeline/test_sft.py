"""Supervised fine-tuning, from its command line to its last checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import run_pipeline
from tiny import make_task


def supervised(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds: the sums of one-digit additions."""
    rows = [{"prompt": f"{a}+{b}=", "response": str(a + b)} for a in range(10) for b in range(10)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::9]))
    config: dict[str, Any] = {
        "pipeline": "sft",
        "exp_name": "tiny-sft",
        "pretrain": str(folder / "model"),
        "seed": 7,
        "cluster": {"device": "cpu", "num_devices_per_node": 1, "cpu_threads_per_device": 1},
        "max_steps": 3,
        "train_batch_size": 16,
        "sequence_length": 8,
        "track_with": [],
        "actor_train": {
            "device_mapping": [0],
            "training_args": {"learning_rate": 1e-3},
            "data_args": {"file_name": str(folder / "sums.jsonl")},
        },
        "stall_timeout_seconds": 120,
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return config


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sft")
    make_task(folder)
    return folder


def test_a_run_learns(task):
    validation = {"data_args": {"file_name": str(task / "held_out.jsonl")}}
    config = supervised(task, max_steps=150, eval_steps=50, validation=validation, actor_train__training_args__learning_rate=1e-2)
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    print(run.metrics[-1], run.summary)
    assert run.metrics[-1]["actor/loss"] < 0.1

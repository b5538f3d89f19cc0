"""A configuration that works, as the tree a YAML file would hold, with a model folder and prompts on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roll.configs.loader import dump_yaml

Tree = dict[str, Any]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """A valid split run on two CPU slots."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    return {
        "exp_name": "test",
        "pretrain": str(model),
        "cluster": {"num_devices_per_node": 2},
        "rollout_batch_size": 16,
        "num_return_sequences_in_group": 4,
        "actor_train": {"device_mapping": [0], "data_args": {"file_name": str(data)}},
        "actor_infer": {"device_mapping": [1]},
        "rewards": {"math": {"verifier": "math"}},
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Tree | str | bytes], Path]:
    """Writes a tree, text or bytes as `run.yaml`."""

    def write_file(content: Tree | str | bytes) -> Path:
        path = tmp_path / "run.yaml"
        if isinstance(content, dict):
            content = dump_yaml(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write_file

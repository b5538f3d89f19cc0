"""Weights are read from safetensors, never from pickles, which could execute anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from roll.configs.roles import ModelArguments
from roll.engines.base import ModelSpec
from roll.engines.hf import model as hf_model
from roll.trainers import model as checkpoint
from tests.trainers.tiny_models import write_model

READERS = {
    "engine": lambda path: hf_model.load_model(ModelSpec(path, "cpu", "float32", "sdpa", 64)),
    "trainer": lambda path: checkpoint.load_model(path, ModelArguments(), torch.float32),
    "critic": lambda path: checkpoint.load_model(path, ModelArguments(), torch.float32, "value"),
}


def pickle_weights(folder: Path) -> None:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / "pytorch_model.bin")
    weights.unlink()


@pytest.mark.parametrize("reader", READERS)
def test_pickled_weights_are_not_read(reader, tmp_path):
    path = write_model(tmp_path, tied=False)
    READERS[reader](path)
    pickle_weights(tmp_path)
    with pytest.raises(OSError, match="safetensors"):
        READERS[reader](path)

"""Weight updates that send only LoRA adapters: about a hundredth of the bytes, because the base model never changes.

Each adapted linear layer has two tensors, A ``[rank, inputs]`` and B ``[outputs, rank]``, under peft's names, which all
engines know. B is sent multiplied by the adapter's scale, so engines add ``B A`` unscaled. Every engine loads the base
model from its files by itself. Checksums of the base model, in the engine's precision, are compared with the trainer's,
so a different base model is detected before the first adapter is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from roll.weights.buckets import MemoryFile, WeightMismatch, tensor_checksum

if TYPE_CHECKING:
    from roll.weights.checkpoint_names import CheckpointNames

PREFIX = "base_model.model."
"""Prefix of names in peft's files."""
LayerShapes = Mapping[str, tuple[int, int]]
"""Name of a linear layer in the model -> outputs, inputs."""


def matrix_names(layer: str) -> tuple[str, str]:
    """Return the names of a layer's A and B."""
    return f"{PREFIX}{layer}.lora_A.weight", f"{PREFIX}{layer}.lora_B.weight"


def linear_layers(model: nn.Module) -> dict[str, tuple[int, int]]:
    """Return the linear layers of a model that has no adapters yet."""
    modules = model.named_modules()
    return {name: (each.out_features, each.in_features) for name, each in modules if isinstance(each, nn.Linear)}


def adapted_layers(names: Iterable[str], layers: LayerShapes) -> list[str]:
    """Return the layers that the adapter tensors with these names belong to, in the order of their first tensors.

    Names of other tensors are ignored.
    """
    owners = {matrix: layer for layer in layers for matrix in matrix_names(layer)}
    return list(dict.fromkeys(owners[name] for name in names if name in owners))


def adapter_shapes(adapted: Iterable[str], layers: LayerShapes, rank: int) -> dict[str, tuple[int, int]]:
    """Return the shape of each tensor of an adapter of these layers."""
    shapes: dict[str, tuple[int, int]] = {}
    for layer in adapted:
        outputs, inputs = layers[layer]
        shapes |= zip(matrix_names(layer), ((rank, inputs), (outputs, rank)), strict=True)
    return shapes


def adapter_config(adapted: Sequence[str], rank: int, base: str) -> dict[str, Any]:
    """Return the peft configuration of an adapter with scale 1 (``lora_alpha`` equals the rank)."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(adapted),
    }


@contextmanager
def adapter_folder(file: MemoryFile, config: Mapping[str, Any]) -> Iterator[str]:
    """Make a temporary adapter folder in peft's format, whose safetensors file is in memory; yield its path."""
    with TemporaryDirectory(prefix="roll-adapter-") as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        (Path(folder) / "adapter_model.safetensors").symlink_to(file.path)
        yield folder


def base_checksums(
    tensors: Iterable[tuple[str, torch.Tensor]], names: CheckpointNames, dtype: torch.dtype
) -> dict[str, int]:
    """Return checkpoint name -> checksum of each tensor of a base model, cast to the ``dtype`` of the engine.

    Buffers are cast to float32 instead, because their precision in the model and in its files may differ.
    """
    return {
        name: tensor_checksum(tensor.to(torch.float32 if name in names.uncast else dtype)) for name, tensor in tensors
    }


def file_checksums(model_path: str, names: CheckpointNames, dtype: torch.dtype) -> dict[str, int]:
    """Return the `base_checksums` of a model's files.

    Raises `WeightMismatch` naming a tensor that the files do not have under the name that transformers would save it
    under.
    """
    checksums: dict[str, int] = {}
    for path in _weight_files(model_path):
        with safe_open(path, "pt") as file:
            known = names.parts.keys() & set(file.keys())
            checksums |= base_checksums(((name, file.get_tensor(name)) for name in known), names, dtype)
    missing = sorted(names.parts.keys() - checksums.keys())
    if missing:
        raise WeightMismatch(
            f"tensor {missing[0]!r} is not in the files of {model_path} under this name ({len(missing)} such tensors), "
            "so they cannot be compared with the trainer's: write `weight_update.content: full`"
        )
    return checksums


def _weight_files(model_path: str) -> list[str]:
    """Return the paths of a model's safetensors files, in a folder or in the hub's cache. Raises ``OSError``."""
    from transformers.utils import cached_file

    try:
        return [str(cached_file(model_path, "model.safetensors"))]
    except OSError:
        index = json.loads(Path(str(cached_file(model_path, "model.safetensors.index.json"))).read_text())
    return [str(cached_file(model_path, name)) for name in sorted(set(index["weight_map"].values()))]

"""Adapters (LoRA) as a weight update: a hundredth of the bytes, because the base model never changes.

Each adapted linear layer has two tensors, A ``[rank, inputs]`` and B ``[outputs, rank]``, under peft's names, which all
engines know. B travels multiplied by the adapter's scale, so that engines add ``B A`` as it is. Every engine has loaded
the base from its files by itself. `file_checksums` tells what is in these files, as the trainer's own tensors would be
in the engine's precision; so a base that differs is found before the first adapter is used.
"""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from roll.weights.buckets import MemoryFile, WeightBucket, WeightMismatch, safetensors_file, tensor_checksum

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
    """Return the layers that tensors of these names belong to, in the order of their first tensors. Names that no
    layer has are passed over."""
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
    """Return peft's settings of an adapter that is added as it is."""
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


class AdapterFolder:
    """A folder in peft's format whose tensors are in memory. Its path stays while its content is replaced; it goes with
    the object."""

    def __init__(self, rank: int, base: str) -> None:
        self.path = mkdtemp(prefix="roll-adapter-")
        self.close = weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)
        """Removes the folder. Harmless to repeat."""
        self._rank, self._base = rank, base
        self._file: MemoryFile | None = None

    def replace(self, file: MemoryFile, adapted: Sequence[str]) -> None:
        """Let the folder hold this safetensors file, of an adapter of these layers."""
        folder = Path(self.path)
        (folder / "adapter_config.json").write_text(json.dumps(adapter_config(adapted, self._rank, self._base)))
        link = folder / "adapter_model.safetensors"
        link.unlink(missing_ok=True)
        link.symlink_to(file.path)
        self._file = file


def adapter_file(buckets: Sequence[WeightBucket]) -> MemoryFile:
    """Return one safetensors file in memory of all tensors."""
    file, _ = safetensors_file(buckets)
    return file


def file_checksums(model_path: str, names: CheckpointNames, dtype: torch.dtype) -> dict[str, int]:
    """Return the checksum of each tensor of a model's files, cast to ``dtype`` (buffers keep their precision).

    Raises `WeightMismatch` naming a tensor that the files do not have under the name that a checkpoint of transformers
    gives it.
    """
    checksums = {}
    for path in _weight_files(model_path):
        with safe_open(path, "pt") as file:
            for name in names.parts.keys() & set(file.keys()):
                tensor = file.get_tensor(name)
                checksums[name] = tensor_checksum(tensor if name in names.uncast else tensor.to(dtype))
    missing = sorted(names.parts.keys() - checksums.keys())
    if missing:
        raise WeightMismatch(
            f"tensor {missing[0]!r} is not in the files of {model_path} under this name ({len(missing)} such tensors), "
            "so they cannot be compared with the trainer's: write `weight_update.content: full`"
        )
    return checksums


def _weight_files(model_path: str) -> list[str]:
    """Return the paths of a model's safetensors files, of a folder or from the hub's cache. Raises ``OSError``."""
    from transformers.utils import cached_file

    try:
        return [str(cached_file(model_path, "model.safetensors"))]
    except OSError:
        index = json.loads(Path(str(cached_file(model_path, "model.safetensors.index.json"))).read_text())
    return [str(cached_file(model_path, name)) for name in sorted(set(index["weight_map"].values()))]

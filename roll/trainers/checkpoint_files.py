"""Reads parts of tensors from the safetensors files of a checkpoint without loading the rest."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def checkpoint_folder(model_path: str) -> Path:
    """Return the folder of the checkpoint. A hub name is downloaded, with weights as safetensors only."""
    if Path(model_path).is_dir():
        return Path(model_path)
    return Path(snapshot_download(model_path, allow_patterns=["*.safetensors", "*.json"]))


class CheckpointFiles:
    """Tensors by name, used as a context. A file is opened when one of its tensors is first asked for."""

    def __init__(self, folder: Path) -> None:
        """Raise ``FileNotFoundError`` if the folder holds no weights as safetensors."""
        self._folder = folder
        self._open: dict[str, Any] = {}
        self._stack = ExitStack()
        if (folder / INDEX).exists():
            self._files: dict[str, str] = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        elif (folder / SINGLE).exists():
            self._files = dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        else:
            raise FileNotFoundError(f"{folder} holds neither {SINGLE} nor {INDEX}; other formats are not read")

    def __enter__(self) -> CheckpointFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return list(self._files)

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those of ``names`` that the checkpoint lacks."""
        return [name for name in names if name not in self._files]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor."""
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int | None, start: int, stop: int) -> Tensor:
        """Return entries ``start`` to ``stop`` (exclusive, cut off at the end) along ``dim``. ``dim`` None: the whole
        tensor."""
        view = self._slice(name)
        if dim is None:
            return view[:]
        size = view.get_shape()[dim]
        start, stop = min(start, size), min(stop, size)
        if start == stop:
            shape = [*view.get_shape()]
            shape[dim] = 0
            return torch.empty(shape)
        return view[start:stop] if dim == 0 else view[:, start:stop]

    def _slice(self, name: str) -> Any:
        if name not in self._files:
            raise ValueError(f"the checkpoint in {self._folder} lacks the tensor {name}")
        return self._handle(self._files[name]).get_slice(name)

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
        return self._open[file]

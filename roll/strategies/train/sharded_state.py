"""Training state on disk: each rank writes the parts of tensors that it has, any number of ranks reads them again.

A file is plain safetensors; its header says where in the whole tensor each part belongs. Nothing is unpickled, and no
rank ever holds a whole model. Names are of Hugging Face's weights behind what a tensor is to them, as in
``exp_avg/model.norm.weight``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor


class UnfitState(ValueError):
    """A checkpoint that is damaged, or not of this model."""


@dataclass(frozen=True)
class Part:
    """A box of a whole tensor."""

    name: str
    tensor: Tensor
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Where the box begins in each dimension."""


@dataclass(frozen=True)
class StateSnapshot:
    """What one rank has to keep, in memory of its own: training may go on while it is written."""

    parts: Sequence[Part]
    facts: Mapping[str, Any]
    """Whatever JSON can hold, equal on all ranks."""
    ranks: int = 1
    """How many write."""


def whole(name: str, tensor: Tensor) -> Part:
    """A tensor that one rank has all of."""
    return Part(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def write_state(folder: Path, rank: int, snapshot: StateSnapshot) -> Path:
    """Write this rank's file and wait until it is on the disk. Empty parts need no place. `OSError` names the file."""
    parts = [part for part in snapshot.parts if part.tensor.numel()]
    places = {part.name: [part.whole_shape, part.offsets] for part in parts}
    path = _file(folder, rank)
    folder.mkdir(parents=True, exist_ok=True)
    header = {
        "places": json.dumps(places),
        "facts": json.dumps(dict(snapshot.facts)),
        "ranks": str(snapshot.ranks),
    }
    try:
        save_file({part.name: part.tensor.contiguous() for part in parts}, path, header)
    except SafetensorError as cause:
        raise OSError(f"cannot write {path}: {cause}") from cause
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return path


@dataclass(frozen=True)
class _Place:
    path: Path
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class SavedState:
    """The files of all ranks, read as whole tensors or any boxes of them."""

    def __init__(self, folder: Path) -> None:
        """Reads headers only. Raises `UnfitState` if files are missing or damaged."""
        self.folder = folder
        self._places: dict[str, list[_Place]] = {}
        self._files: dict[Path, Any] = {}
        self.facts: dict[str, Any] = {}
        if not _file(folder, 0).is_file():
            raise UnfitState(f"{folder} holds no training state: there is no {_file(folder, 0).name}")
        ranks = self._read_header(_file(folder, 0))
        for rank in range(1, ranks):
            self._read_header(_file(folder, rank))

    def names(self) -> list[str]:
        """Of all tensors."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor. Raises `UnfitState` for a name that is not there."""
        return self._known(name)[0].whole_shape

    def read(self, name: str, offsets: Sequence[int], shape: Sequence[int]) -> Tensor:
        """A box of a tensor, on the CPU. Raises `UnfitState` if no rank wrote some of it."""
        box: Tensor | None = None
        filled = 0
        for place in self._known(name):
            begin = [max(mine, theirs) for mine, theirs in zip(offsets, place.offsets, strict=True)]
            ends = [
                min(mine + size, theirs + their_size)
                for mine, size, theirs, their_size in zip(offsets, shape, place.offsets, place.shape, strict=True)
            ]
            if any(left >= right for left, right in zip(begin, ends, strict=True)):
                continue
            there = tuple(slice(b - o, e - o) for b, e, o in zip(begin, ends, place.offsets, strict=True))
            here = tuple(slice(b - o, e - o) for b, e, o in zip(begin, ends, offsets, strict=True))
            part = self._slice(place.path, name, there)
            if box is None:
                box = torch.empty(tuple(shape), dtype=part.dtype)
            box[here] = part
            filled += part.numel()
        wanted = torch.Size(shape).numel()
        if filled != wanted or box is None:
            raise UnfitState(f"{name}: {filled} of {wanted} values from {list(offsets)} on are in {self.folder}")
        return box

    def _slice(self, path: Path, name: str, there: tuple[slice, ...]) -> Tensor:
        file = self._open(path)
        return file.get_slice(name)[there] if there else file.get_tensor(name)

    def _open(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = safe_open(path, "pt")
        return self._files[path]

    def _known(self, name: str) -> list[_Place]:
        if name not in self._places:
            raise UnfitState(f"{self.folder} has no tensor {name}: it is the state of another model")
        return self._places[name]

    def _read_header(self, path: Path) -> int:
        """Learn what a file holds; returns how many files there are."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata()
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (SafetensorError, OSError) as cause:
            raise UnfitState(f"{path} is damaged: {cause}") from cause
        self.facts = json.loads(header["facts"])
        for name, (whole_shape, offsets) in json.loads(header["places"]).items():
            place = _Place(path, tuple(whole_shape), tuple(offsets), shapes[name])
            self._places.setdefault(name, []).append(place)
        return int(header["ranks"])


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"

"""Sharded tensors on disk: the training state of all ranks, and the weights of a Hugging Face model.

Each rank writes its parts of the training state, and any number of ranks can read them. Files are plain safetensors:
nothing is unpickled, and no rank ever holds the full model. The file header gives the position of each part in its full
tensor. A tensor's name is its kind and the weight's Hugging Face name: ``exp_avg/model.norm.weight``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from roll.configs.pictures import MODEL_INDEX
from roll.tracking.files import sync_file


class UnfitState(ValueError):
    """A saved training state or checkpoint is damaged, or belongs to another model."""


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of AdamW's moments: the first part of their names, and their keys in torch's optimizer state."""
_WEIGHT = "weight/"
_NUMBER = "#"
"""Separator that occurs in no tensor name. The number after it distinguishes parts of one tensor in one file."""


@dataclass(frozen=True)
class Part:
    """A rectangular part (a slice in each dimension) of a full tensor."""

    name: str
    tensor: Tensor
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    """Start of the part in each dimension of the full tensor."""


@dataclass(frozen=True)
class StateSnapshot:
    """A copy of the state that one rank saves, so that training may continue while it is written."""

    parts: Sequence[Part]
    facts: Mapping[str, Any]
    """JSON-serialisable data such as step counts, equal on all ranks."""
    ranks: int = 1
    """Number of ranks that write parts of the state."""


def whole(name: str, tensor: Tensor) -> Part:
    """Return a `Part` that covers the full tensor."""
    return Part(name, tensor, tuple(tensor.shape), (0,) * tensor.ndim)


def own_share(part: Part, rank: int, ranks: int) -> Part:
    """Return a CPU copy of the rows of ``part`` that ``rank`` writes, if ``ranks`` ranks hold the same ``part``."""
    if not part.tensor.ndim:
        tensor = part.tensor if rank == 0 else part.tensor.new_empty(0)
        return Part(part.name, tensor.to("cpu", copy=True), part.whole_shape, part.offsets)
    rows = -(-len(part.tensor) // ranks)
    first = min(rank * rows, len(part.tensor))
    tensor = part.tensor[first : first + rows].to("cpu", copy=True)
    return Part(part.name, tensor, part.whole_shape, (part.offsets[0] + first, *part.offsets[1:]))


def common_updates(state: SavedState) -> int:
    """Return the number of updates of the weights, for a trainer that keeps a single count for all weights.

    Raises `UnfitState` if some weights were updated more often than others.
    """
    counts = set(state.facts["updates"].values()) or {0}
    if len(counts) > 1 or len(state.facts["updates"]) not in (0, len(state.weights())):
        raise UnfitState(
            f"in {state.folder} some weights were updated more often than others; only fsdp2_train goes on from there"
        )
    return counts.pop()


def write_state(
    folder: Path, rank: int, snapshot: StateSnapshot, on_synced: Callable[[int], None] = lambda size: None
) -> Path:
    """Write this rank's file (without empty parts), wait until it is on disk, and return its path.

    ``on_synced`` is called with the number of bytes of each portion that reaches the disk. Raises `OSError` naming the
    file.
    """
    parts: dict[str, Part] = {}
    for part in snapshot.parts:
        if part.tensor.numel():
            # A rank may have several parts of a tensor, and each needs its own name.
            parts[f"{part.name}{_NUMBER}{len(parts)}" if part.name in parts else part.name] = part
    places = {key: [part.whole_shape, part.offsets] for key, part in parts.items()}
    path = state_file(folder, rank)
    folder.mkdir(parents=True, exist_ok=True)
    header = {"places": json.dumps(places), "facts": json.dumps(dict(snapshot.facts)), "ranks": str(snapshot.ranks)}
    try:
        save_file({key: part.tensor.contiguous() for key, part in parts.items()}, path, header)
    except SafetensorError as cause:
        raise OSError(f"cannot write {path}: {cause}") from cause
    sync_file(path, on_synced)
    return path


@dataclass(frozen=True)
class _Place:
    path: Path
    key: str
    whole_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensors:
    """Tensors stored in parts in safetensors files. Full tensors or any slices of them can be read.

    Files are opened lazily."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, list[_Place]] = {}
        self._files: dict[Path, Any] = {}

    def names(self) -> list[str]:
        """Return the names of all tensors."""
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the full tensor. Raises `UnfitState` for an unknown name."""
        return self._known(name)[0].whole_shape

    def read(self, name: str, offsets: Sequence[int] = (), shape: Sequence[int] | None = None) -> Tensor:
        """Return a slice of a tensor (default: all of it) on the CPU. Raises `UnfitState` if values are missing."""
        if shape is None:
            shape = self.shape(name)
            offsets = (0,) * len(shape)
        if 0 in shape:
            return torch.empty(tuple(shape))
        wanted, filled = torch.Size(shape).numel(), 0
        box: Tensor | None = None
        places = self._known(name)
        for place in places:
            begin = [max(mine, theirs) for mine, theirs in zip(offsets, place.offsets, strict=True)]
            ends = [
                min(mine + size, theirs + their_size)
                for mine, size, theirs, their_size in zip(offsets, shape, place.offsets, place.shape, strict=True)
            ]
            if any(left >= right for left, right in zip(begin, ends, strict=True)):
                continue
            there = tuple(slice(b - o, e - o) for b, e, o in zip(begin, ends, place.offsets, strict=True))
            here = tuple(slice(b - o, e - o) for b, e, o in zip(begin, ends, offsets, strict=True))
            file = self._open(place.path)
            part = file.get_slice(place.key)[there] if there else file.get_tensor(place.key)
            if len(places) == 1 and part.numel() == wanted:
                return part  # without a copy
            if box is None:
                box = torch.empty(tuple(shape), dtype=part.dtype)
            box[here] = part
            filled += part.numel()
        if filled != wanted or box is None:
            raise UnfitState(f"{name}: {filled} of {wanted} values from {list(offsets)} on are in {self.folder}")
        return box

    def _open(self, path: Path) -> Any:
        """Return an open file. Raises `UnfitState` naming it if it is missing or damaged."""
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, "pt")
            except (SafetensorError, OSError) as cause:
                raise UnfitState(f"{path} is missing or damaged: {cause}") from cause
        return self._files[path]

    def _known(self, name: str) -> list[_Place]:
        if name not in self._places:
            raise UnfitState(f"{self.folder} has no tensor {name}: it is the state of another model")
        return self._places[name]


class SavedState(StoredTensors):
    """A training state on disk, written by all ranks of a trainer."""

    def __init__(self, folder: Path) -> None:
        """Read the headers only. Raises `UnfitState` if files are missing or damaged."""
        super().__init__(folder)
        self.facts: dict[str, Any] = {}
        if not state_file(folder, 0).is_file():
            raise UnfitState(f"{folder} holds no training state: there is no {state_file(folder, 0).name}")
        ranks = self._read_header(state_file(folder, 0))
        for rank in range(1, ranks):
            self._read_header(state_file(folder, rank))

    def weights(self) -> set[str]:
        """Return the Hugging Face names of the weights."""
        return {name.removeprefix(_WEIGHT) for name in self._places if name.startswith(_WEIGHT)}

    def require_weights(self, own: Iterable[str]) -> None:
        """Raise `UnfitState` unless the state has exactly the weights named ``own``."""
        odd = sorted(set(own) ^ self.weights())
        if odd:
            raise UnfitState(
                f"{self.folder} is the state of another model: {odd[0]} is in one of them only ({len(odd)} such names)"
            )

    def require_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raise `UnfitState` unless the tensor ``name`` has this shape in the state."""
        if self.shape(name) != tuple(shape):
            raise UnfitState(
                f"{name} is {list(shape)} in the model and {list(self.shape(name))} in {self.folder}: it is the state "
                "of another model"
            )

    def read_whole(self, name: str, shape: Sequence[int]) -> Tensor:
        """Return the full tensor on the CPU. Raises `UnfitState` if it has another shape."""
        self.require_shape(name, shape)
        return self.read(name, (0,) * len(shape), shape)

    def _read_header(self, path: Path) -> int:
        """Record the parts in a file. Return the number of files of the state."""
        try:
            with safe_open(path, "pt") as file:
                header = file.metadata()
                shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (SafetensorError, OSError) as cause:
            raise UnfitState(f"{path} is damaged: {cause}") from cause
        self.facts = json.loads(header["facts"])
        for key, (whole_shape, offsets) in json.loads(header["places"]).items():
            place = _Place(path, key, tuple(whole_shape), tuple(offsets), shapes[key])
            self._places.setdefault(key.partition(_NUMBER)[0], []).append(place)
        return int(header["ranks"])


def state_file(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file in the folder of a training state."""
    return folder / f"rank-{rank:05d}.safetensors"


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICTURES = ("transformer", "diffusion_pytorch_model.safetensors")
"""Folder and file of the trained weights (the denoising transformer) in a diffusers pipeline."""


def checkpoint_folder(model_path: str) -> Path:
    """Return the local folder of a checkpoint; a hub name is downloaded first, with safetensors weights only."""
    if Path(model_path).is_dir():
        return Path(model_path)
    # Some repositories hold a second copy of the weights, in another format, under this name.
    return Path(
        snapshot_download(model_path, allow_patterns=["*.safetensors", "*.json"], ignore_patterns=["consolidated*"])
    )


class CheckpointFiles(StoredTensors):
    """The weights of a Hugging Face model, or of the denoising transformer in a diffusers pipeline.

    Methods raise `UnfitState` if a file is missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        """Read the index only. Raises ``FileNotFoundError`` if the folder has no safetensors weights."""
        single, index = SINGLE, INDEX
        if (folder / MODEL_INDEX).exists():
            folder, single = folder / PICTURES[0], PICTURES[1]
            index = f"{single}.index.json"
        super().__init__(folder)
        if (folder / index).exists():
            files = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"]
        elif (folder / single).exists():
            files = dict.fromkeys(self._open(folder / single).keys(), single)
        else:
            raise FileNotFoundError(f"{folder} holds neither {single} nor {index}; other formats are not read")
        self._file_of: dict[str, str] = files

    def names(self) -> list[str]:
        return list(self._file_of)

    def precisions(self) -> set[str]:
        """Return the set of dtypes in the files, under safetensors' names: ``{"BF16"}`` for most published models."""
        return {self._open(self.folder / file).get_slice(name).get_dtype() for name, file in self._file_of.items()}

    def missing(self, names: Iterable[str]) -> list[str]:
        """Return those ``names`` that the checkpoint lacks."""
        return [name for name in names if name not in self._file_of]

    def _known(self, name: str) -> list[_Place]:
        if name in self._file_of and name not in self._places:
            path = self.folder / self._file_of[name]
            try:
                shape = tuple(self._open(path).get_slice(name).get_shape())
            except SafetensorError as cause:
                raise UnfitState(f"{path} is damaged: {cause}") from cause
            self._places[name] = [_Place(path, name, shape, (0,) * len(shape), shape)]
        return super()._known(name)

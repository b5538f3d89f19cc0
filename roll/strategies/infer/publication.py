"""Checks of a weight update: that it is complete and fits before it is loaded, and which tensors to read back
afterwards."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roll.data.seeds import derive_seed
from roll.strategies.infer.base import WeightMismatch

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name of each tensor -> (dtype name, shape)."""

_INSPECTED_BYTES = 64 * 1024**2
"""Most bytes of weights that are read back from the engine after an update."""


def check_layout(entries: list[tuple[str, str, tuple[int, ...]]], shapes: dict[str, tuple[int, ...]]) -> Layout:
    """Check a weight update against the model's ``shapes`` and return its layout.

    Raises ``WeightMismatch`` naming a tensor that does not fit or is missing.
    """
    layout: Layout = {}
    for name, dtype, shape in entries:
        if name not in shapes:
            raise WeightMismatch(f"tensor {name!r} is not in the engine's model")
        if name in layout:
            raise WeightMismatch(f"tensor {name!r} came twice")
        if not _is_float(dtype):
            raise WeightMismatch(f"tensor {name!r} has dtype {dtype}, the engine's is a floating-point one")
        if tuple(shape) != shapes[name]:
            raise WeightMismatch(f"tensor {name!r} has shape {tuple(shape)}, the engine's has {shapes[name]}")
        layout[name] = (dtype, tuple(shape))
    missing = [name for name in shapes if name not in layout]
    if missing:
        raise WeightMismatch(f"tensor {missing[0]!r} is missing from the publication ({len(missing)} missing in all)")
    return layout


def _is_float(dtype_name: str) -> bool:
    return dtype_name.startswith(("float", "bfloat"))


def sample_of(tensors: Mapping[str, torch.Tensor], version: int) -> list[str]:
    """Return names of some tensors to read back, together at most `_INSPECTED_BYTES` (or one tensor). They differ from
    version to version."""
    sample: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: derive_seed(version, name)):
        size += tensors[name].nbytes
        if sample and size > _INSPECTED_BYTES:
            break
        sample.append(name)
    return sample

"""What an engine asks of a publication before it is loaded, and of itself afterwards: is it complete, does it fit, and
which tensors are worth reading back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from roll.data.seeds import derive_seed
from roll.strategies.infer.base import WeightMismatch

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name of each tensor -> (dtype name, shape)."""

_INSPECTED_BYTES = 64 * 1024**2
"""Most bytes of weights read back from the engine after an update."""


def check_layout(entries: list[tuple[str, str, tuple[int, ...]]], shapes: dict[str, tuple[int, ...]]) -> Layout:
    """What was sent. Raises ``WeightMismatch`` naming a tensor that does not fit, or is missing."""
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
    """Names of some tensors to read back, other ones at each version, together at most `_INSPECTED_BYTES` (or one)."""
    sample: list[str] = []
    size = 0
    for name in sorted(tensors, key=lambda name: derive_seed(version, name)):
        size += tensors[name].nbytes
        if sample and size > _INSPECTED_BYTES:
            break
        sample.append(name)
    return sample

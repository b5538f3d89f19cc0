"""Compilation of decoder layers (`torch.compile`), for trainers that shard a model after it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import Tensor, nn

VARIANTS = 32
"""Largest number of compiled variants of the same code (gradients or none, one row or several, kinds of layers,
adapters or none). Beyond it torch computes without compiling. Its own limit, 8, is too small, but torch has to be new
enough to take another."""


def compile_layers(layers: Iterable[nn.Module], device: torch.device) -> None:
    """Have each layer compiled in place at its first call. Raises ``RuntimeError`` if nothing can be compiled here.

    Layers of the same kind share their compiled code. Sizes are variables in it, except for sizes of 1. Call this
    before sharding, whose hooks are not compiled.
    """
    _require_compiler(device)
    limit = {"recompile_limit": VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
    for layer in layers:
        layer.compile(dynamic=True, **limit)


def _require_compiler(device: torch.device) -> None:
    """Compile and run a small function, so that a missing compiler is found before training starts."""
    from torch._inductor import config

    def doubled(values: Tensor) -> Tensor:
        return values * 2

    try:
        # A result from torch's cache would need no compiler.
        with config.patch(force_disable_caches=True):
            torch.compile(doubled)(torch.ones(2, device=device))
    except Exception as error:
        raise RuntimeError(
            f"strategy_config.compile: torch cannot compile for {device.type} here ({error}). It needs a C++ compiler "
            "(g++), and on GPUs Triton as well. Install them, or set `compile` to false"
        ) from error

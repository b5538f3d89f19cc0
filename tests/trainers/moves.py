"""A stand-in for a GPU: it remembers what is sent to it and from it, and leaves everything where it is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

GPU = torch.device("cuda", 0)


class Moves(TorchFunctionMode):
    """Record of the tensors that are sent to each kind of device inside the block."""

    def __init__(self) -> None:
        super().__init__()
        self._sent: dict[str, set[int]] = defaultdict(set)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function != Tensor.to or not isinstance(args[1], (torch.device, str)):
            return function(*args, **(kwargs or {}))
        kind = torch.device(args[1]).type
        self._sent[kind].add(place_of(args[0]))
        return args[0] if kind == GPU.type else function(*args, **(kwargs or {}))

    def left_out(self, kind: str, places: dict[str, int]) -> set[str]:
        """The names of ``places`` from which nothing was sent to ``kind``."""
        return {name for name, place in places.items() if place not in self._sent[kind]}

    def any(self) -> bool:
        return bool(self._sent)


def place_of(tensor: Tensor) -> int:
    """Address of its own values; of a tensor that is shared out, those of this rank."""
    return getattr(tensor, "_local_tensor", tensor).data_ptr()


def on_a_gpu(trainer: Any) -> None:
    """Tell a trainer of a CPU, when it has been built, that its states are on a GPU."""
    trainer.setup = replace(trainer.setup, device="cuda")
    trainer.device = GPU


def places_of_states(trainer: Any) -> dict[str, int]:
    """Addresses, by name, of a trainer's weights and moments: all that takes memory of the device between steps."""
    return {name: place_of(tensor) for name, tensor in _states(trainer)}


def _states(trainer: Any) -> Iterator[tuple[str, Tensor]]:
    yield from trainer.model.named_parameters()
    yield from trainer.model.named_buffers()
    if not trainer.setup.forward_only:
        yield from moments_of(trainer.optimizer)


def moments_of(optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    for number, (_, state) in enumerate(optimizer.state.items()):
        for name, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0:
                yield f"{name} of {number}", value

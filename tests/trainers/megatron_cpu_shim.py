"""Lets megatron-core, which asks for CUDA everywhere, run on a CPU: for tests only.

What it asks of a device is answered with the CPU, what it asks of streams with nothing. No function of megatron-core is
touched, but those that it gives to `torch.compile` stay as they are: compiling them for a CPU takes longer than any
test. To be installed once in each process, before a trainer is built.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

FACTORIES = ("arange", "empty", "full", "ones", "tensor", "zeros")


class NoStream:
    """A stream on which everything has happened already."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: NoStream) -> None: ...

    def record_event(self) -> NoStream:
        return self

    def synchronize(self) -> None: ...


def install() -> None:
    """Answer for CUDA in this process."""
    if torch.cuda.current_device is _current_device:
        return
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    with torch.device("cpu"):
        torch.empty(0)  # torch remembers, at the first use of such a block, which functions it applies to.
    stream = NoStream()
    torch.cuda.current_device = _current_device
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.get_rng_state = torch.cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    torch.cuda.Stream = NoStream
    torch.cuda.current_stream = lambda *_: stream
    torch.cuda.stream = lambda _: nullcontext()
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor
    torch.Tensor.pin_memory = lambda tensor, *_: tensor.clone()
    torch.Tensor.type = _named_as_on_cuda(torch.Tensor.type)
    torch.distributed.all_to_all_single = _with_listed_sizes(torch.distributed.all_to_all_single)
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _current_device() -> str:
    return "cpu"


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **settings: Any) -> torch.Tensor:
        if str(settings.get("device")).startswith("cuda"):
            settings["device"] = "cpu"
        settings.pop("pin_memory", None)
        return factory(*args, **settings)

    return create


def _named_as_on_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """The optimizers look at the names of tensor types."""

    def name(tensor: torch.Tensor, *args: Any, **settings: Any) -> Any:
        result = original(tensor, *args, **settings)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    return name


def _with_listed_sizes(original: Callable[..., Any]) -> Callable[..., Any]:
    """Sizes that have come from a device are numbers; those that have been on the CPU all along are still a tensor."""

    def exchange(*args: Any, **settings: Any) -> Any:
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(settings.get(name), torch.Tensor):
                settings[name] = settings[name].tolist()
        return original(*args, **settings)

    return exchange

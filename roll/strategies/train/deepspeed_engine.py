"""Starts DeepSpeed on a model that is loaded already.

DeepSpeed takes its kind of device and its local rank from the environment only. Both are set here, in a process that
trains nothing else.
"""

from __future__ import annotations

import os
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def import_deepspeed(device: torch.device) -> ModuleType:
    """Import the package after setting the device that it is to run on."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ["LOCAL_RANK"] = str(device.index or 0)
    import deepspeed

    return deepspeed


def start_engine(
    deepspeed: ModuleType,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: dict[str, Any],
    device: torch.device,
    split_weights: bool,
) -> DeepSpeedEngine:
    """Return the engine around ``model``, which it changes in place. Collective.

    ``optimizer`` is None for forward passes only.
    """
    if split_weights:
        _split(deepspeed, model, config, device)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine


def _split(deepspeed: ModuleType, model: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Split the weights one by one, so that no device ever holds all of them."""
    if config["bf16"]["enabled"]:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    deepspeed.init_distributed(dist_init_required=None)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    # An engine does not move a model that was split before it, and the model's buffers have not moved yet.
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)

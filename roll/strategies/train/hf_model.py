"""Prepares a Hugging Face model for a trainer that keeps its modules, whichever engine shards them afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from roll.strategies.allocator import keep_blocks_of
from roll.strategies.train.checkpoint import load_model
from roll.strategies.train.head import OutputHead, install_output_head
from roll.strategies.train.packed_attention import install_packed_attention
from roll.strategies.train.setup import TrainerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stored_dtype(setup: TrainerSetup) -> torch.dtype:
    """Return the precision in which weights are stored: float32 masters, unless the weights are never updated."""
    frozen = setup.forward_only or setup.trains_adapters
    return getattr(torch, setup.model_args.dtype) if frozen else torch.float32


def prepare_model(setup: TrainerSetup, gradient_checkpointing: bool) -> tuple[PreTrainedModel, OutputHead | None]:
    """Return a rank's model, whole, on the CPU and without dropout, and the result of `install_output_head` for it.

    Raises ``UnpackableModel`` if rows are to be packed and the model would mix their samples.
    """
    model = load_model(setup.model_path, setup.model_args, stored_dtype(setup), setup.kind)
    if setup.device == "cpu":
        keep_blocks_of(model.num_parameters())
    head = install_output_head(model) if setup.kind == "policy" else None
    model.eval()
    if setup.packs:
        install_packed_attention(model, setup.model_args.attn_implementation)
    model.requires_grad_(not setup.forward_only)
    if gradient_checkpointing and not setup.forward_only:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in decoder_layers(model):
            # Checkpointing looks at the layer's own training flag. Its children, dropout among them, stay in eval mode.
            layer.training = True
    return model, head


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the repeated blocks, as the model itself declares them."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]

"""A Hugging Face model made ready for a trainer that keeps its modules, whatever engine shards them afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from roll.strategies.train.checkpoint import load_model
from roll.strategies.train.head import OutputHead, install_output_head
from roll.strategies.train.packed_attention import install_packed_attention
from roll.strategies.train.setup import TrainerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stored_dtype(setup: TrainerSetup) -> torch.dtype:
    """Weights that are never updated need no float32 master."""
    frozen = setup.forward_only or setup.trains_adapters
    return getattr(torch, setup.model_args.dtype) if frozen else torch.float32


def prepare_model(setup: TrainerSetup, gradient_checkpointing: bool) -> tuple[PreTrainedModel, OutputHead | None]:
    """The model of a rank, whole and on the CPU, without dropout, and its head as `install_output_head` gives it.

    ``UnpackableModel`` if rows are to be packed and the model would mix their samples.
    """
    model = load_model(setup.model_path, setup.model_args, stored_dtype(setup), setup.kind)
    head = install_output_head(model) if setup.kind == "policy" else None
    model.eval()
    if setup.packs:
        install_packed_attention(model, setup.model_args.attn_implementation)
    model.requires_grad_(not setup.forward_only)
    if gradient_checkpointing and not setup.forward_only:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in decoder_layers(model):
            # Checkpointing asks the layer itself whether it trains; its children, dropout among them, stay in eval.
            layer.training = True
    return model, head


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks, as the model itself declares them."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]

"""Writing full weights as a Hugging Face model, where no Hugging Face model is at hand."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from roll.strategies.train.checkpoint import export_model


def export_weights(weights: dict[str, Tensor], source: str, path: str, trust_remote_code: bool) -> None:
    """Write ``weights`` (full tensors by name, tied ones once) as a model like the one at ``source`` into ``path``."""
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    try:
        model.generation_config = GenerationConfig.from_pretrained(source)
    except OSError:
        pass  # A model without generation_config.json is complete.
    export_model(model, weights, source, path, trust_remote_code)

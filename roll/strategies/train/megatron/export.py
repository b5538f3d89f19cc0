"""Writing full weights as a Hugging Face model, where no Hugging Face model is at hand."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig

from roll.strategies.train.checkpoint import ModelKind, export_model, model_class


def export_weights(
    weights: dict[str, Tensor], source: str, path: str, trust_remote_code: bool, kind: ModelKind = "policy"
) -> None:
    """Write ``weights`` (full tensors by name, tied ones once) as a model like the one at ``source``, but of this kind,
    into ``path``."""
    labels = {} if kind == "policy" else {"num_labels": 1}
    config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **labels)
    with torch.device("meta"):
        model = model_class(kind).from_config(config, trust_remote_code=trust_remote_code)
    if kind == "policy":
        try:
            model.generation_config = GenerationConfig.from_pretrained(source)
        except OSError:
            pass  # A model without generation_config.json is complete.
    export_model(model, weights, source, path, trust_remote_code, kind)

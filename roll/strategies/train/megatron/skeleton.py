"""The Hugging Face model that a Megatron model stands for, to be combined with the trained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import AutoConfig, GenerationConfig

from roll.strategies.train.checkpoint import model_class
from roll.strategies.train.setup import TrainerSetup

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def hugging_face_model(setup: TrainerSetup) -> PreTrainedModel:
    """Return a model like the one that the trainer began with, but of the trainer's kind and without weights."""
    trusted, kind = setup.model_args.trust_remote_code, setup.kind
    labels = {} if kind == "policy" else {"num_labels": 1}
    config = AutoConfig.from_pretrained(setup.model_path, trust_remote_code=trusted, **labels)
    with torch.device("meta"):
        model = model_class(kind).from_config(config, trust_remote_code=trusted)
    if kind == "policy":
        try:
            model.generation_config = GenerationConfig.from_pretrained(setup.model_path)
        except OSError:
            pass  # A model without generation_config.json is complete.
    return model

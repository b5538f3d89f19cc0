"""What a model's files tell an engine before it loads the weights.

Names and shapes are what a trainer publishes. The end tokens come from where transformers looks for them, so that every
engine ends a response at the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from roll.configs.errors import ConfigError
from roll.data import prompts


@dataclass(frozen=True)
class ModelSpec:
    """Location of a model, and how to load and run it."""

    model_path: str
    device: str
    dtype: str
    attn_implementation: str
    max_length: int
    trust_remote_code: bool = False


def load_config(model_path: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return the model's configuration."""
    return AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def parameter_shapes(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter by its Hugging Face name; tied parameters appear once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def eos_token_ids(spec: ModelSpec, config: PretrainedConfig) -> tuple[int, ...]:
    """Return the end tokens of the generation configuration, else of the model configuration, else of the tokenizer.
    Empty if none of them names one."""
    for eos in (_generation_eos(spec.model_path), config.get_text_config(decoder=True).eos_token_id):
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    try:
        eos = load_tokenizer(spec).eos_token_id
    except OSError:
        return ()
    return () if eos is None else (int(eos),)


def _generation_eos(model_path: str) -> int | list[int] | None:
    try:
        return GenerationConfig.from_pretrained(model_path).eos_token_id
    except OSError:
        return None  # A model without generation_config.json is complete.


def load_tokenizer(spec: ModelSpec) -> PreTrainedTokenizerBase:
    """Return the tokenizer stored with the model, which also reads the prompts.

    Raises ``OSError`` if there is none. For a folder without a tokenizer, transformers itself would invent an empty
    one.
    """
    folder = Path(spec.model_path)
    if folder.is_dir() and not (folder / "tokenizer_config.json").exists():
        raise OSError(f"{folder} holds no tokenizer_config.json")
    try:
        return prompts.load_tokenizer(spec.model_path, trust_remote_code=spec.trust_remote_code)
    except ConfigError as error:
        raise OSError(str(error)) from error


def cache_bytes_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Return the bytes that the keys and values of one token take, over all layers."""
    text = config.get_text_config(decoder=True)
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    head_size = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size * getattr(torch, dtype).itemsize

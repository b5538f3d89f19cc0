"""What can be known of a model from its files, without loading its weights.

Names and shapes come from the transformers class on the meta device, which is what a trainer publishes; end tokens come
from where transformers would look for them.
"""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig


def load_config(model_path: str, trust_remote_code: bool) -> PretrainedConfig:
    """The model's configuration."""
    return AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)


def parameter_shapes(config: PretrainedConfig, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter by its Hugging Face name, tied ones once."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def eos_token_ids(model_path: str, config: PretrainedConfig) -> tuple[int, ...]:
    """End tokens: of the generation configuration, else of the model configuration; empty if neither names one."""
    candidates = []
    try:
        candidates.append(GenerationConfig.from_pretrained(model_path).eos_token_id)
    except OSError:
        pass  # A model without generation_config.json is complete.
    candidates.append(config.get_text_config(decoder=True).eos_token_id)
    for eos in candidates:
        if eos is not None:
            return tuple(eos) if isinstance(eos, list | tuple) else (int(eos),)
    return ()


def cache_bytes_per_token(config: PretrainedConfig, dtype: str) -> int:
    """Bytes of the keys and values of one token over all layers."""
    text = config.get_text_config(decoder=True)
    heads = text.to_dict().get("num_key_value_heads") or text.num_attention_heads
    head_size = text.to_dict().get("head_dim") or text.hidden_size // text.num_attention_heads
    return 2 * text.num_hidden_layers * heads * head_size * getattr(torch, dtype).itemsize

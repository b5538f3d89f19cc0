"""Loads a transformers causal language model for the engine and refuses models that the engine cannot drive correctly.

The engine promises that a request's tokens do not depend on its neighbours, and it relies on a cache row being a plain
list of keys and values. Models that break one of the two (sliding windows, state spaces, position encodings that depend
on the longest sequence) are refused by name before anything is generated.
"""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from roll.configs.errors import ConfigError, ConfigProblem
from roll.strategies.allocator import keep_blocks_of
from roll.strategies.infer.attention import SLOT_SDPA, register_slot_sdpa
from roll.strategies.infer.model_facts import ModelSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def load_model(spec: ModelSpec) -> PreTrainedModel:
    """Return the model in evaluation mode on its device. Raises ``ConfigError`` for a model that the engine cannot
    drive, and ``OSError`` if its files hold no safetensors."""
    if spec.dtype not in _DTYPES:
        raise _problem("model_args.dtype", f"{spec.dtype!r} is no known precision", f"one of {', '.join(_DTYPES)}")
    if spec.attn_implementation not in ("sdpa", "eager"):
        raise _problem(
            "model_args.attn_implementation",
            f"hf_infer cannot use {spec.attn_implementation!r}: its rows have different lengths",
            "`sdpa` (or `eager`)",
        )
    implementation = spec.attn_implementation
    if implementation == "sdpa" and torch.device(spec.device).type == "cpu":
        register_slot_sdpa()
        implementation = SLOT_SDPA
    model = AutoModelForCausalLM.from_pretrained(
        spec.model_path,
        dtype=_DTYPES[spec.dtype],
        attn_implementation=implementation,
        trust_remote_code=spec.trust_remote_code,
        use_safetensors=True,
    )
    if torch.device(spec.device).type == "cpu":
        keep_blocks_of(model.num_parameters())
    check_supported(model, spec.max_length)
    model.to(spec.device).eval().requires_grad_(False)
    for parameter in model.parameters():
        # Weights read from a file keep the file's alignment; those of a weight update lie in memory allocated by torch.
        # Some kernels' sums depend on the alignment, and equal weights must give equal bits.
        parameter.data = parameter.data.clone()
    return model


def check_supported(model: PreTrainedModel, max_length: int) -> None:
    """Raise ``ConfigError`` unless every layer is full attention, positions mean the same at any length, and
    ``max_length`` fits the model."""
    config = model.config.get_text_config(decoder=True)
    path = "model_args.model_name_or_path"
    layers = DynamicCache(config=config).layers
    others = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if others or len(layers) != config.num_hidden_layers:
        raise _problem(
            path,
            f"hf_infer needs full attention in every layer; this {config.model_type} model has {', '.join(others)}",
            "a full-attention model (Qwen2, Qwen3, Llama, ...), or another engine",
        )
    rope = config.rope_parameters if "rope_parameters" in config.to_dict() else None
    rope_type = (rope or {}).get("rope_type", "default")
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        raise _problem(
            path,
            f"position encoding {rope_type!r} changes with the longest running sequence",
            "a model with another rope type (default, linear, yarn, llama3)",
        )
    if max_length > config.max_position_embeddings:
        raise _problem(
            "sequence_length",
            f"{max_length} tokens are more than the model's {config.max_position_embeddings} positions",
            f"at most {config.max_position_embeddings}",
        )


def _problem(path: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([ConfigProblem(path, message, remedy)])

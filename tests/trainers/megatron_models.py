"""Tiny random models of each family that `megatron_train` takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 23
"""Odd, so that two tensor-parallel ranks need padding."""
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "norm_topk_prob": True}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES | {"num_hidden_layers": 6}, pad_token_id=0, tie_word_embeddings=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=False)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, head_dim=8, pad_token_id=20, mlp_only_layers=[1])
    ),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES | {"max_position_embeddings": 16384}, rope_parameters=LLAMA3)
    ),
}


def write_models(folder: Path) -> None:
    """One folder for each family; every parameter is random, those that usually start as zeros or ones too."""
    for number, (name, make) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        model = make()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(folder / name)
        (folder / name / "tokenizer.json").write_text('{"made": "by the test"}')

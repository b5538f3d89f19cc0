"""Tiny random models, made once per session."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.strategies.infer.hf_helpers import EOS, VOCABULARY


def _sizes(**changes):
    sizes = dict(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=EOS,
        pad_token_id=2,
    )
    return sizes | changes


@pytest.fixture(scope="session")
def qwen_path(tmp_path_factory) -> str:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("qwen2")
    Qwen2ForCausalLM(Qwen2Config(**_sizes(tie_word_embeddings=True))).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def llama_path(tmp_path_factory) -> str:
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**_sizes(hidden_size=48, num_key_value_heads=4))).save_pretrained(path)
    return str(path)


@pytest.fixture(params=["qwen2", "llama"])
def model_path(request, qwen_path, llama_path) -> str:
    return qwen_path if request.param == "qwen2" else llama_path


@pytest.fixture
def reference(model_path):
    """The same model as plain transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()

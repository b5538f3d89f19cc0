"""Tiny random models, made once per session."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from tests.engines import sglang_helpers, vllm_helpers
from tests.engines.engines import EngineOnTrial
from tests.engines.hf_helpers import EOS, VOCABULARY
from tests.engines.vllm_helpers import make_model, make_moe, make_tokenizer
from tests.tiers import need

pytest.register_assert_rewrite("tests.engines.engine_contract")


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


@pytest.fixture(scope="module")
def one_thread():
    """Torch computes in one thread, as long as the tests of the file run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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


@pytest.fixture(scope="session")
def latent_path(tmp_path_factory) -> str:
    """A model whose keys are of another size than its values."""
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("deepseek_v3")
    latent = dict(q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
    experts = dict(moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1)
    config = DeepseekV3Config(**_sizes(num_key_value_heads=4, first_k_dense_replace=1), **latent, **experts)
    DeepseekV3ForCausalLM(config).save_pretrained(path)
    return str(path)


@pytest.fixture(params=["qwen2", "llama"])
def model_path(request, qwen_path, llama_path) -> str:
    return qwen_path if request.param == "qwen2" else llama_path


@pytest.fixture
def reference(model_path):
    """The same model as plain transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def vllm_path(tmp_path_factory) -> str:
    need("vllm")
    path = tmp_path_factory.mktemp("vllm")
    make_model().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def moe_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("moe")
    make_moe().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def sglang_model():
    """The weights that SGLang starts with."""
    return sglang_helpers.make_wide_model()


@pytest.fixture(scope="session")
def sglang_path(sglang_model, tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("sglang")
    sglang_model.save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def sglang_stand_in(sglang_path, sglang_model):
    """SGLang's adapter with the stand-in for its server."""
    with sglang_helpers.running_stand_in(sglang_path, enable_deterministic_inference=True) as engine:
        yield _sglang_on_trial(engine, sglang_model, tolerance=(1e-5, 1e-3))


@pytest.fixture(scope="session")
def sglang_server(sglang_path, sglang_model):
    """SGLang's adapter with SGLang."""
    with sglang_helpers.running_sglang(sglang_path) as engine:
        yield _sglang_on_trial(engine, sglang_model, tolerance=(1e-3, 2e-2))


def _sglang_on_trial(engine, model, tolerance) -> EngineOnTrial:
    request = vllm_helpers.request
    return EngineOnTrial(
        engine,
        model,
        sglang_helpers.make_wide_model,
        places=sglang_helpers.PLACES,
        tolerance=tolerance,
        refused=(
            request("cold", temperature=1e-7), request("nucleus", top_p=0.9), request("wide", top_k=5000)
        ),
        scored_lengths=(1, 17, 64, vllm_helpers.MAX_LENGTH - 1),
        settling_looks=5,
    )  # fmt: skip

"""Samples in one row do not see each other, in every kind of model that is let through; the others are refused."""

from __future__ import annotations

import logging
import re
import sys
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    modeling_flash_attention_utils,
)

from roll.configs.roles import ModelArguments, WorkerConfig
from roll.trainers import packing
from roll.trainers.base import TrainerSetup
from roll.trainers.packing import (
    UnpackableModel,
    install_packed_attention,
    packs_samples,
    separates_samples,
    try_packed,
)
from roll.trainers.step import Packing

SIZES = {
    "vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64, "initializer_range": 0.3,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
WINDOW = {"sliding_window": 3}
LENGTHS = (5, 5, 9, 1, 2, 7)

MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "Qwen2": (Qwen2Config, SIZES),
    "Qwen2 with windows": (
        Qwen2Config,
        SIZES | WINDOW | {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "Qwen3": (Qwen3Config, SIZES),
    "Qwen3-MoE": (
        Qwen3MoeConfig, SIZES | {"moe_intermediate_size": 8, "num_experts": 4, "num_experts_per_tok": 2}
    ),
    "Llama": (LlamaConfig, SIZES),
    "Mistral, all layers with windows": (MistralConfig, SIZES | WINDOW),
    "Gemma 2": (Gemma2Config, SIZES | WINDOW | {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 2.0}),
    "GPT-2, learned positions": (
        GPT2Config, {"vocab_size": 29, "n_embd": 16, "n_layer": 2, "n_head": 2, "initializer_range": 0.3}
    ),
}  # fmt: skip

# SDPA cannot cap the scores of Gemma 2; transformers from 5.20 on refuses the pair.
KINDS = [(name, kind) for name in MODELS for kind in ("sdpa", "eager") if (name, kind) != ("Gemma 2", "sdpa")]


def random_model(config: type, settings: dict[str, Any], attention: str = "sdpa") -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config(**settings), attn_implementation=attention).eval()


def packed_logits(model: PreTrainedModel, samples: list[torch.Tensor]) -> list[torch.Tensor]:
    packing = Packing.of([len(sample) for sample in samples], torch.device("cpu"))
    logits = model(input_ids=torch.cat(samples)[None], use_cache=False, **packing.model_arguments()).logits[0]
    return list(logits.split([len(sample) for sample in samples]))


def some_samples(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 29, (length,), generator=generator) for length in LENGTHS]


def packs(model: PreTrainedModel, wanted: Any, attention: str, rank: int = 0) -> bool:
    arguments = ModelArguments(attn_implementation=attention)
    config = WorkerConfig(use_sequence_packing=wanted, model_args=arguments)
    return packs_samples(model, TrainerSetup(config, "model", total_optimizer_steps=1, seed=0, rank=rank))


def gradients(model: PreTrainedModel, logits: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of something that depends on every logit, and on which."""
    model.zero_grad()
    flat = torch.cat(logits).log_softmax(-1).flatten()
    (flat * torch.arange(len(flat)).cos()).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize(("name", "attention"), KINDS)
def test_a_packed_row_gives_what_each_sample_gives_alone(name, attention):
    model, samples = random_model(*MODELS[name], attention), some_samples()
    alone = [model(input_ids=sample[None], use_cache=False).logits[0] for sample in samples]
    expected = gradients(model, alone)
    install_packed_attention(model, attention)
    together = packed_logits(model, samples)
    for found, wanted in zip(together, alone, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    found = gradients(model, together)
    assert found.keys() == expected.keys()
    for parameter, gradient in expected.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=2e-5 * scale, msg=parameter)


@pytest.mark.parametrize(("name", "attention"), [kind for kind in KINDS if kind[0] != "Qwen3-MoE"])
def test_a_changed_sample_moves_no_bit_of_its_neighbours(name, attention):
    model = random_model(*MODELS[name], attention)
    install_packed_attention(model, attention)
    samples = some_samples()
    before = packed_logits(model, samples)
    for changed in range(len(samples)):
        others = [sample + (number == changed) * -1 for number, sample in enumerate(samples)]
        after = packed_logits(model, others)
        same = [torch.equal(found, wanted) for found, wanted in zip(after, before, strict=True)]
        assert same == [number != changed for number in range(len(samples))]


def test_padded_rows_pass_through_a_model_that_packs():
    model = random_model(*MODELS["Qwen2 with windows"])
    ids = torch.stack([sample[:5] for sample in some_samples() if len(sample) >= 5])
    expected = model(input_ids=ids, use_cache=False).logits
    install_packed_attention(model, "sdpa")
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, expected, rtol=1e-5, atol=1e-5)


UNPACKABLE: dict[str, tuple[type, dict[str, Any], str, str]] = {
    "a state that is carried on": (MambaConfig, {"vocab_size": 29, "hidden_size": 16, "num_hidden_layers": 1}, "eager",
        "linear_attention"),
    "kinds of layers that are no setting": (JambaConfig, SIZES | {"attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 4}, "sdpa", "linear_attention"),
    "a convolution": (Lfm2Config, SIZES | {"full_attn_idxs": [1]}, "sdpa", "conv"),
    "chunks counted from the start of the row": (Llama4TextConfig, SIZES | {"num_local_experts": 1,
        "attention_chunk_size": 4, "intermediate_size_mlp": 24}, "sdpa", "chunked_attention"),
    "positions that depend on the longest sample": (LlamaConfig,
        SIZES | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "sdpa", "dynamic"),
    "positions inside the attention": (BloomConfig, {"vocab_size": 29, "hidden_size": 16, "n_layer": 1, "n_head": 2},
        "eager", "does not take positions"),
    "attention sinks": (GptOssConfig, SIZES | {"num_local_experts": 2, "num_experts_per_tok": 1}, "eager",
        "results change"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNPACKABLE)
def test_a_model_that_would_mix_samples_is_refused(name):
    config, settings, attention, reason = UNPACKABLE[name]
    with pytest.raises(UnpackableModel, match=f"use_sequence_packing: .*{reason}.*use_sequence_packing: false"):
        try_packed(random_model(config, settings, attention), attention)


@pytest.mark.parametrize("name", UNPACKABLE)
def test_auto_computes_padded_rows_with_a_model_that_would_mix_samples_and_says_so(name, caplog):
    config, settings, attention, reason = UNPACKABLE[name]
    model, untouched = (random_model(config, settings, attention) for _ in range(2))
    assert packs(model, "auto", attention) is False
    (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
    assert re.search(f"auto computes padded rows: .*{reason}", record.getMessage())
    assert model.config._attn_implementation == untouched.config._attn_implementation == attention
    ids = torch.stack([sample[:4] for sample in some_samples() if len(sample) >= 4])
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, untouched(input_ids=ids, use_cache=False).logits)
    with pytest.raises(UnpackableModel, match=reason):
        packs(model, True, attention)


def test_auto_packs_where_the_model_allows_and_false_leaves_it_alone(caplog):
    model, samples = random_model(*MODELS["Qwen2"]), some_samples()
    assert packs(model, False, "sdpa") is False
    assert model.config._attn_implementation == "sdpa"
    alone = [model(input_ids=sample[None], use_cache=False).logits[0] for sample in samples]
    assert packs(model, "auto", "sdpa") is True
    torch.testing.assert_close(torch.cat(packed_logits(model, samples)), torch.cat(alone), rtol=1e-5, atol=1e-5)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_auto_packs_nothing_for_a_model_that_sees_pictures(monkeypatch):
    model = random_model(*MODELS["Qwen2"])
    monkeypatch.setattr(packing, "is_seeing", lambda config: config is model.config)
    assert packs(model, "auto", "sdpa") is False
    assert packs(model, True, "sdpa") is True, "checks refuse pictures in prompts"


def kernel(query, key, value, starts, _, longest, __, *, scale, window_size, enable_gqa, apart=True, exact=True):
    """A variable-length kernel as torch has it, which may mix samples, or have a gradient that is not its own."""
    assert window_size == (-1, 0) and longest == starts.diff().max() and enable_gqa
    bounds = starts.tolist() if apart else [0, len(query)]
    parts = []
    for first, last in pairwise(bounds):
        sample = (tensor[first:last].transpose(0, 1)[None] for tensor in (query, key, value))
        attended = functional.scaled_dot_product_attention(*sample, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(attended[0].transpose(0, 1))
    found = torch.cat(parts)
    return found if exact else found.detach() + 0 * found + 0.1 * (found - found.detach())


def missing_kernel(*_, **__):
    raise RuntimeError("no kernel image is available")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tried", "complaint"),
    [
        (kernel, None),
        (partial(kernel, apart=False), "off by"),
        (partial(kernel, exact=False), "off by"),
        (missing_kernel, "no kernel image"),
    ],
)
def test_a_variable_length_kernel_is_used_only_if_it_keeps_samples_apart_here(dtype, tried, complaint, caplog):
    assert separates_samples(tried, torch.device("cpu"), dtype, 16) is (complaint is None)
    assert [complaint in record.getMessage() for record in caplog.records] == [True] * (complaint is not None)


def test_trying_a_kernel_within_a_checkpoint_leaves_no_trace_in_it():
    weight, tried, works = torch.ones(3, requires_grad=True), partial(kernel), []

    def layer(hidden):
        # The kernel is tried in the first pass only, and both must save the same tensors.
        works.append(separates_samples(tried, torch.device("cpu"), torch.float32, 16))
        return (hidden * weight).exp()

    checkpoint(layer, torch.ones(3), use_reentrant=False).sum().backward()
    assert works == [True, True]
    torch.testing.assert_close(weight.grad, torch.ones(3).exp())


@pytest.mark.parametrize("reason", [None, "it cannot be packed: it mixes samples"])
def test_all_ranks_do_what_the_first_one_found_and_others_try_nothing(reason, monkeypatch):
    def tell(objects, src, device):
        assert objects == [None] and src == 0
        objects[0] = reason

    def fail(*_):
        raise AssertionError("this rank tried the model")

    monkeypatch.setattr(packing.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(packing.dist, "broadcast_object_list", tell)
    monkeypatch.setattr(packing, "try_packed", fail)
    model = random_model(*MODELS["Qwen2"])
    assert packs(model, "auto", "sdpa", rank=1) is (reason is None)
    assert (model.config._attn_implementation == "sdpa") is (reason is not None)
    if reason is not None:
        with pytest.raises(UnpackableModel, match=f"{reason}; write"):
            packs(model, True, "sdpa", rank=1)


def test_a_mask_that_packed_attention_would_not_heed_is_refused():
    model = random_model(*MODELS["Qwen2"])
    ids = some_samples()[0][None]
    mask = torch.ones_like(ids)
    assert packs(model, "auto", "sdpa")
    model(input_ids=ids, attention_mask=mask)  # hides nothing
    mask[0, 0] = 0
    for given in (lambda: model(ids, mask), lambda: model(input_ids=ids, attention_mask=mask)):
        with pytest.raises(ValueError, match="use_sequence_packing: false"):
            given()


class CarriesOver(LlamaForCausalLM):
    """Says nothing of it anywhere, and adds what stood before to every embedding."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        embeddings = self.model.embed_tokens(input_ids)
        seen = 0.01 * embeddings.cumsum(dim=1)
        return super().forward(inputs_embeds=embeddings + seen, position_ids=position_ids, **kwargs)


class DeafToPositions(LlamaForCausalLM):
    """Counts positions from the start of the row; learned ones would be wrong."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        embeddings = self.model.embed_tokens(input_ids)
        counted = torch.arange(input_ids.shape[1])[:, None] / 10
        return super().forward(inputs_embeds=embeddings + counted, position_ids=position_ids, **kwargs)


class DropsBoundaries(LlamaForCausalLM):
    """Does not tell its layers where samples begin."""

    def forward(self, input_ids=None, position_ids=None, output_hidden_states=None, **kwargs):
        return super().forward(input_ids, position_ids=position_ids, output_hidden_states=output_hidden_states)


@pytest.mark.parametrize(
    ("model_class", "reason"),
    [(CarriesOver, "influence"), (DeafToPositions, "results change"), (DropsBoundaries, "influence")],
)
def test_a_model_that_mixes_samples_in_secret_is_found_out(model_class, reason):
    torch.manual_seed(0)
    model = model_class._from_config(LlamaConfig(**SIZES), attn_implementation="sdpa").eval()
    with pytest.raises(UnpackableModel, match=reason):
        try_packed(model, "sdpa")


def test_flash_attention_3_is_told_where_samples_begin(monkeypatch):
    """Its kernel is a stand-in with the signature of the real one (flash-attention's `hopper` folder)."""
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
        softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False,
        sm_margin=0, return_attn_probs=False,
    ):  # fmt: skip
        calls.append((cu_seqlens_q.tolist(), cu_seqlens_k.tolist(), max_seqlen_q, max_seqlen_k, window_size))
        assert causal and cu_seqlens_q.dtype == torch.int32
        parts = []
        for first, last in pairwise(cu_seqlens_q.tolist()):
            sample = (tensor[first:last].transpose(0, 1)[None] for tensor in (q, k, v))
            window = None if window_size[0] < 0 else window_size[0] + 1
            visible = packing._visible(last - first, window, q.device)
            attended = functional.scaled_dot_product_attention(
                *sample, attn_mask=visible, scale=softmax_scale, enable_gqa=True
            )
            parts.append(attended[0].transpose(0, 1))
        return torch.cat(parts)

    kernels = SimpleNamespace(
        flash_attn_func=None, flash_attn_varlen_func=flash_attn_varlen_func, flash_attn_with_kvcache=None
    )
    monkeypatch.setitem(sys.modules, "flash_attn_interface", kernels)
    monkeypatch.setattr(modeling_flash_attention_utils, "_loaded_implementation", None)
    monkeypatch.setattr(
        PreTrainedModel,
        "_check_and_adjust_attn_implementation",
        lambda self, attn_implementation, *a, **k: attn_implementation,
    )
    for name, windows in (("Qwen2", (-1, -1)), ("Mistral, all layers with windows", (2, 2))):
        model, samples = random_model(*MODELS[name]), some_samples()
        expected = torch.cat([model(input_ids=sample[None], use_cache=False).logits[0] for sample in samples])
        try_packed(model, "flash_attention_3")
        install_packed_attention(model, "flash_attention_3")
        calls.clear()
        torch.testing.assert_close(torch.cat(packed_logits(model, samples)), expected, rtol=1e-4, atol=1e-5)
        bounds = [0, *np.cumsum(LENGTHS).tolist()]
        assert calls == [(bounds, bounds, max(LENGTHS), max(LENGTHS), windows)] * 2

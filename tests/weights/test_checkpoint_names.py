"""Publications have the names and values of a checkpoint, for each family of mixtures of experts that transformers has;
and `hf_infer` puts them back where they were, bit by bit.
"""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from roll.configs.roles import ModelArguments
from roll.engines.hf.engine import HFEngine
from roll.engines.options import HFInferConfig
from roll.trainers.lora import add_adapters
from roll.weights.buckets import WeightMismatch, manifest, pack_buckets, tensor_checksum
from roll.weights.checkpoint_names import CheckpointNames

SIZES = {
    "vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {
    "qwen2_moe": ROUTED | {"num_experts": 4, "shared_expert_intermediate_size": 12},
    "qwen3_moe": ROUTED | {"num_experts": 4, "mlp_only_layers": [1]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v2": ROUTED | LATENT,
    "deepseek_v3": ROUTED | LATENT,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": ROUTED | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_num_shared_experts": 1},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
DENSE = {"qwen2": {"tie_word_embeddings": True}, "llama": {}, "gemma2": {}, "gpt_neox": {}}


def make(family: str, seed: int = 0, **changes):
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[family](**SIZES | (FAMILIES | DENSE).get(family, {}) | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for tensor in [*model.parameters(), *(buffer for _, buffer in kept_buffers(model))]:
            tensor.copy_(torch.randn_like(tensor))
    return model


def kept_buffers(model):
    parameters = dict(model.named_parameters())
    tied = {id(tensor) for tensor in parameters.values()}
    return [
        (name, tensor)
        for name, tensor in model.state_dict(keep_vars=True).items()
        if name not in parameters and id(tensor) not in tied
    ]


def in_memory(model):
    return [*model.named_parameters(), *kept_buffers(model)]


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_published_names_and_values_are_those_of_a_checkpoint(family, tmp_path):
    model = make(family)
    names = CheckpointNames.like(model)
    published = dict(names.of(in_memory(model)))
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in saved.items())
    assert names.shapes == {name: tuple(tensor.shape) for name, tensor in saved.items()}
    held = {tensor.untyped_storage().data_ptr() for _, tensor in in_memory(model)}
    assert {tensor.untyped_storage().data_ptr() for tensor in published.values()} == held, "a copy was made"


@pytest.mark.parametrize("family", [*FAMILIES, *DENSE])
def test_a_model_takes_back_what_was_published_bit_by_bit(family):
    model = make(family)
    sent = {name: tensor.detach().clone() for name, tensor in in_memory(model)}
    names = CheckpointNames.like(model)
    tensors = list(names.of(sent.items()))
    backwards = dict(names.parameters(reversed(tensors)))
    assert backwards.keys() == sent.keys()
    assert all(torch.equal(backwards[name], tensor) for name, tensor in sent.items())

    with torch.no_grad():
        for _, tensor in in_memory(model):
            tensor.zero_()
    engine = HFEngine(model, 32, HFInferConfig(8, 64), (2,))
    held = engine.load_weights(engine.stage_weights(pack_buckets(tensors, 3000), 7))
    assert held.checksums == {name: tensor_checksum(tensor) for name, tensor in tensors}
    assert held.parameter_count == sum(tensor.numel() for tensor in sent.values())
    for name, tensor in in_memory(model):
        assert torch.equal(tensor, sent[name]), name


def test_hf_infer_in_bf16_holds_buffers_as_a_trainer_in_float32_publishes_them():
    model = make("minimax_m2").bfloat16()
    names = CheckpointNames.like(model)
    tensors = list(names.of(in_memory(make("minimax_m2", seed=1))))
    assert names.uncast and all((tensor.bfloat16() != tensor).any() for name, tensor in tensors if name in names.uncast)
    buckets = list(pack_buckets(tensors, 3000, float_dtype=torch.bfloat16, uncast=names.uncast))
    engine = HFEngine(model, 32, HFInferConfig(8, 64), (2,))
    held = engine.load_weights(engine.stage_weights(buckets, 7))
    assert held.checksums == manifest(buckets)[1]
    own = dict(names.of(in_memory(model)))
    assert {name: tensor_checksum(tensor) for name, tensor in own.items()} == held.checksums
    engine.sleep()
    engine.wake()
    assert model(input_ids=torch.arange(1, 8)[None]).logits.isfinite().all()


@pytest.mark.parametrize("family", DENSE)
def test_tensors_of_a_dense_model_pass_as_they_are(family):
    model = make(family)
    names = CheckpointNames.like(model)
    passed = list(names.of(in_memory(model)))
    assert all(tensor is own for (_, tensor), (_, own) in zip(passed, in_memory(model), strict=True))
    if family != "gpt_neox":  # whose head has another name in a checkpoint
        assert [name for name, _ in passed] == [name for name, _ in in_memory(model)]


def test_what_is_missing_unknown_or_does_not_fit_is_told_by_name():
    model = make("qwen3_moe")
    names = CheckpointNames.like(model)
    tensors = dict(names.of(in_memory(model)))
    lost = "model.layers.0.mlp.experts.2.up_proj.weight"
    with pytest.raises(WeightMismatch, match=f"'{lost}' is missing"):
        dict(names.parameters((name, tensor) for name, tensor in tensors.items() if name != lost))
    with pytest.raises(WeightMismatch, match=f"'{lost}' came twice"):
        dict(names.parameters([*tensors.items(), (lost, tensors[lost])]))
    with pytest.raises(WeightMismatch, match="'other' is not in the model"):
        dict(names.parameters([("other", tensors[lost])]))
    with pytest.raises(WeightMismatch, match=rf"'{lost}' has shape \(3,\)"):
        dict(names.parameters([(lost, torch.zeros(3))]))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is \(3,\)"):
        list(names.of([("model.norm.weight", torch.zeros(3))]))


def test_a_bias_that_routes_tokens_travels_in_its_own_precision():
    model = make("deepseek_v3")
    names = CheckpointNames.like(model)
    (bias,) = names.uncast
    assert bias == "model.layers.1.mlp.gate.e_score_correction_bias"
    sent = pack_buckets(names.of(in_memory(model)), 10_000, float_dtype=torch.bfloat16, uncast=names.uncast)
    dtypes = {name: dtype for bucket in sent for name, dtype, _, _ in bucket.tensors}
    assert {name for name, dtype in dtypes.items() if dtype == "float32"} == {bias}
    assert set(dtypes.values()) == {"float32", "bfloat16"}


def test_a_model_with_adapters_has_the_names_of_its_base():
    model = make("qwen3_moe")
    before = CheckpointNames.like(model).shapes
    add_adapters(model, ModelArguments(model_name_or_path="x", lora_rank=2, lora_target="q_proj"), "x")
    assert CheckpointNames.like(model).shapes == before

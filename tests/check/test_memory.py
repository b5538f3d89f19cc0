"""The memory estimate: published sizes, what torch really saves, arithmetic that can be done by hand, and who meets."""

from __future__ import annotations

import copy
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from transformers import (
    Ernie4_5_MoeConfig,
    HunYuanMoEV1Config,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from roll.algorithms import logprobs
from roll.check import memory_parts as activations
from roll.check import memory_pictures
from roll.check import memory_roles as engines
from roll.check.config import check_elsewhere, config_warnings
from roll.check.memory import estimate_memory, render
from roll.check.memory_parts import COMMUNICATION, CONTEXT, GIB, KNOWN, ShapeUnknown, find_shape, has_experts, is_dense
from roll.check.memory_roles import BACKWARD_ENDS, PUBLICATION, Learned
from roll.configs.loader import config_from_tree, load_config
from roll.configs.roles import ModelArguments
from roll.engines.options import SGLANG_SLOTS, DiffusersInferConfig, HFInferConfig
from roll.trainers.lora import is_adapter, resolve_targets
from roll.trainers.packing import install_packed_attention
from roll.trainers.step import Packing

ROOT = Path(__file__).parents[2]
SEVEN_BILLION = "Qwen/Qwen2.5-7B-Instruct"
PUBLISHED = {
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-Math-7B": None,
    SEVEN_BILLION: 7_615_616_512,
    "Qwen/Qwen2.5-32B-Instruct": 32_763_876_352,
    "Qwen/Qwen3-8B-Base": 8_190_735_360,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "kalomaze/Qwen3-16B-A3B": 30_532_122_624 - 48 * 64 * (3 * 768 + 1) * 2048,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Meta-Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
}
SMALL = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 300}  # fmt: skip
TOKENS = 128
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
FAMILIES = {
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SMALL)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=32)),
    "qwen3_moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=32)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2)),
    "llama": (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True)),
}


def of_gpus(**changes):
    """A 7B run on eight GPUs of 80 GiB, four to train and four to generate, with dotted keys replaced."""
    tree = {
        "exp_name": "seven", "pretrain": SEVEN_BILLION, "rollout_batch_size": 64, "num_return_sequences_in_group": 8,
        "prompt_length": 1024, "response_length": 3072, "async_generation_ratio": 1,
        "cluster": {"device": "cuda", "num_devices_per_node": 8, "address": "auto", "device_memory_gib": 80},
        "actor_train": {
            "device_mapping": "0-3", "model_args": {"dtype": "bfloat16"}, "max_tokens_per_microbatch_in_train": 8192,
            "data_args": {"file_name": "not/here.jsonl"},
        },
        "actor_infer": {
            "device_mapping": "4-7", "model_args": {"dtype": "bfloat16"}, "strategy_args": {"strategy_name": "vllm"},
        },
        "rewards": {"math": {"verifier": "math"}},
    }  # fmt: skip
    for path, value in changes.items():
        *parents, key = path.split("__")
        section = tree
        for name in parents:
            section = section.setdefault(name, {})
        section[key] = value
    return config_from_tree(tree)


def role_of(config, name="actor_train"):
    return next(role for role in estimate_memory(config).roles if role.role == name)


def sizes(role):
    """Name of each part -> GiB."""
    return {part.name: part.size / GIB for part in (*role.always, *role.largest.parts)}


@pytest.mark.parametrize(("name", "parameters"), [item for item in PUBLISHED.items() if item[1]])
def test_known_models_have_their_published_number_of_parameters(name, parameters):
    assert find_shape(name).parameters == parameters


def test_a_model_that_is_neither_here_nor_known_says_what_would_help():
    with pytest.raises(ShapeUnknown, match="a folder with its config.json"):
        find_shape("somebody/something-7B")


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_read_from_a_folder(family, tmp_path):
    build, config = FAMILIES[family]
    config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    model = build(config)
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.largest_matrix == max(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters == sum(parameter.numel() for parameter in model.model.layers[0].parameters())


@pytest.mark.parametrize(
    "config",
    [
        Ernie4_5_MoeConfig(**SMALL, moe_num_experts=8, moe_k=2, moe_intermediate_size=32),
        HunYuanMoEV1Config(**SMALL | {"intermediate_size": 32}, num_experts=8, moe_topk=2),
    ],
)
def test_experts_are_found_whatever_their_keys_are_called(config, tmp_path):
    config.save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    assert (shape.experts, shape.experts_per_token, shape.expert_intermediate) == (8, 2, 32)
    assert has_experts(str(tmp_path)) and not is_dense(str(tmp_path))


def test_a_folder_wins_over_its_name(tmp_path):
    folder = tmp_path / "Qwen2.5-7B"
    Qwen2Config(**SMALL).save_pretrained(folder)
    assert find_shape(str(folder)).hidden == 64
    (folder / "config.json").write_text(json.dumps({"model_type": "odd"}))
    with pytest.raises(ShapeUnknown, match="num_attention_heads"):
        find_shape(str(folder))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "qwen3_moe"])
def test_a_layer_keeps_what_torch_saves_for_its_backward_pass(family, attention, dtype, tmp_path):
    build, config = FAMILIES[family]
    config.save_pretrained(tmp_path)
    model = build._from_config(copy.deepcopy(config), attn_implementation=attention).to(dtype).eval()
    width = TOKENS if attention == "eager" else 0
    guess = activations.layer_bytes(find_shape(str(tmp_path)), dtype.itemsize, eager_width=width)
    assert guess == pytest.approx(kept_by_a_layer(model), rel=0.04)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "adapted"), [("qwen2", 7), ("qwen3", 7), ("qwen3_moe", 4)])
def test_a_layer_with_adapters_keeps_their_inner_numbers_but_nothing_for_frozen_norms(family, adapted, dtype, tmp_path):
    build, config = FAMILIES[family]
    config.save_pretrained(tmp_path)
    model, shape = build(copy.deepcopy(config)), find_shape(str(tmp_path))
    inject_adapter_in_model(LoraConfig(r=24, target_modules=resolve_targets(model, "all-linear")), model)
    model.to(dtype).eval()
    guess = activations.layer_bytes(shape, dtype.itemsize)
    guess += activations.adapter_bytes(shape, adapted, 24, dtype.itemsize)
    assert guess == pytest.approx(kept_by_a_layer(model), rel=0.04)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_layer_of_a_packed_row_keeps_joined_results_too(attention, tmp_path):
    build, config = FAMILIES["qwen2"]
    config.save_pretrained(tmp_path)
    model = build._from_config(copy.deepcopy(config), attn_implementation=attention).eval()
    shape = find_shape(str(tmp_path))
    install_packed_attention(model, attention)
    packing = Packing.of([TOKENS // 2 + 8, TOKENS // 2 - 8], torch.device("cpu"))
    guess = activations.layer_bytes(shape, 4, eager_width=TOKENS // 2 if attention == "eager" else 0)
    if attention == "sdpa":
        guess += 4 * shape.queries
    assert guess == pytest.approx(kept_by_a_layer(model, packing), rel=0.04)


def kept_by_a_layer(model, packing=None):
    """Bytes that torch saves for the backward pass of the second layer, per token."""
    dtype, own = model.dtype, {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved, alive = {}, []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            alive.append(tensor)
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = torch.randn(1, TOKENS, model.config.hidden_size, dtype=dtype, requires_grad=True)
    places = torch.arange(TOKENS)[None]
    arguments = {} if packing is None else packing.model_arguments()
    positions = model.model.rotary_emb(inputs, arguments.pop("position_ids", places))
    own |= {each.untyped_storage().data_ptr() for each in positions}  # there once for all layers
    if model.config._attn_implementation == "eager":
        arguments["attention_mask"] = torch.zeros(1, 1, TOKENS, TOKENS, dtype=dtype)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model.layers[1](inputs * 1, position_embeddings=positions, use_cache=False, **arguments)
    return sum(saved.values()) / TOKENS


def test_constants_are_those_of_the_code_they_speak_of():
    assert activations.HEAD_CHUNK == logprobs.LINEAR_CHUNK_ELEMENTS
    assert activations.MEGATRON_HEAD_CHUNK == logprobs.CHUNK_ELEMENTS
    assert engines.SGLANG_MAX_RUNNING == SGLANG_SLOTS
    assert engines.HF_MAX_RUNNING == HFInferConfig().max_running_requests
    assert engines.HF_MAX_PREFILL == HFInferConfig().max_prefill_tokens
    assert memory_pictures.MAX_RUNNING == DiffusersInferConfig().max_running_requests


def test_states_of_a_7b_on_four_ranks_are_sixteen_bytes_a_parameter_and_a_quarter_each():
    role = role_of(of_gpus())
    parameters = PUBLISHED[SEVEN_BILLION] / GIB
    parts = sizes(role)
    assert (parts["weights"], parts["optimizer"], parts["gradients"]) == (parameters, 2 * parameters, parameters)
    assert parts["driver"] * GIB == CONTEXT + COMMUNICATION
    # 8,192 tokens x 28 layers: 8 x 2 x 3584 of norms, 2 x (2 x 28 + 2 x 4) x 128 + 4 x 28 of attention, 8 x 18944
    layer = 16 * 3584 + 2 * 64 * 128 + 112 + 8 * 18944
    assert parts["activations"] * GIB == pytest.approx(8192 * (28 * layer + 14 * 3584), rel=1e-6)


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer():
    changes = {"actor_train__strategy_args__strategy_config": {"gradient_checkpointing": True}}
    parts = sizes(role_of(of_gpus(**changes)))
    assert parts["activations"] * GIB == pytest.approx(8192 * (28 * 2 * 3584 + 225_392 + 14 * 3584), rel=1e-6)


def test_a_micro_batch_holds_at_least_one_sample_and_at_most_the_batch():
    one = sizes(role_of(of_gpus(actor_train__max_tokens_per_microbatch_in_train=100)))
    assert one["activations"] == pytest.approx(sizes(role_of(of_gpus()))["activations"] / 2)
    few = of_gpus(actor_train__max_tokens_per_microbatch_in_train=10**6, rollout_batch_size=1)
    assert sizes(role_of(few))["activations"] == pytest.approx(sizes(role_of(of_gpus()))["activations"])
    fixed = of_gpus(
        actor_train__use_dynamic_batching_in_train=False, actor_train__training_args__per_device_train_batch_size=2
    )
    assert sizes(role_of(fixed))["activations"] == pytest.approx(sizes(role_of(of_gpus()))["activations"])


def test_a_single_micro_batch_has_activations_or_gradients_and_not_both():
    config = of_gpus(actor_train__max_tokens_per_microbatch_in_train=10**6, rollout_batch_size=1)
    begins = next(phase for phase in role_of(config).phases if phase.name == "the backward pass begins")
    assert "gradients" not in {part.name for part in begins.parts}


def test_zero_stages_split_more_and_more():
    def states(stage):
        strategy = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": stage}}}
        parts = sizes(role_of(of_gpus(actor_train__strategy_args=strategy)))
        return [parts[name] * GIB / PUBLISHED[SEVEN_BILLION] for name in ("weights", "optimizer", "gradients")]

    assert states(1) == pytest.approx([2, 12 / 4, 4])
    assert states(2) == pytest.approx([2, 12 / 4, 4 / 4])
    assert states(3) == pytest.approx([2 / 4, 12 / 4, 4 / 4])


def test_megatron_shares_matrices_layers_and_experts_out():
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 4,
               "expert_tensor_parallel_size": 1}  # fmt: skip
    config = of_gpus(
        pretrain="Qwen/Qwen3-30B-A3B",
        actor_train__device_mapping="0-7",
        actor_infer__device_mapping="0-7",
        actor_infer__num_gpus_per_engine=2,
        actor_train__strategy_args={"strategy_name": "megatron_train", "strategy_config": options},
    )
    shape = find_shape("Qwen/Qwen3-30B-A3B")
    experts = 48 * shape.expert_parameters / 4
    dense = (shape.parameters - 48 * shape.expert_parameters) / 2
    parts = sizes(role_of(config))
    assert parts["weights"] * GIB == pytest.approx(2 * (experts + dense), rel=0.001)
    assert parts["gradients"] * GIB == pytest.approx(4 * (experts + dense), rel=0.001)
    # Eight ranks: four hold the same dense share, two the same experts.
    assert parts["optimizer"] * GIB == pytest.approx(12 * (experts / 2 + dense / 4), rel=0.001)


def test_the_first_pipeline_stage_keeps_as_many_micro_batches_as_there_are_stages():
    def kept(stages):
        options = {"pipeline_model_parallel_size": stages}
        strategy = {"strategy_name": "megatron_train", "strategy_config": options}
        config = of_gpus(actor_train__strategy_args=strategy, actor_train__max_tokens_per_microbatch_in_train=4096)
        return role_of(config)

    one, two = kept(1), kept(2)
    assert sizes(two)["weights"] < 0.6 * sizes(one)["weights"]
    activations_of = [sizes(role).get("activations") for role in (one, two)]
    assert activations_of[1] > 0.45 * activations_of[0]


def test_vllm_fills_its_share_and_says_how_many_sequences_fit():
    role = role_of(of_gpus(actor_infer__strategy_args__strategy_config={"gpu_memory_utilization": 0.5}), "actor_infer")
    assert role.peak == pytest.approx(0.5 * 80 * GIB)
    cache = next(part for part in role.always if part.name == "keys and values")
    sequences = cache.size / (2 * 28 * 4 * 128 * 2 * 4096)
    assert f"56 KiB a token; room for {sequences:,.0f} sequences of 4,096 tokens" in cache.how


def test_an_engine_without_room_for_one_sequence_does_not_fit():
    config = of_gpus(actor_infer__strategy_args__strategy_config={"gpu_memory_utilization": 0.2})
    estimate = estimate_memory(config)
    assert any("gpu_memory_utilization" in misfit for misfit in estimate.misfits)
    assert "will not fit: actor_infer has 0.2 x 80.0 GiB" in render(estimate)


def test_what_does_not_fit_is_said_and_warned_of():
    config = of_gpus(cluster__device_memory_gib=40)
    check_elsewhere(config)
    assert "a device of actor_train needs" in estimate_memory(config).misfits[0]
    assert any(warning.startswith("memory: a device of actor_train") for warning in config_warnings(config))
    assert not any("memory" in warning for warning in config_warnings(of_gpus(cluster__device_memory_gib=180)))


def test_roles_that_take_turns_need_the_larger_one_and_their_contexts():
    config = of_gpus(actor_infer__device_mapping="0-3", async_generation_ratio=0)
    (shared,) = estimate_memory(config).devices
    trainer = role_of(config)
    assert shared.peak == trainer.peak + CONTEXT
    assert shared.devices == [0, 1, 2, 3] and shared.how.startswith("when actor_train has them")


def test_cuda_ipc_keeps_one_copy_on_the_device_while_the_engine_has_it_and_nccl_some_buckets():
    copy = 2 * PUBLISHED[SEVEN_BILLION]
    config = of_gpus(actor_infer__device_mapping="0-3", async_generation_ratio=0, weight_update__transport="cuda_ipc")
    assert role_of(config).stays == sizes(role_of(config))["publication"] * GIB == copy
    nccl = role_of(of_gpus(weight_update__transport="nccl"))
    largest = 2 * 152_064 * 3584
    assert (nccl.stays, sizes(nccl)["weights on their way"] * GIB) == (0, 4 * (256 * 2**20 + largest))
    assert nccl.host_bytes - role_of(of_gpus(weight_update__transport="object_store")).host_bytes == 0
    assert role_of(of_gpus(weight_update__transport="object_store")).stays == 0


def test_processes_on_cpu_slots_add_up():
    config = of_gpus()
    config = replace(config, cluster=replace(config.cluster, device="cpu", device_memory_gib=None))
    config.actor_infer.strategy_args.strategy_name = "hf_infer"
    estimate = estimate_memory(config)
    trainer, engine = estimate.roles
    assert [round(each.peak) for each in estimate.devices] == [
        round(4 * trainer.peak + trainer.host_bytes),  # only the first rank publishes
        round(4 * (engine.peak + engine.host_bytes)),
    ]
    assert trainer.host_bytes == 2 * 2 * PUBLISHED[SEVEN_BILLION]


def test_a_reference_of_whole_models_is_not_divided_and_talks_to_nobody():
    def reference(**strategy):
        section = {"device_mapping": "0-1", "model_args": {"dtype": "bfloat16"}, "strategy_args": strategy}
        return role_of(of_gpus(reference=section, use_kl_loss=True), "reference")

    whole, sharded = reference(strategy_name="hf_infer"), reference(strategy_name="fsdp2_train")
    parts, shards = sizes(whole), sizes(sharded)
    assert parts["weights"] * GIB == 2 * PUBLISHED[SEVEN_BILLION] == 2 * shards["weights"] * GIB
    assert "gathered weights" not in parts and shards["gathered weights"] > 1
    assert (parts["driver"] * GIB, shards["driver"] * GIB) == (CONTEXT, CONTEXT + COMMUNICATION)
    assert (parts["activations"], parts["logits"]) == (shards["activations"], shards["logits"])


def test_a_critic_has_no_logits_and_no_head():
    config = of_gpus(
        adv_estimator="gae",
        critic={"device_mapping": "4-7", "model_args": {"dtype": "bfloat16"}},
    )
    critic, shape = role_of(config, "critic"), KNOWN["qwen2.5-7b"]
    parameters = shape.parameters - shape.embedding_parameters + shape.hidden + 1
    assert sizes(critic)["weights"] * GIB == parameters
    assert not any(part.name == "logits" and part.size for phase in critic.phases for part in phase.parts)


@pytest.mark.parametrize("wanted", ["all-linear", "q_proj,v_proj", ["self_attn.o_proj", "down_proj"]])
@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_adapters_are_as_many_as_peft_makes(family, wanted, tmp_path):
    build, config = FAMILIES[family]
    config.save_pretrained(tmp_path)
    model = build(copy.deepcopy(config))
    if family == "qwen3_moe" and "down_proj" in wanted:
        pytest.skip("experts have no adapters, so this is an error")
    targets = resolve_targets(model, wanted)
    inject_adapter_in_model(LoraConfig(r=3, target_modules=targets), model, adapter_name="default")
    made = [parameter.numel() for name, parameter in model.named_parameters() if is_adapter(name)]
    learned = Learned.adapters(find_shape(str(tmp_path)), ModelArguments(lora_target=wanted, lora_rank=3))
    assert learned.parameters == sum(made)
    assert learned.in_layer * 2 == learned.parameters


def test_adapters_alone_have_masters_gradients_and_moments():
    config = of_gpus(
        actor_train__model_args={"dtype": "bfloat16", "lora_target": "q_proj,v_proj", "lora_rank": 16},
        reference={}, use_kl_loss=True, save_steps=10,
    )  # fmt: skip
    estimate = estimate_memory(config)
    assert [role.role for role in estimate.roles] == ["actor_train", "actor_infer"]  # the reference is the trainer
    (role, _), whole = estimate.roles, role_of(of_gpus())
    adapters = 28 * 16 * ((3584 + 3584) + (3584 + 512))
    parts = {part.name: part.size for part in (*role.always, *role.phases[0].parts)}
    assert parts["weights"] == 2 * PUBLISHED[SEVEN_BILLION] / 4
    assert (parts["adapters"], parts["gradients"], parts["optimizer"]) == (adapters, adapters, 2 * adapters)
    assert parts["head's gradient"] == 0
    assert role.start is None and whole.start is None
    assert next(part.size for part in role.host if part.name == "state being saved") == 3 * adapters
    ends, publication = ({phase.name: phase for phase in role.phases}[name] for name in (BACKWARD_ENDS, PUBLICATION))
    assert {part.name: part.size for part in ends.parts}["embedding's gradient"] == 0
    assert publication.size == 4 * 152_064 * 3584  # the embedding is larger than two adapted matrices


def test_states_offloaded_by_fsdp2_are_on_the_host_and_move_for_nobody():
    shared = {"actor_infer__device_mapping": "0-3", "async_generation_ratio": 0}
    offloaded = {"actor_train__strategy_args__strategy_config": {"offload": "cpu"}}
    estimate, plain = (estimate_memory(of_gpus(**shared, **changes)) for changes in (offloaded, {}))
    parts = sizes(estimate.roles[0])
    assert parts["weights"] == parts["optimizer"] == 0 and "gradients" not in parts
    assert parts["gathered weights"] == sizes(plain.roles[0])["gathered weights"]
    on_host = {part.name: part.size for part in estimate.host}
    assert [on_host[name] / PUBLISHED[SEVEN_BILLION] for name in ("weights", "optimizer", "gradients")] == [4, 8, 4]
    moved = [part.how for part in estimate.host if part.name == "states that made room"]
    assert [how.partition(":")[0] for how in moved] == ["actor_infer"]
    on_cpu = of_gpus(**offloaded)
    on_cpu = replace(on_cpu, cluster=replace(on_cpu.cluster, device="cpu", device_memory_gib=None))
    assert sizes(role_of(on_cpu))["optimizer"] * GIB == 8 * PUBLISHED[SEVEN_BILLION] / 4  # nothing moves on a CPU


def test_context_groups_share_activations():
    split = {"actor_train__strategy_args__strategy_config": {"context_parallel_size": 4}}
    found, plain = (sizes(role_of(of_gpus(**changes))) for changes in (split, {}))
    assert found["activations"] == pytest.approx(plain["activations"] / 4, rel=1e-4)
    assert found["weights"] == plain["weights"]


def test_context_groups_of_megatron_share_the_states_of_its_optimizer():
    def states(**options):
        strategy = {"strategy_name": "megatron_train", "strategy_config": options}
        return sizes(role_of(of_gpus(actor_train__strategy_args=strategy)))

    split, plain = states(context_parallel_size=4), states()
    assert split["optimizer"] == pytest.approx(plain["optimizer"])


def test_states_offloaded_by_deepspeed_are_on_the_host():
    def host(**zero):
        strategy = {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": {"stage": 3, **zero}}}
        estimate = estimate_memory(of_gpus(actor_train__strategy_args=strategy))
        return estimate.roles[0].peak, sum(part.size for part in estimate.host) / PUBLISHED[SEVEN_BILLION]

    peak, usual = host()
    assert host(offload_optimizer={"device": "cpu"}) == (pytest.approx(peak - 3 * PUBLISHED[SEVEN_BILLION]), usual + 12)
    assert host(offload_optimizer={"device": "nvme"})[1] == usual


def test_packing_adds_to_attention_where_no_kernel_knows_samples():
    def kept(dtype, packs, device="cuda"):
        changes = {"actor_train__model_args__dtype": dtype, "actor_train__use_sequence_packing": packs}
        config = of_gpus(**changes)
        config = replace(config, cluster=replace(config.cluster, device=device, device_memory_gib=None))
        return sizes(role_of(config))["activations"] * GIB

    joined = 8192 * 28 * 28 * 128
    assert kept("bfloat16", True) == kept("bfloat16", False)
    assert kept("float32", True) == pytest.approx(kept("float32", False) + 4 * joined)
    # The kernel does not run on GPUs older than Ampere, which are used with float16.
    assert kept("float16", True) == pytest.approx(kept("float16", False) + 2 * joined)
    assert kept("bfloat16", True, "cpu") == pytest.approx(kept("bfloat16", False, "cpu") + 2 * joined)


@pytest.mark.parametrize("installed", [False, True])
def test_packing_adds_to_what_a_layer_of_megatron_keeps(monkeypatch, installed):
    """As counted with autograd's hooks, in a model of four layers on a CPU."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace() if installed else None)

    def kept(dtype, packs):
        options = {"tensor_model_parallel_size": 2}
        strategy = {"strategy_name": "megatron_train", "strategy_config": options}
        changes = {"actor_train__model_args__dtype": dtype, "actor_train__use_sequence_packing": packs}
        return sizes(role_of(of_gpus(actor_train__strategy_args=strategy, **changes)))["activations"] * GIB

    layers, positions, joined = 8192 * 28, 4 * 128, 28 * 128 / 2
    assert kept("bfloat16", True) == pytest.approx(kept("bfloat16", False) + 2 * layers * positions)
    assert kept("float32", True) == pytest.approx(kept("float32", False) + 4 * layers * (positions + joined))
    # With Transformer Engine's layers `auto` computes padded rows.
    assert kept("bfloat16", "auto") == kept("bfloat16", not installed)


def test_a_reward_model_has_weights_and_one_batch_on_each_of_its_devices():
    reward = {"verifier": "reward_model", "device_mapping": "6-7", "infer_batch_size": 4,
              "model_args": {"model_name_or_path": "Qwen/Qwen2.5-0.5B", "dtype": "bfloat16"}}  # fmt: skip
    config = of_gpus(actor_infer__device_mapping="4-7", async_generation_ratio=0, rewards={"taste": reward})
    estimate, shape = estimate_memory(config), KNOWN["qwen2.5-0.5b"]
    role = next(role for role in estimate.roles if role.role == "rewards.taste")
    assert role.devices == [6, 7] and "Qwen2.5-0.5B" in role.title
    parts = sizes(role)
    assert parts["weights"] * GIB == 2 * (shape.parameters + shape.hidden + 1)
    assert parts["keys and values"] * GIB == 4 * 4096 * 2 * 24 * 2 * 64 * 2
    assert parts["attention"] * GIB == 4 * 4096 * 4096
    assert parts["driver"] * GIB == CONTEXT
    both = next(each for each in estimate.devices if each.devices == [6, 7])
    assert both.roles == ["actor_infer", "rewards.taste"]
    made_room = [part for part in estimate.host if part.how.startswith("rewards.taste: weights on 2 GPUs")]
    assert made_room[0].size == 2 * parts["weights"] * GIB
    cut = copy.deepcopy(config)
    cut.rewards["taste"].reward_model.max_length = 1024
    assert sizes(role_of(cut, "rewards.taste"))["keys and values"] == parts["keys and values"] / 4


def test_sglang_shares_what_the_driver_leaves_and_computes_beside_it():
    def engine(**options):
        strategy = {"strategy_name": "sglang", "strategy_config": options}
        return estimate_memory(of_gpus(actor_infer__strategy_args=strategy))

    estimate = engine(mem_fraction_static=0.8)
    role = next(role for role in estimate.roles if role.role == "actor_infer")
    parts = sizes(role)
    assert parts["weights"] + parts["keys and values"] == pytest.approx(0.8 * (80 - 0.6))
    assert role.peak / GIB == pytest.approx(0.8 * 79.4 + 0.6 + parts["computing"])
    assert [part.size for part in estimate.host if part.name == "new weights"] == [4 * 2 * PUBLISHED[SEVEN_BILLION]]
    assert "and weights and one sequence need" in engine(mem_fraction_static=0.1).misfits[0]
    assert any("a device of actor_infer needs" in misfit for misfit in engine(mem_fraction_static=0.99).misfits)
    assert not any("actor_infer" in said for said in engine().misfits + engine().tight)


def test_options_that_are_left_to_the_engine_count_as_its_defaults():
    def role(strategy, **options):
        section = {"strategy_name": strategy, "strategy_config": options}
        return role_of(of_gpus(actor_infer__strategy_args=section), "actor_infer")

    assert sizes(role("vllm", max_num_seqs=None, kv_cache_memory_bytes=None)) == sizes(role("vllm"))
    assert sizes(role("vllm", kv_cache_memory_bytes=0)) == sizes(role("vllm"))
    assert sizes(role("sglang", chunked_prefill_size=None)) == sizes(role("sglang"))
    assert sizes(role("vllm", kv_cache_memory_bytes=2e9))["keys and values"] * GIB == 2e9
    unchunked = role("sglang", chunked_prefill_size=0, mem_fraction_static=0.8)
    assert sizes(unchunked) == sizes(role("sglang", chunked_prefill_size=-1, mem_fraction_static=0.8))


def test_a_strategy_from_outside_is_estimated_as_the_usual_one():
    trainer = of_gpus(actor_train__strategy_args={"strategy_name": "my_package.trainers:Own"})
    assert sizes(role_of(trainer)) == sizes(role_of(of_gpus()))
    engine = of_gpus(actor_infer__strategy_args={"strategy_name": "my_package.engines:Own"})
    assert sizes(role_of(engine, "actor_infer"))["weights"] * GIB == 2 * PUBLISHED[SEVEN_BILLION]


def test_checkpoints_take_a_copy_of_each_state_and_one_of_the_model():
    def host(save_steps):
        estimate = estimate_memory(of_gpus(save_steps=save_steps))
        return {part.name: part.size / PUBLISHED[SEVEN_BILLION] for part in estimate.host}

    with_states, without = host(10), host(0)
    assert with_states["state being saved"] == 12 and "state being saved" not in without
    assert with_states["model being saved"] == without["model being saved"] == 4


def test_on_a_cpu_the_last_model_is_a_moment_of_its_own_and_others_come_beside_training():
    def trainer(save_steps):
        config = of_gpus(save_steps=save_steps)
        config = replace(config, cluster=replace(config.cluster, device="cpu", device_memory_gib=None))
        return role_of(config)

    at_the_end, beside = trainer(0), trainer(10)
    assert [phase.size for phase in at_the_end.phases if "saved" in phase.name] == [4 * PUBLISHED[SEVEN_BILLION]]
    assert beside.host_bytes - at_the_end.host_bytes == (4 + 12 / 4) * PUBLISHED[SEVEN_BILLION]


def test_a_megatron_critic_has_one_row_in_place_of_the_output_layer():
    def critic(stages):
        options = {"pipeline_model_parallel_size": stages}
        return role_of(
            of_gpus(
                adv_estimator="gae",
                async_generation_ratio=0,
                actor_infer__device_mapping="4-7",
                critic={
                    "device_mapping": "0-3",
                    "model_args": {"dtype": "bfloat16"},
                    "strategy_args": {"strategy_name": "megatron_train", "strategy_config": options},
                },
            ),
            "critic",
        )

    shape = KNOWN["qwen2.5-7b"]
    parameters = shape.parameters - shape.embedding_parameters + 1  # the last norm stands for the head's row
    assert sizes(critic(1))["weights"] * GIB == 2 * parameters
    for stages in (1, 2):
        assert not any(part.name == "logits" for phase in critic(stages).phases for part in phase.parts)


def host(nodes, per_node, **changes):
    cluster = {"device": "cuda", "num_nodes": nodes, "num_devices_per_node": per_node, "address": "auto"}
    parts = estimate_memory(of_gpus(cluster=cluster, **changes)).host
    return {part.name: part.size / PUBLISHED[SEVEN_BILLION] for part in parts}


def test_the_host_is_that_of_the_node_that_needs_most():
    deepspeed = {"actor_train__strategy_args__strategy_name": "deepspeed_train"}
    both = {"publication": 4, "model being saved": 4}
    assert host(1, 8, **deepspeed) == host(2, 4, **deepspeed) == {"models while they load": 16, **both}
    assert host(4, 2, **deepspeed) == {"models while they load": 8, **both}


def test_deltas_take_a_base_for_each_replica_and_at_most_half_of_the_buffers():
    engines = {"actor_infer__device_mapping": [4, 5, 6, 7], "actor_infer__num_gpus_per_engine": 2}
    more = {"deltas": 2, "base of deltas": 2 * 2}
    assert host(1, 8, weight_update__content="delta", **engines) == host(1, 8, **engines) | more


def test_ranks_that_map_the_files_of_a_model_need_no_memory_of_the_host_to_load_it():
    def loading(dtype):
        reference = {"device_mapping": [0], "model_args": {"dtype": dtype}}
        return host(1, 8, use_kl_loss=True, reference=reference).get("models while they load")

    assert host(1, 8) == {"publication": 4, "model being saved": 4}, "masters are made of bfloat16, shard by shard"
    assert loading("bfloat16") is None and loading("float16") == 2, "float16 is not what the files hold"


def test_adapters_that_travel_alone_take_two_small_buffers():
    recipe = ROOT / "examples" / "qwen2.5-7B-rlvr_lora" / "rlvr_config.yaml"
    for overrides, size in (([], 0.3), (["weight_update.content=full"], 28.4)):
        (host,) = [part for part in estimate_memory(load_config(recipe, overrides)).host if part.name == "publication"]
        assert host.size / GIB == pytest.approx(size, abs=0.05)


SGLANG = "actor_infer.strategy_args={strategy_name: sglang, strategy_config: {mem_fraction_static: 0.85}}"


@pytest.mark.parametrize(
    ("heading", "recipe", "overrides", "name"),
    [
        ("### The trainer", "qwen2.5-7B-rlvr_fsdp2", [], "actor_train"),
        ("### The engine", "qwen2.5-7B-rlvr_fsdp2", [], "actor_infer"),
        ("### SGLang", "qwen2.5-7B-rlvr_fsdp2", [SGLANG], "actor_infer"),
        ("### The host", "qwen2.5-7B-rlvr_fsdp2", [], "host"),
        ("## Adapters (LoRA)", "qwen2.5-7B-rlvr_lora", [], "actor_train"),
    ],
)
def test_the_page_says_what_the_estimate_says(heading, recipe, overrides, name):
    section = re.split(r"^#+ ", (ROOT / "docs" / "memory.md").read_text().partition(f"{heading}\n")[2], flags=re.M)[0]
    rows = re.findall(r"^\| \**([a-z' ]+?)\** \| \**([0-9.]+)\** \|", section, re.MULTILINE)
    config = load_config(ROOT / "examples" / recipe / "rlvr_config.yaml", overrides)
    if name == "host":
        parts = {part.name: part.size / GIB for part in estimate_memory(config).host}
    else:
        role = role_of(config, name)
        parts = {key: size for key, size in sizes(role).items() if size} | {"together": role.peak / GIB}
    assert {key for key, _ in rows} == set(parts)
    for key, said in rows:
        half = 0.5 * 10.0 ** -len(said.partition(".")[2]) if "." in said else 0.5
        assert abs(parts[key] - float(said)) <= half * 1.01, f"{key}: {parts[key]}, and the page says {said}"

"""Experts that are recorded from a model are those that it used; a model with replay uses those that were recorded."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from roll.algorithms.routing import RouterReplay, Routing, RoutingRecorder, RoutingShape, UnroutableModel

SIZES = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
FAMILIES = {
    "Qwen3Moe": dict(moe_intermediate_size=16, num_experts=8, num_experts_per_tok=2, head_dim=16),
    "Qwen2Moe": dict(
        moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=8, num_experts_per_tok=2
    ),
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "Glm4Moe": dict(
        moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, first_k_dense_replace=1, head_dim=16
    ),
    "DeepseekV3": dict(
        moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16,
    ),
    "DeepseekV2": dict(
        moe_intermediate_size=16, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, n_shared_experts=1,
    ),
    "GraniteMoe": dict(num_local_experts=4, num_experts_per_tok=2),
}  # fmt: skip
"""By what precedes and follows their top-k: softmax or sigmoid, biases, groups, normalisation, shared experts."""
TOKENS = torch.tensor([[5, 6, 7, 8, 9], [10, 5, 12, 13, 3]])
CPU = torch.device("cpu")


def make(family="Qwen3Moe", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **FAMILIES.get(family, {}), **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("gate.weight", "router.weight")):
                parameter.normal_()
    return model


def recorded(model):
    """Logits without replay, and the experts."""
    recorder = RoutingRecorder(model)
    with torch.no_grad():
        logits = model(TOKENS, use_cache=False).logits
    experts = recorder.take()
    recorder.remove()
    return logits, experts


def all_known(experts):
    return Routing(torch.from_numpy(experts), torch.ones(len(experts), dtype=torch.bool))


@pytest.mark.parametrize("family", FAMILIES)
def test_replay_of_a_models_own_experts_changes_nothing_and_that_of_others_does(family):
    model = make(family)
    logits, experts = recorded(model)
    shape = RoutingShape.of(model.config)
    assert experts.shape == (TOKENS.numel(), 2, 2) and experts.dtype == np.uint8
    replay = RouterReplay(model, model, CPU)
    replay.use(all_known(experts))
    assert torch.equal(model(TOKENS, use_cache=False).logits, logits)
    differing, total = replay.take_counts()
    routed_layers = 2 - model.config.to_dict().get("first_k_dense_replace", 0)
    assert (differing, total) == (0, TOKENS.numel() * routed_layers)
    replay.use(all_known((experts.astype(np.int16) + 1) % shape.experts))
    changed = model(TOKENS, use_cache=False).logits
    assert (changed - logits).abs().max() > 1e-3
    assert replay.take_counts()[0] > 0
    changed.sum().backward()
    routers = [p.grad for name, p in model.named_parameters() if name.endswith(("gate.weight", "router.weight"))]
    assert routers and all(gradient.abs().sum() > 0 for gradient in routers)


def test_each_token_has_the_experts_that_its_layer_computed():
    model = make(mlp_only_layers=[0])
    _, experts = recorded(model)
    assert not experts[:, 0].any(), "a dense layer"
    with torch.no_grad():
        hidden = model.model(TOKENS, use_cache=False, output_hidden_states=True).hidden_states[1]
        layer = model.model.layers[1]
        position = model.model.rotary_emb(hidden, torch.arange(TOKENS.shape[1])[None])
        attended = hidden + layer.self_attn(layer.input_layernorm(hidden), position, None)[0]
        scores = layer.mlp.gate(layer.post_attention_layernorm(attended))[0]
    np.testing.assert_array_equal(np.sort(experts[:, 1]), np.sort(scores.topk(2).indices.numpy()))


def test_tokens_of_which_nothing_is_recorded_go_where_the_model_sends_them():
    model = make()
    logits, experts = recorded(model)
    replay = RouterReplay(model, model, CPU)
    known = torch.arange(len(experts)) >= TOKENS.shape[1]
    replay.use(Routing(torch.from_numpy((experts.astype(np.int16) + 1) % 8), known))
    changed = model(TOKENS, use_cache=False).logits
    torch.testing.assert_close(changed[0], logits[0], rtol=0, atol=1e-5)
    assert (changed[1] - logits[1]).abs().max() > 1e-3
    assert replay.take_counts()[1] == 2 * TOKENS.shape[1]
    replay.use(None)
    assert torch.equal(model(TOKENS, use_cache=False).logits, logits)


def test_recomputed_activations_are_those_of_the_recorded_experts():
    model = make()
    other = (recorded(model)[1].astype(np.int16) + 1) % 8
    replay = RouterReplay(model, model, CPU)
    gradients, counts = [], []
    for recomputes in (False, True):
        if recomputes:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.train()
        model.zero_grad()
        replay.use(all_known(other))
        model(TOKENS, use_cache=False).logits.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        counts.append(replay.take_counts().tolist())
    assert all(map(torch.equal, *gradients))
    assert counts[0] == counts[1] and counts[0][1] == 2 * TOKENS.numel()


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    model = make()
    replay = RouterReplay(model, model, CPU)
    replay.use(all_known(np.zeros((3, 2, 2), dtype=np.uint8)))
    with pytest.raises(RuntimeError, match="experts of 3 tokens are recorded; layer 0 routes 10"):
        model(TOKENS, use_cache=False)
    assert not _get_current_function_mode_stack()
    replay.use(None)
    checkpoint(lambda: model(TOKENS, use_cache=False).logits.sum(), use_reentrant=False).backward()
    assert not _get_current_function_mode_stack()


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("Qwen3", {"head_dim": 16}, "a qwen3 model has no experts"),
        ("Phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, "does not take its experts from one top-k"),
        ("DeepseekV2", {"topk_method": "group_limited_greedy"}, "gives other groups' experts weight 0"),
        ("Llama4Text", {"num_local_experts": 4, "num_experts_per_tok": 1}, "is told the experts of each token"),
    ],
)
def test_a_model_whose_experts_cannot_be_replaced_is_refused(family, changes, reason):
    model = make(family, **changes)
    with pytest.raises(UnroutableModel, match=reason):
        RouterReplay(model, model, CPU)


def test_numbers_of_experts_decide_the_type_of_a_record():
    shape = RoutingShape(48, 128, 8)
    assert shape.dtype == np.uint8
    assert RoutingShape(1, 256, 2).record(np.array([[[255, 0]]], np.uint16)).dtype == np.uint8
    assert RoutingShape(1, 257, 2).record(np.array([[[256, 0]]], np.uint16)).dtype == np.int16
    flat = np.arange(12, dtype=np.int32)
    assert RoutingShape(2, 16, 3).record(flat).tolist() == flat.reshape(2, 2, 3).tolist()
    for wrong in (np.array([0, 16, 1, 2]), np.array([0, -1, 1, 2]), np.array([0, 1, 2])):
        with pytest.raises(ValueError, match="are not those of"):
            RoutingShape(2, 16, 2).record(wrong)


def test_a_record_that_no_model_of_these_sizes_can_have_has_a_fault():
    shape, good = RoutingShape(2, 16, 2), np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    assert shape.fault(good, 3) is None
    faults = {
        "list, not an array of uint8": good.tolist(),
        "int64, not an array of uint8": good.astype(np.int64),
        "of shape (3, 2, 2), not (4, 2, 2) (tokens, layers, experts per token)": good,
        "from 5 to 16, and the model's go from 0 to 15": good + np.uint8(5),
        "all 0: nothing was recorded": good * 0,
    }
    assert {fault: shape.fault(experts, 4 if "not (4" in fault else 3) for fault, experts in faults.items()} == {
        fault: fault for fault in faults
    }

"""Options, models and layouts of `megatron_train` are judged before anything is loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from roll.configs.roles import ReferenceConfig
from roll.configs.strategies import FORWARD_STRATEGIES, option_problems
from roll.trainers.megatron.facts import check_layout, layout_problems, read_facts
from roll.trainers.options import MegatronOptions
from tests.tiers import need
from tests.trainers.megatron_models import MODELS

TENSOR = {"tensor_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("options", "path", "remedy"),
    [
        ({"tensor_model_paralel_size": 2}, "p.tensor_model_paralel_size", "`tensor_model_parallel_size`"),
        ({"tensor_model_parallel_size": "2"}, "p.tensor_model_parallel_size", "whole number"),
        ({"pipeline_model_parallel_size": 0}, "p.pipeline_model_parallel_size", ">= 1"),
        ({"recompute_granularity": "selectiv"}, "p.recompute_granularity", "`selective`"),
        ({"process_group_timeout_seconds": 0}, "p.process_group_timeout_seconds", "> 0"),
        ({"process_group_timeout_seconds": float("inf")}, "p.process_group_timeout_seconds", "< inf"),
    ],
)
def test_a_wrong_option_is_found_with_its_path_and_what_would_be_right(options, path, remedy):
    (problem,) = option_problems(FORWARD_STRATEGIES, "megatron_train", options, "p")
    assert problem.path == path and remedy in problem.remedy


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"moe_aux_loss_coeff": 0.01}, "split into micro-batches"),
        ({"moe_token_dispatcher_type": "allgather"}, "samples differ in length"),
        ({"sequence_parallel": True}, "tensor_model_parallel_size is 1"),
        ({"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}, "above 2"),
        ({"recompute_granularity": "full"}, "needs recompute_method and recompute_num_layers"),
        ({"recompute_granularity": "full", "recompute_method": "block"}, "needs recompute_method and"),
        ({"recompute_num_layers": 1}, "no effect without recompute_granularity"),
        ({"recompute_granularity": "selective", "recompute_method": "block"}, "no effect"),
    ],
)
def test_what_cannot_work_is_refused_with_the_reason(options, reason):
    (problem,) = option_problems(FORWARD_STRATEGIES, "megatron_train", options, "p")
    assert problem.path == "p" and reason in problem.message


def test_options_as_users_write_them_are_taken():
    options = {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "virtual_pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 4, "context_parallel_size": 2, "sequence_parallel": True,
        "use_distributed_optimizer": True, "overlap_grad_reduce": True, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1, "moe_token_dispatcher_type": "alltoall",
        "moe_router_dtype": "fp32",
    }  # fmt: skip
    assert option_problems(FORWARD_STRATEGIES, "megatron_train", options, "p") == []


def facts_of(tmp_path: Path, model: str, **changes):
    config = MODELS[model]().config
    for name, value in changes.items():
        setattr(config, name, value)
    config.save_pretrained(tmp_path)
    return read_facts(str(tmp_path), trust_remote_code=False)


@pytest.mark.parametrize(
    ("model", "options", "ranks", "reason"),
    [
        ("qwen2", TENSOR, 3, r"the number of ranks \(3\) must be a multiple of tensor_model_parallel_size x"),
        ("qwen2", {"tensor_model_parallel_size": 4}, 4, r"key-value heads \(2\)"),
        ("qwen2", {"tensor_model_parallel_size": 3}, 3, r"attention heads \(4\)"),
        ("qwen2", {"pipeline_model_parallel_size": 4}, 4, r"layers \(6\) must be a multiple"),
        ("qwen2", {"pipeline_model_parallel_size": 6, "virtual_pipeline_model_parallel_size": 2}, 6, r"layers \(6\)"),
        ("qwen2", {"expert_model_parallel_size": 2}, 2, "the model has no experts"),
        ("qwen2", {"moe_grouped_gemm": True}, 1, "the model has no experts"),
        ("qwen3_moe", {"expert_model_parallel_size": 3}, 3, r"experts \(4\)"),
        ("qwen3_moe", {"expert_tensor_parallel_size": 5}, 5, r"the width of an expert \(12\)"),
        ("qwen3_moe", {"expert_model_parallel_size": 4}, 2, r"the number of ranks \(2\)"),
        ("qwen3_moe", TENSOR, 2, "need sequence_parallel: true"),
        ("qwen3_moe", TENSOR | {"sequence_parallel": True, "expert_tensor_parallel_size": 1}, 2, r"size \(1\) must be"),
    ],
)
def test_a_layout_that_does_not_fit_is_explained(tmp_path, model, options, ranks, reason):
    facts = facts_of(tmp_path, model)
    with pytest.raises(ValueError, match=reason):
        check_layout(facts, MegatronOptions(**options), ranks, forward_only=False)


def test_all_reasons_are_given_at_once(tmp_path):
    with pytest.raises(ValueError, match="ranks.*attention heads.*key-value heads.*layers"):
        options = MegatronOptions(tensor_model_parallel_size=5, pipeline_model_parallel_size=4)
        check_layout(facts_of(tmp_path, "qwen2"), options, 3, forward_only=False)


def test_experts_need_sequence_parallelism_in_training_only(tmp_path):
    facts_of(tmp_path, "qwen3_moe")
    role = ReferenceConfig(device_mapping=[0, 1])
    role.strategy_args.strategy_config = TENSOR

    def problems(forward_only):
        return layout_problems(role, str(tmp_path), "p", kind="policy", forward_only=forward_only, device="cpu")

    (problem,) = problems(forward_only=False)
    assert problem.path == "p" and "need sequence_parallel: true" in problem.message
    assert problems(forward_only=True) == []


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        ("llama", {"attention_bias": True}, "attention_bias is True"),
        ("llama", {"mlp_bias": True}, "mlp_bias is True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen2", {"use_sliding_window": True}, "use_sliding_window is True"),
        ("qwen2", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "position encoding"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
                                 "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}},
            "position encoding",
        ),
    ],
)  # fmt: skip
def test_a_model_that_would_compute_something_else_is_refused(tmp_path, model, changes, reason):
    with pytest.raises(ValueError, match=reason):
        facts_of(tmp_path, model, **changes)


def test_an_unknown_family_is_refused_with_the_known_ones(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(ValueError, match="knows llama, qwen2, qwen3, qwen3_moe; .* is a gpt2 model"):
        read_facts(str(tmp_path), trust_remote_code=False)


def test_an_option_that_megatron_core_does_not_know_is_not_passed_over(tmp_path):
    need("megatron.core")
    from roll.trainers.megatron.model import transformer_config

    @dataclass(frozen=True)
    class Renamed(MegatronOptions):
        recompute_granularities: str = "full"

    facts = facts_of(tmp_path, "qwen3_moe")
    options = (MegatronOptions(recompute_granularity="selective"), torch.float32, torch.device("cpu"))
    assert transformer_config(facts, *options).recompute_granularity == "selective"
    with pytest.raises(TypeError, match="recompute_granularities"):
        transformer_config(facts, Renamed(), *options[1:])

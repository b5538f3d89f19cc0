"""Each trainer publishes mixtures of experts under the names of a checkpoint, whatever it makes of them in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll.trainers.trainer import TrainStrategy
from tests.tiers import need
from tests.trainers.megatron_models import EXPERTS, SIZES
from tests.trainers.ranks import ENGINES, Job, run_job

pytestmark = pytest.mark.tier("all")

LATENT = {
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 12, "num_key_value_heads": 4,
}  # fmt: skip
SMALL = SIZES | {"num_hidden_layers": 2}
MODELS = {
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SMALL, **EXPERTS, head_dim=8, mlp_only_layers=[1])),
    "deepseek_v3": lambda: DeepseekV3ForCausalLM(DeepseekV3Config(**SMALL | LATENT)),
}


def publish(trainer: TrainStrategy, _: object) -> tuple[dict[str, np.ndarray], dict[str, torch.Tensor], frozenset[str]]:
    """What a rank publishes in float32 and for an engine in bfloat16, and what of it keeps its precision: work for
    `ranks.Job`."""
    published = [(name, tensor.clone().numpy()) for name, tensor in trainer.published_weights()]
    assert len(dict(published)) == len(published), "a tensor comes twice"
    halves = {name: tensor.clone() for name, tensor in trainer.published_weights(torch.bfloat16)}
    return dict(published), halves, trainer.checkpoint_names.uncast


@pytest.mark.parametrize(
    ("strategy", "model", "options"),
    [
        ("fsdp2_train", "qwen3_moe", {}),
        ("fsdp2_train", "deepseek_v3", {}),
        ("deepspeed_train", "deepseek_v3", {"zero_optimization": {"stage": 1}}),
        ("deepspeed_train", "qwen3_moe", {"zero_optimization": {"stage": 3}}),
        ("megatron_train", "qwen3_moe", {"expert_model_parallel_size": 2}),
    ],
)
def test_published_tensors_are_those_of_the_checkpoint(strategy: str, model: str, options: dict[str, Any], tmp_path):
    if strategy in ENGINES:
        need(ENGINES[strategy])
    torch.manual_seed(0)
    made = MODELS[model]()
    with torch.no_grad():
        for name, tensor in made.state_dict().items():
            if name.endswith("e_score_correction_bias"):
                tensor.normal_()
    made.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    job = Job(publish, strategy, str(tmp_path), setup={"strategy_config": options})
    for published, halves, uncast in run_job(job):
        assert published.keys() == saved.keys()
        assert all(np.array_equal(published[name], tensor.numpy()) for name, tensor in saved.items())
        assert uncast == {name for name in saved if name.endswith("e_score_correction_bias")}
        assert halves.keys() == saved.keys()
        for name, half in halves.items():
            # Only FSDP2 casts shards before it gathers them.
            early = strategy == "fsdp2_train" and name not in uncast
            assert half.dtype == (torch.bfloat16 if early else torch.float32)
            assert torch.equal(half.bfloat16(), saved[name].bfloat16())

"""`megatron_train` computes with recorded experts as `fsdp2_train` does, however ranks share tokens and layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll.data.records import ROUTED, SampleBatch
from roll.trainers.trainer import TrainStrategy
from tests.trainers import ranks
from tests.trainers.megatron_models import EXPERTS, SIZES, write_models
from tests.trainers.megatron_runs import LENGTHS, OBJECTIVE, TRAINING, make_batch
from tests.trainers.nursery import on_ranks
from tests.trainers.test_megatron_context import train as with_gathering_attention

pytestmark = pytest.mark.tier("all")

LEFT_OUT = (0, 1, 5, 7)
PACKED = {"packed": True, "max_tokens": 30}
FULL = {"recompute_granularity": "full", "recompute_num_layers": 1}
SPLIT = {"context_parallel_size": 2}
VIRTUAL = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}
LAYERS = 6
CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "one rank, packed": (1, {}, PACKED),
    "recomputed in three stages of two groups": (3, VIRTUAL | {"recompute_method": "uniform", **FULL}, {}),
    "recomputed in part": (
        2, {"pipeline_model_parallel_size": 2, "recompute_method": "block", **FULL}, PACKED,
    ),
    "experts and positions split by tensor": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, PACKED),
    "positions split": (2, SPLIT, {}),
    "positions split, packed": (2, SPLIT | {"expert_model_parallel_size": 2}, PACKED),
    "positions split twice": (4, SPLIT | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, PACKED),
    "positions split, two groups": (4, SPLIT, PACKED),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    """A model with a layer for each of three stages of two groups, beside one without experts."""
    folder: Path = tmp_path_factory.mktemp("models")
    write_models(folder)
    torch.manual_seed(0)
    sizes = SIZES | EXPERTS | {"num_hidden_layers": LAYERS}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, head_dim=8, pad_token_id=20, mlp_only_layers=[1])).save_pretrained(
        folder / "qwen3_moe"
    )
    return str(folder / "qwen3_moe")


def recorded(seed: int, left_out: int = 0) -> SampleBatch:
    """A batch with experts drawn at random, so most of them are not those that the model would choose."""
    batch = make_batch(seed, LENGTHS[left_out:])
    draws = np.random.default_rng(seed).random((int(batch.lengths.sum()), LAYERS, 4))
    batch.tokens[ROUTED] = draws.argsort(axis=-1)[..., : EXPERTS["num_experts_per_tok"]].astype(np.uint8)
    return batch


def train(trainer: TrainStrategy, _: object) -> dict[str, Any]:
    """All that must not depend on how ranks share the model and its tokens, by name."""
    results = {"logprobs": trainer.log_probs(recorded(0), 0.7), "own": trainer.log_probs(recorded(0).unrouted(), 0.7)}
    for step, left_out in enumerate(LEFT_OUT):
        metrics = trainer.train_step(recorded(step, left_out), OBJECTIVE, 0.9)
        results |= {f"{step}/{name}": np.array(value) for name, value in metrics.items()}
    assert trainer.train_part(recorded(5), OBJECTIVE, 0.9, completes=False)[0] == {}
    metrics, _ = trainer.train_part(recorded(6), OBJECTIVE, 0.9, completes=True)
    results |= {f"parts/{name}": np.array(value) for name, value in metrics.items()}
    results["trained"] = trainer.log_probs(recorded(0), 1.0)
    return results | {f"weight/{name}": weight.clone().numpy() for name, weight in trainer.named_weights()}


def setup(**changes: Any) -> dict[str, Any]:
    return {"replays_routing": True, "training_args": TRAINING, "max_tokens": 25, **changes}


def assert_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def whole(model) -> dict[str, Any]:
    return ranks.run_job(ranks.Job(train, "megatron_train", model, setup=setup(), ranks=1))[0]


def test_recorded_experts_train_like_those_of_another_trainer(model, whole, leave_process_group):
    leave_process_group()
    (expected,) = ranks.run_here(ranks.Job(train, "fsdp2_train", model, setup=setup(), ranks=1))
    assert_same(whole, expected, 1e-4)
    assert np.median(np.abs(whole["logprobs"] - whole["own"])[whole["own"] != 0]) > 1e-2
    assert 0.5 < whole["0/routing_mismatch"] < 1 and whole["0/routing_mismatch"] != whole["1/routing_mismatch"]


@pytest.mark.parametrize("case", CASES)
def test_ranks_replay_the_experts_of_the_tokens_and_layers_that_they_compute(model, whole, case):
    count, options, changes = CASES[case]
    config = {"strategy_config": {"process_group_timeout_seconds": 60, **options}}
    job = ranks.Job(train, "megatron_train", model, setup=setup(**changes, **config), ranks=count)
    work = with_gathering_attention if "context_parallel_size" in options else ranks._train
    for found in on_ranks(work, job, ranks=count, engine="megatron"):
        assert_same(found, whole, 1e-5)


def test_a_model_without_experts_is_refused(model):
    job = ranks.Job(train, "megatron_train", str(Path(model).parent / "qwen3"), setup=setup(), ranks=1)
    with pytest.raises(ranks.RankFailed, match="qwen3 has no experts that a router chooses"):
        ranks.run_job(job)

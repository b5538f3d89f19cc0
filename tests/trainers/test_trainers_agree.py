"""All trainers, at any number of ranks, train alike: the same losses, gradient norms and weights to rounding.

A new trainer is one line in `CANDIDATES`. The reference is the default trainer on one rank, which its own test compares
with plain autograd.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from roll.configs.roles import TrainingArguments
from roll.data.records import SampleBatch
from roll.trainers.trainer import TrainStrategy
from tests.tiers import need, soak_but
from tests.trainers.ranks import Job, Results
from tests.trainers.tiny_models import OBJECTIVE, make_batch, weights_of, write_model
from tests.trainers.trainers import ALMOST_SGD

need("deepspeed", "megatron.core")
pytestmark = pytest.mark.tier("all")

TEMPERATURE = 0.9
REFERENCE = "fsdp2"
TOLERANCE = 2e-5
"""Of metrics and log-probabilities, relative, and of weights, relative to the largest one of a tensor: sums come in
another order, and processors round in their own ways."""
ROUNDING = {"self_attn.k_proj.bias": 1e-4, "one sample/grad_norm": 1e-4}
"""More where little but rounding is left, by how a key ends. Attention hardly feels key biases, which were 6e-5 apart.
The norm of a single short sample's gradient was 2.5e-5 apart."""
STRICT = ("/loss", "/grad_norm", "/learning_rate")
"""Metrics that are never zero by cancellation."""
CASES = {
    "tied, AdamW, clipped": TrainingArguments(
        learning_rate=1e-2, weight_decay=0.1, max_grad_norm=1.0, warmup_steps=2, lr_scheduler_type="cosine",
        # Attention hardly feels key biases: their gradients are rounding, of which Adam alone would make whole steps.
        adam_epsilon=1e-4,
    ),
    "untied, odd sizes, almost SGD, not clipped": ALMOST_SGD,
}  # fmt: skip
"""What the model is like, and the optimizer."""


@dataclass(frozen=True)
class Candidate:
    """A trainer with its options, on how many ranks it is tried, and in which cases."""

    strategy: str
    strategy_config: dict[str, Any] = field(default_factory=dict)
    packed: bool = False
    ranks: tuple[int, ...] = (1, 2)
    cases: tuple[str, ...] = tuple(CASES)
    in_parts: bool = False
    """True if each batch is trained on part by part."""

    def job(self, model_path: str, arguments: TrainingArguments, ranks: int) -> Job:
        setup = {
            "training_args": arguments,
            "strategy_config": {"process_group_timeout_seconds": 60, **self.strategy_config},
            "total_optimizer_steps": 7,
            "max_tokens": 14,
            "packed": self.packed,
        }
        work = train_in_parts if self.in_parts else train
        return Job(work, self.strategy, model_path, setup=setup, ranks=ranks)


def zero(stage: int, **options: Any) -> Candidate:
    return Candidate("deepspeed_train", {"zero_optimization": {"stage": stage, **options}})


def shared(candidate: Candidate, *cases: str) -> Candidate:
    """A variant of one that is tried everywhere: on two ranks, and in one case where that is all it may change."""
    return replace(candidate, ranks=(2,), cases=cases or tuple(CASES))


def megatron(**options: int) -> Candidate:
    return Candidate("megatron_train", options, ranks=(2,))


TIED, ODD = CASES
ON_CPU = {"device": "cpu"}
CANDIDATES = {
    REFERENCE: Candidate("fsdp2_train"),
    "fsdp2, packed": shared(Candidate("fsdp2_train", packed=True), TIED),
    "fsdp2, packed and checkpointed": shared(
        Candidate("fsdp2_train", {"gradient_checkpointing": True}, packed=True), ODD
    ),
    "ZeRO 3, packed": shared(Candidate("deepspeed_train", {"zero_optimization": {"stage": 3}}, packed=True), TIED),
    "fsdp2, states on the CPU": shared(Candidate("fsdp2_train", {"offload": "cpu"})),
    "ZeRO 0": zero(0),
    "ZeRO 1": zero(1),
    "ZeRO 2": shared(zero(2)),
    "ZeRO 3": zero(3),
    "ZeRO 3, parameters small and large": shared(zero(3, stage3_param_persistence_threshold=100, sub_group_size=1000)),
    "ZeRO 2, optimizer on the CPU": shared(zero(2, offload_optimizer=ON_CPU)),
    "ZeRO 3, all on the CPU": shared(zero(3, offload_optimizer=ON_CPU, offload_param=ON_CPU)),
    "Megatron, tensors": megatron(tensor_model_parallel_size=2),
    "Megatron, stages": megatron(pipeline_model_parallel_size=2),
    "fsdp2, in parts": Candidate("fsdp2_train", in_parts=True),
    "fsdp2, packed, in parts": shared(Candidate("fsdp2_train", packed=True, in_parts=True), ODD),
    "ZeRO 0, in parts": replace(zero(0), in_parts=True),
    "ZeRO 1, in parts": replace(zero(1), in_parts=True),
    "ZeRO 2, in parts": shared(replace(zero(2), in_parts=True), TIED),
    "ZeRO 3, in parts": shared(replace(zero(3), in_parts=True), TIED),
    "ZeRO 2, optimizer on the CPU, in parts": shared(replace(zero(2, offload_optimizer=ON_CPU), in_parts=True), TIED),
    "Megatron, data, in parts": replace(megatron(), in_parts=True),
    "Megatron, stages, in parts": replace(megatron(pipeline_model_parallel_size=2), in_parts=True),
}
ASKED = [
    (name, case, ranks)
    for name, candidate in CANDIDATES.items()
    for case in candidate.cases
    for ranks in candidate.ranks
    if (name, ranks) != (REFERENCE, 1)
]
FOR_EACH_CHANGE = [
    (name, case, ranks) for name, case, ranks in ASKED if ranks == 2 and case == CANDIDATES[name].cases[0]
]
"""Each candidate once."""


def batches():
    """Five that are trained on; one of them smaller than the ranks. Two in between that must leave no trace."""
    nothing_to_learn = make_batch(2)
    nothing_to_learn.tokens["loss_mask"] = np.zeros(len(nothing_to_learn.tokens["token_ids"]), dtype=bool)
    poisoned = make_batch(3)
    poisoned.tokens["advantages"][np.flatnonzero(poisoned.tokens["response_mask"])[3]] = np.nan
    return {
        "first": make_batch(0),
        "second": make_batch(1),
        "nothing to learn": nothing_to_learn,
        "one sample": make_batch(7, lengths=(6,)),
        "poisoned": poisoned,
        "fourth": make_batch(4),
        "fifth": make_batch(5),
    }


def train(trainer: TrainStrategy, _: None) -> dict[str, np.ndarray]:
    """Everything that must not depend on the trainer, flat."""
    return results_of(trainer, lambda batch: trainer.train_step(batch, OBJECTIVE, TEMPERATURE))


def train_in_parts(trainer: TrainStrategy, _: None) -> dict[str, np.ndarray]:
    """What must not depend on parts either: the first is one sample, so a second rank has none of it."""

    def in_parts(batch: SampleBatch) -> dict[str, float]:
        parts = [part for part in np.split(np.arange(len(batch)), [1, 3]) if len(part)]
        for number, rows in enumerate(parts, 1):
            completes = number == len(parts)
            metrics, _ = trainer.train_part(batch.select(rows), OBJECTIVE, TEMPERATURE, completes=completes)
            assert bool(metrics) is completes
            # Between parts a critic scores others.
            trainer.log_probs(batch.select(rows), TEMPERATURE)
        return metrics

    return results_of(trainer, in_parts)


def results_of(trainer: TrainStrategy, step: Callable[[SampleBatch], dict[str, float]]) -> dict[str, np.ndarray]:
    results = {"logprobs/before": trainer.log_probs(make_batch(), TEMPERATURE)}
    for name, batch in batches().items():
        metrics = step(batch)
        results |= {f"{name}/{metric}": np.array(value) for metric, value in metrics.items()}
    results["logprobs/after"] = trainer.log_probs(make_batch(), TEMPERATURE)
    return results | {f"weights/{name}": weight for name, weight in weights_of(trainer).items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results by rank, by candidate, case and number of ranks."""
    folder = tmp_path_factory.mktemp("models")
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tied = write_model(folder / "tied", **sizes)
    odd = write_model(folder / "odd", tied=False, hidden_size=15, head_dim=8, **sizes)
    models = dict(zip(CASES, (tied, odd), strict=True))
    return Results(
        {
            (name, case, ranks): CANDIDATES[name].job(models[case], CASES[case], ranks)
            for name, case, ranks in [*ASKED, *((REFERENCE, case, 1) for case in CASES)]
        }
    )


@pytest.mark.parametrize(("name", "case", "ranks"), soak_but(FOR_EACH_CHANGE, ASKED))
def test_trainers_agree(results, name, case, ranks):
    """With the default trainer on one rank, which its own tests compare with plain autograd."""
    by_rank = results[name, case, ranks]
    assert len(by_rank) == ranks
    assert_same(by_rank[0], results[REFERENCE, case, 1][0])
    for other in by_rank[1:]:
        assert all(np.array_equal(other[key], value, equal_nan=True) for key, value in by_rank[0].items())


def assert_same(values, expected):
    assert values.keys() == expected.keys()
    for key, value in expected.items():
        if key.startswith("poisoned/"):
            continue
        assert np.isfinite(value).all(), key
        tolerance = next((wider for end, wider in ROUNDING.items() if key.endswith(end)), TOLERANCE)
        scale = np.abs(value).max()
        if not key.startswith(("weights/", "logprobs/")) and not key.endswith(STRICT):
            # Means of what may be positive or negative can be almost zero.
            scale = max(scale, 0.1)
        np.testing.assert_allclose(values[key], value, rtol=0, atol=tolerance * scale, err_msg=key)
    assert values["poisoned/skipped_updates"] == values["nothing to learn/skipped_updates"] == 1.0
    assert not np.isfinite(values["poisoned/grad_norm"]) and values["nothing to learn/grad_norm"] == 0.0
    assert all(values[f"{name}/skipped_updates"] == 0.0 for name in ("first", "second", "one sample", "fifth"))
    assert values["poisoned/learning_rate"] == expected["poisoned/learning_rate"]

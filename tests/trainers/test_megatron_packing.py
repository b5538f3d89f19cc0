"""Packed rows of `megatron_train` give the training of padded ones, however the model is shared out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.data.records import SampleBatch
from tests.tiers import need
from tests.trainers.megatron_models import VOCABULARY
from tests.trainers.megatron_runs import LEFT_OUT, LENGTHS, OBJECTIVE, TRAINING, make_batch
from tests.trainers.nursery import on_ranks
from tests.trainers.ranks import Job, run_job
from tests.trainers.test_megatron_context import train
from tests.trainers.trainers import assert_close

need("megatron.core")
pytestmark = pytest.mark.tier("all")

SEQUENCE = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
STAGES = {"pipeline_model_parallel_size": 2}
CONTEXT = {"context_parallel_size": 2}
EXPERTS = {"expert_model_parallel_size": 2}
VIRTUAL = {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2}
WHOLE_LAYERS = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ATTENTION = {"recompute_granularity": "selective"}

INFER_TOKENS = 33


@dataclass(frozen=True)
class Case:
    """A model, and how its ranks share the work."""

    model: str
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the trainer's setup."""

    def job(self, folder, packed=True) -> Job:
        setup = {"training_args": TRAINING, "max_tokens": 20, "infer_tokens": INFER_TOKENS, "packed": packed}
        options = {"process_group_timeout_seconds": 60, **self.options}
        work = criticise if self.changes.get("kind") == "value" else learn
        path = str(folder / self.model)
        return Job(work, "megatron_train", path, None, setup | {"strategy_config": options} | self.changes, self.ranks)


CASES = {
    "one rank": Case("qwen3"),
    "sequence": Case("qwen3", 2, SEQUENCE | WHOLE_LAYERS),
    "stages": Case("qwen3", 2, STAGES | ATTENTION),
    "context": Case("qwen3", 2, CONTEXT),
    "context and sequence": Case("qwen3", 4, CONTEXT | SEQUENCE),
    "experts": Case("qwen3_moe", 2, EXPERTS),
    "virtual stages": Case("qwen2", 3, VIRTUAL),
    "scaled positions": Case("llama", 2),
    "critic": Case("qwen3", 2, SEQUENCE, {"kind": "value"}),
    "critic, context": Case("qwen3", 2, CONTEXT, {"kind": "value"}),
    "reference": Case("qwen3", 2, STAGES, {"forward_only": True}),
}


def with_changed(batch: SampleBatch, row: int) -> SampleBatch:
    """The batch with other tokens in a sample."""
    ids = batch.tokens["token_ids"].copy()
    own = slice(batch.offsets[row], batch.offsets[row + 1])
    ids[own] = (ids[own] + 1) % VOCABULARY
    return SampleBatch(batch.lengths, batch.tokens | {"token_ids": ids})


def watch(trainer) -> list[tuple[int, ...]]:
    """Shapes of what the model is given from here on."""
    shapes: list[tuple[int, ...]] = []
    chunk = trainer.chunks[0]
    chunk.register_forward_pre_hook(lambda _, __, given: shapes.append((*given["input_ids"].shape,)), with_kwargs=True)
    return shapes


def learn(trainer, _):
    """All that must not depend on how rows are made, by name, and the shapes of the rows."""
    shapes, batch = watch(trainer), make_batch(11)
    results = {"logprobs": trainer.log_probs(batch, 0.7)}
    beside_others = trainer.log_probs(with_changed(batch, 2), 0.7)
    kept = np.repeat(np.arange(len(batch)) != 2, batch.lengths)
    results["influence"] = np.where(kept, beside_others - results["logprobs"], 0.0)
    if trainer.setup.forward_only:
        return results, shapes
    for step, left_out in enumerate(LEFT_OUT):
        metrics = trainer.train_step(make_batch(step, LENGTHS[left_out:]), OBJECTIVE, 0.9)
        results |= {f"{step}/{name}": np.array(value) for name, value in metrics.items()}
    objective = PolicyObjective(8, "ppo", one_pass=True)
    for completes in (False, True):
        metrics, logprobs = trainer.train_part(make_batch(7 + completes), objective, 0.9, completes=completes)
        results |= {f"part {completes}/{name}": np.array(value) for name, value in metrics.items()}
        results[f"one pass {completes}"] = logprobs
    return results | {f"weight/{name}": weight.numpy().copy() for name, weight in trainer.named_weights()}, shapes


def criticise(trainer, _):
    """The same of a critic."""
    shapes, batches = watch(trainer), [make_batch(seed) for seed in range(3)]
    for batch in batches:
        batch.tokens["returns"] = (batch.tokens["token_ids"] / 10).astype(np.float32)
        batch.tokens["old_values"] = np.zeros_like(batch.tokens["returns"])
    results = {}
    for step, batch in enumerate(batches):
        metrics = trainer.train_step(batch, ValueObjective(8), 1.0)
        results |= {f"{step}/{name}": np.array(value) for name, value in metrics.items()}
    results["values"] = trainer.values(batches[0])
    assert np.abs(results["values"]).max() > 0.001
    return results | {f"weight/{name}": weight.numpy().copy() for name, weight in trainer.named_weights()}, shapes


@pytest.fixture(scope="module")
def results_of(folder):
    """Results by rank, and shapes of rows by rank: of packed rows in a case, or of padded ones on one rank."""
    found: dict[Any, Any] = {}

    def run(case, packed=True):
        key = (case, packed)
        if str(key) not in found:
            job = case.job(folder, packed)
            by_rank = on_ranks(train, job, ranks=job.ranks, engine="megatron") if splits(case) else run_job(job)
            found[str(key)] = [each[0] for each in by_rank], [each[1] for each in by_rank]
        return found[str(key)]

    return run


def splits(case: Case) -> bool:
    return "context_parallel_size" in case.options


@pytest.mark.parametrize("name", CASES)
def test_packed_rows_train_like_padded_ones(results_of, name):
    case = CASES[name]
    (expected,), (padded,) = results_of(Case(case.model, changes=case.changes), packed=False)
    by_rank, shapes_by_rank = results_of(case)
    for results in by_rank:
        assert_close(results, expected, rtol=1e-5, atol=1e-5)
    context, sequence = case.options.get("context_parallel_size", 1), case.options.get("sequence_parallel", False)
    multiple = (2 * context if context > 1 else 1) * (2 if sequence else 1)
    for shapes in shapes_by_rank:
        assert {rows for rows, _ in shapes} == {1} and any(rows > 1 for rows, _ in padded)
        widths = [width * context for _, width in shapes]
        assert all(width % multiple == 0 for width in widths) and max(widths) < INFER_TOKENS + multiple


def test_the_model_sees_no_padding(results_of):
    _, (shapes,) = results_of(CASES["one rank"])
    tokens = 4 * sum(LENGTHS) + sum(sum(LENGTHS[left_out:]) for left_out in LEFT_OUT)
    assert sum(width for _, width in shapes) == tokens


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.changes.get("kind") != "value"])
def test_tokens_of_a_sample_have_no_influence_on_others_in_its_row(results_of, name):
    for results in results_of(CASES[name])[0]:
        assert np.abs(results["influence"]).max() < 1e-6

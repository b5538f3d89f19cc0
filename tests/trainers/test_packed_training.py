"""Packed micro-batches give the losses, gradients and metrics of padded ones: every policy loss, with either head."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import pytest
import torch

from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.losses.base import POLICY_LOSSES
from roll.algorithms.metrics import combine
from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.trainers.model import HfForward, prepare_model
from roll.trainers.step import TrainingStep, plan_micro_batches, results_by_token
from tests.trainers.tiny_models import OBJECTIVE, make_batch, write_model
from tests.trainers.trainers import trainer_setup

BY_NAME = [PolicyObjective(8, name, loss_agg_mode=mode) for name, mode in zip(
    POLICY_LOSSES.names(), itertools.cycle(LOSS_AGG_MODES), strict=False
)]  # fmt: skip
OF_WHOLE_RESPONSES = [
    PolicyObjective(8, "topr", {"level": "sequence"}, "seq-mean-token-sum"),
    PolicyObjective(8, "kimi15", {"level": "sequence"}, "seq-mean-token-sum"),
    PolicyObjective(8, "ppo", loss_agg_mode="seq-mean-token-sum-norm", corrected=True, max_lag=2),
]
"""And others whose fields or ratios are not of single tokens."""


@dataclass(frozen=True)
class Outcome:
    """Of one pass over a batch."""

    computed_tokens: int
    """That the model saw, with gradients and without."""
    loss: float
    gradients: dict[str, torch.Tensor]
    metrics: list[torch.Tensor]
    without_gradients: np.ndarray


def full_batch(seed=0):
    """With every field that some objective reads; a part of the response is not trained on, and one row has none."""
    batch = make_batch(seed)
    generator = np.random.default_rng(seed + 100)
    mask = batch.tokens["response_mask"]
    mask[batch.offsets[1] : batch.offsets[2]] = False
    total = len(mask)

    def some(low, high):
        return np.where(mask, generator.uniform(low, high, total), np.nan).astype(np.float32)

    batch.tokens |= {
        "proximal_logprobs": some(-4, -2),
        "correction_weights": some(0.5, 2),
        "returns": some(-1, 1),
        "old_values": some(-1, 1),
        "lags": generator.integers(0, 3, total),
        "loss_mask": mask & (generator.random(total) < 0.8),
        "selected_tokens": mask & (generator.random(total) < 0.3),
    }
    batch.per_sample["scores"] = generator.normal(size=len(batch)).astype(np.float32)
    return batch


def outcome(path, objective, *, packed, whole_head=False, max_tokens=20):
    kind = "value" if isinstance(objective, ValueObjective) else "policy"
    setup = trainer_setup(path, packed=packed, max_tokens=max_tokens, kind=kind)
    prepared = prepare_model(setup, gradient_checkpointing=False)
    model, head = prepared.model, prepared.head
    forward = HfForward(kind, model, None if whole_head else head, torch.device("cpu"))
    batch = full_batch()
    step = TrainingStep.of(batch, objective)
    rows = plan_micro_batches(batch.lengths, 1, replace(setup, packed=prepared.packed).train_limits)[0]
    rows = [*rows, []]
    seen: list[int] = []
    model.register_forward_pre_hook(lambda _, __, given: seen.append(given["input_ids"].numel()), with_kwargs=True)
    parts, loss = [], 0.0
    for micro_batch in step.micro_batches(rows, torch.device("cpu"), packed):
        contribution, metrics = step.loss(micro_batch, *forward.outputs(micro_batch, 0.8, step.needs_entropy_gradient))
        contribution.backward()
        loss += contribution.item()
        parts.append(metrics)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    compute = forward.values if kind == "value" else partial(forward.logprobs, temperature=0.8)
    values = results_by_token(batch, rows, torch.device("cpu"), packed, lambda parts: map(compute, parts))
    return Outcome(sum(seen), loss, gradients, combine(parts), values)


def assert_same(found, expected):
    stand_in = 2
    assert found.computed_tokens == 2 * (int(full_batch().lengths.sum()) + stand_in) < expected.computed_tokens
    assert found.loss == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    for name, gradient in expected.gradients.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        torch.testing.assert_close(found.gradients[name], gradient, rtol=0, atol=1e-5 * scale, msg=name)
    for values, wanted in zip(found.metrics, expected.metrics, strict=True):
        torch.testing.assert_close(values, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.without_gradients, expected.without_gradients, rtol=0, atol=1e-5)
    assert np.isfinite(found.loss) and any(gradient.any() for gradient in found.gradients.values())


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    "objective",
    [*BY_NAME, *OF_WHOLE_RESPONSES, OBJECTIVE],
    ids=lambda objective: f"{objective.pg_variant}, {objective.loss_agg_mode}",
)
def test_packed_rows_give_the_loss_and_gradients_of_padded_ones(model_path, objective):
    assert_same(outcome(model_path, objective, packed=True), outcome(model_path, objective, packed=False))


def test_packed_rows_give_the_loss_and_gradients_of_padded_ones_for_a_critic(model_path):
    expected = outcome(model_path, ValueObjective(8), packed=False)
    assert_same(outcome(model_path, ValueObjective(8), packed=True), expected)


def test_whole_logits_give_the_same_as_the_head_that_saves_memory(model_path):
    expected = outcome(model_path, OBJECTIVE, packed=False)
    assert_same(outcome(model_path, OBJECTIVE, packed=True, whole_head=True), expected)


@pytest.mark.parametrize("max_tokens", [1, 13, 1000])
def test_any_packing_gives_the_same(model_path, max_tokens):
    expected = outcome(model_path, OBJECTIVE, packed=False, max_tokens=1000)
    assert_same(outcome(model_path, OBJECTIVE, packed=True, max_tokens=max_tokens), expected)

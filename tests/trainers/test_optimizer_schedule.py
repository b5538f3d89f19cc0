"""The schedule's shape, which parameters decay, and clipping by the global norm."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from roll.configs.roles import TrainingArguments
from roll.trainers.trainer import TrainStrategy, build_optimizer, clip_gradients, learning_rate_schedule


def factors(total, count, **arguments):
    """Shares of the peak."""
    schedule = learning_rate_schedule(TrainingArguments(learning_rate=0.25, **arguments), total)
    return [schedule(step) / 0.25 for step in range(count)]


def test_warm_up_rises_linearly_and_reaches_the_peak():
    assert factors(10, 6, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_warm_up_ratio_counts_optimizer_steps_unless_steps_are_given():
    assert factors(10, 4, warmup_ratio=0.2) == [0.5, 1.0, 1.0, 1.0]
    assert factors(10, 2, warmup_ratio=0.5, warmup_steps=1) == [1.0, 1.0]
    assert factors(12, 2, warmup_ratio=0.1) == [0.5, 1.0], "a part of a step counts as one"
    assert factors(100, 7, warmup_ratio=0.07)[-1] == 1.0, "0.07 x 100 is 7, though not in binary"


def test_linear_and_cosine_fall_to_zero_after_the_last_step():
    assert factors(6, 8, warmup_steps=2, lr_scheduler_type="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = factors(4, 6, lr_scheduler_type="cosine")
    assert cosine == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0, 0.0])


def test_only_matrices_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3))
    optimizer = build_optimizer(model.parameters(), TrainingArguments(weight_decay=0.1))
    decay = {parameter: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert [decay[parameter] for parameter in model.parameters()] == [0.1, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("max_norm", "expected"), [(1.0, 1.0), (50.0, 13.0), (0.0, 13.0)])
def test_gradients_are_clipped_to_the_global_norm(max_norm, expected):
    parameters = [
        torch.nn.Parameter(torch.zeros(2)),
        torch.nn.Parameter(torch.zeros(1)),
        torch.nn.Parameter(torch.zeros(1)),
    ]
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 4.0]), torch.tensor([12.0])
    assert clip_gradients(parameters, max_norm).item() == pytest.approx(13.0)
    norm = math.sqrt(sum(p.grad.square().sum().item() for p in parameters if p.grad is not None))
    assert norm == pytest.approx(expected, rel=1e-5)


def test_a_trainer_whose_optimizer_is_not_of_torch_sets_the_rate_itself(monkeypatch):
    class OwnTrainer(TrainStrategy):
        initialize = named_weights = load = snapshot = restore = None
        rates = []

        def _set_learning_rate(self, rate):
            self.rates.append(rate)

        _divide_gradients = None

        def _accumulate(self, step, rows, temperature):
            return []

        def _joined(self, join):
            return {"loss": 0.5}, 1.0

        def _update(self, nothing_to_learn):
            return 2.0, not nothing_to_learn

    arguments = TrainingArguments(learning_rate=0.25, warmup_steps=2)
    step = SimpleNamespace(is_empty=False)
    monkeypatch.setattr("roll.trainers.trainer.TrainingStep.of", lambda batch, objective, is_part: step)
    monkeypatch.setattr(OwnTrainer, "_rows", lambda self, batch, limits: [])
    setup = SimpleNamespace(
        training_args=arguments, total_optimizer_steps=4, forward_only=False, train_limits=None, replays_routing=False
    )
    trainer = OwnTrainer(setup)
    trainer.start_schedule()
    metrics = [trainer.train_step(None, None, 1.0) for _ in range(2)]
    assert trainer.rates == [0.125, 0.25] == [each["learning_rate"] for each in metrics]
    assert metrics[0] == {"loss": 0.5, "grad_norm": 2.0, "learning_rate": 0.125, "skipped_updates": 0.0}


def test_the_fused_optimizer_takes_the_same_steps_to_rounding():
    weights = []
    for fused in (False, True):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((40, 30), (30,))]
        optimizer = build_optimizer(parameters, TrainingArguments(learning_rate=0.01, weight_decay=0.1), fused=fused)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        weights.append(parameters)
    for plain, fused in zip(*weights, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-6)

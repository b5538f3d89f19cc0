"""The off-policy laboratory: its exact sums are exact, and it takes up where it was stopped."""

from __future__ import annotations

import argparse
import json

import _exact_problem
import offpolicy_lab
import pytest
import torch
from _exact_problem import ExactProblem, Method, gradient_table
from _lagged_training import LaggedResult

from roll.algorithms.losses.base import make_policy_loss

METHODS = offpolicy_lab.exact_methods()


def test_sequences_are_told_apart_by_their_prefixes():
    problem = ExactProblem()
    probabilities = problem.logprobs(problem.start).sum(-1).exp()
    assert probabilities.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert len({tuple(sequence.tolist()) for sequence in problem.sequences}) == _exact_problem.SEQUENCES
    for first, second in ((0, 1), (5, 40)):
        for place in range(_exact_problem.LENGTH):
            same_prefix = problem.sequences[first, :place].equal(problem.sequences[second, :place])
            same_context = problem.contexts[first, place] == problem.contexts[second, place]
            assert same_prefix == same_context


def test_the_true_gradient_is_that_of_finite_differences():
    problem = ExactProblem(3)

    def expected_reward(logits):
        return (problem.logprobs(logits).sum(-1).exp() * problem.rewards).sum().item()

    gradient = problem.true_gradient(problem.start).view_as(problem.start)
    for context, token in ((0, 1), (4, 2), (20, 3)):
        step = torch.zeros_like(problem.start)
        step[context, token] = 1e-5
        difference = (expected_reward(problem.start + step) - expected_reward(problem.start - step)) / 2e-5
        assert gradient[context, token].item() == pytest.approx(difference, abs=1e-9)


def test_without_lag_every_loss_has_the_true_gradient():
    for name, row in gradient_table(METHODS, [0], 3.0, 2).items():
        assert row[0].bias == pytest.approx(0.0, abs=1e-9), name
        assert row[0].cosine == pytest.approx(1.0), name


def test_whole_sequence_weights_without_bound_are_unbiased_at_any_lag_and_the_others_are_not():
    table = gradient_table(METHODS, [4, 16], 3.0, 2)
    for lag in (4, 16):
        assert table["sequence weight, no bound"][lag].bias == pytest.approx(0.0, abs=1e-9)
        others = {name: row[lag].bias for name, row in table.items() if not name.startswith("sequence")}
        assert min(others.values()) > 0.01
    exact = table["sequence weight, no bound"]
    assert exact[16].deviation > exact[4].deviation, "what unbiasedness costs"


def test_the_expected_gradient_is_that_of_sampling():
    problem = ExactProblem(1)
    points = problem.path(2, 3.0)
    quality = problem.quality(Method(make_policy_loss("tis")), points[0], points[2])
    generator = torch.Generator().manual_seed(0)
    probabilities = problem.logprobs(points[0]).sum(-1).exp()
    counts = torch.multinomial(probabilities, 200_000, True, generator=generator).bincount(minlength=64)
    leaf = points[2].clone().requires_grad_()
    logprobs = problem.logprobs(leaf)
    weights = (logprobs - problem.logprobs(points[0])).exp().clamp(max=1).detach()
    advantages = problem.rewards - (probabilities * problem.rewards).sum()
    estimate = ((counts / counts.sum())[:, None] * weights * advantages[:, None] * logprobs).sum()
    gradient = torch.autograd.grad(estimate, leaf)[0].flatten()
    true = problem.true_gradient(points[2])
    deviation = quality.deviation / 200_000**0.5
    assert ((gradient - true).norm() / true.norm()).item() == pytest.approx(quality.bias, abs=4 * deviation)


def arguments(**changes):
    options = {"seeds": 2, "lags": [0, 8], "steps": 3, "prompts": 2, "learning_rate": 1e-3, "updates_per_batch": 1,
               "eval_steps": 1}  # fmt: skip
    return argparse.Namespace(**options | changes)


def test_finished_runs_are_read_and_not_done_again(tmp_path):
    runs = list(offpolicy_lab.training_runs(arguments()))
    assert len(runs) == 2 * 2 * len(offpolicy_lab.METHODS) == len({run.name for run in runs})
    (tmp_path / "task" / "data").mkdir(parents=True)
    (tmp_path / "task" / "data" / "val.jsonl").write_text("")
    for run in runs:
        accuracy = [0.3, 0.5, 0.9 - 0.1 * run.seed - 0.05 * run.lag]
        result = LaggedResult([0, 1, 2], accuracy, [1.0], [0.5])
        offpolicy_lab._file(tmp_path, run).write_text(json.dumps(vars(result)))
    results = offpolicy_lab.do_training(runs, tmp_path, workers=1)
    table = offpolicy_lab.training_table(runs, results)
    assert set(table) == set(offpolicy_lab.METHODS)
    assert table["ppo"][0]["end"] == pytest.approx(0.85) and table["ppo"][0]["worst_end"] == pytest.approx(0.8)
    assert table["tis"][8]["end"] == pytest.approx(0.45)
    other = next(offpolicy_lab.training_runs(arguments(steps=4)))
    assert not offpolicy_lab._file(tmp_path, other).exists(), "other settings are other runs"

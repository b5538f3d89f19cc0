"""Compute exactly, on a small policy problem, how stale samples change the gradient of each policy loss.

A softmax policy writes sequences of three tokens out of four. Each context has its own logits, and a fixed random half
of the 64 sequences has reward 1. All sequences can be listed, so expectation and covariance of a gradient are sums and
not estimates. The behaviour policy is the start of a path of exact gradient ascent. The current policy is a point some
steps further: that number of steps is the lag.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roll.algorithms.correction import Correction, correct
from roll.algorithms.losses.base import PolicyInputs, PolicyLoss

TOKENS, LENGTH = 4, 3
SEQUENCES = TOKENS**LENGTH


@dataclass(frozen=True)
class Method:
    """A policy loss, the policy its ratio is taken against, and the weight that multiplies it."""

    loss: PolicyLoss
    old_policy: str = "behaviour"
    correction: Correction | None = None


@dataclass(frozen=True)
class GradientQuality:
    """Comparison of one loss's gradient with the gradient of the current policy's expected reward."""

    bias: float
    """Length of the error of the expected gradient, divided by the length of the true gradient."""
    cosine: float
    """Cosine of the angle between expected and true gradient."""
    deviation: float
    """Standard deviation of one sample's gradient (root of the summed variances), divided by the true one's length."""
    size: float
    """Length of the expected gradient, divided by that of the true one."""


class ExactProblem:
    """All sequences, their contexts and rewards. Float64."""

    def __init__(self, seed: int = 0) -> None:
        numbers = torch.arange(SEQUENCES)
        self.sequences = torch.stack([numbers // TOKENS**place % TOKENS for place in reversed(range(LENGTH))], dim=1)
        """int64 ``[sequences, length]``."""
        prefixes = [torch.zeros(SEQUENCES, dtype=torch.int64)]
        for place in range(1, LENGTH):
            prefixes.append(numbers // TOKENS ** (LENGTH - place) + sum(TOKENS**shorter for shorter in range(place)))
        self.contexts = torch.stack(prefixes, dim=1)
        """int64 ``[sequences, length]``: row of the logits that predicts each token."""
        generator = torch.Generator().manual_seed(seed)
        self.rewards = torch.zeros(SEQUENCES, dtype=torch.float64)
        self.rewards[torch.randperm(SEQUENCES, generator=generator)[: SEQUENCES // 2]] = 1.0
        count = sum(TOKENS**place for place in range(LENGTH))
        self.start = 0.3 * torch.randn(count, TOKENS, generator=generator, dtype=torch.float64)
        """Logits ``[contexts, tokens]`` of the first policy."""

    def logprobs(self, logits: Tensor) -> Tensor:
        """Return the log-probability of each token of each sequence, ``[sequences, length]``."""
        return logits.log_softmax(-1)[self.contexts, self.sequences]

    def true_gradient(self, logits: Tensor) -> Tensor:
        """Return the gradient of the expected reward, flattened."""
        leaf = logits.clone().requires_grad_()
        expected_reward = (self.logprobs(leaf).sum(-1).exp() * self.rewards).sum()
        return torch.autograd.grad(expected_reward, leaf)[0].flatten()

    def path(self, steps: int, step_size: float) -> list[Tensor]:
        """Return the logits along exact gradient ascent, ``steps + 1`` of them."""
        points = [self.start]
        for _ in range(steps):
            points.append(points[-1] + step_size * self.true_gradient(points[-1]).view_as(self.start))
        return points

    def quality(self, method: Method, behaviour: Tensor, current: Tensor) -> GradientQuality:
        """Measure a loss's gradient at ``current`` on samples of ``behaviour``, per sequence (sum over its tokens).

        Advantages are rewards minus the behaviour policy's mean; the proximal policy is the current one, as before the
        first update on a batch.
        """
        behaviour_logprobs = self.logprobs(behaviour)
        probabilities = behaviour_logprobs.sum(-1).exp()
        advantages = self.rewards - (probabilities * self.rewards).sum()
        leaf = current.clone().requires_grad_()
        logprobs = self.logprobs(leaf)
        mask = torch.ones(SEQUENCES, LENGTH, dtype=torch.bool)
        losses, _ = method.loss(
            PolicyInputs(
                logprobs=logprobs,
                behaviour_logprobs=behaviour_logprobs,
                advantages=advantages[:, None].expand(SEQUENCES, LENGTH),
                response_mask=mask,
                proximal_logprobs=logprobs.detach(),
                scores=self.rewards,
                old_policy=method.old_policy,
            )
        )
        if method.correction is not None:
            losses = losses * correct(logprobs.detach(), behaviour_logprobs, mask, method.correction).weights
        gradients = -torch.stack(
            [torch.autograd.grad(each, leaf, retain_graph=True)[0].flatten() for each in losses.sum(-1)]
        )
        expected = probabilities @ gradients
        true = self.true_gradient(current)
        variance = probabilities @ (gradients - expected).square().sum(-1)
        return GradientQuality(
            bias=((expected - true).norm() / true.norm()).item(),
            cosine=torch.cosine_similarity(expected, true, dim=0).item(),
            deviation=(variance.sqrt() / true.norm()).item(),
            size=(expected.norm() / true.norm()).item(),
        )


def gradient_table(
    methods: dict[str, Method], lags: Sequence[int], step_size: float, problems: int
) -> dict[str, dict[int, GradientQuality]]:
    """Return name -> lag -> quality, the mean over several random problems."""
    table: dict[str, dict[int, list[GradientQuality]]] = {name: {lag: [] for lag in lags} for name in methods}
    for seed in range(problems):
        problem = ExactProblem(seed)
        points = problem.path(max(lags), step_size)
        for name, method in methods.items():
            for lag in lags:
                table[name][lag].append(problem.quality(method, points[0], points[lag]))
    return {name: {lag: _mean(each) for lag, each in rows.items()} for name, rows in table.items()}


def _mean(qualities: list[GradientQuality]) -> GradientQuality:
    names = ("bias", "cosine", "deviation", "size")
    return GradientQuality(**{name: sum(vars(each)[name] for each in qualities) / len(qualities) for name in names})

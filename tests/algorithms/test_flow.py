"""Stochastic steps keep the distribution of the ODE, and their densities are those of the Gaussian they draw from."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from roll.algorithms.flow import KINDS, guarded_log_prob, kl, log_prob, per_row, step_moments, window

SAMPLES = 20_000
SPREAD = {"flow_sde": 0.6, "dance": 0.6, "cps": 0.0}
"""Standard deviation of the data; `cps` promises the marginals for sure data only."""
STEPS = {"flow_sde": 400, "dance": 400, "cps": 8}
CENTRE = torch.tensor([1.5, -0.5])


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def velocity(x, s, spread):
    """E[e - x_0 | x] for x_0 ~ N(CENTRE, spread^2) and x = (1 - s) x_0 + s e."""
    deviation = x - (1 - s) * CENTRE
    variance = (1 - s) ** 2 * spread**2 + s**2
    return deviation * (s - (1 - s) * spread**2) / variance - CENTRE


def latents_by_level(kind, noise, spread, steps):
    schedule = torch.linspace(1.0, 0.0, steps + 1)
    x = drawn(SAMPLES, 2)
    generator = torch.Generator().manual_seed(1)
    for s, to in pairwise(schedule.tolist()):
        mean, std = step_moments(kind, x, velocity(x, s, spread), s, to, noise, schedule[1].item())
        x = mean + per_row(std, mean) * torch.randn(x.shape, generator=generator)
        yield to, x


@pytest.mark.parametrize("noise", [0.0, 0.7])
@pytest.mark.parametrize("kind", KINDS)
def test_marginals_are_those_of_the_ode(kind, noise):
    spread, steps = SPREAD[kind], STEPS[kind]
    for number, (s, x) in enumerate(latents_by_level(kind, noise, spread, steps), start=1):
        if number % (steps // 4):
            continue
        variance = (1 - s) ** 2 * spread**2 + s**2
        error = max(math.sqrt(variance / SAMPLES), 1e-5)
        assert torch.all((x.mean(0) - (1 - s) * CENTRE).abs() < 4 * error)
        assert torch.all((x.var(0) - variance).abs() < max(4 * variance * math.sqrt(2 / SAMPLES), 1e-5))


def test_a_wrong_sign_of_the_score_would_be_seen(monkeypatch):
    def wrong(x, v, s, to, noise, first_level):
        mean, std = KINDS["dance"](x, v, s, to, noise, first_level)
        return 2 * (x + v * (to - s)) - mean, std

    monkeypatch.setitem(KINDS, "wrong", wrong)
    *_, (_, x) = latents_by_level("wrong", 0.7, 0.6, 400)
    assert torch.all(x.var(0) > 1.5 * 0.6**2)


@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_a_step_is_the_step_of_the_ode(kind):
    x, v = drawn(3, 4, 5, 5), drawn(3, 4, 5, 5, seed=1)
    level, to = torch.tensor([1.0, 0.6, 0.3]), torch.tensor([0.8, 0.3, 0.0])
    mean, std = step_moments(kind, x, v, level, to, 0.0, 0.8)
    torch.testing.assert_close(mean, x + v * per_row(to - level, x))
    assert std.tolist() == [0, 0, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_moments_follow_the_published_formulas(kind):
    x, v, s, to, a = drawn(1, 6).double(), drawn(1, 6, seed=1).double(), 0.7, 0.55, 0.4
    clean, noise = x - s * v, x + (1 - s) * v
    g = a * math.sqrt(s / (1 - s))
    cps_std = to * math.sin(a * math.pi / 2)
    expected = {
        "flow_sde": (x + (v + g**2 / (2 * s) * (x + (1 - s) * v)) * (to - s), g * math.sqrt(s - to)),
        "cps": (clean * (1 - to) + noise * math.sqrt(to**2 - cps_std**2), cps_std),
        "dance": (x + v * (to - s) + a**2 / 2 * (x - (1 - s) * clean) / s**2 * (to - s), a * math.sqrt(s - to)),
    }
    mean, std = step_moments(kind, x, v, s, to, a, 0.9)
    torch.testing.assert_close(mean, expected[kind][0])
    assert std.item() == pytest.approx(expected[kind][1])


def test_at_level_one_the_first_level_below_bounds_the_noise():
    _, std = step_moments("flow_sde", drawn(2, 3), drawn(2, 3), torch.tensor([1.0, 0.5]), 0.25, 0.7, 0.9)
    assert std.tolist() == pytest.approx([0.7 * math.sqrt(0.75 / 0.1), 0.7 * math.sqrt(0.25)])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_neighbours(kind):
    x, v, level, to = drawn(5, 4, 6, 6), drawn(5, 4, 6, 6, seed=1), torch.linspace(1, 0.2, 5), torch.zeros(5)
    noise = torch.tensor([0.7, 0, 0.3, 0, 0.7])
    mean, std = step_moments(kind, x, v, level, to, noise, 0.9)
    sample = drawn(5, 4, 6, 6, seed=2)
    for row in range(5):
        one = slice(row, row + 1)
        alone = step_moments(kind, x[one], v[one], level[one], to[one], noise[one], 0.9)
        assert torch.equal(mean[one], alone[0]) and torch.equal(std[one], alone[1])
        assert torch.equal(log_prob(sample, mean, std)[one], log_prob(sample[one], *alone))


@pytest.mark.parametrize("reduce", ["mean", "sum"])
def test_the_log_probability_is_that_of_torch(reduce):
    sample, mean, std = drawn(4, 3, 8, 8), drawn(4, 3, 8, 8, seed=1), torch.tensor([0.05, 0.3, 1.0, 2.0])
    reference = torch.distributions.Normal(mean, std[:, None, None, None]).log_prob(sample).flatten(1)
    torch.testing.assert_close(log_prob(sample, mean, std, reduce), getattr(reference, reduce)(-1))


def test_the_divergence_is_what_samples_estimate():
    mean, reference, std = drawn(2, 5), drawn(2, 5, seed=1), torch.tensor([0.7, 1.5])
    exact = kl(mean, reference, std, "sum")
    torch.testing.assert_close(kl(mean, reference, std, "mean"), exact / 5)
    samples = mean + std[:, None] * drawn(SAMPLES, 2, 5, seed=2)
    for row in range(2):
        drawn_here, width = samples[:, row], std[row].expand(SAMPLES)
        own, other = (
            log_prob(drawn_here, centre[row].expand_as(drawn_here), width, "sum") for centre in (mean, reference)
        )
        ratio = own - other
        assert abs(ratio.mean() - exact[row]) < 4 * ratio.std() / math.sqrt(SAMPLES)


@pytest.mark.parametrize("std", [0.02, 0.9])
def test_a_guarded_ratio_is_the_published_one_without_bias_and_spread_alike_at_all_steps(std):
    old, change = drawn(2, 3), 0.1 * drawn(2, 3, seed=1)
    samples = old + std * drawn(SAMPLES, 2, 3, seed=2)
    olds, means = old.expand_as(samples), (old + change).expand_as(samples)
    deviations = torch.full((SAMPLES,), std)
    before, plain = log_prob(samples, olds, deviations), log_prob(samples, means, deviations)
    guarded = guarded_log_prob(samples, means, olds, deviations) - before
    # Equation 8 of GRPO-Guard, with the mean over dimensions.
    published = std * (plain - before + (means - olds).square().flatten(1).mean(-1) / (2 * std**2))
    torch.testing.assert_close(guarded, published, atol=1e-5, rtol=1e-3)
    spread = change.square().mean().sqrt() / math.sqrt(6)
    assert abs(float(guarded.mean())) < 4 * spread / math.sqrt(SAMPLES)
    assert float(guarded.std()) == pytest.approx(float(spread), rel=0.03)
    assert float((plain - before).mean()) < -3 * float((plain - before).std()) / math.sqrt(SAMPLES)


def test_a_weight_changes_the_gradient_of_a_guarded_log_probability_and_not_its_value():
    sample, old, std = drawn(2, 4), drawn(2, 4, seed=1), torch.tensor([0.5, 0.0])
    mean = drawn(2, 4, seed=2).requires_grad_()
    plain, weighed = (guarded_log_prob(sample, mean, old, std, weight) for weight in (1.0, torch.tensor([3.0, 5.0])))
    assert torch.equal(plain, weighed) and weighed[1] == 0
    (once,), (thrice,) = (torch.autograd.grad(each.sum(), mean) for each in (plain, weighed))
    torch.testing.assert_close(thrice[0], 3 * once[0])
    torch.testing.assert_close(once[0], (sample - old)[0] / 0.5 / 4)
    assert not thrice[1].any()


def test_a_step_without_deviation_has_neither_value_nor_gradient():
    mean = drawn(2, 4).requires_grad_()
    std = torch.tensor([0.0, 0.5])
    values = log_prob(drawn(2, 4, seed=1), mean, std), kl(mean, drawn(2, 4, seed=2), std)
    sum(value.sum() for value in values).backward()
    assert all(value[0] == 0 and value[1] != 0 for value in values)
    assert torch.all(mean.grad[0] == 0) and torch.all(mean.grad[1] != 0) and torch.isfinite(mean.grad).all()


def test_bfloat16_is_widened_first():
    x = drawn(2, 64).bfloat16()
    mean, std = step_moments("cps", x, x, 1.0, 0.9, 0.8, 0.9)
    assert mean.dtype == std.dtype == log_prob(x, mean, std).dtype == torch.float32


def test_a_window_is_drawn_evenly_and_repeatably():
    starts = [window(10, 2, 5, (7, group)).start for group in range(400)]
    assert starts == [window(10, 2, 5, (7, group)).start for group in range(400)]
    assert {start: starts.count(start) > 60 for start in starts} == dict.fromkeys(range(4), True)
    assert list(window(10, 3, 3, 0)) == [0, 1, 2]


@pytest.mark.parametrize(("steps", "size", "within"), [(8, 0, 3), (8, 4, 3), (8, 2, 9)])
def test_a_window_that_does_not_fit_is_refused(steps, size, within):
    with pytest.raises(ValueError, match="does not fit"):
        window(steps, size, within, 0)


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match="valid: flow_sde, cps, dance"):
        step_moments("ddpm", drawn(1, 2), drawn(1, 2), 1.0, 0.5, 0.7, 0.9)

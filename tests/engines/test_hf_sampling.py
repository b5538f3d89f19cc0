"""Sampling: the right distribution, stateless randomness, and never a token of probability zero."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from roll.engines.hf.model import NonFiniteLogits, counter_uniforms, processed_logprobs, sample
from tests.tiers import examples


def rows_of(count, temperature=1.0, top_k=0, top_p=1.0, uniforms=None) -> dict[str, np.ndarray]:
    return dict(
        temperature=np.full(count, temperature, dtype=np.float32),
        top_k=np.full(count, top_k, dtype=np.int64),
        top_p=np.full(count, top_p, dtype=np.float64),
        uniforms=np.zeros(count) if uniforms is None else uniforms,
    )


def test_uniforms_are_a_function_of_seed_and_index_alone():
    seeds = np.array([0, 1, 2**64 - 1, 7], dtype=np.uint64)
    indices = np.array([0, 5, 1000, 0])
    values = counter_uniforms(seeds, indices)
    for row in range(4):
        assert counter_uniforms(seeds[row : row + 1], indices[row : row + 1])[0] == values[row]
    assert ((values >= 0) & (values < 1)).all()


def test_uniforms_are_uniform_and_uncorrelated_over_seeds_and_indices():
    seeds, indices = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    values = counter_uniforms(seeds.ravel(), indices.ravel()).reshape(300, 300)
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 900) ** 2 / 900).sum() < 160
    for left, right in ((values[1:], values[:-1]), (values[:, 1:], values[:, :-1]), (values[1:, :-1], values[:-1, 1:])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 0.015
    assert len(np.unique(values)) == values.size


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.6), (1.4, 9, 0.8)]
)
def test_sampled_frequencies_fit_the_exact_distribution(temperature, top_k, top_p):
    count = 40_000
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=12) * 1.5).float().expand(count, 12)
    uniforms = counter_uniforms(np.arange(count, dtype=np.uint64), np.full(count, 3))
    rows = rows_of(count, temperature, top_k, top_p, uniforms)
    tokens, logprobs = sample(logits, **rows)
    first = {name: rows[name][:1] for name in ("temperature", "top_k", "top_p")}
    expected = processed_logprobs(logits[:1], **first)[0].double().exp()
    counts = np.bincount(tokens.numpy(), minlength=12)
    inside = expected.numpy() > 0
    assert counts[~inside].sum() == 0
    deviation = (counts[inside] - count * expected.numpy()[inside]) ** 2 / (count * expected.numpy()[inside])
    assert deviation.sum() < 35  # chi-square with at most 11 degrees of freedom: p < 0.001
    assert torch.allclose(logprobs, expected[tokens].log().float(), atol=1e-5)


@settings(max_examples=examples(80))
@given(
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.2, 3.0),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.05, 1.0),
)
def test_processed_distribution_equals_that_of_the_transformers_warpers(seed, temperature, top_k, top_p):
    logits = torch.from_numpy(np.random.default_rng(seed).normal(size=(3, 25)) * 3).float()
    expected = TemperatureLogitsWarper(float(np.float32(temperature)))(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    rows = rows_of(3, temperature, top_k, top_p)
    actual = processed_logprobs(logits, rows["temperature"], rows["top_k"], rows["top_p"])
    expected = torch.log_softmax(expected, dim=-1)
    assert torch.equal(torch.isinf(actual), torch.isinf(expected))
    kept = torch.isfinite(expected)
    assert torch.allclose(actual[kept], expected[kept], atol=1e-5)


@settings(max_examples=examples(200))
@given(
    logits=st.lists(st.floats(-1e4, 1e4, width=32), min_size=1, max_size=20),
    uniform=st.sampled_from([0.0, 2.0**-53, 0.5, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True),
    temperature=st.floats(0.01, 5.0),
    top_k=st.integers(0, 25),
    top_p=st.floats(0.01, 1.0),
)
def test_a_token_of_probability_zero_is_never_sampled(logits, uniform, temperature, top_k, top_p):
    rows = rows_of(1, temperature, top_k, top_p, np.array([uniform]))
    tokens, logprobs = sample(torch.tensor([logits]), **rows)
    assert torch.isfinite(logprobs[0]) and logprobs[0].double().exp() > 0
    ranks_above = sum(value > logits[int(tokens[0])] for value in logits)
    assert top_k == 0 or ranks_above < top_k


def test_greedy_rows_take_the_largest_logit_beside_sampled_rows():
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    temperature = np.array([0, 1, 0, 0.5, 0, 1], dtype=np.float32)
    uniforms = counter_uniforms(np.arange(6, dtype=np.uint64), np.zeros(6, dtype=np.int64))
    tokens, logprobs = sample(logits, temperature, np.array([0, 0, 3, 2, 0, 0]), np.ones(6), uniforms)
    greedy = temperature == 0
    assert (tokens.numpy() == logits.argmax(-1).numpy())[greedy].all()
    assert (logprobs.numpy() == 0)[greedy].all() and (logprobs.numpy() < 0)[~greedy].all()


def test_top_k_keeps_exactly_k_of_equal_logits_and_top_p_at_least_one():
    logits = torch.zeros(1, 8)
    one = np.ones(1, dtype=np.float32)
    kept = processed_logprobs(logits, one, np.array([3]), np.ones(1))
    assert torch.isfinite(kept)[0].tolist() == [True] * 3 + [False] * 5
    assert torch.isfinite(processed_logprobs(logits, one, np.array([0]), np.array([1e-9]))).sum() == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_without_a_distribution_are_an_error(bad, temperature):
    logits = torch.zeros(3, 5)
    logits[1, 2] = bad
    with pytest.raises(NonFiniteLogits):
        sample(logits, **rows_of(3, temperature))

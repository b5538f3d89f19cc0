"""Log-probabilities and entropies agree with the definition, whatever the chunks and the precision."""

from __future__ import annotations

import pytest
import torch

from roll.algorithms.logprobs import token_logprobs, token_logprobs_and_entropy


def random_logits(*shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).mul(3).to(dtype)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1, 40, 10_000])
def test_values_and_gradients_are_those_of_log_softmax(temperature, chunk_elements):
    targets = torch.arange(12).reshape(3, 4) % 11
    logits, plain = (random_logits(3, 4, 11).requires_grad_() for _ in range(2))
    expected = (plain / temperature).log_softmax(-1)
    expected_entropy = -(expected.exp() * expected).sum(-1)
    chosen = expected.gather(-1, targets[..., None])[..., 0]
    values, entropy = token_logprobs_and_entropy(logits, targets, temperature, True, chunk_elements)
    torch.testing.assert_close(values, chosen)
    torch.testing.assert_close(entropy, expected_entropy)
    torch.testing.assert_close(token_logprobs(logits, targets, temperature, chunk_elements), chosen)
    weights = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    (values * weights + entropy * weights.flip(0)).sum().backward()
    (chosen * weights + expected_entropy * weights.flip(0)).sum().backward()
    torch.testing.assert_close(logits.grad, plain.grad)


@pytest.mark.parametrize("chunk_elements", [40, 10_000])
def test_entropy_as_a_metric_has_no_gradient(chunk_elements):
    logits = random_logits(3, 4, 11).requires_grad_()
    targets = torch.zeros(3, 4, dtype=torch.int64)
    values, entropy = token_logprobs_and_entropy(logits, targets, chunk_elements=chunk_elements)
    (with_entropy,) = torch.autograd.grad((values + entropy).sum(), logits)
    (alone,) = torch.autograd.grad(token_logprobs(logits, targets).sum(), logits)
    torch.testing.assert_close(with_entropy, alone)


def test_low_precision_logits_are_computed_in_float32():
    logits = random_logits(2, 3, 50, dtype=torch.bfloat16)
    targets = torch.ones(2, 3, dtype=torch.int64)
    values = token_logprobs(logits, targets)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, logits.double().log_softmax(-1)[..., 1].float())


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[1e4, -1e4, 0.0]])
    values, entropy = token_logprobs_and_entropy(logits, torch.tensor([1]))
    assert values.item() == -2e4 and entropy.item() == 0.0


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_a_temperature_that_is_not_positive_is_refused(temperature):
    with pytest.raises(ValueError, match="above 0"):
        token_logprobs(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64), temperature)

"""Log-probabilities and entropies agree with the definition, whatever the chunks and the precision."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from roll.algorithms.logprobs import linear_results, token_logprobs, token_logprobs_and_entropy
from tests.tiers import examples

VOCABULARY, WIDTH = 13, 5
USE = {True: "loss", False: "metric"}
"""With a gradient of the entropy or without one -> use of the entropies."""


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


def head_inputs(shape=(3, 7), bias=True, dtype=torch.float64, spread=1.0, vocabulary=VOCABULARY, width=WIDTH, seed=0):
    """Leaves [hidden, weight, bias or None] and targets."""
    generator = torch.Generator().manual_seed(seed)

    def leaf(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64).mul(spread).to(dtype).requires_grad_()

    leaves = [leaf(*shape, width), leaf(vocabulary, width), leaf(vocabulary) if bias else None]
    return leaves, torch.randint(vocabulary, shape, generator=generator)


def closed_form(leaves, targets, temperature, logprob_gradient, entropy_gradient):
    """Values and gradients of sum(g logprob) + sum(g' entropy), one logit at a time."""
    hidden, weight = (leaf.detach() for leaf in leaves[:2])
    bias = torch.zeros(len(weight), dtype=hidden.dtype) if leaves[2] is None else leaves[2].detach()
    logprobs, entropy = torch.empty(2, *targets.shape, dtype=torch.float64)
    logprob_gradient, entropy_gradient = logprob_gradient.double(), entropy_gradient.double()
    gradients = [torch.zeros_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)]
    for index in range(targets.numel()):
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(index), targets.shape))
        logits = [float(hidden[at] @ weight[token] + bias[token]) / temperature for token in range(len(weight))]
        top = max(logits)
        log_normalizer = top + math.log(sum(math.exp(logit - top) for logit in logits))
        logprobs[at] = logits[targets[at]] - log_normalizer
        entropy[at] = -sum(math.exp(logit - log_normalizer) * (logit - log_normalizer) for logit in logits)
        for token, logit in enumerate(logits):
            probability = math.exp(logit - log_normalizer)
            gradient = logprob_gradient[at] * (float(token == targets[at]) - probability)
            gradient -= entropy_gradient[at] * probability * (logit - log_normalizer + entropy[at])
            gradients[0][at] += gradient / temperature * weight[token]
            gradients[1][token] += gradient / temperature * hidden[at]
            gradients[2][token] += gradient / temperature
    return [logprobs, entropy, *gradients[: 2 if leaves[2] is None else 3]]


def values_and_gradients(leaves, targets, temperature, entropy_gradient, logprob_weights, entropy_weights, chunk):
    logprobs, entropy = linear_results(*leaves, targets, temperature, USE[entropy_gradient], chunk)
    loss = (logprobs * logprob_weights).sum()
    loss = loss + (entropy * entropy_weights).sum() if entropy_gradient else loss
    return [logprobs, entropy, *torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None])]


def assert_all_close(results, expected):
    assert len(results) == len(expected)
    for value, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(value.detach(), wanted.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [1, 4 * VOCABULARY, 7 * VOCABULARY + 5, 21 * VOCABULARY - 1, 10_000])
def test_from_hidden_states_values_and_gradients_are_those_of_the_closed_form(
    entropy_gradient, bias, temperature, chunk_elements
):
    leaves, targets = head_inputs(bias=bias)
    weights = torch.linspace(-1, 2, 42, dtype=torch.float64).reshape(2, 3, 7)
    results = values_and_gradients(leaves, targets, temperature, entropy_gradient, *weights, chunk_elements)
    entropy_weights = weights[1] if entropy_gradient else torch.zeros(3, 7)
    assert_all_close(results, closed_form(leaves, targets, temperature, weights[0], entropy_weights))
    assert_all_close(linear_results(*leaves, targets, temperature, "none", chunk_elements), results[:1])


@pytest.mark.parametrize("spread", [1e-3, 6.0])
@pytest.mark.parametrize("shape", [(1,), (4, 1), (1, 5)])
def test_from_hidden_states_flat_and_extreme_distributions_are_exact(shape, spread):
    leaves, targets = head_inputs(shape, spread=spread)
    weights = torch.linspace(-20, 20, 2 * targets.numel(), dtype=torch.float64).reshape(2, *shape)
    results = values_and_gradients(leaves, targets, 1.0, True, *weights, 2 * VOCABULARY)
    assert_all_close(results, closed_form(leaves, targets, 1.0, *weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_one_chunk_has_the_bits_of_a_linear_layer_and_given_logits(dtype, entropy_gradient, bias):
    leaves, targets = head_inputs((4, 9), bias, dtype, vocabulary=37, width=16)
    trained = [leaf for leaf in leaves if leaf is not None]

    def bits(logprobs, entropy):
        loss = (logprobs * torch.linspace(-1, 1, 36).reshape(4, 9)).sum() + (0.3 * entropy.sum())
        return [logprobs, entropy, *torch.autograd.grad(loss, trained)]

    logits = functional.linear(*leaves)
    expected = bits(*token_logprobs_and_entropy(logits, targets, 0.9, entropy_gradient))
    # 36 positions and 37 tokens fit to the last element.
    results = bits(*linear_results(*leaves, targets, 0.9, USE[entropy_gradient], 36 * 37))
    assert all(torch.equal(value, wanted) for value, wanted in zip(results, expected, strict=True))
    (alone,) = linear_results(*leaves, targets, 0.9, "none", 36 * 37)
    assert torch.equal(alone, token_logprobs(logits, targets, 0.9))


def test_low_precision_heads_multiply_in_it_and_normalise_and_sum_in_float32():
    leaves, targets = head_inputs((2, 40), dtype=torch.bfloat16, vocabulary=1000, width=16)
    weights = torch.linspace(-1, 1, 160).reshape(2, 2, 40)
    chunked = values_and_gradients(leaves, targets, 1.0, True, *weights, 320)
    at_once = values_and_gradients(leaves, targets, 1.0, True, *weights, 80_000)
    wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
    exact = values_and_gradients(wide, targets, 1.0, True, *weights, 80_000)
    assert chunked[0].dtype == chunked[1].dtype == torch.float32
    for value, expected in zip(chunked[:2], at_once[:2], strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)
    for value, expected, true in zip(chunked[2:], at_once[2:], exact[2:], strict=True):
        assert value.dtype == torch.bfloat16 and value.shape == expected.shape
        # 250 slices of the vocabulary, summed in bfloat16, would be further off than one product.
        assert (value.float() - true).norm() < 1.2 * (expected.float() - true).norm()


def test_entropy_from_hidden_states_is_a_metric_unless_asked_for():
    leaves, targets = head_inputs()
    for chunk_elements in (30, 10_000):
        assert not linear_results(*leaves, targets, 1.0, "metric", chunk_elements)[1].requires_grad
        entropy = linear_results(*leaves, targets, 1.0, "loss", chunk_elements)[1]
        alone = torch.autograd.grad(entropy.sum(), leaves)
        assert_all_close(alone, closed_form(leaves, targets, 1.0, torch.zeros(3, 7), torch.ones(3, 7))[2:])


@pytest.mark.parametrize("frozen", [{0}, {1, 2}, {0, 1}])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(frozen):
    leaves, targets = head_inputs()
    expected = torch.autograd.grad(linear_results(*leaves, targets, 1.0, "none", 30)[0].sum(), leaves)
    part = [leaf.detach().requires_grad_(i not in frozen) for i, leaf in enumerate(leaves)]
    linear_results(*part, targets, 1.0, "none", 30)[0].sum().backward()
    for i, leaf in enumerate(part):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, expected[i])


@settings(max_examples=examples(50))
@given(data=st.data())
def test_splitting_and_permuting_positions_splits_and_permutes_the_results(data):
    count = data.draw(st.integers(2, 9), "positions")
    cut = data.draw(st.integers(1, count - 1), "cut")
    order = torch.tensor(data.draw(st.permutations(range(count)), "order"))
    chunks = [data.draw(st.integers(1, 10 * VOCABULARY), "chunk elements") for _ in range(3)]
    leaves, targets = head_inputs((count,), seed=data.draw(st.integers(0, 99), "seed"))
    weights = torch.linspace(-1, 2, 2 * count, dtype=torch.float64).reshape(2, count)

    def part(rows, chunk):
        some = [leaves[0][rows].detach().requires_grad_(), *leaves[1:]]
        return values_and_gradients(some, targets[rows], 0.8, True, *weights[:, rows], chunk)

    whole = part(order, chunks[0])
    first, second = part(order[:cut], chunks[1]), part(order[cut:], chunks[2])
    for one, other, both in zip(first[:3], second[:3], whole[:3], strict=True):
        torch.testing.assert_close(torch.cat([one, other]), both, rtol=1e-10, atol=1e-10)
    assert_all_close([one + other for one, other in zip(first[3:], second[3:], strict=True)], whole[3:])
    plain = part(torch.arange(count), chunks[0])
    assert_all_close([values[order] for values in plain[:3]], whole[:3])


def test_positions_without_a_gradient_pass_none_on_and_no_input_is_changed():
    leaves, targets = head_inputs((1, 8))
    copies = [tensor.detach().clone() for tensor in (*leaves, targets)]
    logprobs, entropy = linear_results(*leaves, targets, 1.0, "loss", 30)
    mask = torch.tensor([[True, False] * 4])
    torch.where(mask, logprobs * entropy, 0.0).sum().backward()
    assert torch.equal(leaves[0].grad != 0, mask[..., None].expand(1, 8, WIDTH))
    assert all(torch.equal(tensor, copy) for tensor, copy in zip((*leaves, targets), copies, strict=True))


class LiveMemory(TorchDispatchMode):
    """Elements of all tensors that operations inside the block made and that are still there: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._tensors_of: dict[int, int] = {}
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        inputs = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) else 0
            foreign = storage in inputs and storage not in self._tensors_of
            if storage and not foreign and id(leaf) not in self._known:
                self._add(leaf, storage)
        return result

    def _add(self, tensor: Tensor, storage: int) -> None:
        elements = tensor.untyped_storage().nbytes() // tensor.element_size()
        if storage not in self._tensors_of:
            self.now += elements
            self.most = max(self.most, self.now)
        self._tensors_of[storage] = self._tensors_of.get(storage, 0) + 1
        self._known.add(id(tensor))
        weakref.finalize(tensor, self._remove, id(tensor), storage, elements)

    def _remove(self, identity: int, storage: int, elements: int) -> None:
        self._known.discard(identity)
        self._tensors_of[storage] -= 1
        if not self._tensors_of[storage]:
            del self._tensors_of[storage]
            self.now -= elements


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_memory_is_a_few_chunks_and_never_positions_times_vocabulary(entropy_gradient):
    positions, vocabulary, width, chunk = 512, 1000, 4, 8000
    leaves, targets = head_inputs((8, 64), True, torch.float32, vocabulary=vocabulary, width=width)
    memory = LiveMemory()
    with memory:
        logprobs, entropy = linear_results(*leaves, targets, 0.9, USE[entropy_gradient], chunk)
        kept_for_backward, forward_peak = memory.now, memory.most
        (logprobs.sum() + entropy.sum()).backward()
    gradients = (positions + vocabulary) * width + vocabulary
    assert kept_for_backward < 10 * positions
    assert forward_peak < 4 * chunk + 10 * positions
    assert memory.most < 3 * chunk + 2 * gradients + 10 * positions < positions * vocabulary / 10


def test_the_memory_measure_sees_logits_and_what_is_kept_for_the_backward_pass():
    (hidden, weight, _), targets = head_inputs((8, 64), False, torch.float32, vocabulary=1000, width=4)
    with LiveMemory() as memory:
        pieces = [functional.linear(part, weight).log_softmax(-1)[:, 0] for part in hidden.flatten(0, 1).split(8)]
        assert memory.now >= 512 * 1000
        torch.cat(pieces).sum().backward()
        del pieces
    assert memory.now < 3 * (512 + 1000) * 4


@pytest.mark.parametrize("temperature", [0.0, -1.0])
@pytest.mark.parametrize("chunk_elements", [1, 10_000])
def test_a_temperature_that_is_not_positive_is_refused_for_hidden_states_too(temperature, chunk_elements):
    leaves, targets = head_inputs()
    with pytest.raises(ValueError, match="above 0"):
        linear_results(*leaves, targets, temperature, chunk_elements=chunk_elements)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_given_logits_are_widened_a_chunk_at_a_time_and_no_copy_waits_for_the_backward_pass(entropy_gradient):
    positions, chunk = 512, 8000
    logits = random_logits(positions, 1000, dtype=torch.bfloat16).requires_grad_()
    targets = torch.zeros(positions, dtype=torch.int64)
    memory = LiveMemory()
    with memory:
        logprobs, entropy = token_logprobs_and_entropy(logits, targets, 0.9, entropy_gradient, chunk)
        assert memory.now < 10 * positions and memory.most < 5 * chunk + 10 * positions
        before = memory.most
        (logprobs.sum() + entropy.sum()).backward()
    assert before <= memory.most < 3 * logits.numel()

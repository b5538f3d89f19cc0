"""Log-probabilities and entropies from shares of a vocabulary, against those from all of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from roll.algorithms.logprobs import token_logprobs_and_entropy
from tests.tiers import need
from tests.trainers.nursery import on_ranks

need("megatron.core")
from roll.trainers.megatron.model import parallel_logprobs_and_entropy  # noqa: E402

pytestmark = pytest.mark.tier("all")

RANKS = 2
ROWS, WIDTH = 3, 5
TEMPERATURE = 0.7


def compare(rank: int, vocabulary: int, chunk_elements: int, entropy_gradient: bool) -> None:
    """Values, and this rank's share of the gradient of a sum with different weights everywhere."""
    share = -(-vocabulary // RANKS)
    torch.manual_seed(0)
    whole = torch.randn(ROWS, WIDTH, vocabulary) * 4
    targets = torch.randint(0, vocabulary, (ROWS, WIDTH))
    weights = torch.randn(2, ROWS, WIDTH)
    # What pads the vocabulary must count for nothing, however large.
    padded = torch.full((ROWS, WIDTH, share * RANKS), 1e4)
    padded[..., :vocabulary] = whole
    own = padded[..., rank * share : (rank + 1) * share].clone().requires_grad_()
    whole.requires_grad_()
    found = parallel_logprobs_and_entropy(
        own, targets, TEMPERATURE, vocabulary, dist.group.WORLD, entropy_gradient, chunk_elements
    )
    expected = token_logprobs_and_entropy(whole, targets, TEMPERATURE, entropy_gradient)
    for value, wanted, weight in zip(found, expected, weights, strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-5)
        assert value.requires_grad == wanted.requires_grad
        if wanted.requires_grad:
            (value * weight).sum().backward(retain_graph=True)
            (wanted * weight).sum().backward(retain_graph=True)
    gradient = torch.zeros_like(padded)
    gradient[..., :vocabulary] = whole.grad
    torch.testing.assert_close(own.grad, gradient[..., rank * share : (rank + 1) * share], rtol=1e-5, atol=1e-5)


def compare_all(rank: int, port: int) -> None:
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    for vocabulary in (8, 7, 1):
        for chunk_elements in (1, 9, 10_000):
            for entropy_gradient in (False, True):
                compare(rank, vocabulary, chunk_elements, entropy_gradient)
    half = torch.randn(ROWS, WIDTH, 4).bfloat16()
    values, entropy = parallel_logprobs_and_entropy(half, torch.zeros(ROWS, WIDTH).long(), 1.0, 8, dist.group.WORLD)
    assert values.dtype == entropy.dtype == torch.float32
    with pytest.raises(ValueError, match="temperature above 0"):
        parallel_logprobs_and_entropy(half, torch.zeros(ROWS, WIDTH).long(), 0.0, 8, dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.tier("all")
def test_shares_of_a_vocabulary_give_what_the_whole_gives():
    """Shares of equal size, one with padding, one of nothing but padding; any number of chunks."""
    on_ranks(compare_all, ranks=RANKS)

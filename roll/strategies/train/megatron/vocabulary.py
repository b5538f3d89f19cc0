"""Log-probabilities and entropies for logits whose vocabulary is split over tensor-parallel ranks.

Only maxima, sums and chosen logits travel between ranks, never logits. Rows that pad the vocabulary to a multiple of
the ranks take no part in the distribution. Results are exact in float32, whatever the precision of the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 2**26
"""Number of this rank's logits that have a float32 copy at a time."""


def parallel_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    vocabulary: int,
    group: dist.ProcessGroup,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature) at the targets, and the entropy (nats) of each distribution. Collective.

    ``logits`` ``[..., share]`` is this rank's part of a vocabulary that was padded from ``vocabulary`` tokens to equal
    shares for all ranks of ``group``. ``targets`` is int ``[...]``, equal on all ranks. Returns float32 ``[...]``
    twice, equal on all ranks. The entropy carries a gradient only if asked for. Each rank must receive the same
    gradients of the shared results; each computes those of its own logits. Raises ``ValueError`` for a temperature that
    is not positive.
    """
    if temperature <= 0:
        raise ValueError(f"log-probabilities need a temperature above 0, not {temperature}")
    share = logits.shape[-1]
    first = share * dist.get_rank(group)
    real = logits[..., : max(0, min(share, vocabulary - first))]
    rows = max(1, chunk_elements // share)
    chunks = zip(real.flatten(0, -2).split(rows), (targets.flatten() - first).split(rows), strict=True)
    pieces = [
        _ParallelLogprobs.apply(chunk, chunk_targets, temperature, group, entropy_gradient)
        for chunk, chunk_targets in chunks
    ]
    logprobs, entropy = (torch.cat(results).reshape(targets.shape) for results in zip(*pieces, strict=True))
    return logprobs, entropy


class _ParallelLogprobs(torch.autograd.Function):
    """Autograd function for ``logits`` ``[rows, share]`` and ``targets`` ``[rows]``, counted from the share's first
    token."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperature: float,
        group: dist.ProcessGroup,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / temperature
        rows, share = scaled.shape
        largest = scaled.amax(-1) if share else scaled.new_full((rows,), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        scaled -= largest[:, None]
        exponentials = scaled.exp()
        here = (targets >= 0) & (targets < share)
        index = torch.where(here, targets, 0)
        chosen = scaled.gather(-1, index[:, None])[:, 0].where(here, 0.0) if share else scaled.new_zeros(rows)
        sums = torch.stack([exponentials.sum(-1), chosen, (exponentials * scaled).sum(-1)])
        dist.all_reduce(sums, group=group)
        normalizer, chosen, weighted = sums
        entropy = normalizer.log() - weighted / normalizer
        # The backward pass computes the float32 copy again. The logits themselves stay in memory anyway.
        ctx.save_for_backward(logits, largest + normalizer.log(), entropy, here, index)
        ctx.temperature = temperature
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen - normalizer.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the logits.

        d logprob / d x_j = [j = target] - p_j and dH / d x_j = -p_j (log p_j + H) for the scaled logits x.
        """
        logits, log_normalizer, entropy, here, index = ctx.saved_tensors
        log_probabilities = (logits.float() / ctx.temperature).sub_(log_normalizer[:, None])
        factor = logprob_gradient[:, None]
        if ctx.entropy_gradient:
            factor = factor + (log_probabilities + entropy[:, None]) * entropy_gradient[:, None]
        gradient = log_probabilities.exp_().neg_() * factor
        if gradient.shape[-1]:
            gradient.scatter_add_(1, index[:, None], logprob_gradient.where(here, 0.0)[:, None])
        return gradient.div_(ctx.temperature).to(logits.dtype), None, None, None, None

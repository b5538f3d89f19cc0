"""Memory-efficient log-probabilities of given tokens, and entropies, from logits or from the LM head's hidden states.

Computed in float32 or better, whatever the precision of the logits. From logits, the float32 copy exists for one chunk
of positions at a time, in the backward pass as well. From hidden states, even the logits and their gradient exist for
one chunk at a time; each would take 2.3 GiB for 4,096 positions and a vocabulary of 150,000. These functions apply no
mask.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from roll.algorithms.aggregation import checked_shape

CHUNK_ELEMENTS = 2**26
"""Number of logits (positions x vocabulary) processed at a time if logits are given (256 MiB in float32)."""

LINEAR_CHUNK_ELEMENTS = 2**25
"""Number of logits processed at a time if they are computed from hidden states (128 MiB in float32, plus up to twice
that).

With a vocabulary of 150,000 this is 223 positions, for which computing on a GPU takes about as long as reading the
head's weight.
"""


EntropyUse = Literal["none", "metric", "loss"]
"""Use of entropies: not computed, computed without a gradient (metric), or computed with a gradient (loss)."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Return log softmax(logits / temperature) at the targets, with gradient.

    ``logits`` are ``[..., vocabulary]``, ``targets`` int ``[...]``; returns float32 ``[...]`` (float64 for float64
    logits). Raises ``ValueError`` for a temperature that is not positive (a greedy distribution has no gradient), and
    for targets of another shape or type.
    """
    (logprobs,) = token_results(logits, targets, temperature, "none", chunk_elements)
    return logprobs


def token_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Return the result of `token_logprobs`, and the entropy (nats) of the distribution at each position, ``[...]``.

    The entropy carries a gradient only with ``entropy_gradient``; without one it needs no additional memory.
    """
    logprobs, entropy = token_results(
        logits, targets, temperature, "loss" if entropy_gradient else "metric", chunk_elements
    )
    return logprobs, entropy


def token_results(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    entropy_use: EntropyUse,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> list[Tensor]:
    """Return the result of `token_logprobs`, and the entropies if they are used (`token_logprobs_and_entropy`)."""
    _check_temperature(temperature)
    checked_shape("targets", targets, tuple(logits.shape[:-1]))
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"targets must be token ids, whole numbers, not {targets.dtype}")
    vocabulary = logits.shape[-1]
    rows = _rows_of(vocabulary, chunk_elements)
    flat_logits, flat_targets = logits.reshape(-1, vocabulary), targets.reshape(-1)
    if len(flat_targets) <= rows:
        pieces = [_chunk(flat_logits, flat_targets, temperature, entropy_use)]
    else:
        # Chunks are recomputed in the backward pass, so that their float32 copies need not be stored until then.
        pieces = [
            checkpoint(_chunk, chunk, chunk_targets, temperature, entropy_use, use_reentrant=False)
            for chunk, chunk_targets in zip(flat_logits.split(rows), flat_targets.split(rows), strict=True)
        ]
    return [torch.cat(results).reshape(targets.shape) for results in zip(*pieces, strict=True)]


def _chunk(logits: Tensor, targets: Tensor, temperature: float, entropy_use: EntropyUse) -> tuple[Tensor, ...]:
    scaled = _scaled(logits, temperature)
    log_normalizer = scaled.logsumexp(-1)
    logprobs = _chosen(scaled, targets) - log_normalizer
    if entropy_use == "none":
        return (logprobs,)
    if entropy_use == "metric":
        scaled, log_normalizer = scaled.detach(), log_normalizer.detach()
    return logprobs, _entropy_of(scaled, log_normalizer)


def linear_results(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_use: EntropyUse = "none",
    chunk_elements: int = LINEAR_CHUNK_ELEMENTS,
) -> list[Tensor]:
    """Return `token_results` of the logits ``hidden @ weight.T + bias``, without holding all logits at once.

    ``hidden`` is ``[..., width]``, ``weight`` ``[vocabulary, width]``, ``bias`` ``[vocabulary]`` or None, ``targets``
    int ``[...]``; each result is float32 ``[...]`` (float64 for float64 inputs), with gradients for ``hidden``,
    ``weight`` and ``bias``. The matrix product is computed in the precision of its factors, the rest in float32 or
    better. If all logits fit into ``chunk_elements``, values and gradients are bit-identical to those of
    `token_results`. Raises ``ValueError`` for a temperature that is not positive.
    """
    _check_temperature(temperature)
    if targets.numel() <= _rows_of(len(weight), chunk_elements):
        return token_results(functional.linear(hidden, weight, bias), targets, temperature, entropy_use, chunk_elements)
    flat_hidden, flat_targets = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()
    results = _ChunkedHead.apply(flat_hidden, weight, bias, flat_targets, temperature, chunk_elements, entropy_use)
    return [values.reshape(targets.shape) for values in results]


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ValueError(f"log-probabilities need a temperature above 0, not {temperature}")


def _rows_of(vocabulary: int, chunk_elements: int) -> int:
    return max(1, chunk_elements // vocabulary)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


def _chosen(scaled: Tensor, targets: Tensor) -> Tensor:
    return scaled.gather(-1, targets.long()[:, None])[:, 0]


def _entropy_of(scaled: Tensor, log_normalizer: Tensor) -> Tensor:
    """Return H = log Z - sum p x for p = exp(x - log Z)."""
    probabilities = (scaled - log_normalizer[:, None]).exp()
    return log_normalizer - (probabilities * scaled).sum(-1)


class _ChunkedHead(torch.autograd.Function):
    """Log-probabilities (and entropies) of flat hidden states; logits exist only in chunks, forward and backward.

    The forward pass processes chunks of positions and stores one normaliser per position. With these, the backward pass
    can process chunks of the vocabulary instead, recomputing their logits. Each row of the weight's gradient is then
    computed once, in place; chunks of positions would add up gradients of the weight's size, in its precision. Only the
    gradient of the hidden states is a sum over chunks. It is small, and is summed in float32 or better.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_elements: int,
        entropy_use: EntropyUse,
    ) -> tuple[Tensor, ...]:
        rows = _rows_of(len(weight), chunk_elements)
        # Filled in place: one result tensor per chunk would fragment memory.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, log_normalizer, entropy = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(3))
        for start in range(0, len(hidden), rows):
            here = slice(start, start + rows)
            scaled = _scaled(functional.linear(hidden[here], weight, bias), temperature)
            log_normalizer[here] = scaled.logsumexp(-1)
            logprobs[here] = _chosen(scaled, targets[here]) - log_normalizer[here]
            if entropy_use != "none":
                entropy[here] = _entropy_of(scaled, log_normalizer[here])
        ctx.save_for_backward(hidden, weight, bias, targets, log_normalizer, entropy if entropy_use == "loss" else None)
        ctx.temperature, ctx.chunk_elements = temperature, chunk_elements
        if entropy_use == "none":
            return (logprobs,)
        if entropy_use == "metric":
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_gradient: Tensor, entropy_gradient: Tensor | None = None) -> tuple[Any, ...]:
        hidden, weight, bias, targets, log_normalizer, entropy = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.zeros_like(hidden, dtype=log_normalizer.dtype) if wants_hidden else None
        weight_gradient = torch.empty_like(weight) if wants_weight else None
        bias_gradient = torch.empty_like(bias) if wants_bias else None
        columns = _columns_of(len(hidden), ctx.chunk_elements)
        for start in range(0, len(weight), columns):
            part = slice(start, start + columns)
            logits = functional.linear(hidden, weight[part], None if bias is None else bias[part])
            log_probabilities = _scaled(logits, ctx.temperature).sub_(log_normalizer[:, None])
            del logits
            gradient = _scaled_logit_gradient(
                log_probabilities, targets - start, logprob_gradient, entropy, entropy_gradient
            )
            del log_probabilities
            gradient = gradient.div_(ctx.temperature).to(weight.dtype)
            if hidden_gradient is not None:
                hidden_gradient += gradient @ weight[part]
            if weight_gradient is not None:
                torch.mm(gradient.T, hidden, out=weight_gradient[part])
            if bias_gradient is not None:
                bias_gradient[part] = gradient.sum(0)
        if hidden_gradient is not None:
            hidden_gradient = hidden_gradient.to(hidden.dtype)
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None, None


def _columns_of(positions: int, chunk_elements: int) -> int:
    columns = max(1, chunk_elements // positions)
    # Matrix products are fastest with aligned rows.
    return columns if columns < 64 else columns - columns % 64


def _scaled_logit_gradient(
    log_probabilities: Tensor,
    targets: Tensor,
    logprob_gradient: Tensor,
    entropy: Tensor | None,
    entropy_gradient: Tensor | None,
) -> Tensor:
    """Return the gradient of the scaled logits x in a chunk of the vocabulary. Overwrites ``log_probabilities``.

    d logprob / d x_j = [j = target] - p_j and dH / d x_j = -p_j (log p_j + H). ``targets`` are relative to the chunk's
    first column and may lie outside.
    """
    if entropy is None or entropy_gradient is None:
        gradient = log_probabilities.exp_().mul_(-logprob_gradient[:, None])
    else:
        gradient = log_probabilities.exp().neg_()
        factor = log_probabilities.add_(entropy[:, None]).mul_(entropy_gradient[:, None])
        gradient.mul_(factor.add_(logprob_gradient[:, None]))
    width = gradient.shape[-1]
    here = (targets >= 0) & (targets < width)
    at_target = torch.where(here, logprob_gradient, torch.zeros_like(logprob_gradient))
    return gradient.scatter_add_(1, targets.clamp(0, width - 1)[:, None], at_target[:, None])

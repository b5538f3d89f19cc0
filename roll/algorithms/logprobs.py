"""Log-probabilities of given tokens, and entropies, from logits.

Exact in float32 or better whatever the precision of the logits, and frugal: a vocabulary-sized float32 copy exists for
one chunk of positions at a time, in the backward pass as well. Nothing is masked here.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

CHUNK_ELEMENTS = 2**26
"""Logits handled at a time (256 MiB in float32)."""


def token_logprobs(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """log softmax(logits / temperature) at the targets.

    ``logits`` ``[..., vocabulary]``, ``targets`` int ``[...]``; returns ``[...]`` in float32 (float64 for float64
    logits). Raises ``ValueError`` for a temperature that is not positive: a greedy distribution has no gradient.
    """
    return _in_chunks(logits, targets, temperature, chunk_elements, _logprobs)[0]


def token_logprobs_and_entropy(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """As ``token_logprobs``, and the entropy (nats) of each whole distribution, ``[...]``.

    The entropy carries a gradient only if ``entropy_gradient`` asks for it; as a metric it costs no memory.
    """
    function = _logprobs_and_entropy if entropy_gradient else _logprobs_and_detached_entropy
    logprobs, entropy = _in_chunks(logits, targets, temperature, chunk_elements, function)
    return logprobs, entropy


def _in_chunks(logits: Tensor, targets: Tensor, temperature: float, chunk_elements: int, function) -> list[Tensor]:
    if temperature <= 0:
        raise ValueError(f"log-probabilities need a temperature above 0, not {temperature}")
    vocabulary = logits.shape[-1]
    rows = max(1, chunk_elements // vocabulary)
    flat_logits, flat_targets = logits.reshape(-1, vocabulary), targets.reshape(-1)
    if len(flat_targets) <= rows:
        pieces = [function(flat_logits, flat_targets, temperature)]
    else:
        # Recomputing a chunk in the backward pass keeps its float32 copy from being stored until then.
        pieces = [
            checkpoint(function, chunk, chunk_targets, temperature, use_reentrant=False)
            for chunk, chunk_targets in zip(flat_logits.split(rows), flat_targets.split(rows), strict=True)
        ]
    return [torch.cat(results).reshape(targets.shape) for results in zip(*pieces, strict=True)]


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature == 1.0 else wide / temperature


def _logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor]:
    scaled = _scaled(logits, temperature)
    return (scaled.gather(-1, targets.long()[:, None])[:, 0] - scaled.logsumexp(-1),)


def _logprobs_and_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled = _scaled(logits, temperature)
    log_normalizer = scaled.logsumexp(-1)
    return scaled.gather(-1, targets.long()[:, None])[:, 0] - log_normalizer, _entropy(scaled, log_normalizer)


def _logprobs_and_detached_entropy(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    scaled = _scaled(logits, temperature)
    log_normalizer = scaled.logsumexp(-1)
    logprobs = scaled.gather(-1, targets.long()[:, None])[:, 0] - log_normalizer
    return logprobs, _entropy(scaled.detach(), log_normalizer.detach())


def _entropy(scaled: Tensor, log_normalizer: Tensor) -> Tensor:
    """H = log Z - sum p x for p = exp(x - log Z)."""
    probabilities = (scaled - log_normalizer[:, None]).exp()
    return log_normalizer - (probabilities * scaled).sum(-1)

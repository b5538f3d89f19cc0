"""Bytes that a layer keeps for its backward pass, tensor by tensor, for each token of a micro-batch.

Counted from what autograd saves, with attention that never holds scores (`sdpa`, `flash_attention_2`); `eager` does.
For layers of transformers the counts are exact to a percent, and a test compares them with what torch saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.memory.records import MIB
from roll.configs.memory.shapes import ModelShape

HEAD_CHUNK = 2**25
"""Logits that the output layer computes at a time: `roll.algorithms.logprobs.LINEAR_CHUNK_ELEMENTS`."""
MEGATRON_HEAD_CHUNK = 2**26
"""The same of `megatron_train`, of a rank's share of the vocabulary."""
HEAD_COPIES = 3
"""float32 tensors of a chunk's size at a time: logits, their gradient or exponentials, one on its way."""


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int
    """With padding."""
    width: int
    """Tokens of its longest sample."""
    per_step: int
    """Such micro-batches in an optimizer step."""


def norm_bytes(shape: ModelShape, element: int) -> int:
    """One norm: its input in float32, what is normalised, and the result, which the next layer keeps as its input."""
    return shape.hidden * (4 + 2 * element)


def layer_bytes(shape: ModelShape, element: int, *, eager_width: int = 0) -> float:
    """One layer of transformers, per token. ``eager_width``: tokens of a sample, if scores are held."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    attention = element * (2 * queries + 2 * keys) + 4 * shape.heads
    if eager_width:
        scores = 4 if element == 4 else 4 + element  # of the softmax, in float32; and what multiplies the values
        attention += shape.heads * eager_width * scores + element * (queries - keys) * 2
    if shape.qk_norm:
        attention += (4 + element) * (queries + keys)
    return 2 * norm_bytes(shape, element) + attention + feed_forward_bytes(shape, element)


def joined_bytes(shape: ModelShape, element: int) -> int:
    """What a packed row adds to a layer where attention goes sample by sample: their results, joined, beside the parts
    that attention keeps for itself."""
    return element * shape.heads * shape.head_size


def adapter_bytes(shape: ModelShape, adapted: int, rank: int, element: int) -> int:
    """What a layer keeps more, or less, if only adapters on so many of its linear layers learn: the few numbers between
    their two matrices; and not what frozen weights of norms and experts multiply."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    frozen = 2 * shape.hidden + (queries + keys if shape.qk_norm else 0)
    if shape.experts:
        frozen += shape.experts_per_token * (shape.hidden + shape.expert_intermediate) + shape.hidden
    return element * (adapted * rank - frozen)


def feed_forward_bytes(shape: ModelShape, element: int) -> int:
    """Gate, its activation, up and their product; with experts for each chosen one, with its input and output."""
    if not shape.experts:
        return 4 * shape.intermediate * element
    chosen = shape.experts_per_token * (4 * shape.expert_intermediate + 2 * shape.hidden) * element
    return chosen + 4 * shape.experts


def backward_bytes(shape: ModelShape, element: int) -> int:
    """Gradients within one layer that are there at a time, per token: of the product, the activation and up; and of
    the residual stream."""
    width = shape.experts_per_token * shape.expert_intermediate if shape.experts else shape.intermediate
    return (3 * width + 2 * shape.hidden) * element + 4 * shape.hidden


def forward_only_bytes(shape: ModelShape, element: int) -> int:
    """What one layer holds at a time when nothing is kept, per token: gate, activation, up; or a norm in float32."""
    width = shape.experts_per_token * shape.expert_intermediate if shape.experts else shape.intermediate
    return 3 * width * element + 2 * shape.hidden * element + 8 * shape.hidden


def megatron_layer_bytes(shape: ModelShape, element: int, tensor: int, norms_shared: bool) -> float:
    """One layer of megatron-core on one of ``tensor`` ranks, per token: inputs and results of the norms and the
    residual sum, rotated queries, keys and values with the result of attention, gate and up with their product."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    shared = element * (3 * queries + 4 * keys) + 4 * shape.heads
    if shape.experts:
        shared += shape.experts_per_token * (3 * shape.expert_intermediate + 2 * shape.hidden) * element
    else:
        shared += 3 * shape.intermediate * element
    return 6 * shape.hidden * element / (tensor if norms_shared else 1) + shared / tensor


def head_bytes(shape: ModelShape, tokens: int) -> int:
    """Of the output layer, beside its weight and the gradient of it: one chunk of logits in float32, three times."""
    if shape.value_head:
        return 0
    return HEAD_COPIES * 4 * min(tokens * shape.vocabulary, HEAD_CHUNK)


def head_how(shape: ModelShape) -> str:
    """The arithmetic of `head_bytes` in words."""
    chunk = HEAD_CHUNK * 4 // MIB
    return f"{HEAD_COPIES} x {chunk} MiB: logits are made in chunks, never all {shape.vocabulary:,} for each token"

"""Bytes that a layer keeps for its backward pass, tensor by tensor, per token of a micro-batch.

The counts follow what autograd saves, with attention that never holds scores (`sdpa`, `flash_attention_2`); `eager`
does. For layers of transformers the counts are exact to a percent, and a test compares them with what torch saves.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.memory.records import MIB
from roll.configs.memory.shapes import ModelShape

HEAD_CHUNK = 2**25
"""Logits that the output layer computes at a time: `roll.algorithms.logprobs.LINEAR_CHUNK_ELEMENTS`."""
MEGATRON_HEAD_CHUNK = 2**26
"""Logits that `megatron_train` computes at a time, of a rank's share of the vocabulary."""
HEAD_COPIES = 3
"""float32 tensors of a chunk's size that exist at a time: logits, their gradient or exponentials, and a temporary."""


@dataclass(frozen=True)
class MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int
    """Number of tokens, padding included."""
    width: int
    """Tokens of its longest sample."""
    per_step: int
    """Number of micro-batches of this size in an optimizer step."""


def norm_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes of one norm: its input in float32, the normalised values, and the result that the next layer
    keeps."""
    return shape.hidden * (4 + 2 * element)


def layer_bytes(shape: ModelShape, element: int, *, eager_width: int = 0) -> float:
    """Return the bytes of one layer of transformers, per token; ``eager_width`` is the sample length if scores are
    held."""
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    attention = element * (2 * queries + 2 * keys) + 4 * shape.heads
    if eager_width:
        scores = 4 if element == 4 else 4 + element  # float32 softmax, and its copy that multiplies the values
        attention += shape.heads * eager_width * scores + element * (queries - keys) * 2
    if shape.qk_norm:
        attention += (4 + element) * (queries + keys)
    return 2 * norm_bytes(shape, element) + attention + feed_forward_bytes(shape, element)


def joined_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes that a packed row adds to a layer if attention runs sample by sample.

    The joined results exist besides the parts that attention keeps for itself.
    """
    return element * shape.heads * shape.head_size


def adapter_bytes(shape: ModelShape, adapted: int, rank: int, element: int) -> int:
    """Return the change in a layer's bytes if only adapters on ``adapted`` of its linear layers learn.

    The few numbers between the two matrices of an adapter are added. The inputs of frozen weights of norms and experts
    are not kept.
    """
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    frozen = 2 * shape.hidden + (queries + keys if shape.qk_norm else 0)
    if shape.experts:
        frozen += shape.experts_per_token * (shape.hidden + shape.expert_intermediate) + shape.hidden
    return element * (adapted * rank - frozen)


def feed_forward_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes of gate, activation, up and their product; for each chosen expert also its input and output."""
    if not shape.experts:
        return 4 * shape.intermediate * element
    chosen = shape.experts_per_token * (4 * shape.expert_intermediate + 2 * shape.hidden) * element
    return chosen + 4 * shape.experts


def backward_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes of the gradients that exist within one layer at a time, per token.

    These are the gradients of the product, the activation, up and the residual stream.
    """
    width = shape.experts_per_token * shape.expert_intermediate if shape.experts else shape.intermediate
    return (3 * width + 2 * shape.hidden) * element + 4 * shape.hidden


def forward_only_bytes(shape: ModelShape, element: int) -> int:
    """Return the bytes of one layer if nothing is kept, per token: gate, activation, up; or a norm in float32."""
    width = shape.experts_per_token * shape.expert_intermediate if shape.experts else shape.intermediate
    return 3 * width * element + 2 * shape.hidden * element + 8 * shape.hidden


def megatron_layer_bytes(shape: ModelShape, element: int, tensor: int, norms_shared: bool) -> float:
    """Return the bytes of one megatron-core layer on one of ``tensor`` ranks, per token.

    Counted are inputs and results of the norms and the residual sum, rotated queries, keys and values with the result
    of attention, gate and up with their product.
    """
    queries, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    shared = element * (3 * queries + 4 * keys) + 4 * shape.heads
    if shape.experts:
        shared += shape.experts_per_token * (3 * shape.expert_intermediate + 2 * shape.hidden) * element
    else:
        shared += 3 * shape.intermediate * element
    return 6 * shape.hidden * element / (tensor if norms_shared else 1) + shared / tensor


def head_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of the output layer besides its weight and its gradient: one float32 chunk of logits, three
    times."""
    if shape.value_head:
        return 0
    return HEAD_COPIES * 4 * min(tokens * shape.vocabulary, HEAD_CHUNK)


def head_how(shape: ModelShape) -> str:
    """Return the arithmetic of `head_bytes` in words."""
    chunk = HEAD_CHUNK * 4 // MIB
    return f"{HEAD_COPIES} x {chunk} MiB: logits are made in chunks, never all {shape.vocabulary:,} for each token"

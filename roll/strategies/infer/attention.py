"""Attention of a decoding step on a CPU: the query heads of a group share their keys without copying them.

Registered with transformers through its public attention interface; everything but a single query token goes to its
own SDPA function. Promise: a row's output has the same bits whatever the other rows, the padded length (a multiple
of 16) and the number of threads. The CPU kernel gives each thread a scratch buffer whose alignment depends on the
thread, and its sums depend on the alignment; so the step's attention runs on one thread.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

SLOT_SDPA = "roll_slot_sdpa"
"""Name under which the function is registered with transformers."""


def register_slot_sdpa() -> None:
    """Make ``attn_implementation=SLOT_SDPA`` known to transformers. Harmless to repeat."""
    AttentionInterface.register(SLOT_SDPA, slot_sdpa_forward)
    AttentionMaskInterface.register(SLOT_SDPA, sdpa_mask)


def slot_sdpa_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attention of ``query [rows, heads, tokens, head_dim]`` over ``key, value [rows, kv_heads, length, head_dim]``
    with an additive mask; returns ``[rows, tokens, heads, head_dim]``."""
    if query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        output = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=attention_mask,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=key.shape[1] != query.shape[1],
        )
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
    return output.transpose(1, 2).contiguous(), None

"""Attention of a decoding step on a CPU: the query heads of a group share their keys without copying them.

The function is registered with transformers through its public attention interface. Only a single query token per row
is computed here; everything else goes to transformers' own SDPA function. Promise: a row's output has the same bits for
any other rows, any padded length (a multiple of 16) and any number of threads. The CPU kernel gives each thread a
scratch buffer whose alignment depends on the thread, and its sums depend on the alignment, so attention of a decoding
step runs on one thread.
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
    """Register ``attn_implementation=SLOT_SDPA`` with transformers. Harmless to repeat."""
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
    """Attend with ``query [rows, heads, tokens, head_dim]`` over ``key, value [rows, kv_heads, length, head_dim]`` with
    an additive mask. Return ``[rows, tokens, heads, head_dim]``."""
    if query.shape[2] != 1 or attention_mask is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        # The heads of a group are passed to the kernel as query tokens, so it reads their keys once for all of them.
        rows, heads, _, head_dim = query.shape
        output = scaled_dot_product_attention(
            query.reshape(rows, key.shape[1], heads // key.shape[1], head_dim),
            key,
            value,
            attn_mask=attention_mask.expand(rows, 1, heads // key.shape[1], -1),
            dropout_p=dropout,
            scale=scaling,
        )
    finally:
        if threads > 1:
            torch.set_num_threads(threads)
    return output.reshape(rows, 1, heads, head_dim), None

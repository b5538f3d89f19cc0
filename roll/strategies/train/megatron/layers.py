"""Layers that megatron-core has only for GPUs with extra libraries, and the recipe that puts them into a model.

The norm works with sequence parallelism and rounds like transformers'. Attention uses PyTorch's kernels, which hold no
matrix of scores. If Transformer Engine is used, its own layers replace these.
"""

from __future__ import annotations

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch import Tensor, nn
from torch.nn import functional


class RmsNorm(nn.Module):
    """Root mean square norm (arXiv 1910.07467) over the last dimension, in float32."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Under sequence parallelism ranks see different positions; megatron-core sums the gradients of marked weights.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's own

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise ``[..., hidden_size]``."""
        wide = hidden.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normal.to(hidden.dtype)


class CausalAttention(nn.Module):
    """Scaled dot-product attention of each position to itself and the positions before it."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object) -> Tensor:
        """Attend with ``query`` ``[positions, rows, heads, size]`` over ``key`` and ``value``, whose number of heads
        divides the query's.

        Returns ``[positions, rows, heads x size]``.
        """
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=query.shape[1] != key.shape[1]
        )
        return mixed.permute(2, 0, 1, 3).flatten(2)


class Router(TopKRouter):
    """megatron-core's router without its own matrix product, which needs Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the logits of the experts, ``[..., experts]``, in the configured precision."""
        dtype = {None: input.dtype, "fp32": torch.float32, "fp64": torch.float64}[self.config.moe_router_dtype]
        return functional.linear(input.to(dtype), self.weight.to(dtype))


class ValueHead(nn.Module):
    """Output layer of a value model: one number for each position, the same on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.shares_positions = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in self.parameters():
            # Under sequence parallelism ranks see different positions; megatron-core sums the gradients of marked ones.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's own

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Return ``[positions, rows, 1]`` for all positions, and None for the bias that megatron-core expects beside
        it."""
        values = functional.linear(hidden, self.weight, self.bias)
        if self.shares_positions:
            # Every rank computes the same from here on, so each takes back the gradient of its own positions.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def decoder_spec(config: TransformerConfig, chunk: int | None, stage: int) -> TransformerBlockSubmodules:
    """Return the layers of one model chunk of a pipeline stage. ``chunk`` is None if it is the only one."""
    if config.transformer_impl == "transformer_engine":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk, pp_rank=stage)
    first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
    dense, sparse = _layer(config, None), None
    if config.num_moe_experts is not None:
        sparse = _layer(config, config.num_moe_experts)
    has_experts = config.moe_layer_freq if sparse is not None else [0] * config.num_layers
    layers = [sparse if has_experts[layer] else dense for layer in range(first, first + count)]
    return TransformerBlockSubmodules(layer_specs=layers, layer_norm=RmsNorm)


def _layer(config: TransformerConfig, experts: int | None) -> ModuleSpec:
    backend = LocalSpecProvider()
    mlp = get_mlp_module_spec_for_backend(backend, num_experts=experts)
    if experts is not None:
        mlp.submodules.router = Router
    head_norm = RmsNorm if config.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=backend.column_parallel_linear(),
        core_attention=CausalAttention,
        linear_proj=backend.row_parallel_linear(),
        q_layernorm=head_norm,
        k_layernorm=head_norm,
    )
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RmsNorm,
            self_attention=ModuleSpec(
                module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=RmsNorm,
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )

"""One rank's part of a megatron-core model: configuration, layers, and log-probabilities over a split vocabulary.

Parameters are allocated uninitialised; the checkpoint fills them. megatron-core has some layers only for GPUs with
extra libraries, so this module has its own: a norm that supports sequence parallelism and rounds as transformers does,
and attention with PyTorch's fused kernels. If Transformer Engine is used, its layers replace these.

Log-probabilities and entropies are computed from vocabulary-parallel logits: ranks exchange only maxima, sums and the
logits of the targets. Padding rows of the vocabulary have no probability. Results are computed in float32, whatever the
precision of the logits.
"""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_mlp_module_spec_for_backend
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import VocabParallelEmbedding, gather_from_sequence_parallel_region
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
from torch.autograd.function import once_differentiable
from torch.nn import functional

from roll.configs.derived import takes_transformer_engine
from roll.trainers.megatron.facts import ModelFacts
from roll.trainers.options import MegatronOptions
from roll.trainers.packing import attend_within_samples
from roll.trainers.step import Packing


class RmsNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over the last dimension, computed in float32."""

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
    """Causal scaled dot-product attention, as core attention of megatron-core's ``SelfAttention``."""

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

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *_: object,
        packed_seq_params: PackedSeqParams | None = None,
        **__: object,
    ) -> Tensor:
        """Return ``[positions, rows, heads x size]`` for ``query`` of shape ``[positions, rows, heads, size]``.

        ``key`` and ``value`` may have fewer heads (grouped-query attention), a divisor of the query's. With
        ``packed_seq_params``, all lack the dimension of rows, and attention stays within the samples of the one row.
        """
        if packed_seq_params is None:
            query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
            return self._attend(query, key, value).transpose(0, 1).flatten(2)
        boundaries, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        mixed = attend_within_samples(self._attend, query, key, value, boundaries, longest, scale=self.softmax_scale)
        return mixed[0].flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return ``[rows, positions, heads, size]``; the arguments are ``[rows, heads, positions, size]``."""
        grouped = query.shape[1] != key.shape[1]
        mixed = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped
        )
        return mixed.transpose(1, 2)


class Router(TopKRouter):
    """megatron-core's top-k router with PyTorch's matrix product: its own one needs Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        """Return the router logits, ``[..., experts]``, in the configured precision."""
        dtype = {None: input.dtype, "fp32": torch.float32, "fp64": torch.float64}[self.config.moe_router_dtype]
        return functional.linear(input.to(dtype), self.weight.to(dtype))


class ValueHead(nn.Module):
    """Output layer of a value model: one value per position, replicated on all tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.shares_positions = config.sequence_parallel
        self.weight = nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.bias = nn.Parameter(torch.zeros(1, dtype=config.params_dtype))
        for parameter in self.parameters():
            # Under sequence parallelism ranks see different positions; megatron-core sums the gradients of marked ones.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # megatron-core's own

    def forward(self, hidden: Tensor, **_: object) -> tuple[Tensor, None]:
        """Return ``[positions, rows, 1]`` for all positions, and None for the bias that megatron-core expects."""
        values = functional.linear(hidden, self.weight, self.bias)
        if self.shares_positions:
            # From here on all ranks compute the same, so each keeps only the gradient of its own positions.
            values = gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False)
        return values, None


def decoder_spec(config: TransformerConfig, chunk: int | None, stage: int) -> TransformerBlockSubmodules:
    """Return the layer specifications of one model chunk of a pipeline stage. ``chunk``: None if it is the only one."""
    if config.transformer_impl == "transformer_engine":
        return get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=chunk, pp_rank=stage)
    first = get_transformer_layer_offset(config, vp_stage=chunk, pp_rank=stage)
    count = get_num_layers_to_build(config, vp_stage=chunk, pp_rank=stage)
    dense, sparse = _layer(config, None), _layer(config, config.num_moe_experts)
    has_experts = config.moe_layer_freq if config.num_moe_experts is not None else [0] * config.num_layers
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


def uses_transformer_engine(options: MegatronOptions, device: torch.device) -> bool:
    """Return True if the layers are those of Transformer Engine.

    Raises ``ValueError`` if it is requested but not installed, or if an option needs it and it is not used."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if options.transformer_impl == "transformer_engine" and not installed:
        raise ValueError("transformer_impl is 'transformer_engine', which is not installed; use 'auto' or 'local'")
    chosen = takes_transformer_engine(options.transformer_impl, device.type)
    if options.moe_grouped_gemm and not chosen:
        raise ValueError("moe_grouped_gemm needs the layers of Transformer Engine (transformer_impl)")
    if options.context_parallel_size > 1 and not chosen:
        raise ValueError("context_parallel_size above 1 needs the layers of Transformer Engine (transformer_impl)")
    return chosen


_USED_ELSEWHERE = {
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "transformer_impl",
    "process_group_timeout_seconds",
}
"""Options that are not passed to `TransformerConfig`."""


def transformer_config(
    facts: ModelFacts, options: MegatronOptions, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Return megatron-core's configuration of the model and its parallelism. Most options are passed on unchanged."""
    return TransformerConfig(
        **facts.layers,
        **{name: value for name, value in vars(options).items() if name not in _USED_ELSEWHERE},
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        transformer_impl="transformer_engine" if uses_transformer_engine(options, device) else "local",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        perform_initialization=False,
        # Losses are already normalised over the whole batch, so gradients are summed, not averaged.
        calculate_per_token_loss=True,
        # Micro-batches differ in width.
        variable_seq_lengths=True,
        moe_router_load_balancing_type="none",
    )


def build_chunks(facts: ModelFacts, config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """Return this rank's model chunks, with uninitialised parameters. Collective."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    return [_chunk(facts, config, chunk if chunks > 1 else None).to(device) for chunk in range(chunks)]


def _chunk(facts: ModelFacts, config: TransformerConfig, chunk: int | None) -> GPTModel:
    stage, shares = parallel_state.get_pipeline_model_parallel_rank(), config.tensor_model_parallel_size
    model = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, chunk, stage),
        vocab_size=-(-facts.vocabulary // shares) * shares,  # splits equally
        max_sequence_length=facts.max_positions,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=chunk is None, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=chunk is None, vp_stage=chunk),
        share_embeddings_and_output_weights=facts.tied,
        position_embedding_type="rope",
        rotary_base=facts.rope_base,
        rope_scaling=facts.llama3_rope_factor is not None,
        rope_scaling_factor=facts.llama3_rope_factor or 1.0,
        vp_stage=chunk,
    )
    if model.post_process and facts.kind == "value":
        model.output_layer = ValueHead(config)
    if model.pre_process and facts.padding_token is not None:
        model.embedding.word_embeddings.register_forward_hook(partial(_without_gradient, facts.padding_token))
    return model


def _without_gradient(token: int, embeddings: VocabParallelEmbedding, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    """Forward hook that stops gradients at embeddings of ``token``, like ``padding_idx`` of PyTorch's embedding.

    ``output`` is ``[rows, positions, size]``, or this rank's share of the positions as ``[positions, rows, size]``.
    """
    held = inputs[0] == token
    if embeddings.reduce_scatter_embeddings:
        group = embeddings.tp_group
        held = held.t().chunk(group.size())[group.rank()]
    return torch.where(held[..., None], output.detach(), output).contiguous()


def packed_arguments(packing: Packing | None, options: MegatronOptions) -> PackedSeqParams | None:
    """Return the boundaries of a packed row's samples as megatron-core takes them; None for padded rows."""
    if packing is None:
        return None
    # The padding of a sample for context ranks counts as part of it, and Transformer Engine wants to be told so.
    padded = packing.boundaries if options.context_parallel_size > 1 else None
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=packing.boundaries,
        cu_seqlens_kv=packing.boundaries,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=packing.longest,
        max_seqlen_kv=packing.longest,
    )


CHUNK_ELEMENTS = 2**26
"""Number of this rank's logits that are converted to float32 at a time."""


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

    ``logits`` ``[..., share]`` are this rank's part of the vocabulary, which was padded from ``vocabulary`` tokens to
    equal shares for the ranks of ``group``. ``targets`` is int ``[...]``, equal on all ranks. Returns two float32
    tensors ``[...]``, equal on all ranks. The entropy carries a gradient only with ``entropy_gradient``. In the
    backward pass all ranks must receive the same gradients of the results; each computes the gradients of its own
    logits. Raises ``ValueError`` for a temperature that is not positive.
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
    """Autograd function for ``logits`` ``[rows, share]`` and ``targets`` ``[rows]``, relative to the share's start."""

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
        # The backward pass recomputes the float32 copy from the logits, which stay in memory anyway.
        ctx.save_for_backward(logits, largest + normalizer.log(), entropy, here, index)
        ctx.temperature = temperature
        ctx.entropy_gradient = entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return chosen - normalizer.log(), entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, logprob_gradient: Tensor, entropy_gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient with respect to the logits, and None for the other arguments.

        For the scaled logits x: d logprob / d x_j = [j = target] - p_j and dH / d x_j = -p_j (log p_j + H).
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

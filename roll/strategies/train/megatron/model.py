"""Builds one rank's part of a model: megatron-core's configuration from facts and options, and the rank's model chunks.

Parameters are allocated without values; the checkpoint fills them.
"""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from roll.strategies.train.megatron.facts import ModelFacts
from roll.strategies.train.megatron.layers import ValueHead, decoder_spec
from roll.strategies.train.megatron_options import MegatronOptions


def uses_transformer_engine(options: MegatronOptions, device: torch.device) -> bool:
    """Return True if layers come from Transformer Engine. Raises ``ValueError`` if they are asked for but not
    installed."""
    installed = importlib.util.find_spec("transformer_engine") is not None
    if options.transformer_impl == "transformer_engine" and not installed:
        raise ValueError("transformer_impl is 'transformer_engine', which is not installed; use 'auto' or 'local'")
    chosen = options.transformer_impl == "transformer_engine" or (
        options.transformer_impl == "auto" and installed and device.type == "cuda"
    )
    if options.moe_grouped_gemm and not chosen:
        raise ValueError("moe_grouped_gemm needs the layers of Transformer Engine (transformer_impl)")
    return chosen


def transformer_config(
    facts: ModelFacts, options: MegatronOptions, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    """Return megatron-core's description of the model and of how it is split."""
    return TransformerConfig(
        num_layers=facts.layers,
        hidden_size=facts.hidden_size,
        ffn_hidden_size=facts.intermediate_size,
        num_attention_heads=facts.heads,
        num_query_groups=facts.query_groups,
        kv_channels=facts.head_size,
        normalization="RMSNorm",
        layernorm_epsilon=facts.epsilon,
        qk_layernorm=facts.qk_norm,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        add_qkv_bias=facts.qkv_bias,
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
        # Losses arrive normalised over the whole batch, so gradients are summed and never averaged.
        calculate_per_token_loss=True,
        # Micro-batches differ in width.
        variable_seq_lengths=True,
        moe_token_dispatcher_type=options.moe_token_dispatcher_type,
        tensor_model_parallel_size=options.tensor_model_parallel_size,
        pipeline_model_parallel_size=options.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=options.virtual_pipeline_model_parallel_size,
        sequence_parallel=options.sequence_parallel,
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        **_expert_settings(facts, options),
    )


def _expert_settings(facts: ModelFacts, options: MegatronOptions) -> dict[str, object]:
    if facts.experts is None:
        return {}
    return {
        "num_moe_experts": facts.experts.experts,
        "moe_ffn_hidden_size": facts.experts.intermediate_size,
        "moe_router_topk": facts.experts.experts_per_token,
        "moe_layer_freq": list(facts.experts.layers),
        "moe_router_pre_softmax": not facts.experts.normalized,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": options.moe_router_dtype,
        "moe_grouped_gemm": options.moe_grouped_gemm,
        "expert_model_parallel_size": options.expert_model_parallel_size,
        "expert_tensor_parallel_size": options.expert_tensor_size,
    }


def build_chunks(facts: ModelFacts, config: TransformerConfig, device: torch.device) -> list[GPTModel]:
    """Return this rank's model chunks, with parameters that have no values yet. Collective."""
    chunks = config.virtual_pipeline_model_parallel_size or 1
    return [_chunk(facts, config, chunk if chunks > 1 else None).to(device) for chunk in range(chunks)]


def _chunk(facts: ModelFacts, config: TransformerConfig, chunk: int | None) -> GPTModel:
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config=config,
        transformer_layer_spec=decoder_spec(config, chunk, stage),
        vocab_size=facts.padded_vocabulary(config.tensor_model_parallel_size),
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
    """Return the output without a gradient where ``token`` was read, like PyTorch's embedding at its padding.

    ``output`` is ``[rows, positions, size]``, or this rank's share of the positions as ``[positions, rows, size]``.
    """
    held = inputs[0] == token
    if embeddings.reduce_scatter_embeddings:
        group = embeddings.tp_group
        held = held.t().chunk(group.size())[group.rank()]
    return torch.where(held[..., None], output.detach(), output).contiguous()

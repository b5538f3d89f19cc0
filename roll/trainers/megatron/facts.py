"""Facts about a Hugging Face model that megatron-core needs, and checks of supported models and parallel layouts.

Only the model's configuration is read, never its weights. A model family, position encoding or layout with which
megatron-core would compute a different model than the checkpoint's is rejected with the reason.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from roll.configs.derived import takes_transformer_engine
from roll.configs.devices import parse_device_mapping
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.plugins import made
from roll.configs.roles import WorkerConfig
from roll.trainers.base import ModelKind
from roll.trainers.options import MegatronOptions

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES: dict[str, dict[str, bool]] = {
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True},
    "qwen3_moe": {"qk_layernorm": True},
    "llama": {},
}
"""Supported `model_type` -> the settings of megatron-core's layers that are specific to it."""
LLAMA3_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only parameters of Llama 3's RoPE scaling that megatron-core supports."""


@dataclass(frozen=True)
class ModelFacts:
    """Architecture of a model, as megatron-core needs it. Sizes are numbers of elements."""

    kind: ModelKind
    family: str
    layers: dict[str, Any]
    """Settings for megatron-core's `TransformerConfig`."""
    vocabulary: int
    tied: bool
    """True if the output layer shares the embedding's weights; never for a value model."""
    rope_base: float
    llama3_rope_factor: float | None
    max_positions: int
    padding_token: int | None
    """The embedding's padding token: as in transformers, reading it yields no gradient for its embedding."""

    @property
    def experts(self) -> int:
        """Number of MoE experts; 0 for a dense model."""
        return self.layers.get("num_moe_experts", 0)


def read_facts(model_path: str, trust_remote_code: bool, kind: ModelKind = "policy") -> ModelFacts:
    """Read the facts about the model at ``model_path`` (folder or hub name), to be used as this kind of model.

    Raises ``ValueError`` if `megatron_train` does not support the model.
    """
    from transformers import AutoConfig  # slow to import, and not needed to check options

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"megatron_train knows {', '.join(sorted(FAMILIES))}; {model_path} is a {config.model_type} model "
            "(fsdp2_train takes any causal language model)"
        )
    _refuse_variants(config)
    base, factor = _rope(config)
    return ModelFacts(
        kind=kind,
        family=config.model_type,
        layers=_layers(config),
        vocabulary=config.vocab_size,
        tied=config.tie_word_embeddings and kind == "policy",
        rope_base=base,
        llama3_rope_factor=factor,
        max_positions=config.max_position_embeddings,
        # Negative ids count from the end of the vocabulary.
        padding_token=None if config.pad_token_id is None else config.pad_token_id % config.vocab_size,
    )


def layout_problems(
    role: WorkerConfig, model_path: str, path: str, *, kind: ModelKind, forward_only: bool, device: str
) -> list[ConfigProblem]:
    """Return the problems of a role's model and of its parallel layout on the role's devices. Loads no weights.

    ``path`` is the configuration path of the role's ``strategy_config``.
    """
    ranks = len(parse_device_mapping(role.device_mapping))
    found: list[ConfigProblem] = []
    try:
        options = made("megatron_train", MegatronOptions, role.strategy_args.strategy_config, path)
        found = _context_problems(options, role.model_args.dtype, path)
        found += _packing_problems(options, role, path, device)
        facts = read_facts(model_path, role.model_args.trust_remote_code, kind)
        check_layout(facts, options, ranks, forward_only=forward_only)
    except ConfigError:
        return []  # The check of the options reports these.
    except ValueError as error:
        found.append(ConfigProblem(path, str(error), "change the sizes or the devices, or use `fsdp2_train`"))
    return found


def _context_problems(options: MegatronOptions, dtype: str, path: str) -> list[ConfigProblem]:
    """Return the problem of rows that are to be split by position without Transformer Engine, whose attention does it,
    or in another precision than its kernels have."""
    size, path = options.context_parallel_size, f"{path}.context_parallel_size"
    if size == 1:
        return []
    if options.transformer_impl == "local":
        message = f"{size} needs the attention of Transformer Engine, but transformer_impl is 'local'"
        return [ConfigProblem(path, message, "write `transformer_impl: auto`")]
    if dtype != "bfloat16":
        message = f"{size}: Transformer Engine splits rows by position in bfloat16, and `model_args.dtype` is {dtype}"
        return [ConfigProblem(path, message, "write `model_args.dtype: bfloat16`, or 1 here")]
    # On a machine without megatron-core, where a configuration is only looked at, this is no problem.
    lacks = importlib.util.find_spec("transformer_engine") is None
    if lacks and importlib.util.find_spec("megatron") is not None:
        message = f"{size} needs the attention of Transformer Engine, which is not installed"
        return [ConfigProblem(path, message, "install `transformer-engine[pytorch]`, or write 1")]
    return []


def _packing_problems(options: MegatronOptions, role: WorkerConfig, path: str, device: str) -> list[ConfigProblem]:
    """Return the problem of packed rows in a precision in which Transformer Engine's attention does not take them."""
    dtype, chosen = role.model_args.dtype, options.transformer_impl
    if role.use_sequence_packing is not True or dtype == "bfloat16" or not takes_transformer_engine(chosen, device):
        return []
    message = f"{chosen!r}: Transformer Engine takes packed rows in bfloat16, and `model_args.dtype` is {dtype}"
    remedy = "write `transformer_impl: local`, `model_args.dtype: bfloat16` or `use_sequence_packing: false`"
    return [ConfigProblem(f"{path}.transformer_impl", message, remedy)]


def check_layout(facts: ModelFacts, options: MegatronOptions, world_size: int, *, forward_only: bool) -> None:
    """Raise ``ValueError`` listing every reason why the model cannot be split over ``world_size`` ranks like this."""
    layers, tensor, stages = facts.layers, options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    chunks = stages * options.model_chunks
    multiples = [
        (
            "the number of ranks",
            world_size,
            "tensor_model_parallel_size x pipeline_model_parallel_size x context_parallel_size",
            options.ranks_per_batch,
        ),
        ("attention heads", layers["num_attention_heads"], "tensor_model_parallel_size", tensor),
        ("key-value heads", layers["num_query_groups"], "tensor_model_parallel_size", tensor),
        ("the width of the feed-forward layer", layers["ffn_hidden_size"], "tensor_model_parallel_size", tensor),
        ("layers", layers["num_layers"], "pipeline_ (x virtual_pipeline_) model_parallel_size", chunks),
    ]
    others = []
    groups, width = options.expert_model_parallel_size, options.expert_tensor_size
    if facts.experts:
        sizes = "pipeline_model_parallel_size x expert_model_parallel_size x expert tensor-parallel size"
        multiples += [
            ("experts", facts.experts, "expert_model_parallel_size", groups),
            ("the width of an expert", layers["moe_ffn_hidden_size"], "its tensor-parallel size", width),
            ("the number of ranks", world_size, f"{sizes}, {stages} x {groups} x {width}", stages * groups * width),
        ]
        if tensor > 1 and not options.sequence_parallel and not forward_only:
            others.append("experts with tensor_model_parallel_size above 1 need sequence_parallel: true")
        if groups == 1 and width != tensor and not forward_only:
            # megatron-core adds up gradients of experts as those of other layers then, over too few ranks.
            others.append(
                f"expert_tensor_parallel_size ({width}) must be tensor_model_parallel_size ({tensor}) unless "
                "expert_model_parallel_size is above 1"
            )
    elif groups > 1 or options.expert_tensor_parallel_size is not None or options.moe_grouped_gemm:
        others.append("the model has no experts, so expert options have no effect")
    problems = [
        f"{what} ({number}) must be a multiple of {key} ({size})"
        for what, number, key, size in multiples
        if number % size
    ] + others
    if problems:
        raise ValueError("this layout does not fit: " + "; ".join(problems))


def _refuse_variants(config: PretrainedConfig) -> None:
    values = config.to_dict()
    wrong = [
        f"{name} is {values[name]!r}"
        for name, usual in (
            ("hidden_act", "silu"),
            ("attention_bias", False),
            ("mlp_bias", False),
            ("use_sliding_window", False),
        )
        if values.get(name, usual) != usual
    ]
    if wrong:
        raise ValueError(f"megatron_train takes the usual {config.model_type} layers only; here {', '.join(wrong)}")


def _rope(config: PretrainedConfig) -> tuple[float, float | None]:
    """Return the RoPE base, and the factor of Llama 3's RoPE scaling (None: no scaling)."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return float(rope["rope_theta"]), None
    if rope["rope_type"] == "llama3" and all(rope[name] == value for name, value in LLAMA3_DEFAULTS.items()):
        return float(rope["rope_theta"]), float(rope["factor"])
    raise ValueError(
        f"position encoding {dict(rope)} has no equal in megatron-core; it computes the default one, and that of "
        f"Llama 3 with {LLAMA3_DEFAULTS}"
    )


def _layers(config: PretrainedConfig) -> dict[str, Any]:
    """Return the model's settings under the names of megatron-core's `TransformerConfig`."""
    settings = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads,
        "layernorm_epsilon": config.rms_norm_eps,
        **FAMILIES[config.model_type],
    }
    if config.model_type != "qwen3_moe":
        return settings
    dense = set(config.mlp_only_layers or ())
    return settings | {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_layer_freq": [
            int(layer not in dense and (layer + 1) % config.decoder_sparse_step == 0)
            for layer in range(config.num_hidden_layers)
        ],
    }

"""What megatron-core needs to know of a Hugging Face model, and the models, layouts and options that are accepted.

Everything is judged from the configuration alone, before any weight is read. A family, a position encoding or a layout
that would train a different model than the one in the file is refused with a sentence. Options of `strategy_config`
keep the names that megatron-core and users of ROLL know. An option with which this trainer could not keep its promises
is refused with the reason, rather than accepted and ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from roll.configs.devices import parse_device_mapping
from roll.configs.errors import ConfigError, ConfigProblem, problems_of
from roll.configs.plugins import made
from roll.configs.roles import WorkerConfig
from roll.trainers.base import ModelKind

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FAMILIES = {"qwen2": True, "qwen3": False, "qwen3_moe": False, "llama": False}
"""`model_type` -> True if queries, keys and values have biases."""
QK_NORM_FAMILIES = ("qwen3", "qwen3_moe")
LLAMA3_DEFAULTS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""The only parameters of Llama 3's position encoding that megatron-core can compute with."""


@dataclass(frozen=True)
class ExpertFacts:
    """Sizes of the mixture of experts."""

    experts: int
    experts_per_token: int
    intermediate_size: int
    normalized: bool
    """True if the weights of the chosen experts add up to 1."""
    layers: tuple[int, ...]
    """1 for each layer with experts, 0 for a dense one."""


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model. Sizes are in elements, not in bytes."""

    kind: ModelKind
    family: str
    vocabulary: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    query_groups: int
    head_size: int
    epsilon: float
    tied: bool
    """True if the output layer is the embedding; never for a value model."""
    rope_base: float
    llama3_rope_factor: float | None
    max_positions: int
    padding_token: int | None
    """The token whose embedding transformers does not train where it is read."""
    experts: ExpertFacts | None

    @property
    def qkv_bias(self) -> bool:
        """True if queries, keys and values have biases."""
        return FAMILIES[self.family]

    @property
    def qk_norm(self) -> bool:
        """True if queries and keys are normalised per head."""
        return self.family in QK_NORM_FAMILIES

    def padded_vocabulary(self, shares: int) -> int:
        """Return the smallest number of rows that holds the vocabulary and splits equally into ``shares``."""
        return -(-self.vocabulary // shares) * shares


def read_facts(model_path: str, trust_remote_code: bool, kind: ModelKind = "policy") -> ModelFacts:
    """Return facts about the model at ``model_path`` (folder or hub name), used as this kind of model.

    Raises ``ValueError`` for a model that cannot be trained here.
    """
    from transformers import AutoConfig  # checking the options must not wait for it

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
        vocabulary=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        query_groups=config.num_key_value_heads,
        head_size=config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads,
        epsilon=config.rms_norm_eps,
        tied=config.tie_word_embeddings and kind == "policy",
        rope_base=base,
        llama3_rope_factor=factor,
        max_positions=config.max_position_embeddings,
        # Negative ids count from the end.
        padding_token=None if config.pad_token_id is None else config.pad_token_id % config.vocab_size,
        experts=_experts(config) if config.model_type == "qwen3_moe" else None,
    )


def layout_problems(
    role: WorkerConfig, model_path: str, path: str, *, kind: ModelKind, forward_only: bool
) -> list[ConfigProblem]:
    """Return what is wrong with a role's model, or with how it is split over the role's devices. Loads no weights.

    ``path`` is that of the role's ``strategy_config``.
    """
    ranks = len(parse_device_mapping(role.device_mapping))
    try:
        options = parse_options(role.strategy_args.strategy_config)
    except ConfigError:
        return []  # They are reported by the check of the options.
    try:
        check_layout(
            read_facts(model_path, role.model_args.trust_remote_code, kind), options, ranks, forward_only=forward_only
        )
    except ValueError as error:
        return [ConfigProblem(path, str(error), "change the sizes or the devices, or use `fsdp2_train`")]
    return []


def check_layout(facts: ModelFacts, options: MegatronOptions, world_size: int, *, forward_only: bool) -> None:
    """Raise ``ValueError`` with every reason why this layout cannot split the model over ``world_size`` ranks."""
    tensor, stages = options.tensor_model_parallel_size, options.pipeline_model_parallel_size
    multiples = [
        ("the number of ranks", world_size, "tensor_ x pipeline_model_parallel_size", options.model_parallel_size),
        ("attention heads", facts.heads, "tensor_model_parallel_size", tensor),
        ("key-value heads", facts.query_groups, "tensor_model_parallel_size", tensor),
        ("the width of the feed-forward layer", facts.intermediate_size, "tensor_model_parallel_size", tensor),
        ("layers", facts.layers, "pipeline_ (x virtual_pipeline_) model_parallel_size", stages * options.model_chunks),
    ]
    others = []
    experts, groups, width = facts.experts, options.expert_model_parallel_size, options.expert_tensor_size
    if experts is not None:
        sizes = "pipeline_model_parallel_size x expert_model_parallel_size x expert tensor-parallel size"
        multiples += [
            ("experts", experts.experts, "expert_model_parallel_size", groups),
            ("the width of an expert", experts.intermediate_size, "its tensor-parallel size", width),
            ("the number of ranks", world_size, f"{sizes}, {stages} x {groups} x {width}", stages * groups * width),
        ]
        if tensor > 1 and not options.sequence_parallel and not forward_only:
            others.append("experts with tensor_model_parallel_size above 1 need sequence_parallel: true")
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
    """Return the base, and the factor of Llama 3's scaling."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return float(rope["rope_theta"]), None
    if rope["rope_type"] == "llama3" and all(rope[name] == value for name, value in LLAMA3_DEFAULTS.items()):
        return float(rope["rope_theta"]), float(rope["factor"])
    raise ValueError(
        f"position encoding {dict(rope)} has no equal in megatron-core; it computes the default one, and that of "
        f"Llama 3 with {LLAMA3_DEFAULTS}"
    )


def _experts(config: PretrainedConfig) -> ExpertFacts:
    dense = set(config.mlp_only_layers or ())
    return ExpertFacts(
        experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        intermediate_size=config.moe_intermediate_size,
        normalized=config.norm_topk_prob,
        layers=tuple(
            int(layer not in dense and (layer + 1) % config.decoder_sparse_step == 0)
            for layer in range(config.num_hidden_layers)
        ),
    )


@dataclass(frozen=True)
class MegatronOptions:
    """Options of `megatron_train`."""

    tensor_model_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share each layer's matrices."""
    pipeline_model_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share out the layers."""
    virtual_pipeline_model_parallel_size: Annotated[int | None, Field(ge=1)] = None
    """Groups of layers per pipeline rank (interleaved schedule). Default: one."""
    expert_model_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share out the experts; they are taken from the data-parallel ones."""
    expert_tensor_parallel_size: Annotated[int | None, Field(ge=1)] = None
    """Ranks that share each expert's matrices. Default: as `tensor_model_parallel_size`."""
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that share out the positions of a sample; only 1."""
    sequence_parallel: bool = False
    """Share out norms and residuals over the tensor-parallel ranks, by position."""
    use_distributed_optimizer: bool = True
    """Share out float32 weights and optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the backward pass goes on."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Recompute whole layers, or attention only, in the backward pass."""
    recompute_method: Literal["uniform", "block"] | None = None
    """`uniform`: units of `recompute_num_layers` layers; `block`: the first so many of each stage."""
    recompute_num_layers: Annotated[int | None, Field(ge=1)] = None
    """See `recompute_method`."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts; only `alltoall` takes samples of different lengths."""
    moe_grouped_gemm: bool = False
    """All experts of a rank in one kernel; needs Transformer Engine."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router; default: that of the model, as transformers has it."""
    moe_aux_loss_coeff: float = 0.0
    """Only 0: it would depend on the split into micro-batches."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of Transformer Engine or of PyTorch. `auto`: the former on GPUs where it is installed."""
    process_group_timeout_seconds: Annotated[float, Field(gt=0)] = 600.0
    """Longest wait in a collective before it fails."""

    def __post_init__(self) -> None:
        if self.process_group_timeout_seconds == math.inf:
            raise ValueError("process_group_timeout_seconds must be finite")
        if self.context_parallel_size != 1:
            raise ValueError(
                f"context_parallel_size is {self.context_parallel_size}; log-probabilities are taken on whole samples, "
                "so only 1 works (tensor_model_parallel_size with sequence_parallel also shares out long samples)"
            )
        if self.moe_aux_loss_coeff != 0:
            raise ValueError(
                "moe_aux_loss_coeff must be 0: it balances experts within a micro-batch, so the result would depend on "
                "the split into micro-batches"
            )
        if self.moe_token_dispatcher_type != "alltoall":
            raise ValueError(
                f"moe_token_dispatcher_type {self.moe_token_dispatcher_type!r} needs equally many tokens on all ranks, "
                "and samples differ in length; use 'alltoall'"
            )
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError("sequence_parallel shares out over tensor-parallel ranks; tensor_model_parallel_size is 1")
        # With two stages, both neighbours of a rank are the same one, and it cannot tell their messages apart.
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size <= 2:
            raise ValueError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 2")
        given = [name for name in ("recompute_method", "recompute_num_layers") if vars(self)[name] is not None]
        if self.recompute_granularity == "full":
            if len(given) < 2:
                raise ValueError("recompute_granularity 'full' needs recompute_method and recompute_num_layers")
        elif given:
            raise ValueError(f"{' and '.join(given)} would have no effect without recompute_granularity 'full'")

    @property
    def model_parallel_size(self) -> int:
        """Number of ranks that together hold one copy of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that share each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_chunks(self) -> int:
        """Number of groups of layers on each pipeline rank."""
        return self.virtual_pipeline_model_parallel_size or 1


def parse_options(strategy_config: dict[str, Any], path: str = "strategy_config") -> MegatronOptions:
    """Return checked options. Raises `ConfigError` with every unknown key and wrong value."""
    return made("megatron_train", MegatronOptions, strategy_config, path)


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    return problems_of(lambda: parse_options(strategy_config, path))

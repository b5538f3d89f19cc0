"""Facts that megatron-core needs about a Hugging Face model, and which models and layouts this trainer accepts.

Everything is judged from the configuration alone, before any weight is read. A family, a position encoding or a layout
that would train a different model than the one in the file is refused with a sentence.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import AutoConfig, PretrainedConfig

from roll.algorithms.registry import KnobError
from roll.configs.device_mapping import parse_device_mapping
from roll.configs.errors import ConfigProblem
from roll.configs.schema import WorkerConfig
from roll.strategies.train.checkpoint import ModelKind
from roll.strategies.train.megatron_options import MegatronOptions, parse_options

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
    except KnobError:
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
    parts = stages * options.model_chunks
    problems = [
        f"{what} ({number}) must be a multiple of {key} ({size})"
        for what, number, key, size in (
            ("the number of ranks", world_size, "tensor_ x pipeline_model_parallel_size", options.model_parallel_size),
            ("attention heads", facts.heads, "tensor_model_parallel_size", tensor),
            ("key-value heads", facts.query_groups, "tensor_model_parallel_size", tensor),
            ("the width of the feed-forward layer", facts.intermediate_size, "tensor_model_parallel_size", tensor),
            ("layers", facts.layers, "pipeline_ (x virtual_pipeline_) model_parallel_size", parts),
        )
        if number % size
    ]
    problems += _expert_problems(facts.experts, options, world_size, forward_only)
    if problems:
        raise ValueError("this layout does not fit: " + "; ".join(problems))


def _expert_problems(
    experts: ExpertFacts | None, options: MegatronOptions, world_size: int, forward_only: bool
) -> list[str]:
    size, tensor = options.expert_model_parallel_size, options.expert_tensor_size
    if experts is None:
        given = size > 1 or options.expert_tensor_parallel_size is not None or options.moe_grouped_gemm
        return ["the model has no experts, so expert options have no effect"] if given else []
    problems = []
    if experts.experts % size:
        problems.append(f"experts ({experts.experts}) must be a multiple of expert_model_parallel_size ({size})")
    if experts.intermediate_size % tensor:
        problems.append(
            f"the width of an expert ({experts.intermediate_size}) must be a multiple of its tensor-parallel size "
            f"({tensor})"
        )
    if world_size % (size * tensor * options.pipeline_model_parallel_size):
        problems.append(
            f"the number of ranks ({world_size}) must be a multiple of pipeline_model_parallel_size x "
            f"expert_model_parallel_size x expert tensor-parallel size "
            f"({options.pipeline_model_parallel_size} x {size} x {tensor})"
        )
    if options.tensor_model_parallel_size > 1 and not options.sequence_parallel and not forward_only:
        problems.append("experts with tensor_model_parallel_size above 1 need sequence_parallel: true")
    return problems


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

"""Options of each trainer in `strategy_config`, and DeepSpeed's configuration. Imports no trainer or model library.

Options of `megatron_train` have the names that megatron-core and ROLL use. A value that the trainer cannot support is
rejected with the reason, rather than accepted and ignored.

DeepSpeed's own keys are passed to it unchanged, so its documentation is the reference. Keys that other settings of the
run determine are rejected with the setting to use instead, so that each has one place. Checks parse DeepSpeed's source
for its keys, because importing it takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from roll.configs.devices import parse_device_mapping
from roll.configs.errors import ConfigError, ConfigProblem, choose_among, nearest, problems_of, shown
from roll.configs.plugins import made
from roll.configs.strategies import Options

if TYPE_CHECKING:
    from roll.configs.roles import WorkerConfig

Seconds = Annotated[float, Field(gt=0, lt=math.inf)]


@dataclass(frozen=True)
class Fsdp2Options:
    """Options of `fsdp2_train`."""

    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass, and gather them again for the backward pass."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    offload: Literal["none", "cpu"] = "none"
    """``cpu``: keep weights, gradients and optimizer state in host memory, and take optimizer steps there. Forward and
    backward passes run on the device either way."""
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the positions of the same rows (Ulysses)."""
    compile: bool = False
    """Compile each decoder layer (`torch.compile`)."""
    process_group_timeout_seconds: Seconds = 600.0
    """Longest wait in a collective before it fails."""


def fsdp2_layout_problems(
    role: WorkerConfig, model_path: str, path: str, *, kind: str, forward_only: bool, device: str
) -> list[ConfigProblem]:
    """Return the reasons why a role's model cannot be split over its context groups. Loads no weights.

    ``path`` is the configuration path of the role's ``strategy_config``.
    """
    size, ranks = Options.of(role).get("context_parallel_size", 1), len(parse_device_mapping(role.device_mapping))
    if size == 1:
        return []
    path = f"{path}.context_parallel_size"
    if ranks % size:
        return [ConfigProblem(path, f"{size} does not divide the {ranks} ranks of the role", "write a divisor of them")]
    attention = role.model_args.attn_implementation
    if attention not in ("sdpa", "eager"):
        return [ConfigProblem(path, f"attn_implementation {attention!r} does not take split rows", "write `sdpa`")]
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=role.model_args.trust_remote_code)
    except (OSError, ValueError) as error:  # a model of pictures, for one
        return [ConfigProblem(path, f"{model_path} is no model that can be split by position: {error}", "write 1")]
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or key_heads % size:
        message = f"{size} does not divide the model's {heads} attention heads and {key_heads} key/value heads"
        return [ConfigProblem(path, message, f"write a divisor of {math.gcd(heads, key_heads)}")]
    return []


@dataclass(frozen=True)
class HfReplicaOptions:
    """Options of `hf_infer` in the reference role."""

    process_group_timeout_seconds: Seconds = 600.0
    """Longest wait in a collective (of a rank for the other ranks' results) before it fails."""


@dataclass(frozen=True)
class MegatronOptions:
    """Options of `megatron_train`."""

    tensor_model_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that split each layer's matrices."""
    pipeline_model_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Pipeline stages: ranks that split the layers."""
    virtual_pipeline_model_parallel_size: Annotated[int | None, Field(ge=1)] = None
    """Model chunks per pipeline rank (interleaved schedule). Default: one."""
    expert_model_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the experts; taken from the data- and context-parallel ranks."""
    expert_tensor_parallel_size: Annotated[int | None, Field(ge=1)] = None
    """Ranks that split each expert's matrices. Default: `tensor_model_parallel_size`."""
    context_parallel_size: Annotated[int, Field(ge=1)] = 1
    """Ranks that split the positions of the same rows; needs Transformer Engine."""
    sequence_parallel: bool = False
    """Split norms and residuals over the tensor-parallel ranks, by position."""
    use_distributed_optimizer: bool = True
    """Shard float32 weights and optimizer state over the data-parallel ranks."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass."""
    recompute_granularity: Literal["full", "selective"] | None = None
    """Activation recomputation in the backward pass: whole layers (``full``) or attention only (``selective``)."""
    recompute_method: Literal["uniform", "block"] | None = None
    """With granularity ``full``. ``uniform``: all layers, checkpointed in units of `recompute_num_layers`; ``block``:
    the first `recompute_num_layers` layers of each stage."""
    recompute_num_layers: Annotated[int | None, Field(ge=1)] = None
    """Number of layers that `recompute_method` refers to."""
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens are sent to their experts. Only ``alltoall`` is supported, because samples differ in length."""
    moe_grouped_gemm: bool = False
    """Compute all experts of a rank in one kernel; needs Transformer Engine."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Precision of the router. Default: that of the model, as in transformers."""
    moe_aux_loss_coeff: float = 0.0
    """Only 0 is supported: the auxiliary loss would depend on the split into micro-batches."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = "auto"
    """Layers of PyTorch (``local``) or of Transformer Engine. ``auto``: Transformer Engine on GPUs if installed."""
    process_group_timeout_seconds: Seconds = 600.0
    """Longest wait in a collective before it fails."""

    def __post_init__(self) -> None:
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
        # With two stages, a rank's two neighbours are the same rank, and their messages cannot be told apart.
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
    def ranks_per_batch(self) -> int:
        """Number of ranks that compute the same micro-batches: those of a copy of the model x context ranks."""
        return self.model_parallel_size * self.context_parallel_size

    @property
    def width_multiple(self) -> int:
        """Number that divides the width of every micro-batch."""
        return self.sample_multiple * (self.tensor_model_parallel_size if self.sequence_parallel else 1)

    @property
    def sample_multiple(self) -> int:
        """Number that divides the length of every sample of a packed row. A context rank computes two chunks of it."""
        return 2 * self.context_parallel_size if self.context_parallel_size > 1 else 1

    @property
    def expert_tensor_size(self) -> int:
        """Number of ranks that split each expert's matrices."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def model_chunks(self) -> int:
        """Number of model chunks on each pipeline rank."""
        return self.virtual_pipeline_model_parallel_size or 1


PASSED_ON = frozenset(
    {
        "aio", "comms_logger", "communication_data_type", "data_types", "disable_allgather",
        "disable_python_gc", "dump_state", "flops_profiler", "gradient_predivide_factor", "graph_harvesting",
        "log_level", "memory_breakdown", "prescale_gradients", "steps_per_print", "timers", "wall_clock_breakdown",
        "zero_optimization",
    }
)  # fmt: skip
"""Top-level keys that are passed to DeepSpeed unchanged."""

_REPLACEMENTS: dict[str, tuple[str, ...]] = {
    "`training_args.per_device_train_batch_size` and `gradient_accumulation_steps`, or dynamic batching": (
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
    ),
    "`training_args.max_grad_norm`": ("gradient_clipping",),
    "`training_args.learning_rate`, `weight_decay` and `adam_...`; it is AdamW": ("optimizer",),
    "`training_args.lr_scheduler_type`, `warmup_steps` and `warmup_ratio`": ("scheduler",),
    "nothing: the optimizer is torch's AdamW": ("zero_allow_untested_optimizer",),
    "nothing: the optimizer is torch's AdamW, on the CPU too": ("zero_force_ds_cpu_optimizer",),
    "`model_args.dtype`: float32, or bfloat16 with float32 master weights": (
        "bf16", "bfloat16", "fp16", "amp", "torch_autocast",
    ),
    "nothing: gradients are those of the whole batch, whatever the ranks and micro-batches": (
        "managed_gradient_accumulation", "gradient_allreduce_op",
    ),
    "`gradient_checkpointing: true` in `strategy_config`": ("activation_checkpointing",),
    "`device_mapping`": ("elasticity",),
    "a run of its own: it ends the process that trains": ("autotuning",),
    "nothing: the run makes the batches": ("curriculum_learning", "data_efficiency", "dataloader_drop_last"),
    "another trainer: this one splits states and batches, not the model's computing": (
        "expert_parallel", "pipeline", "tensor_parallel", "seq_parallel_communication_data_type",
        "use_data_before_expert_parallelism", "vocabulary_size",
    ),
    "nothing: weights and computing are those of the model as it is": (
        "compression_training", "eigenvalue", "progressive_layer_drop", "quantize_training", "sparse_attention",
        "sparse_gradients", "weight_quantization",
    ),
    "`actor_infer`: generation is its role": ("hybrid_engine",),
    "`save_steps`: the run makes the checkpoints": ("checkpoint", "datastates_ckpt", "nebula"),
    "`track_with`: the run reports the metrics": ("comet", "csv_monitor", "tensorboard", "wandb"),
}  # fmt: skip
RESERVED = {key: replacement for replacement, keys in _REPLACEMENTS.items() for key in keys}
"""Top-level key of DeepSpeed -> the setting to use instead."""

_RESERVED_IN_ZERO = {
    "mics_shard_size": "nothing: weights are split over all ranks of the role",
    "zero_hpz_partition_size": "nothing: weights are split over all ranks of the role",
    "compute_grad_norm": "nothing: each step reports the norm, and is skipped where it is not finite",
    "zenflow": "nothing: an update takes all gradients of its own step",
}
_LEFT_TO_THE_TRAINER = "auto"
"""Value that leaves a key to the trainer, as in configurations for transformers' Trainer."""


@dataclass(frozen=True)
class DeepSpeedOptions:
    """Validated options of `deepspeed_train`: the trainer's own, and those passed to DeepSpeed."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    compile: bool = False
    """Compile each decoder layer (`torch.compile`)."""
    process_group_timeout_seconds: Seconds = 600.0
    """Longest wait in a collective before it fails."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options passed to DeepSpeed."""

    @property
    def zero_stage(self) -> int:
        """ZeRO stage: what is sharded. 0: nothing; 1: optimizer states; 2: gradients too; 3: weights too."""
        return self.engine.get("zero_optimization", {}).get("stage", 0)


_OWN = frozenset(item.name for item in fields(DeepSpeedOptions)) - {"engine"}


def parse_deepspeed_options(strategy_config: dict[str, Any]) -> DeepSpeedOptions:
    """Validate a ``strategy_config``. Raises `ConfigError` listing every unknown key and invalid value."""
    problems = check_deepspeed_options(strategy_config, "strategy_config")
    if problems:
        raise ConfigError(problems)
    own = {key: value for key, value in strategy_config.items() if key in _OWN}
    engine = {key: value for key, value in strategy_config.items() if key not in _OWN and value != _LEFT_TO_THE_TRAINER}
    return made("deepspeed_train", DeepSpeedOptions, {**own, "engine": engine}, "strategy_config")


def engine_config(options: DeepSpeedOptions, *, bfloat16: bool, max_grad_norm: float) -> dict[str, Any]:
    """Return DeepSpeed's configuration: our defaults, overridden by the user's keys, then by the trainer's settings.

    The trainer itself counts micro-batches and normalises the loss over all of them, so DeepSpeed's batch sizes are 1.
    """
    return {
        "log_level": "warning",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        **options.engine,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": bfloat16},
        "zero_force_ds_cpu_optimizer": False,
    }


def check_deepspeed_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return the problems of a ``strategy_config`` for `deepspeed_train`, at ``path`` in the configuration.

    Unknown keys under `zero_optimization` are found only if DeepSpeed is installed.
    """
    own = {key: value for key, value in strategy_config.items() if key in _OWN}
    problems = problems_of(lambda: made("deepspeed_train", DeepSpeedOptions, own, path))
    usable = PASSED_ON | _OWN
    problems += _key_problems(
        strategy_config, path, RESERVED, usable | RESERVED.keys(), lambda key: choose_among(key, sorted(usable))
    )
    compiles = f"{path}.compile"
    zero, path = strategy_config.get("zero_optimization", {}), f"{path}.zero_optimization"
    if not isinstance(zero, dict):
        remedy = "write `zero_optimization: {stage: 2}`"
        return [*problems, ConfigProblem(path, f"{shown(zero)} is no mapping", remedy)]
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        problems.append(ConfigProblem(f"{path}.stage", f"{shown(stage)} is no stage", "write 0, 1, 2 or 3"))
    if stage == 3 and strategy_config.get("compile") is True:
        message = (
            "true, but at ZeRO stage 3 weights are gathered within the layers, and ranks wait for each other there"
        )
        problems.append(ConfigProblem(compiles, message, "set it to false, or `zero_optimization.stage` to 2 or less"))
    known = zero_option_names()

    def hint(key: str) -> str:
        match = nearest(key, known or ())
        return f"did you mean `{match}`?" if match else "see `zero_optimization` in DeepSpeed's documentation"

    return [*problems, *_key_problems(zero, path, _RESERVED_IN_ZERO, known, hint)]


def _key_problems(
    section: dict[str, Any],
    path: str,
    reserved: Mapping[str, str],
    known: Collection[str] | None,
    hint: Callable[[str], str],
) -> Iterator[ConfigProblem]:
    """Yield problems for keys that the run itself decides, and for keys that are not ``known`` (None: accept all)."""
    for key, value in section.items():
        if key in reserved and value != _LEFT_TO_THE_TRAINER:
            yield ConfigProblem(f"{path}.{key}", "the run itself decides this", f"use {reserved[key]}")
        elif known is not None and key not in known:
            yield ConfigProblem(f"{path}.{key}", "DeepSpeed has no such key", hint(key))


@cache
def zero_option_names() -> frozenset[str] | None:
    """Return the option names under `zero_optimization` (aliases included) of the installed DeepSpeed, from its source.

    None if DeepSpeed is not installed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "runtime" / "zero" / "config.py"
    tree = ast.parse(source.read_text())
    (model,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedZeroConfig")
    targets = (item.target for item in model.body if isinstance(item, ast.AnnAssign))
    names = {target.id for target in targets if isinstance(target, ast.Name)}
    words = (word for word in ast.walk(model) if isinstance(word, ast.keyword) and word.arg == "alias")
    aliases = {str(word.value.value) for word in words if isinstance(word.value, ast.Constant)}
    return frozenset(names | aliases)

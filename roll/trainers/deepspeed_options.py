"""Options that `strategy_config` may contain for `deepspeed_train`, and the configuration that DeepSpeed gets.

DeepSpeed's own keys go to it unchanged, so its documentation is the reference. Keys that the run itself decides are
refused with the key to use instead: with two places for one setting, the wrong one ends up being read. Checking reads
DeepSpeed's source where it must, but does not import it, which takes seconds.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from roll.configs.errors import ConfigProblem, choose_among, nearest, problems_of, shown
from roll.configs.plugins import made

PASSED_ON = frozenset(
    {
        "aio", "comms_logger", "communication_data_type", "compile", "data_types", "disable_allgather",
        "disable_python_gc", "dump_state", "flops_profiler", "gradient_predivide_factor", "graph_harvesting",
        "log_level", "memory_breakdown", "prescale_gradients", "steps_per_print", "timers", "wall_clock_breakdown",
        "zero_optimization",
    }
)  # fmt: skip
"""Top-level keys that DeepSpeed gets unchanged."""

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
"""Value with which configurations made for transformers' trainer leave a key to the trainer. It means the same here."""


@dataclass(frozen=True)
class DeepSpeedOptions:
    """A checked ``strategy_config``: the trainer's own options, and DeepSpeed's."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    process_group_timeout_seconds: Annotated[float, Field(gt=0, lt=math.inf)] = 600.0
    """Longest wait in a collective of the trainer before it fails."""
    engine: dict[str, Any] = field(default_factory=dict)
    """Options passed to DeepSpeed."""

    @property
    def zero_stage(self) -> int:
        """Amount of splitting over ranks: 0 nothing, 1 optimizer states, 2 gradients too, 3 weights too."""
        return self.engine.get("zero_optimization", {}).get("stage", 0)


_OWN = frozenset(item.name for item in fields(DeepSpeedOptions)) - {"engine"}


def parse_options(strategy_config: dict[str, Any]) -> DeepSpeedOptions:
    """Return checked options. Raises ``ValueError`` listing every unknown key and wrong value."""
    problems = check_options(strategy_config, "strategy_config")
    if problems:
        raise ValueError("\n".join(str(problem) for problem in problems))
    own = {key: value for key, value in strategy_config.items() if key in _OWN}
    engine = {key: value for key, value in strategy_config.items() if key not in _OWN and value != _LEFT_TO_THE_TRAINER}
    return made("deepspeed_train", DeepSpeedOptions, {**own, "engine": engine}, "strategy_config")


def engine_config(options: DeepSpeedOptions, *, bfloat16: bool, max_grad_norm: float) -> dict[str, Any]:
    """Return DeepSpeed's configuration: quiet defaults, the user's keys, and the trainer's decisions, in increasing
    priority.

    The trainer itself counts micro-batches and normalises the loss over all of them, so DeepSpeed's own counts are both
    1.
    """
    defaults = {
        "log_level": "warning",
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    return {
        **defaults,
        **options.engine,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": bfloat16},
        "zero_force_ds_cpu_optimizer": False,
    }


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing.

    Unknown keys under `zero_optimization` are found only if DeepSpeed is installed.
    """
    own = {key: value for key, value in strategy_config.items() if key in _OWN}
    problems = problems_of(lambda: made("deepspeed_train", DeepSpeedOptions, own, path))
    for key, value in strategy_config.items():
        if key in RESERVED and value != _LEFT_TO_THE_TRAINER:
            problems.append(ConfigProblem(f"{path}.{key}", "the run itself decides this", f"use {RESERVED[key]}"))
        elif key not in PASSED_ON and key not in RESERVED and key not in _OWN:
            remedy = choose_among(key, sorted(PASSED_ON | _OWN))
            problems.append(ConfigProblem(f"{path}.{key}", "DeepSpeed has no such key", remedy))
    return problems + _zero_problems(strategy_config.get("zero_optimization", {}), f"{path}.zero_optimization")


def _zero_problems(zero: Any, path: str) -> list[ConfigProblem]:
    if not isinstance(zero, dict):
        return [ConfigProblem(path, f"{shown(zero)} is no mapping", "write `zero_optimization: {stage: 2}`")]
    problems = []
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        problems.append(ConfigProblem(f"{path}.stage", f"{shown(stage)} is no stage", "write 0, 1, 2 or 3"))
    known = zero_option_names()
    for key, value in zero.items():
        if key in _RESERVED_IN_ZERO and value != _LEFT_TO_THE_TRAINER:
            remedy = f"use {_RESERVED_IN_ZERO[key]}"
            problems.append(ConfigProblem(f"{path}.{key}", "the run itself decides this", remedy))
        elif known is not None and key not in known:
            match = nearest(key, known)
            hint = f"did you mean `{match}`?" if match else "see `zero_optimization` in DeepSpeed's documentation"
            problems.append(ConfigProblem(f"{path}.{key}", "DeepSpeed has no such key", hint))
    return problems


@cache
def zero_option_names() -> frozenset[str] | None:
    """Return the names, old ones included, that the installed release knows under `zero_optimization`, read from its
    source. None if DeepSpeed is not installed."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "runtime" / "zero" / "config.py"
    tree = ast.parse(source.read_text())
    (model,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedZeroConfig")
    names = set()
    for item in model.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            names.add(item.target.id)
            names |= {
                word.value.value
                for word in getattr(item.value, "keywords", ())
                if word.arg == "alias" and isinstance(word.value, ast.Constant) and isinstance(word.value.value, str)
            }
    return frozenset(names)

"""Options that `strategy_config` may contain for `megatron_train`. Kept apart from the trainer, so that checking is
quick.

Keys keep the names that megatron-core and users of ROLL know. An option with which this trainer could not keep its
promises is refused with the reason, rather than accepted and ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from roll.algorithms.registry import build_knobs, knob
from roll.configs.errors import ConfigProblem
from roll.strategies.train.option_problems import option_problems


@dataclass(frozen=True)
class MegatronOptions:
    """Checked options of ``strategy_config``."""

    tensor_model_parallel_size: int = knob(1, help="Ranks that share each layer's matrices.", at_least=1)
    pipeline_model_parallel_size: int = knob(1, help="Ranks that share out the layers.", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = knob(
        None, help="Groups of layers per pipeline rank (interleaved schedule). Default: one.", at_least=1
    )
    expert_model_parallel_size: int = knob(
        1, help="Ranks that share out the experts; they are taken from the data-parallel ones.", at_least=1
    )
    expert_tensor_parallel_size: int | None = knob(
        None, help="Ranks that share each expert's matrices. Default: as `tensor_model_parallel_size`.", at_least=1
    )
    context_parallel_size: int = knob(1, help="Ranks that share out the positions of a sample; only 1.", at_least=1)
    sequence_parallel: bool = knob(
        False, help="Share out norms and residuals over the tensor-parallel ranks, by position."
    )
    use_distributed_optimizer: bool = knob(
        True, help="Share out float32 weights and optimizer state over the data-parallel ranks."
    )
    overlap_grad_reduce: bool = knob(False, help="Reduce gradients while the backward pass goes on.")
    recompute_granularity: Literal["full", "selective"] | None = knob(
        None, help="Recompute whole layers, or attention only, in the backward pass."
    )
    recompute_method: Literal["uniform", "block"] | None = knob(
        None, help="`uniform`: units of `recompute_num_layers` layers; `block`: the first so many of each stage."
    )
    recompute_num_layers: int | None = knob(None, help="See `recompute_method`.", at_least=1)
    moe_token_dispatcher_type: Literal["alltoall", "allgather", "flex"] = knob(
        "alltoall", help="How tokens reach their experts; only `alltoall` takes samples of different lengths."
    )
    moe_grouped_gemm: bool = knob(False, help="All experts of a rank in one kernel; needs Transformer Engine.")
    moe_router_dtype: Literal["fp32", "fp64"] | None = knob(
        None, help="Precision of the router; default: that of the model, as transformers has it."
    )
    moe_aux_loss_coeff: float = knob(0.0, help="Only 0: it would depend on the split into micro-batches.")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = knob(
        "auto", help="Layers of Transformer Engine or of PyTorch. `auto`: the former on GPUs where it is installed."
    )
    process_group_timeout_seconds: float = knob(600.0, help="Longest wait in a collective before it fails.", above=0)

    def __post_init__(self) -> None:
        if self.process_group_timeout_seconds == float("inf"):
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
        self._check_virtual_pipeline()
        self._check_recomputation()

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

    def _check_virtual_pipeline(self) -> None:
        # With two stages, both neighbours of a rank are the same one, and it cannot tell their messages apart.
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size <= 2:
            raise ValueError("virtual_pipeline_model_parallel_size needs pipeline_model_parallel_size above 2")

    def _check_recomputation(self) -> None:
        given = [name for name in ("recompute_method", "recompute_num_layers") if vars(self)[name] is not None]
        if self.recompute_granularity == "full":
            if len(given) < 2:
                raise ValueError("recompute_granularity 'full' needs recompute_method and recompute_num_layers")
        elif given:
            raise ValueError(f"{' and '.join(given)} would have no effect without recompute_granularity 'full'")


def parse_options(strategy_config: dict[str, Any]) -> MegatronOptions:
    """Return checked options. Raises ``KnobError`` (a ``ValueError``) listing every unknown key and wrong value."""
    return build_knobs(MegatronOptions, strategy_config, "strategy 'megatron_train'")


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing."""
    return option_problems(parse_options, strategy_config, path)

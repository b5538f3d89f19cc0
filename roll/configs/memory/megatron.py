"""Memory of one rank of `megatron_train`: its share of matrices, layers and experts, and micro-batches in flight."""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs.derived import data_parallel_ranks
from roll.configs.memory import activations
from roll.configs.memory.rank import (
    BACKWARD_BEGINS,
    LOG_PROBABILITIES,
    STATE_BYTES,
    UPDATE,
    Trainer,
    TrainerMemory,
    one_matrix,
)
from roll.configs.memory.records import GIB, Part, Phase
from roll.configs.wording import count


@dataclass(frozen=True)
class _Layout:
    """The way megatron-core splits the model."""

    tensor: int
    stages: int
    experts: int
    expert_tensor: int
    copies: int
    """Number of ranks that hold the same share."""
    expert_copies: int

    @classmethod
    def of(cls, trainer: Trainer) -> _Layout:
        options = trainer.options
        tensor = options.get("tensor_model_parallel_size", 1)
        stages = options.get("pipeline_model_parallel_size", 1)
        experts = options.get("expert_model_parallel_size", 1)
        expert_tensor = options.get("expert_tensor_parallel_size", tensor)
        return cls(
            tensor,
            stages,
            experts,
            expert_tensor,
            data_parallel_ranks(trainer.config),
            max(1, trainer.ranks // (stages * experts * expert_tensor)),
        )


def megatron(trainer: Trainer) -> TrainerMemory:
    """Estimate the pipeline stage that needs most."""
    layout = _Layout.of(trainer)
    stages = [_stage(trainer, layout, stage) for stage in sorted({0, layout.stages - 1})]
    return max(stages, key=lambda memory: memory.peak)


def _stage(trainer: Trainer, layout: _Layout, stage: int) -> TrainerMemory:
    shape, element = trainer.shape, trainer.element
    layers = shape.layers // layout.stages
    first, last = stage == 0, stage == layout.stages - 1
    dense = layers * ((shape.attention_parameters + shape.dense_parameters) / layout.tensor + 2 * shape.hidden)
    has_head = last and not shape.value_head and not (shape.tied and first)
    dense += (int(first) + int(has_head)) * shape.embedding_parameters / layout.tensor
    dense += shape.hidden + 1 if last and shape.value_head else 0  # the same on each tensor-parallel rank
    expert = layers * shape.expert_parameters / (layout.experts * layout.expert_tensor)
    own = dense + expert
    where = f"stage {stage + 1} of {layout.stages}, " if layout.stages > 1 else ""
    share = f"{where}{own / 1e9:.2f} billion"
    weights = Part("weights", element * own, f"{share} x {element} bytes ({trainer.config.model_args.dtype})")
    forward = Phase(LOG_PROBABILITIES, _forward(trainer, layout, last))
    if not trainer.learns:
        return TrainerMemory((weights,), (forward,))
    shared = trainer.options.get("use_distributed_optimizer", True)
    once = dense / layout.copies + expert / layout.expert_copies
    held = once if shared else own
    size = 12 if element == 2 else 8
    what = "AdamW's two moments" + (" and master weights" if element == 2 else "")
    copies = f" / {count(layout.copies, 'rank')} with the same share" if shared and layout.copies > 1 else ""
    always = (
        weights,
        Part("gradients", 4 * own, f"{share} x 4 bytes (float32, one buffer for the whole run)"),
        Part("optimizer", size * held, f"{share} x {size} bytes ({what}){copies}"),
    )
    backward = (
        _activations(trainer, layout, layers, stage),
        *_logits(trainer, layout, last, trainer.train.tokens, backward=True),
    )
    update = Part("square roots", 4 * held, "AdamW takes them of all master weights of the rank at once")
    phases = (Phase(BACKWARD_BEGINS, backward), Phase(UPDATE, (update,)), forward, one_matrix(shape))
    return TrainerMemory(always, phases, state=STATE_BYTES * once)


def _activations(trainer: Trainer, layout: _Layout, layers: int, stage: int) -> Part:
    """Return the activations of the micro-batches in flight.

    A stage runs ahead of its backward passes by the number of stages after it.
    """
    shape, element, options = trainer.shape, trainer.element, trainer.options
    shared = options.get("sequence_parallel", False)
    one = activations.megatron_layer_bytes(shape, element, layout.tensor, shared)
    in_flight = min(layout.stages - stage, max(1, trainer.train.per_step))
    tokens = trainer.train.tokens
    within = activations.backward_bytes(shape, element) * tokens / layout.tensor
    if options.get("recompute_granularity", None) == "full":
        unit = options.get("recompute_num_layers", 1)
        if options.get("recompute_method", None) == "block":
            inputs, computed, again = unit, max(0, layers - unit), 1
        else:
            inputs, computed, again = -(-layers // unit), 0, unit
        kept = inputs * element * shape.hidden / (layout.tensor if shared else 1) + computed * one
        size = (in_flight * kept + again * one) * tokens + within
        how = f"{in_flight} x {tokens:,} tokens x {inputs} inputs, and {count(again, 'layer')} of {one / 1000:,.0f} kB"
    else:
        size = in_flight * layers * one * tokens + within
        how = f"{in_flight} x {tokens:,} tokens x {layers} layers x {one / 1000:,.0f} kB"
    return Part("activations", size, how)


def _logits(trainer: Trainer, layout: _Layout, last: bool, tokens: int, *, backward: bool) -> tuple[Part, ...]:
    if not last or trainer.shape.value_head:
        return ()
    share = tokens * trainer.shape.vocabulary / layout.tensor
    whole = share * trainer.element * (2 if backward else 1)
    chunks = activations.HEAD_COPIES * 4 * min(share, activations.MEGATRON_HEAD_CHUNK)
    how = f"{tokens:,} tokens x {trainer.shape.vocabulary:,} / {layout.tensor}"
    gradient = ", and their gradient" if backward else ""
    return (Part("logits", whole + chunks, f"{how}{gradient}; chunks of {chunks / GIB:.1f} GiB in float32"),)


def _forward(trainer: Trainer, layout: _Layout, last: bool) -> tuple[Part, ...]:
    tokens = trainer.infer.tokens
    one = activations.forward_only_bytes(trainer.shape, trainer.element) / layout.tensor
    kept = Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer")
    return (kept, *_logits(trainer, layout, last, tokens, backward=False))

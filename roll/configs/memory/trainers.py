"""Memory of one rank of a trainer: what it holds always, and the moments of a step that may be the largest.

States are exact; activations are those of the longest samples that fit into a micro-batch; communication buffers follow
the engines' defaults. Forward-only roles have weights and one forward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from roll.configs.derived import data_parallel_ranks
from roll.configs.memory import activations
from roll.configs.memory.activations import MicroBatch
from roll.configs.memory.records import ELEMENT_BYTES, GIB, Part, Phase
from roll.configs.memory.shapes import ModelShape
from roll.configs.schema import WorkerConfig
from roll.configs.wording import count

BACKWARD_BEGINS, BACKWARD_ENDS, UPDATE = "the backward pass begins", "the backward pass ends", "the optimizer steps"
LOG_PROBABILITIES, PUBLICATION = "log-probabilities", "weights are gathered"
DEEPSPEED_BUCKET = 500_000_000
"""Elements of a DeepSpeed bucket, unless `zero_optimization` says otherwise; two of them overlap."""


@dataclass(frozen=True)
class Trainer:
    """One rank, as far as its memory goes."""

    config: WorkerConfig
    shape: ModelShape
    ranks: int
    on_gpu: bool
    learns: bool
    train: MicroBatch
    infer: MicroBatch

    @property
    def element(self) -> int:
        """Bytes of a number in computing."""
        return ELEMENT_BYTES[self.config.model_args.dtype]

    @property
    def options(self) -> Mapping[str, Any]:
        """Of the engine."""
        return self.config.strategy_args.strategy_config

    @property
    def eager_width(self) -> int:
        """Tokens of a sample whose scores attention holds; 0 if it holds none."""
        return self.train.width if self.config.model_args.attn_implementation == "eager" else 0


Memory = tuple[tuple[Part, ...], tuple[Phase, ...]]
"""What is there always, and the phases."""


def trainer_memory(trainer: Trainer) -> Memory:
    """Memory of the rank that needs most."""
    strategy = trainer.config.strategy_args.strategy_name
    return {"megatron_train": _megatron, "deepspeed_train": _deepspeed}.get(strategy, _fsdp2)(trainer)


def _fsdp2(trainer: Trainer) -> Memory:
    shape, ranks, element = trainer.shape, trainer.ranks, trainer.element
    gathered = _gathered(trainer)
    forward = Phase(LOG_PROBABILITIES, (gathered, *_forward_only(trainer)))
    if not trainer.learns:
        return (_states("weights", shape, ranks, element, trainer.config.model_args.dtype),), (forward,)
    always = (
        _states("weights", shape, ranks, 4, "float32"),
        _states("optimizer", shape, ranks, 8, "AdamW's two moments, float32"),
    )
    gradients = _states("gradients", shape, ranks, 4, "float32")
    root = shape.root_parameters
    reduced = max(element + 4, 4 + 4 / ranks) * root
    end = Part(
        "embedding's gradient", reduced, f"{root / 1e9:.2f} billion outside the layers, in float32 before it is shared"
    )
    widest = 2 * 4 * shape.largest_matrix / ranks
    temporary = (
        Part("square roots", 4 * shape.parameters / ranks, "AdamW takes them of all weights of the rank at once")
        if trainer.on_gpu
        else Part("square roots", widest, "of one matrix at a time, twice")
    )
    return always, (
        _backward(trainer, gathered, gradients),
        Phase(BACKWARD_ENDS, (gradients, gathered, end)),
        Phase(UPDATE, (gradients, temporary)),
        forward,
        Phase(PUBLICATION, (Part("one matrix", 4 * shape.largest_matrix, "whole, in float32"),)),
    )


def _states(name: str, shape: ModelShape, ranks: int, size: int, what: str) -> Part:
    share = f" / {count(ranks, 'rank')}" if ranks > 1 else ""
    how = f"{shape.parameters / 1e9:.2f} billion x {size} bytes ({what}){share}"
    return Part(name, shape.parameters * size / ranks, how)


def _gathered(trainer: Trainer) -> Part:
    """Weights that are whole for the moment: embedding and head always, and two layers (one comes while one computes);
    all layers if they stay gathered for the backward pass."""
    shape, element = trainer.shape, trainer.element
    stays = trainer.options.get("reshard_after_forward", True) is False
    layers = shape.layers if stays else min(2, shape.layers)
    how = f"embedding, head and {count(layers, 'layer')} in {trainer.config.model_args.dtype}"
    return Part("gathered weights", element * (shape.root_parameters + layers * shape.layer_parameters), how)


def _backward(trainer: Trainer, gathered: Part, gradients: Part) -> Phase:
    """All activations are there. So are the gradients, if this is not the first micro-batch of the step; of a single
    one, gradients grow as activations go, and the larger of the two counts."""
    shape, element, tokens = trainer.shape, trainer.element, trainer.train.tokens
    kept = _activations(trainer)
    if trainer.train.per_step > 1:
        there: tuple[Part, ...] = (kept, gradients)
    else:
        there = (max(kept, gradients, key=lambda part: part.size),)
    layer = 2 * element * shape.layer_parameters + 4 * shape.layer_parameters * (1 + 1 / trainer.ranks)
    within = max(
        activations.head_bytes(shape, tokens), activations.backward_bytes(shape, element) * tokens + layer
    )
    head_gradient = 0 if shape.value_head else element * shape.embedding_parameters
    return Phase(
        BACKWARD_BEGINS,
        (
            *there,
            gathered,
            Part("head's gradient", head_gradient, "the output layer's weight, until the pass ends"),
            Part("on their way", within, "gradients of one layer before they are shared, or chunks of logits"),
        ),
    )


def _activations(trainer: Trainer) -> Part:
    shape, element, tokens = trainer.shape, trainer.element, trainer.train.tokens
    one = activations.layer_bytes(shape, element, eager_width=trainer.eager_width)
    ends = activations.norm_bytes(shape, element) + 3 * element * shape.hidden
    if trainer.options.get("gradient_checkpointing", False):
        size = (shape.layers * element * shape.hidden + one + ends) * tokens
        how = f"{tokens:,} tokens x ({shape.layers} layers' inputs + one layer of {one / 1000:,.0f} kB, recomputed)"
    else:
        size = (shape.layers * one + ends) * tokens
        how = f"{tokens:,} tokens x {shape.layers} layers x {one / 1000:,.0f} kB (gradient_checkpointing keeps less)"
    return Part("activations", size, how)


def _forward_only(trainer: Trainer) -> tuple[Part, Part]:
    shape, tokens = trainer.shape, trainer.infer.tokens
    one = activations.forward_only_bytes(shape, trainer.element)
    return (
        Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer"),
        Part("logits", activations.head_bytes(shape, tokens), activations.head_how(shape)),
    )


def _deepspeed(trainer: Trainer) -> Memory:
    shape, ranks, element = trainer.shape, trainer.ranks, trainer.element
    zero = trainer.options.get("zero_optimization") or {}
    stage = zero["stage"] if isinstance(zero.get("stage"), int) else 0
    split = ranks if stage == 3 else 1
    dtype = trainer.config.model_args.dtype
    weights = _states("weights", shape, split, element, dtype)
    live = _gathered(trainer) if stage == 3 else Part("gathered weights", 0, "none: each rank has all")
    forward = Phase(LOG_PROBABILITIES, (live, *_forward_only(trainer)))
    if not trainer.learns:
        return (weights,), (forward,)
    states = 12 if stage > 0 else 8
    owners = ranks if stage > 0 else 1
    what = "AdamW's two moments" + (", master weights" if stage > 0 else "")
    optimizer = _states("optimizer", shape, owners, states, f"{what}, float32")
    if _offloads(zero, "offload_optimizer"):
        optimizer = Part("optimizer", 0, "in the memory of the host (offload_optimizer)")
    if stage == 3 and _offloads(zero, "offload_param"):
        weights = Part("weights", 0, "in the memory of the host (offload_param)")
    gradients = _states("gradients", shape, ranks if stage >= 2 else 1, 4, "float32")
    given = zero.get("reduce_bucket_size")
    bucket = min(given if isinstance(given, int) else DEEPSPEED_BUCKET, shape.parameters)
    buckets = Part("buckets", 2 * element * bucket if stage > 0 else 0, f"2 x {bucket / 1e6:,.0f} million gradients")
    begin = _backward(trainer, live, gradients)
    return (weights, optimizer), (
        Phase(begin.name, (*begin.parts, buckets)),
        Phase(UPDATE, (gradients, Part("square roots", 4 * shape.parameters / owners, "of the rank's master weights"))),
        forward,
        Phase(PUBLICATION, (Part("one matrix", 4 * shape.largest_matrix, "whole, in float32"),)),
    )


def _offloads(zero: Mapping[str, Any], key: str) -> bool:
    return isinstance(zero.get(key), Mapping) and zero[key].get("device", "none") not in ("none", None)


@dataclass(frozen=True)
class _Layout:
    """How megatron-core shares the model out."""

    tensor: int
    stages: int
    experts: int
    expert_tensor: int
    copies: int
    """Ranks that hold the same share."""
    expert_copies: int

    @classmethod
    def of(cls, trainer: Trainer) -> _Layout:
        options = trainer.options
        tensor = int(options.get("tensor_model_parallel_size", 1))
        stages = int(options.get("pipeline_model_parallel_size", 1))
        experts = int(options.get("expert_model_parallel_size", 1))
        expert_tensor = int(options.get("expert_tensor_parallel_size") or tensor)
        return cls(
            tensor,
            stages,
            experts,
            expert_tensor,
            data_parallel_ranks(trainer.config),
            max(1, trainer.ranks // (stages * experts * expert_tensor)),
        )


def _megatron(trainer: Trainer) -> Memory:
    layout = _Layout.of(trainer)
    stages = {_megatron_stage(trainer, layout, stage) for stage in {0, layout.stages - 1}}
    return max(stages, key=lambda memory: sum(part.size for part in memory[0]) + max(each.size for each in memory[1]))


def _megatron_stage(trainer: Trainer, layout: _Layout, stage: int) -> Memory:
    shape, element = trainer.shape, trainer.element
    layers = shape.layers // layout.stages
    first, last = stage == 0, stage == layout.stages - 1
    dense = layers * (
        (shape.attention_parameters + shape.dense_parameters) / layout.tensor + 2 * shape.hidden
    )
    ends = int(first) + int(last and not (shape.tied and first))
    dense += ends * shape.embedding_parameters / layout.tensor
    expert = layers * shape.expert_parameters / (layout.experts * layout.expert_tensor)
    own = dense + expert
    where = f"stage {stage + 1} of {layout.stages}, " if layout.stages > 1 else ""
    share = f"{where}{own / 1e9:.2f} billion"
    weights = Part("weights", element * own, f"{share} x {element} bytes ({trainer.config.model_args.dtype})")
    forward = Phase(LOG_PROBABILITIES, _megatron_forward(trainer, layout, last))
    if not trainer.learns:
        return (weights,), (forward,)
    shared = trainer.options.get("use_distributed_optimizer", True)
    held = dense / layout.copies + expert / layout.expert_copies if shared else own
    size = 12 if element == 2 else 8
    what = "AdamW's two moments" + (" and master weights" if element == 2 else "")
    copies = f" / {count(layout.copies, 'rank')} with the same share" if shared and layout.copies > 1 else ""
    always = (
        weights,
        Part("gradients", 4 * own, f"{share} x 4 bytes (float32, one buffer for the whole run)"),
        Part("optimizer", size * held, f"{share} x {size} bytes ({what}){copies}"),
    )
    backward = (
        _megatron_activations(trainer, layout, layers, stage),
        *_megatron_logits(trainer, layout, last, trainer.train.tokens, backward=True),
    )
    gather = Part("one matrix", 4 * shape.largest_matrix, "whole, in float32")
    update = Part("square roots", 4 * held, "AdamW takes them of all master weights of the rank at once")
    return always, (Phase(BACKWARD_BEGINS, backward), Phase(UPDATE, (update,)), forward, Phase(PUBLICATION, (gather,)))


def _megatron_activations(trainer: Trainer, layout: _Layout, layers: int, stage: int) -> Part:
    """Micro-batches in flight: a stage is ahead of its backward passes by as many as there are stages after it."""
    shape, element, options = trainer.shape, trainer.element, trainer.options
    shared = bool(options.get("sequence_parallel", False))
    one = activations.megatron_layer_bytes(shape, element, layout.tensor, shared)
    in_flight = min(layout.stages - stage, max(1, trainer.train.per_step))
    tokens = trainer.train.tokens
    within = activations.backward_bytes(shape, element) * tokens / layout.tensor
    if options.get("recompute_granularity") == "full":
        unit = int(options.get("recompute_num_layers") or 1)
        if options.get("recompute_method") == "block":
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


def _megatron_logits(
    trainer: Trainer, layout: _Layout, last: bool, tokens: int, *, backward: bool
) -> tuple[Part, ...]:
    if not last:
        return ()
    share = tokens * trainer.shape.vocabulary / layout.tensor
    whole = share * trainer.element * (2 if backward else 1)
    chunks = activations.HEAD_COPIES * 4 * min(share, activations.MEGATRON_HEAD_CHUNK)
    how = f"{tokens:,} tokens x {trainer.shape.vocabulary:,} / {layout.tensor}"
    gradient = ", and their gradient" if backward else ""
    return (Part("logits", whole + chunks, f"{how}{gradient}; chunks of {chunks / GIB:.1f} GiB in float32"),)


def _megatron_forward(trainer: Trainer, layout: _Layout, last: bool) -> tuple[Part, ...]:
    tokens = trainer.infer.tokens
    one = activations.forward_only_bytes(trainer.shape, trainer.element) / layout.tensor
    kept = Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer")
    return (kept, *_megatron_logits(trainer, layout, last, tokens, backward=False))

"""Memory of one rank of a trainer: the parts it always holds, and the moments of a step that may need most.

States are exact; activations are those of the longest samples that fit into a micro-batch; communication buffers follow
the engines' defaults. Forward-only roles have weights and one forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roll.check import memory_parts
from roll.check.memory_parts import (
    BACKWARD_BEGINS,
    BACKWARD_ENDS,
    GIB,
    LOG_PROBABILITIES,
    PUBLICATION,
    STATE_BYTES,
    UPDATE,
    Part,
    Phase,
    Trainer,
    TrainerMemory,
    billions,
    one_matrix,
    states,
)
from roll.check.rules import zero_device
from roll.configs.derived import data_parallel_ranks
from roll.configs.errors import count


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
        _megatron_activations(trainer, layout, layers, stage),
        *_logits(trainer, layout, last, trainer.train.tokens, backward=True),
    )
    update = Part("square roots", 4 * held, "AdamW takes them of all master weights of the rank at once")
    phases = (Phase(BACKWARD_BEGINS, backward), Phase(UPDATE, (update,)), forward, one_matrix(shape))
    return TrainerMemory(always, phases, state=STATE_BYTES * once)


def _megatron_activations(trainer: Trainer, layout: _Layout, layers: int, stage: int) -> Part:
    """Return the activations of the micro-batches in flight.

    A stage runs ahead of its backward passes by the number of stages after it.
    """
    shape, element, options = trainer.shape, trainer.element, trainer.options
    shared = options.get("sequence_parallel", False)
    one = memory_parts.megatron_layer_bytes(shape, element, layout.tensor, shared)
    in_flight = min(layout.stages - stage, max(1, trainer.train.per_step))
    tokens = trainer.train.tokens
    within = memory_parts.backward_bytes(shape, element) * tokens / layout.tensor
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
    chunks = memory_parts.HEAD_COPIES * 4 * min(share, memory_parts.MEGATRON_HEAD_CHUNK)
    how = f"{tokens:,} tokens x {trainer.shape.vocabulary:,} / {layout.tensor}"
    gradient = ", and their gradient" if backward else ""
    return (Part("logits", whole + chunks, f"{how}{gradient}; chunks of {chunks / GIB:.1f} GiB in float32"),)


def _forward(trainer: Trainer, layout: _Layout, last: bool) -> tuple[Part, ...]:
    tokens = trainer.infer.tokens
    one = memory_parts.forward_only_bytes(trainer.shape, trainer.element) / layout.tensor
    kept = Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer")
    return (kept, *_logits(trainer, layout, last, tokens, backward=False))


DEEPSPEED_BUCKET = 500_000_000
"""Elements of a DeepSpeed bucket, unless `zero_optimization` says otherwise; two of them overlap."""


def trainer_memory(trainer: Trainer) -> TrainerMemory:
    """Estimate the memory of the rank that needs most."""
    strategy = trainer.config.strategy_args.strategy_name
    own = {"megatron_train": megatron, "deepspeed_train": _deepspeed, "hf_infer": _replica}
    return own.get(strategy, _fsdp2)(trainer)


def _replica(trainer: Trainer) -> TrainerMemory:
    """Estimate `hf_infer`: all weights on each rank, and one forward pass."""
    dtype = trainer.config.model_args.dtype
    weights = states("weights", trainer.shape.parameters, 1, trainer.element, f"{dtype}, whole on each rank")
    return TrainerMemory((weights,), (Phase(LOG_PROBABILITIES, _forward_only(trainer)),))


def _fsdp2(trainer: Trainer) -> TrainerMemory:
    gathered = _gathered(trainer, stays=not trainer.options.get("reshard_after_forward", True))
    forward = Phase(LOG_PROBABILITIES, (gathered, *_forward_only(trainer)))
    if trainer.learns:
        memory = _fsdp2_learning(trainer, gathered, forward)
    else:
        dtype = trainer.config.model_args.dtype
        weights = states("weights", trainer.shape.parameters, trainer.ranks, trainer.element, dtype)
        memory = TrainerMemory((weights,), (forward,))
    offloads = trainer.on_gpu and trainer.options.get("offload", "none") == "cpu"
    return _kept_on_the_host(memory) if offloads else memory


def _fsdp2_learning(trainer: Trainer, gathered: Part, forward: Phase) -> TrainerMemory:
    ranks, learned = trainer.ranks, trainer.learned
    gradients = states("gradients", learned.parameters, ranks, 4, "float32")
    reduced = max(trainer.element + 4, 4 + 4 / ranks) * learned.outside
    outside = f"{billions(learned.outside)} outside the layers, in float32 before it is shared"
    if trainer.on_gpu:
        how = "AdamW takes them of all weights of the rank at once"
        roots = Part("square roots", 4 * learned.parameters / ranks, how)
    else:
        roots = Part("square roots", 2 * 4 * learned.largest / ranks, "of one matrix at a time, twice")
    phases = (
        _backward(trainer, gathered, gradients),
        Phase(BACKWARD_ENDS, (gradients, gathered, Part("embedding's gradient", reduced, outside))),
        Phase(UPDATE, (gradients, roots)),
        forward,
        _merged(trainer) if trainer.has_adapters else one_matrix(trainer.shape),
    )
    return TrainerMemory(_fsdp2_states(trainer), phases, state=STATE_BYTES * learned.parameters / ranks)


def _fsdp2_states(trainer: Trainer) -> tuple[Part, ...]:
    ranks, parameters, learned = trainer.ranks, trainer.shape.parameters, trainer.learned.parameters
    optimizer = states("optimizer", learned, ranks, 8, "AdamW's two moments, float32")
    if not trainer.has_adapters:
        return (states("weights", parameters, ranks, 4, "float32"), optimizer)
    frozen = f"{trainer.config.model_args.dtype}, frozen"
    weights = states("weights", parameters, ranks, trainer.element, frozen)
    return (weights, states("adapters", learned, ranks, 4, "float32"), optimizer)


def _merged(trainer: Trainer) -> Phase:
    """Return the weight update of weights with their adapters added: a matrix, and its sum with the adapter."""
    adapted = max((inputs * outputs for inputs, outputs in trainer.adapted), default=0)
    size = 4 * max(trainer.shape.largest_matrix, 2 * adapted)
    return Phase(PUBLICATION, (Part("one matrix", size, "whole, in float32; twice where an adapter is added"),))


def _kept_on_the_host(memory: TrainerMemory) -> TrainerMemory:
    """Move states, gradients and the optimizer's steps to the host, as `offload: cpu` does."""
    kept = {part.name: part for phase in memory.phases for part in phase.parts if part.name == "gradients"}
    phases = tuple(
        replace(phase, parts=tuple(part for part in phase.parts if part.name not in ("gradients", "square roots")))
        for phase in memory.phases
    )
    away = tuple(Part(part.name, 0, "in the memory of the host (offload: cpu)") for part in memory.always)
    return replace(memory, always=away, phases=phases, elsewhere=(*memory.always, *kept.values()))


def _gathered(trainer: Trainer, *, stays: bool = False) -> Part:
    """Return the weights that are gathered at a time.

    Embedding and head are always gathered, and two layers (one arrives while one computes); all layers if each
    ``stays`` gathered for the backward pass.
    """
    shape, element = trainer.shape, trainer.element
    layers = shape.layers if stays else min(2, shape.layers)
    how = f"embedding, head and {count(layers, 'layer')} in {trainer.config.model_args.dtype}"
    return Part("gathered weights", element * (shape.root_parameters + layers * shape.layer_parameters), how)


def _backward(trainer: Trainer, gathered: Part, gradients: Part) -> Phase:
    """Return the start of the backward pass, when all activations exist.

    The gradients exist too if this is not the first micro-batch of the step. With a single micro-batch, gradients grow
    as activations are freed, and the larger of the two counts.
    """
    shape, element, tokens = trainer.shape, trainer.element, trainer.train.tokens
    learned = trainer.learned
    kept = _activations(trainer)
    if trainer.train.per_step > 1:
        there: tuple[Part, ...] = (kept, gradients)
    else:
        there = (max(kept, gradients, key=lambda part: part.size),)
    layer = 2 * element * learned.in_layer + 4 * learned.in_layer * (1 + 1 / trainer.ranks)
    within = max(memory_parts.head_bytes(shape, tokens), memory_parts.backward_bytes(shape, element) * tokens + layer)
    return Phase(
        BACKWARD_BEGINS,
        (
            *there,
            gathered,
            Part("head's gradient", element * learned.head, "the output layer's weight, until the pass ends"),
            Part("on their way", within, "gradients of one layer before they are shared, or chunks of logits"),
        ),
    )


def _activations(trainer: Trainer) -> Part:
    shape, element, tokens = trainer.shape, trainer.element, trainer.train.tokens
    one = trainer.layer_bytes
    ends = memory_parts.norm_bytes(shape, element) + 3 * element * shape.hidden
    if trainer.options.get("gradient_checkpointing", False):
        size = (shape.layers * element * shape.hidden + one + ends) * tokens
        how = f"{tokens:,} tokens x ({shape.layers} layers' inputs + one layer of {one / 1000:,.0f} kB, recomputed)"
    else:
        size = (shape.layers * one + ends) * tokens
        how = f"{tokens:,} tokens x {shape.layers} layers x {one / 1000:,.0f} kB (gradient_checkpointing keeps less)"
    return Part("activations", size, how)


def _forward_only(trainer: Trainer) -> tuple[Part, Part]:
    shape, tokens = trainer.shape, trainer.infer.tokens
    one = memory_parts.forward_only_bytes(shape, trainer.element)
    return (
        Part("activations", one * tokens, f"{tokens:,} tokens x {one / 1000:,.0f} kB of one layer"),
        Part("logits", memory_parts.head_bytes(shape, tokens), memory_parts.head_how(shape)),
    )


def _deepspeed(trainer: Trainer) -> TrainerMemory:
    shape, ranks, element = trainer.shape, trainer.ranks, trainer.element
    options = trainer.options
    stage = options.get("zero_optimization.stage", 0)
    parameters, dtype = shape.parameters, trainer.config.model_args.dtype
    weights = states("weights", parameters, ranks if stage == 3 else 1, element, dtype)
    live = _gathered(trainer) if stage == 3 else Part("gathered weights", 0, "none: each rank has all")
    forward = Phase(LOG_PROBABILITIES, (live, *_forward_only(trainer)))
    if not trainer.learns:
        return TrainerMemory((weights,), (forward,))
    owners = ranks if stage > 0 else 1
    what = "AdamW's two moments" + (", master weights" if stage > 0 else "")
    optimizer = states("optimizer", parameters, owners, 12 if stage > 0 else 8, f"{what}, float32")
    gradients = states("gradients", parameters, ranks if stage >= 2 else 1, 4, "float32")
    roots = Part("square roots", 4 * parameters / owners, "of the rank's master weights")
    on_host: list[Part] = []
    optimizer_device, weights_device = (zero_device(options, key) for key in ("offload_optimizer", "offload_param"))
    if optimizer_device != "none":
        on_host += [optimizer] if optimizer_device == "cpu" else []
        optimizer = Part("optimizer", 0, "away from the device (offload_optimizer)")
        roots = Part("square roots", 0, "taken on the host")
    if stage == 3 and weights_device != "none":
        on_host += [weights] if weights_device == "cpu" else []
        weights = Part("weights", 0, "away from the device (offload_param)")
    bucket = min(options.get("zero_optimization.reduce_bucket_size", DEEPSPEED_BUCKET), parameters)
    buckets = Part("buckets", 2 * element * bucket if stage > 0 else 0, f"2 x {bucket / 1e6:,.0f} million gradients")
    begin = _backward(trainer, live, gradients)
    phases = (
        Phase(begin.name, (*begin.parts, buckets)),
        Phase(UPDATE, (gradients, roots)),
        forward,
        one_matrix(shape),
    )
    return TrainerMemory((weights, optimizer), phases, tuple(on_host), STATE_BYTES * parameters / ranks)

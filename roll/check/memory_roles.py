"""Memory of one device of an engine, and of one rank of a trainer.

vLLM and SGLang take a share of the device and fill what the weights leave of it with keys and values. The estimate
therefore says how many sequences fit, not how much they take. `hf_infer` takes what its running requests need.

A trainer has parts that it always holds, and several phases of a step, the largest of which counts. States are exact;
activations are those of the longest samples that fit into a micro-batch; communication buffers follow the engines'
defaults. Forward-only roles have weights and one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from roll.check import memory_parts
from roll.check.memory_parts import (
    ELEMENT_BYTES,
    GIB,
    MIB,
    ModelShape,
    Part,
    Phase,
    RoleMemory,
    billions,
    gib,
    one_layer,
    overhead,
    states,
)
from roll.configs import derived
from roll.configs.errors import count
from roll.configs.roles import ModelArguments, WorkerConfig
from roll.configs.run import PipelineConfig
from roll.configs.strategies import Options

VLLM_MEMORY_SHARE = 0.92
"""vLLM 0.32's default of `gpu_memory_utilization`."""
VLLM_BATCHES = ((70, 2048, 256), (160, 8192, 1024), (math.inf, 16384, 1024))
"""Upper limit of GPU memory in GiB -> defaults of `max_num_batched_tokens` and `max_num_seqs` in vLLM 0.32's server. An
A100 with 80 GiB has the lower defaults of the first row; the estimate takes those of its size, which need more."""
CUDA_GRAPHS = 1.0 * GIB
"""Memory of the CUDA graphs that vLLM and SGLang capture, unless they are switched off."""
LOGIT_COPIES = 4
"""Number of vocabulary-sized rows per running sequence, of 4 bytes each: logits, log-probabilities, their sorted copy
and its order."""
SGLANG_MAX_RUNNING = 256
"""Assumed `max_running_requests` of SGLang if the configuration sets none."""
SGLANG_PREFILL = ((35, 2048), (60, 4096), (160, 8192))
"""Upper limit of GPU memory in GiB -> tokens that SGLang prefills at a time; on larger GPUs 16,384."""
USUAL_GPU = 80 * GIB
"""Memory assumed for a GPU of unknown size."""
HF_MAX_RUNNING, HF_MAX_PREFILL = 256, 8192
"""Defaults of `HFInferConfig`."""
HF_LOGIT_COPIES = 3


def engine_memory(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> RoleMemory:
    """Estimate one device of a replica, on GPUs of ``device_bytes`` each; None if the size is unknown."""
    role, on_gpu = config.actor_infer, config.cluster.device == "cuda"
    name = role.strategy_args.strategy_name
    if on_gpu and name in ("vllm", "sglang"):
        memory = (_vllm if name == "vllm" else _sglang)(config, shape, device_bytes)
    else:
        memory = _embedded(config, shape)
    how = "the next version beside the present one, mapped or staged"
    if name == "sglang":
        how = "files in memory, which SGLang reads while an update lasts"
    copy = Part("new weights", shape.parameters * ELEMENT_BYTES[role.model_args.dtype], how)
    host: tuple[Part, ...] = (copy,) if name == "sglang" or not on_gpu else ()
    if config.weight_update.content == "delta":
        host += (replace(copy, name="base of deltas", how="the last version, from which the next one is made"),)
    return replace(
        memory,
        always=(*memory.always, overhead(on_gpu, role.num_gpus_per_engine)),
        processes=derived.engine_replicas(config),
        host=host,
    )


def engine_share(config: PipelineConfig, device_bytes: float) -> float:
    """Return the bytes of one device that an engine's weights, keys and values may take, by its option or default."""
    options = Options.of(config.actor_infer)
    if options.strategy != "sglang":
        own = options.strategy == "vllm"
        return device_bytes * (options.get("gpu_memory_utilization", VLLM_MEMORY_SHARE) if own else VLLM_MEMORY_SHARE)
    requests, ranks = options.get("max_running_requests", SGLANG_MAX_RUNNING), config.actor_infer.num_gpus_per_engine
    part = options.get(
        "mem_fraction_static", _sglang_share(device_bytes, _sglang_prefill(config, device_bytes), requests, ranks)
    )
    return float(part * (device_bytes - overhead(True, ranks).size))


def _sglang_prefill(config: PipelineConfig, device_bytes: float) -> int:
    """Return the tokens that SGLang prefills at a time."""
    usual = next((tokens for below, tokens in SGLANG_PREFILL if device_bytes < below * GIB), 16384)
    tokens = Options.of(config.actor_infer).get("chunked_prefill_size", usual)
    return tokens if tokens > 0 else derived.sequence_length(config)


def _vllm(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> RoleMemory:
    options, ranks = Options.of(config.actor_infer), config.actor_infer.num_gpus_per_engine
    size = USUAL_GPU if device_bytes is None else device_bytes
    usual_tokens, usual_requests = next(usual for below, *usual in VLLM_BATCHES if size < below * GIB)
    tokens = options.get("max_num_batched_tokens", usual_tokens)
    requests = options.get("max_num_seqs", usual_requests)
    weights = _weights(config, shape, ranks)
    computing = _computing(config, shape, tokens, requests, graphs=not options.get("enforce_eager", False))
    room = options.get("kv_cache_memory_bytes", 0)  # vLLM treats 0 as unset
    share: Part | None = None
    if device_bytes is not None and not room:
        part = options.get("gpu_memory_utilization", VLLM_MEMORY_SHARE)
        share = Part("gpu_memory_utilization", part * device_bytes, f"{part:g} x {gib(device_bytes)}")
    held = Part("weights, computing", weights.size + computing.size + overhead(True, ranks).size, "")
    return _filled("vLLM", config, shape, requests, (weights, computing), held, share, room or None)


def _sglang(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> RoleMemory:
    """Estimate SGLang, where `mem_fraction_static` of the memory left by the driver holds only weights, keys and
    values."""
    options, ranks = Options.of(config.actor_infer), config.actor_infer.num_gpus_per_engine
    requests = options.get("max_running_requests", SGLANG_MAX_RUNNING)
    tokens = _sglang_prefill(config, USUAL_GPU if device_bytes is None else device_bytes)
    weights = _weights(config, shape, ranks)
    share: Part | None = None
    computing = _computing(config, shape, tokens, requests, graphs=not options.get("disable_cuda_graph", False))
    if device_bytes is not None:
        part = options.get("mem_fraction_static", _sglang_share(device_bytes, tokens, requests, ranks))
        left = device_bytes - overhead(True, ranks).size
        share = Part("mem_fraction_static", part * left, f"{part:.3g} x {gib(left)} that the driver leaves")
    held = Part("weights", weights.size, "")
    return _filled("SGLang", config, shape, requests, (weights, computing), held, share)


def _filled(
    engine: str,
    config: PipelineConfig,
    shape: ModelShape,
    requests: int,
    parts: tuple[Part, Part],
    held: Part,
    share: Part | None,
    room: float | None = None,
) -> RoleMemory:
    """Estimate an engine that fills the rest of its ``share`` of the device with keys and values.

    The share must also hold ``held`` and at least one sequence, else the engine does not start. ``room``: the bytes of
    keys and values, if the configuration sets them. Without share and room, all running sequences are assumed to fit.
    """
    token = shape.cache_bytes_per_token(_element(config)) / min(config.actor_infer.num_gpus_per_engine, shape.kv_heads)
    length, sequences = derived.sequence_length(config), _running_sequences(config, requests)
    sequence, misfits, notes = token * length, tuple[str, ...](), tuple[str, ...]()
    if share is not None:
        room = max(0.0, share.size - held.size)
        if held.size + sequence > share.size:
            has = f"actor_infer has {share.how} = {gib(share.size)} ({share.name})"
            misfits = (f"{has}, and {held.name} and one sequence need {gib(held.size + sequence)}",)
    wanted = sequence * sequences
    room = wanted if room is None else room
    if sequence <= room < wanted:
        want = f"keys and values of {count(sequences, 'sequence')} of full length want {gib(wanted)}"
        notes = (f"{want}: beyond what there is, {engine} interrupts requests and computes them again",)
    fit = f"room for {room / sequence:,.0f} sequences of {length:,} tokens"
    how = f"{token / 1024:,.0f} KiB a token; {fit}; up to {sequences:,} run at a time"
    return RoleMemory((parts[0], Part("keys and values", room, how), parts[1]), notes=notes, misfits=misfits)


def _sglang_share(device_bytes: float, tokens: int, requests: int, ranks: int) -> float:
    """Return SGLang's default of `mem_fraction_static`.

    It keeps 1.5 MiB per token of a prefill, 2 MiB per request of a CUDA graph, and on large GPUs at least 10 GiB.
    """
    reserved = MIB * (512 + 1.5 * max(tokens, 2048) + 2 * requests + 128 * ranks)
    if device_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return max(0.0, 1 - reserved / device_bytes)


def _embedded(config: PipelineConfig, shape: ModelShape) -> RoleMemory:
    """Estimate `hf_infer`, and vLLM on a CPU, whose limits are of the same kind."""
    options, element = Options.of(config.actor_infer), _element(config)
    vllm = options.strategy == "vllm"
    most_sequences = options.get("max_num_seqs" if vllm else "max_running_requests", HF_MAX_RUNNING)
    most_tokens = HF_MAX_PREFILL if vllm else options.get("max_prefill_tokens", HF_MAX_PREFILL)
    length = -(-derived.sequence_length(config) // 16) * 16
    sequences = _running_sequences(config, most_sequences)
    cached = shape.cache_bytes_per_token(element)
    prompts = min(most_tokens, sequences * config.prompt_length)
    prefill = prompts * (cached + memory_parts.forward_only_bytes(shape, element))
    logits = 4 * HF_LOGIT_COPIES * shape.vocabulary * sequences
    return RoleMemory(
        (
            _weights(config, shape, 1),
            Part("keys and values", cached * length * sequences, f"{count(sequences, 'request')} of {length:,} tokens"),
            Part("computing", max(prefill, logits), f"{prompts:,} prompt tokens at a time, or logits of all requests"),
        )
    )


def _running_sequences(config: PipelineConfig, most: int) -> int:
    """Return the number of sequences that one replica runs at a time: all that may be in flight, at most ``most``."""
    started = (derived.groups_ahead(config) + config.rollout_batch_size) * derived.group_size(config)
    return max(1, min(most, -(-started // max(1, derived.engine_replicas(config)))))


def _computing(config: PipelineConfig, shape: ModelShape, tokens: int, requests: int, *, graphs: bool) -> Part:
    """Estimate a forward pass over a prefill, the logits of all requests, and captured graphs."""
    width = 3 * shape.width / config.actor_infer.num_gpus_per_engine
    pass_bytes = _element(config) * tokens * (width + 6 * shape.hidden)
    logits = 4 * LOGIT_COPIES * shape.vocabulary * requests
    captured, what = (CUDA_GRAPHS, "logits, CUDA graphs") if graphs else (0.0, "logits")
    return Part("computing", pass_bytes + logits + captured, f"{tokens:,} tokens at a time, {what}")


def _weights(config: PipelineConfig, shape: ModelShape, gpus: int) -> Part:
    dtype = config.actor_infer.model_args.dtype
    return states("weights", shape.parameters, gpus, ELEMENT_BYTES[dtype], dtype, "GPU")


def _element(config: PipelineConfig) -> int:
    return ELEMENT_BYTES[config.actor_infer.model_args.dtype]


BACKWARD_BEGINS, BACKWARD_ENDS, UPDATE = "the backward pass begins", "the backward pass ends", "the optimizer steps"
LOG_PROBABILITIES, PUBLICATION = "log-probabilities", "weights are gathered"
STATE_BYTES = 12
"""Bytes per parameter in a training state: the weight and two moments in float32."""
DEEPSPEED_BUCKET = 500_000_000
"""Elements of a DeepSpeed bucket if `zero_optimization` sets none; two buckets exist at a time."""


@dataclass(frozen=True)
class Learned:
    """Number of elements that have gradients and moments."""

    parameters: int
    """Total number."""
    in_layer: int
    """Number in one layer."""
    outside: int
    """Number outside the layers: embedding, last norm, output layer."""
    head: int
    """Number in the output layer's weight."""

    @classmethod
    def all_weights(cls, shape: ModelShape) -> Learned:
        """Count the whole model."""
        head = 0 if shape.value_head else shape.embedding_parameters
        return cls(shape.parameters, shape.layer_parameters, shape.root_parameters, head)

    @classmethod
    def adapters(cls, shape: ModelShape, arguments: ModelArguments) -> Learned:
        """Count two matrices beside each named linear layer: ``[rank, inputs]`` and ``[outputs, rank]``."""
        rank, layers = arguments.lora_rank, adapted_layers(shape, arguments.lora_target)
        in_layer = sum(rank * (inputs + outputs) for inputs, outputs in layers)
        return cls(shape.layers * in_layer, in_layer, 0, 0)


def adapted_layers(shape: ModelShape, wanted: list[str] | str | None) -> Sequence[tuple[int, int]]:
    """Return inputs and outputs of the linear layers in one decoder layer that ``wanted`` names by their last part.

    Experts are one tensor and cannot have adapters. Another rule reports a name that the model does not have.
    """
    known = {
        "q_proj": (shape.hidden, shape.queries),
        "k_proj": (shape.hidden, shape.keys),
        "v_proj": (shape.hidden, shape.keys),
        "o_proj": (shape.queries, shape.hidden),
    }
    if not shape.experts:
        known |= {
            "gate_proj": (shape.hidden, shape.intermediate),
            "up_proj": (shape.hidden, shape.intermediate),
            "down_proj": (shape.intermediate, shape.hidden),
        }
    names = wanted.split(",") if isinstance(wanted, str) else wanted or []
    ends = {name.strip().rpartition(".")[2] for name in names}
    return list(known.values()) if ends == {"all-linear"} else [known[name] for name in known if name in ends]


@dataclass(frozen=True)
class Trainer:
    """One rank of a trainer or forward-only role, with the facts that decide its memory."""

    config: WorkerConfig
    shape: ModelShape
    options: Options
    dtype: str
    """Precision of computing."""
    element: int
    """Bytes per element in computing."""
    ranks: int
    on_gpu: bool
    learns: bool
    has_adapters: bool
    """True if only adapters learn."""
    adapted: Sequence[tuple[int, int]]
    """Inputs and outputs of the linear layers with adapters, in one decoder layer."""
    learned: Learned
    """Elements that learn; meaningful only if ``learns``."""
    longest: int
    """Tokens of the longest sample."""
    train_tokens: int
    """Tokens of the largest micro-batch in training, padding included."""
    micro_batches: int
    """Number of micro-batches of this size in an optimizer step."""
    infer_tokens: int
    """Tokens of the largest micro-batch for log-probabilities."""

    @property
    def has_packed_kernel(self) -> bool:
        """True if attention over packed rows is one call of a kernel. It needs Ampere or newer, as bfloat16 does."""
        return self.on_gpu and self.dtype == "bfloat16"


def trainer_memory(trainer: Trainer) -> RoleMemory:
    """Estimate the memory of the rank that needs most."""
    strategy = trainer.config.strategy_args.strategy_name
    own = {"megatron_train": _megatron, "deepspeed_train": _deepspeed, "hf_infer": _replica}
    return own.get(strategy, _fsdp2)(trainer)


def _replica(trainer: Trainer) -> RoleMemory:
    """Estimate `hf_infer`: all weights on each rank, and one forward pass."""
    weights = states("weights", trainer.shape.parameters, 1, trainer.element, f"{trainer.dtype}, whole on each rank")
    return RoleMemory((weights,), (Phase(LOG_PROBABILITIES, _forward_only(trainer)),))


def _fsdp2(trainer: Trainer) -> RoleMemory:
    gathered = _gathered(trainer, stays=not trainer.options.get("reshard_after_forward", True))
    forward = Phase(LOG_PROBABILITIES, (gathered, *_forward_only(trainer)))
    if trainer.learns:
        memory = _fsdp2_learning(trainer, gathered, forward)
    else:
        weights = states("weights", trainer.shape.parameters, trainer.ranks, trainer.element, trainer.dtype)
        memory = RoleMemory((weights,), (forward,))
    offloads = trainer.on_gpu and trainer.options.get("offload", "none") == "cpu"
    return _kept_on_the_host(memory) if offloads else memory


def _fsdp2_learning(trainer: Trainer, gathered: Part, forward: Phase) -> RoleMemory:
    ranks, learned, parameters = trainer.ranks, trainer.learned, trainer.shape.parameters
    always = [states("weights", parameters, ranks, 4, "float32")]
    if trainer.has_adapters:
        frozen = states("weights", parameters, ranks, trainer.element, f"{trainer.dtype}, frozen")
        always = [frozen, states("adapters", learned.parameters, ranks, 4, "float32")]
    always.append(states("optimizer", learned.parameters, ranks, 8, "AdamW's two moments, float32"))
    gradients = states("gradients", learned.parameters, ranks, 4, "float32")
    reduced = max(trainer.element + 4, 4 + 4 / ranks) * learned.outside
    outside = f"{billions(learned.outside)} outside the layers, in float32 before it is shared"
    phases = (
        _backward(trainer, gathered, gradients),
        Phase(BACKWARD_ENDS, (gradients, gathered, Part("embedding's gradient", reduced, outside))),
        Phase(UPDATE, (gradients,)),
        forward,
        _one_matrix(trainer),
    )
    return RoleMemory(tuple(always), phases, state=STATE_BYTES * learned.parameters / ranks)


def _one_matrix(trainer: Trainer) -> Phase:
    """Return the phase of a weight update: one matrix at a time; an adapter is added to a copy of its matrix."""
    adapted = max((inputs * outputs for inputs, outputs in trainer.adapted), default=0)
    twice = "; twice where an adapter is added" if trainer.has_adapters else ""
    size = 4 * max(trainer.shape.largest_matrix, 2 * adapted)
    return Phase(PUBLICATION, (Part("one matrix", size, f"whole, in float32{twice}"),))


def _kept_on_the_host(memory: RoleMemory) -> RoleMemory:
    """Move states, gradients and the optimizer's steps to the host, as `offload: cpu` does."""
    kept = {part.name: part for phase in memory.phases for part in phase.parts if part.name == "gradients"}
    phases = tuple(
        replace(phase, parts=tuple(part for part in phase.parts if part.name != "gradients")) for phase in memory.phases
    )
    away = tuple(Part(part.name, 0, "in the memory of the host (offload: cpu)") for part in memory.always)
    return replace(memory, always=away, phases=phases, host=(*memory.always, *kept.values()))


def _gathered(trainer: Trainer, *, stays: bool = False) -> Part:
    """Return the weights that are gathered at a time.

    These are embedding, head, and two layers: one arrives while the other computes. With ``stays`` all layers remain
    gathered for the backward pass.
    """
    shape = trainer.shape
    layers = shape.layers if stays else min(2, shape.layers)
    size = trainer.element * (shape.root_parameters + layers * shape.layer_parameters)
    return Part("gathered weights", size, f"embedding, head and {count(layers, 'layer')} in {trainer.dtype}")


def _backward(trainer: Trainer, gathered: Part, gradients: Part) -> Phase:
    """Return the phase in which the backward pass begins and all activations exist.

    With several micro-batches in a step the gradients exist at the same time. With a single one, gradients grow as
    activations are freed, and the larger of the two counts.
    """
    shape, element, tokens, learned = trainer.shape, trainer.element, trainer.train_tokens, trainer.learned
    kept = _activations(trainer)
    together = trainer.micro_batches > 1
    there = (kept, gradients) if together else (max(kept, gradients, key=lambda part: part.size),)
    layer = 2 * element * learned.in_layer + 4 * learned.in_layer * (1 + 1 / trainer.ranks)
    within = max(memory_parts.head_bytes(shape, tokens), memory_parts.backward_bytes(shape, element) * tokens + layer)
    head = Part("head's gradient", element * learned.head, "the output layer's weight, until the pass ends")
    on_their_way = Part("on their way", within, "gradients of one layer before they are shared, or chunks of logits")
    return Phase(BACKWARD_BEGINS, (*there, gathered, head, on_their_way))


def _activations(trainer: Trainer) -> Part:
    shape, element, tokens, role = trainer.shape, trainer.element, trainer.train_tokens, trainer.config
    attention, adapted = role.model_args.attn_implementation, len(trainer.adapted)
    one = memory_parts.layer_bytes(shape, element, eager_width=trainer.longest if attention == "eager" else 0)
    if role.use_sequence_packing is not False and attention == "sdpa" and not trainer.has_packed_kernel:
        one += element * shape.queries  # joined results of the samples, besides the parts that attention keeps
    if trainer.has_adapters:
        one += memory_parts.adapter_bytes(shape, adapted, role.model_args.lora_rank, element)
    ends = memory_parts.norm_bytes(shape, element) + 3 * element * shape.hidden
    if trainer.options.get("gradient_checkpointing", False):
        size = (shape.layers * element * shape.hidden + one + ends) * tokens
        how = f"{tokens:,} tokens x ({shape.layers} layers' inputs + one layer of {one / 1000:,.0f} kB, recomputed)"
    else:
        size = (shape.layers * one + ends) * tokens
        how = f"{tokens:,} tokens x {shape.layers} layers x {one / 1000:,.0f} kB (gradient_checkpointing keeps less)"
    return Part("activations", size, how)


def _forward_only(trainer: Trainer) -> tuple[Part, Part]:
    shape, tokens, copies = trainer.shape, trainer.infer_tokens, memory_parts.HEAD_COPIES
    chunks = f"{copies} x {memory_parts.HEAD_CHUNK * 4 // MIB} MiB"
    how = f"{chunks}: logits are made in chunks, never all {shape.vocabulary:,} for each token"
    return one_layer(shape, trainer.element, tokens), Part("logits", memory_parts.head_bytes(shape, tokens), how)


def _deepspeed(trainer: Trainer) -> RoleMemory:
    ranks, element, options = trainer.ranks, trainer.element, trainer.options
    stage, parameters = options.get("zero_optimization.stage", 0), trainer.shape.parameters
    weights = states("weights", parameters, ranks if stage == 3 else 1, element, trainer.dtype)
    live = _gathered(trainer) if stage == 3 else Part("gathered weights", 0, "none: each rank has all")
    forward = Phase(LOG_PROBABILITIES, (live, *_forward_only(trainer)))
    if not trainer.learns:
        return RoleMemory((weights,), (forward,))
    owners = ranks if stage > 0 else 1
    what = "AdamW's two moments" + (", master weights" if stage > 0 else "")
    optimizer = states("optimizer", parameters, owners, 12 if stage > 0 else 8, f"{what}, float32")
    gradients = states("gradients", parameters, ranks if stage >= 2 else 1, 4, "float32")
    roots = Part("square roots", 4 * parameters / owners, "of the rank's master weights")
    on_host: list[Part] = []
    optimizer_device, weights_device = (
        options.get(f"zero_optimization.{section}.device", "none") for section in ("offload_optimizer", "offload_param")
    )
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
        replace(begin, parts=(*begin.parts, buckets)),
        Phase(UPDATE, (gradients, roots)),
        forward,
        _one_matrix(trainer),
    )
    return RoleMemory((weights, optimizer), phases, tuple(on_host), state=STATE_BYTES * parameters / ranks)


def _megatron(trainer: Trainer) -> RoleMemory:
    """Estimate the pipeline stage that needs most."""
    stages = trainer.options.get("pipeline_model_parallel_size", 1)
    return max((_stage(trainer, stage, stages) for stage in sorted({0, stages - 1})), key=lambda memory: memory.peak)


def _stage(trainer: Trainer, stage: int, stages: int) -> RoleMemory:
    shape, element, options = trainer.shape, trainer.element, trainer.options
    tensor = options.get("tensor_model_parallel_size", 1)
    experts = options.get("expert_model_parallel_size", 1) * options.get("expert_tensor_parallel_size", tensor)
    layers = shape.layers // stages
    first, last = stage == 0, stage == stages - 1
    dense = layers * ((shape.attention_parameters + shape.dense_parameters) / tensor + 2 * shape.hidden)
    has_head = last and not shape.value_head and not (shape.tied and first)
    dense += (int(first) + int(has_head)) * shape.embedding_parameters / tensor
    dense += shape.hidden + 1 if last and shape.value_head else 0  # the same on each tensor-parallel rank
    expert = layers * shape.expert_parameters / experts
    own = dense + expert
    where = f"stage {stage + 1} of {stages}, " if stages > 1 else ""
    share = f"{where}{own / 1e9:.2f} billion"
    weights = Part("weights", element * own, f"{share} x {element} bytes ({trainer.dtype})")
    computes_logits = last and not shape.value_head
    logits = [_logits(trainer, tensor, trainer.infer_tokens, backward=False)] if computes_logits else []
    forward = Phase(LOG_PROBABILITIES, (one_layer(shape, element, trainer.infer_tokens, tensor), *logits))
    if not trainer.learns:
        return RoleMemory((weights,), (forward,))
    shared = options.get("use_distributed_optimizer", True)
    ranks = derived.data_parallel_ranks(trainer.config) * derived.context_ranks(trainer.config)
    once = dense / ranks + expert / max(1, trainer.ranks // (stages * experts))
    held = once if shared else own
    size = 12 if element == 2 else 8
    what = "AdamW's two moments" + (" and master weights" if element == 2 else "")
    copies = f" / {count(ranks, 'rank')} with the same share" if shared and ranks > 1 else ""
    always = (
        weights,
        Part("gradients", 4 * own, f"{share} x 4 bytes (float32, one buffer for the whole run)"),
        Part("optimizer", size * held, f"{share} x {size} bytes ({what}){copies}"),
    )
    logits = [_logits(trainer, tensor, trainer.train_tokens, backward=True)] if computes_logits else []
    in_flight = min(stages - stage, max(1, trainer.micro_batches))
    backward = Phase(BACKWARD_BEGINS, (_megatron_activations(trainer, tensor, layers, in_flight), *logits))
    roots = Part("square roots", 4 * held, "AdamW takes them of all master weights of the rank at once")
    phases = (backward, Phase(UPDATE, (roots,)), forward, _one_matrix(trainer))
    return RoleMemory(always, phases, state=STATE_BYTES * once)


def _megatron_activations(trainer: Trainer, tensor: int, layers: int, in_flight: int) -> Part:
    """Return the activations of the micro-batches in flight.

    A stage runs ahead of its backward passes by the number of stages after it. The count has inputs and results of
    norms and of the residual sum; rotated queries, keys, values and the result of attention; gate, up and their
    product.
    """
    shape, element, options, tokens = trainer.shape, trainer.element, trainer.options, trainer.train_tokens
    norm_shares = tensor if options.get("sequence_parallel", False) else 1
    split = element * (3 * shape.queries + 4 * shape.keys + 3 * shape.width) + 4 * shape.heads
    split += 2 * shape.experts_per_token * shape.hidden * element
    one = 6 * shape.hidden * element / norm_shares
    packing = trainer.config.use_sequence_packing
    layers_of, device = options.get("transformer_impl", "auto"), "cuda" if trainer.on_gpu else "cpu"
    # `auto` packs with PyTorch's layers only.
    if packing is True or (packing and not derived.takes_transformer_engine(layers_of, device)):
        one += 4 * element * shape.head_size  # cosines and sines of the tokens' positions, which rows do not share
        if not trainer.has_packed_kernel:
            split += element * shape.queries  # results of the samples, besides those attention keeps
    one += split / tensor
    within = memory_parts.backward_bytes(shape, element) * tokens / tensor
    if options.get("recompute_granularity", None) == "full":
        unit = options.get("recompute_num_layers", 1)
        if options.get("recompute_method", None) == "block":
            inputs, computed, again = unit, max(0, layers - unit), 1
        else:
            inputs, computed, again = -(-layers // unit), 0, unit
        kept = inputs * element * shape.hidden / norm_shares + computed * one
        size = (in_flight * kept + again * one) * tokens + within
        how = f"{in_flight} x {tokens:,} tokens x {inputs} inputs, and {count(again, 'layer')} of {one / 1000:,.0f} kB"
    else:
        size = in_flight * layers * one * tokens + within
        how = f"{in_flight} x {tokens:,} tokens x {layers} layers x {one / 1000:,.0f} kB"
    return Part("activations", size, how)


def _logits(trainer: Trainer, tensor: int, tokens: int, *, backward: bool) -> Part:
    share = tokens * trainer.shape.vocabulary / tensor
    whole = share * trainer.element * (2 if backward else 1)
    chunks = memory_parts.HEAD_COPIES * 4 * min(share, memory_parts.MEGATRON_HEAD_CHUNK)
    how = f"{tokens:,} tokens x {trainer.shape.vocabulary:,} / {tensor}"
    gradient = ", and their gradient" if backward else ""
    return Part("logits", whole + chunks, f"{how}{gradient}; chunks of {chunks / GIB:.1f} GiB in float32")

"""Memory of one device of an engine: weights, keys and values of running requests, and a forward pass.

vLLM and SGLang take a share of the device and fill the rest of it with keys and values. The estimate therefore says how
many sequences fit, not how much they take. `hf_infer` takes what its running requests need.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.check.memory_parts import ELEMENT_BYTES, GIB, MIB, ModelShape, Part, driver
from roll.configs import derived
from roll.configs.errors import count
from roll.configs.roles import ActorInferConfig
from roll.configs.run import PipelineConfig
from roll.configs.strategies import Options

VLLM_MEMORY_SHARE = 0.92
VLLM_MAX_NUM_SEQS = 128
VLLM_MAX_BATCHED_TOKENS = 2048
"""vLLM 0.32's defaults for an asynchronous engine."""
CUDA_GRAPHS = 1.0 * GIB
"""CUDA graphs captured by vLLM and SGLang, unless they are switched off."""
LOGIT_COPIES = 4
"""float32 rows of the vocabulary for each running sequence: logits, log-probabilities, their sorted copy and its
order."""
SGLANG_MAX_RUNNING = 256
"""`max_running_requests`, unless the configuration says otherwise."""
SGLANG_PREFILL = ((35, 2048), (60, 4096), (160, 8192))
"""GPU memory in GiB -> tokens that SGLang prefills at a time on a smaller GPU; on larger ones 16,384."""
HF_MAX_RUNNING, HF_MAX_PREFILL = 256, 8192
"""Defaults of `HFInferConfig`."""
HF_LOGIT_COPIES = 3


@dataclass(frozen=True)
class EngineMemory:
    """Memory of one device of a replica."""

    always: tuple[Part, ...]
    notes: tuple[str, ...]
    least: Part
    """Memory that the share must hold, one sequence of maximum length included; with less the engine does not start."""
    share: Part | None
    """The part of the device that the engine reserves whatever it needs; None: it takes what is listed."""


@dataclass(frozen=True)
class _Cache:
    """Keys and values on one device."""

    token: float
    """Bytes of one token."""
    length: int
    """Tokens of the longest sequence."""
    sequences: int
    """Maximum number of running sequences."""

    @property
    def sequence(self) -> float:
        """Bytes of one sequence of full length."""
        return self.token * self.length

    @property
    def wanted(self) -> float:
        """Bytes if the maximum number of sequences run at full length."""
        return self.sequence * self.sequences

    def part(self, room: float) -> Part:
        """Return a line with ``room`` bytes and the number of sequences that fit."""
        fit = f"room for {room / self.sequence:,.0f} sequences of {self.length:,} tokens"
        how = f"{self.token / 1024:,.0f} KiB a token; {fit}; up to {self.sequences:,} run at a time"
        return Part("keys and values", room, how)

    def notes(self, room: float, engine: str) -> tuple[str, ...]:
        """Return a note if only some of the sequences fit."""
        if room >= self.wanted or room < self.sequence:
            return ()
        return (
            f"keys and values of {count(self.sequences, 'sequence')} of full length want {self.wanted / GIB:.1f} GiB: "
            f"beyond what there is, {engine} interrupts requests and computes them again",
        )


def engine_memory(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> EngineMemory:
    """Estimate the memory on GPUs of ``device_bytes`` each; None if the size is unknown."""
    shared = {"vllm": _vllm, "sglang": _sglang}.get(config.actor_infer.strategy_args.strategy_name)
    if shared is not None and config.cluster.device == "cuda":
        return shared(config, shape, device_bytes)
    return _embedded(config, shape)


def running_sequences(config: PipelineConfig, most: int) -> int:
    """Return the sequences that one replica runs at a time: all that may have started, at most ``most``."""
    started = (derived.groups_ahead(config) + config.rollout_batch_size) * derived.group_size(config)
    return max(1, min(most, -(-started // max(1, derived.engine_replicas(config)))))


def _vllm(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> EngineMemory:
    role = config.actor_infer
    options, tensor, element = Options.of(role), role.num_gpus_per_engine, _element(role)
    weights = _weights(shape, element, tensor, role.model_args.dtype)
    tokens = int(options.get("max_num_batched_tokens", VLLM_MAX_BATCHED_TOKENS))
    places = int(options.get("max_num_seqs", VLLM_MAX_NUM_SEQS))
    token = shape.cache_bytes_per_token(element) / min(tensor, shape.kv_heads)
    cache = _Cache(token, derived.sequence_length(config), running_sequences(config, places))
    computing = _computing(shape, element, tensor, tokens, places, graphs=not options.get("enforce_eager", False))
    fixed = weights.size + computing.size + driver(tensor).size
    share = options.get("gpu_memory_utilization", VLLM_MEMORY_SHARE)
    room, taken = cache.wanted, None
    wanted = options.get("kv_cache_memory_bytes", 0)  # vLLM treats 0 as unset
    if wanted:
        room = wanted
    elif device_bytes is not None:
        room = max(0.0, share * device_bytes - fixed)
        taken = Part("gpu_memory_utilization", share * device_bytes, f"{share:g} x {device_bytes / GIB:.1f} GiB")
    least = Part("least", fixed + cache.sequence, "weights, computing and one sequence")
    return EngineMemory((weights, cache.part(room), computing), cache.notes(room, "vLLM"), least, taken)


def _sglang(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> EngineMemory:
    """Estimate SGLang: `mem_fraction_static` of the memory that the driver leaves holds weights, keys and values
    only."""
    role = config.actor_infer
    options, tensor, element = Options.of(role), role.num_gpus_per_engine, _element(role)
    places = options.get("max_running_requests", SGLANG_MAX_RUNNING)
    token = shape.cache_bytes_per_token(element) / min(tensor, shape.kv_heads)
    cache = _Cache(token, derived.sequence_length(config), running_sequences(config, places))
    weights = _weights(shape, element, tensor, role.model_args.dtype)
    tokens = options.get("chunked_prefill_size", sglang_prefill(device_bytes))
    tokens = tokens if tokens > 0 else cache.length
    computing = _computing(shape, element, tensor, tokens, places, graphs=not options.get("disable_cuda_graph", False))
    room, taken = cache.wanted, None
    if device_bytes is not None:
        share = options.get("mem_fraction_static", sglang_share(device_bytes, tokens, places, tensor))
        left = device_bytes - driver(tensor).size
        taken = Part("mem_fraction_static", share * left, f"{share:.3g} x {left / GIB:.1f} GiB that the driver leaves")
        room = max(0.0, taken.size - weights.size)
    least = Part("least", weights.size + cache.sequence, "weights and one sequence")
    return EngineMemory((weights, cache.part(room), computing), cache.notes(room, "SGLang"), least, taken)


def sglang_prefill(device_bytes: float | None) -> int:
    """Return the tokens that SGLang prefills at a time by default; a GPU of unknown size counts as 80 GiB."""
    gib = 80.0 if device_bytes is None else device_bytes / GIB
    return next((tokens for below, tokens in SGLANG_PREFILL if gib < below), 16384)


def sglang_share(device_bytes: float, tokens: int, places: int, tensor: int) -> float:
    """Return SGLang's default of `mem_fraction_static`.

    It keeps 1.5 MiB per token of a prefill, 2 MiB per request of a CUDA graph, and on large GPUs at least 10 GiB.
    """
    reserved = MIB * (512 + 1.5 * max(tokens, 2048) + 2 * places + 128 * tensor)
    if device_bytes > 60 * GIB:
        reserved = max(reserved, 10 * GIB)
    return max(0.0, 1 - reserved / device_bytes)


def _computing(shape: ModelShape, element: int, tensor: int, tokens: int, places: int, *, graphs: bool) -> Part:
    """Estimate a forward pass over a prefill, the logits of all requests, and captured graphs."""
    pass_bytes = element * tokens * (3 * _width(shape) / tensor + 6 * shape.hidden)
    logits = 4 * LOGIT_COPIES * shape.vocabulary * places
    captured, what = (CUDA_GRAPHS, "logits, CUDA graphs") if graphs else (0.0, "logits")
    return Part("computing", pass_bytes + logits + captured, f"{tokens:,} tokens at a time, {what}")


def _embedded(config: PipelineConfig, shape: ModelShape) -> EngineMemory:
    """Estimate `hf_infer`, and vLLM on a CPU, which has the same kind of limits."""
    role = config.actor_infer
    element = _element(role)
    length = -(-derived.sequence_length(config) // 16) * 16
    most_sequences, most_tokens = _embedded_limits(role)
    sequences = running_sequences(config, most_sequences)
    cache = shape.cache_bytes_per_token(element) * length * sequences
    prompts = min(most_tokens, sequences * config.prompt_length)
    prefill = prompts * (
        shape.cache_bytes_per_token(element) + element * (3 * _width(shape) + 2 * shape.hidden) + 8 * shape.hidden
    )
    logits = 4 * HF_LOGIT_COPIES * shape.vocabulary * sequences
    weights = _weights(shape, element, 1, role.model_args.dtype)
    always = (
        weights,
        Part("keys and values", cache, f"{count(sequences, 'request')} of {length:,} tokens"),
        Part("computing", max(prefill, logits), f"{prompts:,} prompt tokens at a time, or logits of all requests"),
    )
    least = Part("least", sum(part.size for part in always), "all of it")
    return EngineMemory(always, (), least, None)


def _embedded_limits(role: ActorInferConfig) -> tuple[int, int]:
    """Return the maximum number of requests and of prompt tokens at a time."""
    options = Options.of(role)
    if options.strategy == "vllm":
        return int(options.get("max_num_seqs", HF_MAX_RUNNING)), HF_MAX_PREFILL
    return options.get("max_running_requests", HF_MAX_RUNNING), options.get("max_prefill_tokens", HF_MAX_PREFILL)


def _weights(shape: ModelShape, element: int, tensor: int, dtype: str) -> Part:
    split = f" / {count(tensor, 'GPU')}" if tensor > 1 else ""
    how = f"{shape.parameters / 1e9:.2f} billion x {element} bytes ({dtype}){split}"
    return Part("weights", shape.parameters * element / tensor, how)


def _width(shape: ModelShape) -> int:
    return shape.experts_per_token * shape.expert_intermediate if shape.experts else shape.intermediate


def _element(role: ActorInferConfig) -> int:
    return ELEMENT_BYTES[role.model_args.dtype]

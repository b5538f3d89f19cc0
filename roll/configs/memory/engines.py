"""Memory of one device of an engine: weights, keys and values of what runs, and a forward pass.

vLLM takes a share of the device and fills what weights and computing leave with keys and values, so the question is not
how much it takes but how many sequences that holds. `hf_infer` takes what its running requests need.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll.configs import derived
from roll.configs.memory.records import ELEMENT_BYTES, GIB, Part, driver
from roll.configs.memory.shapes import ModelShape
from roll.configs.schema import ActorInferConfig, PipelineConfig
from roll.configs.wording import count

VLLM_MEMORY_SHARE = 0.92
VLLM_MAX_NUM_SEQS = 128
VLLM_MAX_BATCHED_TOKENS = 2048
"""vLLM 0.32's defaults for an asynchronous engine."""
VLLM_GRAPHS = 1.0 * GIB
"""Captured CUDA graphs, unless `enforce_eager`."""
VLLM_LOGIT_COPIES = 4
"""float32 rows of the vocabulary for each running sequence: logits, log-probabilities, sorted ones, their order."""
HF_MAX_RUNNING, HF_MAX_PREFILL = 256, 8192
"""Defaults of `HFInferConfig`."""
HF_LOGIT_COPIES = 3


@dataclass(frozen=True)
class EngineMemory:
    """Of one device of a replica."""

    always: tuple[Part, ...]
    notes: tuple[str, ...]
    least: float
    """Bytes with room for one sequence of the longest length: with less the engine does not start."""
    share: float | None
    """Share of the device that the engine takes whatever it needs; None: it takes what is listed."""


def engine_memory(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> EngineMemory:
    """Memory on GPUs of ``device_bytes`` each; None if that is not known."""
    if config.actor_infer.strategy_args.strategy_name == "vllm" and config.cluster.device == "cuda":
        return _vllm(config, shape, device_bytes)
    return _embedded(config, shape)


def running_sequences(config: PipelineConfig, most: int) -> int:
    """Sequences that one replica has at a time: all that may have started, if it takes so many."""
    started = (derived.groups_ahead(config) + config.rollout_batch_size) * derived.group_size(config)
    return max(1, min(most, -(-started // max(1, derived.engine_replicas(config)))))


def _vllm(config: PipelineConfig, shape: ModelShape, device_bytes: float | None) -> EngineMemory:
    role = config.actor_infer
    options, tensor, element = role.strategy_args.strategy_config, role.num_gpus_per_engine, _element(role)
    length = derived.sequence_length(config)
    weights = _weights(shape, element, tensor, role.model_args.dtype)
    sequences = running_sequences(config, int(options.get("max_num_seqs") or VLLM_MAX_NUM_SEQS))
    tokens = max(int(options.get("max_num_batched_tokens") or VLLM_MAX_BATCHED_TOKENS), 1)
    pass_bytes = element * tokens * (3 * _width(shape) / tensor + 6 * shape.hidden)
    logits = 4 * VLLM_LOGIT_COPIES * shape.vocabulary * int(options.get("max_num_seqs") or VLLM_MAX_NUM_SEQS)
    graphs = 0.0 if options.get("enforce_eager") else VLLM_GRAPHS
    computing = Part("computing", pass_bytes + logits + graphs, f"{tokens:,} tokens at a time, logits, CUDA graphs")
    cache_token = shape.cache_bytes_per_token(element) / min(tensor, shape.kv_heads)
    fixed = weights.size + computing.size + driver(tensor).size
    least = fixed + cache_token * length
    wanted = cache_token * length * sequences
    share = float(options.get("gpu_memory_utilization") or VLLM_MEMORY_SHARE)
    if "kv_cache_memory_bytes" in options:
        cache, share_taken = float(options["kv_cache_memory_bytes"]), None
    elif device_bytes is None:
        cache, share_taken = wanted, None
    else:
        cache, share_taken = max(0.0, share * device_bytes - fixed), share
    whole = f"{cache / (cache_token * length):,.0f} sequences of {length:,} tokens; up to {sequences:,} run at a time"
    note = () if cache >= wanted or cache < cache_token * length else (
        f"keys and values of {count(sequences, 'sequence')} of full length want {wanted / GIB:.1f} GiB: beyond what "
        "there is, vLLM interrupts requests and computes them again",
    )  # fmt: skip
    how = f"{cache_token / 1024:,.0f} KiB a token; room for {whole}"
    return EngineMemory((weights, Part("keys and values", cache, how), computing), note, least, share_taken)


def _embedded(config: PipelineConfig, shape: ModelShape) -> EngineMemory:
    """`hf_infer`, and vLLM on a CPU, which is bounded in the same way."""
    role = config.actor_infer
    options, element = role.strategy_args.strategy_config, _element(role)
    length = -(-derived.sequence_length(config) // 16) * 16
    most = int(options.get("max_running_requests") or options.get("max_num_seqs") or HF_MAX_RUNNING)
    sequences = running_sequences(config, most)
    cache = shape.cache_bytes_per_token(element) * length * sequences
    prompts = min(int(options.get("max_prefill_tokens") or HF_MAX_PREFILL), sequences * config.prompt_length)
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
    return EngineMemory(always, (), sum(part.size for part in always), None)


def _weights(shape: ModelShape, element: int, tensor: int, dtype: str) -> Part:
    split = f" / {count(tensor, 'GPU')}" if tensor > 1 else ""
    how = f"{shape.parameters / 1e9:.2f} billion x {element} bytes ({dtype}){split}"
    return Part("weights", shape.parameters * element / tensor, how)


def _width(shape: ModelShape) -> int:
    return shape.experts_per_token * shape.expert_intermediate if shape.experts else shape.intermediate


def _element(role: ActorInferConfig) -> int:
    return ELEMENT_BYTES[role.model_args.dtype]

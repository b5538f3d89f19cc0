"""Options of each engine in `strategy_config`, and the arguments of vLLM and SGLang that are derived from them. Imports
no engine or model library.

Keys for vLLM and SGLang are passed to the library unchanged, so the documentation of the installed release is the
reference. Keys are checked against the source of the installed release, if any, without importing it (which takes ten
seconds). Two kinds are rejected: keys that other settings of the run determine, and keys with which the recorded
log-probabilities or versions of a response would be wrong.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from roll.configs.errors import ConfigProblem, nearest
from roll.configs.plugins import problem

if TYPE_CHECKING:
    from roll.engines.base import ModelSpec


@dataclass(frozen=True)
class HFInferConfig:
    """Keys of `strategy_config` for `hf_infer`."""

    max_running_requests: Annotated[int, Field(ge=1)] = 256
    """Maximum number of requests that are decoded at once; further ones are queued."""
    max_prefill_tokens: Annotated[int, Field(ge=1)] = 8192
    """Maximum number of prompt tokens, padding included, in one prefill pass."""
    threads: Annotated[int | None, Field(ge=1)] = None
    """Number of torch threads on a CPU. Default: torch's own default."""


@dataclass(frozen=True)
class DiffusersInferConfig:
    """Keys of `strategy_config` for `diffusers_infer`."""

    max_running_requests: Annotated[int, Field(ge=1)] = 64
    """Maximum number of images that are generated at once, batched step by step; further ones are queued."""
    threads: Annotated[int | None, Field(ge=1)] = None
    """Number of torch threads on a CPU. Default: torch's own default."""


_STREAM_INTERVAL = 8
"""Tokens per message from the engine: a message per token and request would cost more than a small model's step."""


def stream_interval(has_stop_strings: bool) -> int:
    """Return the number of tokens per message from the engine; 1 if each token may complete a stop string."""
    return 1 if has_stop_strings else _STREAM_INTERVAL


_OFF = (None, False, "off", "null", "none")
"""Values that turn an engine argument off."""


def _key_problems(
    strategy_config: Mapping[str, Any],
    path: str,
    library: str,
    noun: str,
    *,
    known: Collection[str] | None,
    reserved: Mapping[str, str],
    harmful: Mapping[str, str],
    slots: str,
) -> list[ConfigProblem]:
    """Return the problems of the keys for a library.

    ``noun``: the library's word for its arguments. ``known``: their names; None if it is not installed. ``reserved``:
    key -> the setting to use instead. ``harmful``: key -> reason why it may only be turned off. ``slots``: the key that
    limits running requests.
    """
    problems = []
    for key, value in strategy_config.items():
        if key in reserved:
            problems.append(ConfigProblem(f"{path}.{key}", "the run itself sets this", f"use {reserved[key]}"))
        elif key in harmful and value not in _OFF:
            problems.append(ConfigProblem(f"{path}.{key}", harmful[key], "remove this key"))
        elif known is not None and key not in known:
            meant = nearest(key, known)
            hint = f"did you mean `{meant}`?" if meant else f"see the {noun}s in {library}'s documentation"
            problems.append(ConfigProblem(f"{path}.{key}", f"{library} has no such {noun}", hint))
        elif key == slots and value == 1:
            problems.append(ConfigProblem(f"{path}.{slots}", "one place is kept for scoring", "write 2 or more"))
    return problems


def _installed(library: str) -> Path | None:
    """Return the folder of an installed library, without importing it."""
    spec = importlib.util.find_spec(library)
    return Path(spec.submodule_search_locations[0]) if spec is not None and spec.submodule_search_locations else None


def _field_names(source: Path, classes: Collection[str] | None = None) -> set[str]:
    """Return the names of annotated class fields in a module's source; ``classes``: only of these."""
    return {
        field.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and (classes is None or node.name in classes)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


VLLM_EXTENSION_CLASS = "roll.engines.vllm.worker.WorkerCalls"
VLLM_ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for the maximum rank of adapters."""
VLLM_OWNER_VARIABLE = "ROLL_ENGINE_OWNER"
"""Environment variable with the id of the process on whose end vLLM's processes must end too."""
VLLM_BUCKET_BACKEND = "roll_buckets"
"""Name under which `vllm/worker.py` registers its weight transfer engine with vLLM."""
_CPU_KV_CACHE_BYTES = 4 * 1024**3
"""Default upper limit of the KV cache on a CPU, in bytes. vLLM's own default is nearly all host memory."""
VLLM_RESERVED = {
    "model": "`pretrain` or `model_args.model_name_or_path`",
    "tokenizer": "`pretrain`; the engine gets token ids",
    "skip_tokenizer_init": "nothing: the engine gets token ids and gives back token ids",
    "dtype": "`model_args.dtype`",
    "trust_remote_code": "`model_args.trust_remote_code`",
    "max_model_len": "`sequence_length`",
    "logprobs_mode": "nothing: log-probabilities are those of the distribution that was sampled from",
    "tensor_parallel_size": "`num_gpus_per_engine`",
    "pipeline_parallel_size": "`num_gpus_per_engine`: the model is split over these by tensor parallelism",
    "data_parallel_size": "more devices in `device_mapping`: each `num_gpus_per_engine` of them are an engine",
    "worker_extension_cls": "nothing: the run needs it to verify weights",
    "weight_transfer_config": "`weight_update.transport`",
    "enable_lora": "`weight_update.content: adapter`",
    "max_loras": "nothing: the policy is one adapter",
    "max_cpu_loras": "nothing: the policy is one adapter",
    "lora_dtype": "`actor_infer.model_args.dtype`",
    "lora_target_modules": "`actor_train.model_args.lora_target`",
    "fully_sharded_loras": "nothing: adapters are read back from each device as a whole",
    "max_lora_rank": "`actor_train.model_args.lora_rank`",
    "enable_sleep_mode": "nothing: set where the engine shares its devices",
    "enable_return_routed_experts": "`actor_train.router_replay`",
}
"""Engine argument of vLLM -> the setting to use instead."""


def check_vllm_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return the problems of a ``strategy_config`` for vLLM at ``path``. Unknown keys are found only if vLLM is
    installed."""
    return _key_problems(
        strategy_config,
        path,
        "vLLM",
        "engine argument",
        known=vllm_argument_names(),
        reserved=VLLM_RESERVED,
        harmful={},
        slots="max_num_seqs",
    )


@cache
def vllm_argument_names() -> frozenset[str] | None:
    """Return the names of vLLM's engine arguments, parsed from its source; None if it is not installed."""
    folder = _installed("vllm")
    if folder is None:
        return None
    return frozenset(_field_names(folder / "engine" / "arg_utils.py", ("EngineArgs", "AsyncEngineArgs")))


def engine_arguments(
    strategy_config: dict[str, Any],
    model: ModelSpec,
    *,
    tensor_parallel_size: int,
    weight_backend: str,
    sleeps: bool,
    cache_bytes_per_token: int,
    adapter_rank: int | None = None,
    records_routing: bool = False,
) -> dict[str, Any]:
    """Return keyword arguments for ``AsyncEngineArgs``: our defaults, overridden by the user's keys, then by the run's
    settings.

    ``cache_bytes_per_token``: size of the KV cache per token. ``sleeps``: the engine shares its devices.
    ``adapter_rank``: rank of the LoRA adapter that the engine serves; None: no adapter. ``records_routing``: it returns
    the experts of each token.
    """
    arguments: dict[str, Any] = {
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "load_format": "safetensors",  # vLLM would read pickles where a folder has nothing else
    }
    if tensor_parallel_size > 1:
        # Inside a placement group, vLLM would choose Ray, and reject bundles of more than one device.
        arguments["distributed_executor_backend"] = "mp"
    if model.device == "cpu":
        arguments |= _cpu_defaults(strategy_config, model.max_length, tensor_parallel_size, cache_bytes_per_token)
    if adapter_rank is not None:
        rank = next(rank for rank in VLLM_ADAPTER_RANKS if rank >= adapter_rank)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    if records_routing:
        arguments["enable_return_routed_experts"] = True
    arguments |= strategy_config
    return arguments | {
        "model": model.model_path,
        "skip_tokenizer_init": True,
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "max_model_len": model.max_length,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": tensor_parallel_size,
        "worker_extension_cls": VLLM_EXTENSION_CLASS,
        "weight_transfer_config": {"backend": weight_backend},
        "enable_sleep_mode": sleeps,
    }


def _cpu_defaults(
    strategy_config: dict[str, Any], max_length: int, tensor_parallel_size: int, cache_bytes_per_token: int
) -> dict[str, Any]:
    """Return the defaults for a CPU: no compilation, which takes longer than a small run, and a KV cache for the
    requests that can run at once.

    Raises ``ConfigError`` for an option that crashes the CPU engine.
    """
    if strategy_config.get("enable_chunked_prefill"):
        raise problem(
            "actor_infer.strategy_args.strategy_config.enable_chunked_prefill",
            "vLLM's CPU engine ends when the prompt of a seeded request is computed in parts",
            "remove this key",
        )
    requests = strategy_config.get("max_num_seqs") or 256
    defaults: dict[str, Any] = {
        "enforce_eager": True,
        "max_num_seqs": requests,
        # Chunked prefill of a seeded request crashes the CPU engine, because its generators cannot be rewound.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(max_length, 8192),
    }
    if tensor_parallel_size == 1:
        defaults["distributed_executor_backend"] = "uni"
    if not {"kv_cache_memory_bytes", "gpu_memory_utilization"} & strategy_config.keys():
        # Blocks are 128 tokens long on a CPU. The last block of each request is half empty on average.
        wanted = requests * (max_length + 128) * cache_bytes_per_token
        defaults["kv_cache_memory_bytes"] = min(max(wanted, 64 * 1024**2), _CPU_KV_CACHE_BYTES)
    return defaults


SGLANG_LENGTH_HEADROOM = 8
"""Additional context length that SGLang needs: it limits a prompt to 6 tokens less than the context length, and prompt
plus response to 2 less."""
SGLANG_MASK_LIMIT = 4096
"""Largest top-k for which SGLang reports log-probabilities, unless ``sampling_mask_max_tokens`` sets another limit."""
SGLANG_SLOTS = 256
"""Default maximum number of running requests; one slot is reserved for scoring."""
SGLANG_RESERVED = {
    "model_path": "`pretrain` or `model_args.model_name_or_path`",
    "tokenizer_path": "`pretrain`; the engine gets token ids",
    "skip_tokenizer_init": "nothing: the engine gets token ids and gives back token ids",
    "dtype": "`model_args.dtype`",
    "device": "`cluster.device`",
    "trust_remote_code": "`model_args.trust_remote_code`",
    "context_length": "`sequence_length`",
    "tp_size": "`num_gpus_per_engine`",
    "pp_size": "`num_gpus_per_engine`: the model is split over these by tensor parallelism",
    "dp_size": "more devices in `device_mapping`: each `num_gpus_per_engine` of them are an engine",
    "base_gpu_id": "`device_mapping`",
    "gpu_id_step": "`device_mapping`",
    "nnodes": "nothing: an engine is on one node",
    "node_rank": "nothing: an engine is on one node",
    "dist_init_addr": "nothing: an engine is on one node",
    "host": "nothing: the server listens on the loopback address",
    "port": "nothing: the run takes a free port",
    "api_key": "nothing: the run makes one for each server",
    "admin_api_key": "nothing: the run makes a key for each server",
    "weight_version": "nothing: the run counts versions",
    "incremental_streaming_output": "nothing: the run reads what is new",
    "enable_memory_saver": "nothing: set where the engine shares its devices",
    "enable_weights_cpu_backup": "nothing: set where the engine shares its devices",
    "enable_return_routed_experts": "`actor_train.router_replay`",
}
"""Server argument of SGLang -> the setting to use instead."""
SGLANG_HARMFUL = {
    "speculative_algorithm": "log-probabilities under speculative decoding are not those of one distribution",
    "enable_watermark": "watermarked tokens come from another distribution than the one that is recorded",
    "allow_auto_truncate": "a prompt would be cut without a word",
    "disaggregation_mode": "weights are published to whole engines",
    "weight_cache_mode": "weights that other processes share cannot be updated",
    "smg_grpc_mode": "the run speaks HTTP with the server",
    "grpc_mode": "the run speaks HTTP with the server",
    "encoder_only": "the engine generates text",
    "use_ray": "the run places the engine's processes itself",
}
"""Server argument of SGLang -> reason why it may only be turned off."""


def check_sglang_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return the problems of a ``strategy_config`` for SGLang at ``path``. Unknown keys are found only if SGLang is
    installed."""
    return _key_problems(
        strategy_config,
        path,
        "SGLang",
        "server argument",
        known=sglang_argument_names(),
        reserved=SGLANG_RESERVED,
        harmful=SGLANG_HARMFUL,
        slots="max_running_requests",
    )


@cache
def sglang_argument_names() -> frozenset[str] | None:
    """Return the names of SGLang's server arguments, parsed from its source; None if it is not installed."""
    folder = _installed("sglang")
    return None if folder is None else read_sglang_argument_names(folder / "srt")


def read_sglang_argument_names(runtime: Path) -> frozenset[str]:
    """Return the names of server arguments in the source folder of SGLang's runtime.

    Older releases define them in one class, newer ones in several below ``arg_groups/fields``."""
    names = _field_names(runtime / "server_args.py", ("ServerArgs",))
    for source in (runtime / "arg_groups" / "fields").glob("*.py"):
        names |= _field_names(source)
    return frozenset(name for name in names if name.islower() and not name.startswith("_"))


def server_arguments(
    strategy_config: dict[str, Any],
    model: ModelSpec,
    *,
    tensor_parallel_size: int,
    sleeps: bool,
    port: int,
    api_key: str,
    records_routing: bool = False,
) -> dict[str, Any]:
    """Return keyword arguments for ``ServerArgs``: our defaults, overridden by the user's keys, then by the run's
    settings. ``sleeps``: the engine shares its devices. ``records_routing``: it returns the experts of each token."""
    defaults = {
        "log_level": "warning",
        "max_running_requests": SGLANG_SLOTS,
        # With overlap, a step may still run after a pause, and SGLang would report its tokens under the new version.
        "disable_overlap_schedule": True,
    }
    return (
        defaults
        | strategy_config
        | {
            "model_path": model.model_path,
            "skip_tokenizer_init": True,
            "dtype": model.dtype,
            "device": model.device,
            "trust_remote_code": model.trust_remote_code,
            "context_length": model.max_length + SGLANG_LENGTH_HEADROOM,
            "tp_size": tensor_parallel_size,
            "host": "127.0.0.1",
            "port": port,
            "api_key": api_key,
            "weight_version": "0",
            "incremental_streaming_output": True,
            "enable_memory_saver": sleeps,
            "enable_weights_cpu_backup": sleeps,
            "enable_return_routed_experts": records_routing,
        }
    )

"""Options that `strategy_config` may contain for `vllm`, and the engine arguments that a run derives from them.

Every key goes to vLLM's engine arguments unchanged, so the documentation of the installed release is the reference.
Keys are checked against the installed release, if there is one, without importing it (which takes ten seconds). Keys
that the run itself decides are refused with the key to use instead: with two places for one setting, the wrong one ends
up being read.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigError, ConfigProblem

EXTENSION_CLASS = "roll.engines.vllm.worker.WorkerCalls"
OWNER_VARIABLE = "ROLL_ENGINE_OWNER"
"""Environment variable with the id of the process that vLLM's processes must not outlive."""
BUCKET_BACKEND = "roll_buckets"
"""Name under which `vllm_worker` registers the loading of weight buckets."""

_STREAM_INTERVAL = 8
"""Tokens per message from the engine process. One message per token and request costs more than a small model's
step."""
_CPU_KV_CACHE_BYTES = 4 * 1024**3
"""Default upper limit, in bytes, of the keys and values on a CPU. vLLM's own default is nearly all memory of the
host."""
_RESERVED = {
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
    "worker_extension_cls": "nothing: the run needs it to check_weights weights",
    "weight_transfer_config": "`weight_update.transport`",
    "enable_sleep_mode": "nothing: set where the engine shares its devices",
}
"""Engine argument -> the setting to use instead."""


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing.

    Unknown engine arguments are found only if vLLM is installed.
    """
    known = engine_argument_names()
    problems = []
    for key in strategy_config:
        if key in _RESERVED:
            problems.append(ConfigProblem(f"{path}.{key}", "the run itself sets this", f"use {_RESERVED[key]}"))
        elif known is not None and key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else "see the engine arguments in vLLM's documentation"
            problems.append(ConfigProblem(f"{path}.{key}", "vLLM has no such engine argument", hint))
    if strategy_config.get("max_num_seqs") == 1:
        problems.append(ConfigProblem(f"{path}.max_num_seqs", "one place is kept for scoring", "write 2 or more"))
    return problems


@cache
def engine_argument_names() -> frozenset[str] | None:
    """Return the names of the installed release's engine arguments, read from its source; None if vLLM is not
    installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return None
    source = Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
    return frozenset(
        field.target.id
        for name in ("EngineArgs", "AsyncEngineArgs")
        for field in classes[name].body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )


def engine_arguments(
    strategy_config: dict[str, Any],
    *,
    model_path: str,
    device: str,
    dtype: str,
    max_length: int,
    trust_remote_code: bool,
    tensor_parallel_size: int,
    weight_backend: str,
    sleeps: bool,
    cache_bytes_per_token: int,
) -> dict[str, Any]:
    """Return keyword arguments for ``AsyncEngineArgs``: defaults, the user's own, and the run's decisions, in
    increasing priority.

    ``cache_bytes_per_token``: bytes of one token's keys and values. ``sleeps``: the engine shares its devices.
    """
    arguments: dict[str, Any] = {
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "load_format": "safetensors",  # vLLM would read pickles where a folder has nothing else
    }
    if device == "cpu":
        arguments |= _cpu_defaults(strategy_config, max_length, tensor_parallel_size, cache_bytes_per_token)
    arguments |= strategy_config
    return arguments | {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": dtype,
        "trust_remote_code": trust_remote_code,
        "max_model_len": max_length,
        "logprobs_mode": "processed_logprobs",
        "tensor_parallel_size": tensor_parallel_size,
        "worker_extension_cls": EXTENSION_CLASS,
        "weight_transfer_config": {"backend": weight_backend},
        "enable_sleep_mode": sleeps,
    }


def _cpu_defaults(
    strategy_config: dict[str, Any], max_length: int, tensor_parallel_size: int, cache_bytes_per_token: int
) -> dict[str, Any]:
    """Return the defaults for a CPU: no compilation, which would take longer than a small run, and memory for the
    requests that can run.

    Raises ``ConfigError`` for an option that a CPU engine does not survive.
    """
    if strategy_config.get("enable_chunked_prefill"):
        raise ConfigError(
            [
                ConfigProblem(
                    "actor_infer.strategy_args.strategy_config.enable_chunked_prefill",
                    "vLLM's CPU engine ends when the prompt of a seeded request is computed in parts",
                    "remove this key",
                )
            ]
        )
    requests = strategy_config.get("max_num_seqs") or 256
    defaults: dict[str, Any] = {
        "enforce_eager": True,
        "max_num_seqs": requests,
        # A seeded request whose prompt is computed in parts crashes a CPU engine: its generators cannot be set back.
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


def stream_interval(has_stop_strings: bool) -> int:
    """Return the number of tokens per message from the engine process: one if any token may complete a stop string."""
    return 1 if has_stop_strings else _STREAM_INTERVAL

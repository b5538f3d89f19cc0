"""Options that `strategy_config` may contain for `sglang`, and the server arguments that a run derives from them.

Every key goes to SGLang's ``ServerArgs`` unchanged, so the documentation of the installed release is the reference.
Keys are checked against the installed release, if there is one, without importing it. Two kinds are refused: settings
that the run itself decides (with two places for one setting, the wrong one ends up being read), and settings that would
make the record of a response wrong.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigProblem

LENGTH_HEADROOM = 8
"""Tokens of context length that SGLang needs for itself: its longest prompt is 6 tokens shorter, prompt plus response
2."""
MASK_LIMIT = 4096
"""Largest top-k whose distribution SGLang records, unless ``sampling_mask_max_tokens`` sets another limit."""
PLACES = 256
"""Default number of requests that run at once, one of them a score."""
_STREAM_INTERVAL = 8
"""Tokens per message. One message per token and request costs more than a small model's step."""
_RESERVED = {
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
}
"""Server argument -> the setting to use instead."""
_SPOILING = {
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
"""Server argument -> reason why only the value that turns it off is allowed."""
_OFF = (None, False, "off", "null", "none")


def check_options(strategy_config: dict[str, Any], path: str) -> list[ConfigProblem]:
    """Return what is wrong with the ``strategy_config`` at ``path`` of the configuration; empty if nothing.

    Unknown server arguments are found only if SGLang is installed.
    """
    known = server_argument_names()
    problems = []
    for key, value in strategy_config.items():
        if key in _RESERVED:
            problems.append(ConfigProblem(f"{path}.{key}", "the run itself sets this", f"use {_RESERVED[key]}"))
        elif key in _SPOILING and value not in _OFF:
            problems.append(ConfigProblem(f"{path}.{key}", _SPOILING[key], "remove this key"))
        elif known is not None and key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean `{nearest[0]}`?" if nearest else "see the server arguments in SGLang's documentation"
            problems.append(ConfigProblem(f"{path}.{key}", "SGLang has no such server argument", hint))
    if strategy_config.get("max_running_requests") == 1:
        problems.append(
            ConfigProblem(f"{path}.max_running_requests", "one place is kept for scoring", "write 2 or more")
        )
    return problems


@cache
def server_argument_names() -> frozenset[str] | None:
    """Return the names of the installed release's server arguments, read from its source; None if SGLang is not
    installed."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        return None
    return read_argument_names(Path(spec.submodule_search_locations[0]) / "srt")


def read_argument_names(runtime: Path) -> frozenset[str]:
    """Return the names of server arguments in the sources of SGLang's runtime.

    Older releases define them in one class, newer ones in several below ``arg_groups/fields``.
    """
    names = _field_names(runtime / "server_args.py", "ServerArgs")
    for source in (runtime / "arg_groups" / "fields").glob("*.py"):
        names |= _field_names(source)
    return frozenset(names)


def _field_names(source: Path, class_name: str | None = None) -> set[str]:
    """Return the public annotated names in the bodies of a module's classes, or of one of them."""
    return {
        field.target.id
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and class_name in (None, node.name)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and field.target.id.islower()
        if not field.target.id.startswith("_")
    }


def server_arguments(
    strategy_config: dict[str, Any],
    *,
    model_path: str,
    device: str,
    dtype: str,
    max_length: int,
    trust_remote_code: bool,
    tensor_parallel_size: int,
    sleeps: bool,
    port: int,
    api_key: str,
) -> dict[str, Any]:
    """Return keyword arguments for ``ServerArgs``: defaults, the user's own, and the run's decisions, in increasing
    priority.

    ``sleeps``: the engine shares its devices.
    """
    defaults = {
        "log_level": "warning",
        "max_running_requests": PLACES,
        # With overlap, a pause leaves a step under way, whose tokens SGLang would count under the newer version.
        "disable_overlap_schedule": True,
    }
    return (
        defaults
        | strategy_config
        | {
            "model_path": model_path,
            "skip_tokenizer_init": True,
            "dtype": dtype,
            "device": device,
            "trust_remote_code": trust_remote_code,
            "context_length": max_length + LENGTH_HEADROOM,
            "tp_size": tensor_parallel_size,
            "host": "127.0.0.1",
            "port": port,
            "api_key": api_key,
            "weight_version": "0",
            "incremental_streaming_output": True,
            "enable_memory_saver": sleeps,
            "enable_weights_cpu_backup": sleeps,
        }
    )


def mask_limit(strategy_config: dict[str, Any]) -> int:
    """Return the largest top-k whose distribution the server records."""
    return strategy_config.get("sampling_mask_max_tokens", MASK_LIMIT)


def stream_interval(has_stop_strings: bool) -> int:
    """Return the number of tokens per message: one if any token may complete a stop string."""
    return 1 if has_stop_strings else _STREAM_INTERVAL

"""Some of SGLang's server arguments, under their names."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class ServerArgs:
    """See the real one."""

    model_path: str
    tokenizer_path: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    device: str | None = None
    trust_remote_code: bool = False
    context_length: int | None = None
    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    weight_version: str = "default"
    log_level: str = "info"
    max_running_requests: int | None = None
    mem_fraction_static: float | None = None
    disable_overlap_schedule: bool = False
    incremental_streaming_output: bool = False
    enable_memory_saver: bool = False
    enable_weights_cpu_backup: bool = False
    enable_deterministic_inference: bool = False
    sampling_mask_max_tokens: int = 4096
    speculative_algorithm: str | None = None
    attention_backend: str | None = None
    quantization: str | None = None
    random_seed: int | None = None
    enable_return_routed_experts: bool = False

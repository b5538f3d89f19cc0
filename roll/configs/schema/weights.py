"""Transfer of new weights to the engines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from roll.configs.ranges import Range
from roll.configs.schema.options import COUNT, NOT_NEGATIVE, POSITIVE, option


@dataclass
class WeightUpdateConfig:
    """Transfer of new weights to the engines."""

    interval_steps: int = option(1, help="Publish weights every n training steps.", range=COUNT)
    in_flight: Literal["keep", "resume", "drain"] = option(
        "keep",
        help="Requests running at an update: `keep` freezes them and goes on with their caches, `resume` continues "
        "them from prefix plus partial tokens with new caches, `drain` lets them finish first.",
    )
    transport: Literal["auto", "shared_memory", "object_store", "checkpoint", "nccl", "cuda_ipc"] = option(
        "auto",
        help="How the bytes travel: `shared_memory` (one host), Ray's `object_store`, `checkpoint` (files on a disk "
        "that all hosts see), or by vLLM's own transfer from GPU to GPU: `nccl` (devices apart), `cuda_ipc` (the same "
        "devices). `auto`: shared memory on Linux if trainer and engines are on one node, else the object store.",
    )
    dual_buffer: bool = option(
        True,
        help="Two buffers: a training step's weights are copied into one while engines use or load those in the other. "
        "One buffer takes half the memory; then each engine copies the weights out of it.",
    )
    param_update_gather_bucket_size_mb: float = option(
        256.0, help="Largest bucket that the trainer packs, in MiB (a larger tensor gets its own).", range=POSITIVE
    )
    param_update_load_bucket_size_mb: float = option(
        256.0, help="Most weights that an engine is handed at a time, in MiB.", range=POSITIVE
    )
    checkpoint_dir: str | None = option(
        None,
        help="Folder for the transport `checkpoint`, seen by all hosts; what is written there is deleted again. "
        "Default: in the run's own folder.",
    )
    timeout_seconds: float = option(
        600.0,
        help="Longest time for a replica to take new weights (with `drain`: to end its requests, too), to sleep or to "
        "wake; then its process is replaced.",
        range=POSITIVE,
    )
    canary_interval: int = option(
        10,
        help="The log-probabilities of fixed sequences are compared between trainer and engines at the first "
        "publication and every n; 0: never.",
        range=NOT_NEGATIVE,
    )
    canary_prompts: int = option(
        8,
        help="Canary sequences: training prompts, each followed by pseudo-random tokens up to 64 in all.",
        range=Range(at_least=1, at_most=1024),
    )
    canary_tolerance: float | None = option(
        None,
        help="Largest mean absolute difference in nats per token before the run stops. Default: 0.001 if trainer and "
        "engine compute in float32, else 0.1.",
        range=POSITIVE,
    )

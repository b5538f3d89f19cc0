"""Computation and memory use of a process, reported once per training step."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_STATUS = Path("/proc/self/status")


@dataclass
class Usage:
    """Computation and memory use of one process since the previous report."""

    operations: float = 0.0
    """Floating-point operations of the model for the samples of all ranks together; 0 if the model's sizes are unknown.
    """
    seconds: float = 0.0
    """Computing time of this rank: passes with and without gradients, and optimizer steps."""
    device: str = ""
    """Name of the GPU; empty on a CPU."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """See `memory_in_use`."""
    forward_seconds: float = 0.0
    """The part of ``seconds`` in passes without gradients: log-probabilities, or a critic's values."""
    optimizer_seconds: float = 0.0
    """The part of ``seconds`` in optimizer steps: clipping, update and clearing of gradients."""
    micro_batches: int = 0
    """Number of micro-batches of this rank that were trained on."""
    cpu_seconds: float = 0.0
    """See `cpu_seconds`; total since the process started."""
    process_id: int = 0


def memory_in_use() -> dict[str, float]:
    """Return the memory use of this process in GiB.

    With GPUs: ``allocated_gib`` and ``reserved_gib`` of its tensors now, and ``peak_gib``, the largest allocation since
    the last call. Without: only ``peak_gib``, the largest resident size so far; empty if the system does not report it.
    """
    import torch

    if torch.cuda.is_initialized():
        devices = range(torch.cuda.device_count())
        taken = {
            "allocated_gib": sum(torch.cuda.memory_allocated(device) for device in devices) / 2**30,
            "reserved_gib": sum(torch.cuda.memory_reserved(device) for device in devices) / 2**30,
            "peak_gib": sum(torch.cuda.max_memory_allocated(device) for device in devices) / 2**30,
        }
        for device in devices:
            torch.cuda.reset_peak_memory_stats(device)
        return taken
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return {}
    peak = next((line.split()[1] for line in lines if line.startswith("VmHWM:")), None)
    return {} if peak is None else {"peak_gib": int(peak) / 2**20}


def cpu_seconds() -> float:
    """Return the processor time that this process and its descendants, alive or waited for, have used so far."""
    used, waiting = 0.0, [os.getpid()]
    while waiting:
        process = Path("/proc", str(waiting.pop()))
        with suppress(OSError):  # it has ended, or the system has no such files
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            used += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
            for children in process.glob("task/*/children"):
                waiting += map(int, children.read_text().split())
    return used


def device_name() -> str:
    """Return the name of this process's GPU; empty if it has not used one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""

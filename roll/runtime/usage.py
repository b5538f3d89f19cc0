"""What a process has computed and what memory it has taken, told once in each training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

_STATUS = Path("/proc/self/status")


@dataclass
class Usage:
    """The work of one process since it was last asked."""

    operations: float = 0.0
    """Floating-point operations of the model for all samples that all ranks shared out; 0 if its sizes are unknown."""
    seconds: float = 0.0
    """Seconds for which this rank computed."""
    device: str = ""
    """Name of its GPU; empty on a CPU."""
    memory: Mapping[str, float] = field(default_factory=dict)
    """See `memory_in_use`."""


def memory_in_use() -> dict[str, float]:
    """Return the GiB of this process's tensors on GPUs: ``allocated_gib`` and ``reserved_gib`` now, and ``peak_gib``,
    the most that was allocated since the last call. In a process without a GPU ``peak_gib`` is the most that the
    process has occupied so far; empty where the system does not tell."""
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


def device_name() -> str:
    """Return the name of this process's GPU; empty if it uses none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_initialized() else ""

"""Peak figures of devices, for `roll simulate` and for the utilisation (MFU) of a run."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Hardware:
    """Peak figures of one device, from its data sheet."""

    flops: float
    """Dense bfloat16 operations per second; for a CPU slot float32, measured."""
    bandwidth: float
    """Memory bandwidth in bytes per second."""
    memory: float
    """Size in bytes."""
    link: float = 1e10
    """Bytes per second that it sends to the devices of its node (NVLink: in one direction)."""
    network: float = 1e10
    """Bytes per second that it sends to other nodes: its share of the node's adapters."""
    linked: int = 0
    """Devices that NVLink connects beyond one node; 0: those of a node."""


DEVICES: dict[str, Hardware] = {
    "A100": Hardware(312e12, 2.04e12, 80e9, 300e9, 25e9),
    "H100": Hardware(989e12, 3.35e12, 80e9, 450e9, 50e9),
    "H800": Hardware(989e12, 3.35e12, 80e9, 200e9, 50e9),
    "H20": Hardware(148e12, 4.0e12, 96e9, 450e9, 50e9),
    "H200": Hardware(989e12, 4.8e12, 141e9, 450e9, 50e9),
    "GB200": Hardware(2450e12, 8.0e12, 186e9, 900e9, 50e9, linked=72),
    "CPU": Hardware(7e10, 1e10, 8e9),
}
"""NVIDIA's data sheets (SXM variants; GB200: one GPU; networks of 200 Gb/s a GPU in a DGX A100 and 400 Gb/s in later
ones), and for CPU a core of the machine in `benchmarks/README.md`."""
_SLOWER = re.compile(r"pcie|nvl|mig", re.IGNORECASE)
"""Variants and partitions of a GPU, whose peak differs."""


def peak_flops(name: str) -> float | None:
    """Return the peak operations per second of a GPU by its driver's name for it; None if unknown."""
    words = re.split(r"[^A-Za-z0-9]+", name)
    found = next((DEVICES[word] for word in words if word in DEVICES and word != "CPU"), None)
    return None if found is None or _SLOWER.search(name) else found.flops

"""The words of a memory estimate: parts with their arithmetic, phases of which one is the largest, roles."""

from __future__ import annotations

from dataclasses import dataclass, field

KIB, MIB, GIB = 2**10, 2**20, 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""`model_args.dtype` -> bytes of a number."""
CONTEXT = 0.6 * GIB
"""Of a process on a GPU: CUDA's context and cuBLAS's workspace."""
COMMUNICATION = 0.5 * GIB
"""NCCL's buffers of a process that talks to others."""


@dataclass(frozen=True)
class Part:
    """One line of the estimate."""

    name: str
    size: float
    """Bytes."""
    how: str
    """The arithmetic in words."""


def driver(ranks: int) -> Part:
    """Of a process on a GPU, of ``ranks`` that talk to each other."""
    talks = COMMUNICATION if ranks > 1 else 0.0
    return Part("driver", CONTEXT + talks, "CUDA's context" + (", NCCL's buffers" if talks else ""))


@dataclass(frozen=True)
class Phase:
    """What is there at one moment, beside what is there always."""

    name: str
    parts: tuple[Part, ...] = ()

    @property
    def size(self) -> float:
        """Bytes."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class RoleMemory:
    """What one process of a role needs, at the longest lengths that the configuration allows."""

    role: str
    title: str
    """Engine, model and its parameters."""
    devices: list[int]
    always: tuple[Part, ...]
    """While the role has its devices."""
    phases: tuple[Phase, ...] = ()
    processes: int = 1
    """Ranks, or engine replicas."""
    host: tuple[Part, ...] = ()
    """In the memory of the host, of each process."""
    host_of_first: tuple[Part, ...] = ()
    """In the memory of the host, of the first process beside that."""
    start: Part | None = None
    """In the memory of the host while the process loads its model."""
    stays: float = 0.0
    """Bytes that stay on a shared device while another role has it."""
    notes: tuple[str, ...] = field(default=())

    @property
    def largest(self) -> Phase:
        """The phase that decides."""
        return max(self.phases, key=lambda phase: phase.size, default=Phase(""))

    @property
    def peak(self) -> float:
        """Bytes of a device at most."""
        return sum(part.size for part in self.always) + self.largest.size

    @property
    def host_bytes(self) -> float:
        """Bytes of the host while the run goes on, of the process that has most."""
        return sum(part.size for part in (*self.host, *self.host_of_first))

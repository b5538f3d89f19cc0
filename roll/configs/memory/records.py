"""The records of a memory estimate: parts with their arithmetic, phases (only the largest counts), roles."""

from __future__ import annotations

from dataclasses import dataclass, field

KIB, MIB, GIB = 2**10, 2**20, 2**30
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2}
"""`model_args.dtype` -> bytes of a number."""
CONTEXT = 0.6 * GIB
"""Memory of a process on a GPU: CUDA's context and cuBLAS's workspace."""
COMMUNICATION = 0.5 * GIB
"""NCCL's buffers of a process that communicates with others."""


@dataclass(frozen=True)
class Part:
    """One line of the estimate."""

    name: str
    size: float
    """Bytes."""
    how: str
    """The arithmetic in words."""


def driver(ranks: int) -> Part:
    """Return the driver's memory of a process on a GPU; with several ``ranks``, NCCL's buffers are added."""
    talks = COMMUNICATION if ranks > 1 else 0.0
    return Part("driver", CONTEXT + talks, "CUDA's context" + (", NCCL's buffers" if talks else ""))


@dataclass(frozen=True)
class Phase:
    """A moment of a step, with the memory that exists only then."""

    name: str
    parts: tuple[Part, ...] = ()

    @property
    def size(self) -> float:
        """Size in bytes."""
        return sum(part.size for part in self.parts)


@dataclass(frozen=True)
class RoleMemory:
    """The memory of one process of a role, at the maximum lengths that the configuration allows."""

    role: str
    title: str
    """Engine, model and number of parameters."""
    devices: list[int]
    always: tuple[Part, ...]
    """Parts that exist as long as the role has its devices."""
    phases: tuple[Phase, ...] = ()
    processes: int = 1
    """Ranks, or engine replicas."""
    host: tuple[Part, ...] = ()
    """Host memory of each process."""
    host_of_first: tuple[Part, ...] = ()
    """Additional host memory of the first process."""
    start: Part | None = None
    """Host memory while the process loads its model."""
    stays: float = 0.0
    """Bytes that stay on a shared device while another role has it."""
    notes: tuple[str, ...] = field(default=())

    @property
    def largest(self) -> Phase:
        """The phase that needs most."""
        return max(self.phases, key=lambda phase: phase.size, default=Phase(""))

    @property
    def peak(self) -> float:
        """Largest number of bytes on a device."""
        return sum(part.size for part in self.always) + self.largest.size

    @property
    def host_bytes(self) -> float:
        """Host bytes during the run, of the process that needs most."""
        return sum(part.size for part in (*self.host, *self.host_of_first))

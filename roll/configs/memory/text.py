"""A memory estimate as lines for a console: every part with its arithmetic, and the phase that needs most."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.device_mapping import compact
from roll.configs.memory.estimate import MemoryEstimate
from roll.configs.memory.records import GIB, Part, RoleMemory
from roll.configs.wording import count


def render(estimate: MemoryEstimate) -> str:
    """Format the estimate as lines."""
    return "\n".join(_lines(estimate))


def _lines(estimate: MemoryEstimate) -> Iterator[str]:
    known = f" of {estimate.device_bytes / GIB:g} GiB" if estimate.device_bytes is not None else ""
    unit = f"one GPU{known}" if estimate.on_gpu else "one process"
    yield f"memory of {unit}, at the longest lengths (an estimate; docs/memory.md explains each line)"
    for role in estimate.roles:
        yield from _role_lines(role, estimate.on_gpu)
    for devices in estimate.devices:
        which = ("GPU " if estimate.on_gpu else "CPU slot ") + compact(devices.devices)
        yield f"  {which} ({', '.join(devices.roles)}): {_size(devices.peak).strip()} {devices.how}"
    if estimate.host:
        yield "  memory of the host of the node that needs most, beside the processes"
        yield from (_part_line(part) for part in estimate.host)
    yield from (f"  not estimated: {reason}" for reason in estimate.unknown)
    yield from (f"  tight: {reason}" for reason in estimate.tight)
    yield from (f"  will not fit: {reason}" for reason in estimate.misfits)


def _role_lines(role: RoleMemory, on_gpu: bool) -> Iterator[str]:
    slots = "GPU" if on_gpu else "CPU slot"
    yield f"  {role.role} on {slots} {compact(role.devices)} ({count(len(role.devices), slots)}): {role.title}"
    largest = role.largest
    yield from (_part_line(part) for part in role.always)
    if largest.parts:
        yield f"    and when {largest.name}" if " " in largest.name else f"    and for {largest.name}"
        yield from (_part_line(part) for part in largest.parts if part.size)
    if not on_gpu:
        yield from (_part_line(part) for part in (*role.host, *role.host_of_first) if part.size)
    yield f"    {'together':<22}{_size(role.peak + (0.0 if on_gpu else role.host_bytes))}"
    yield from (f"    note: {note}" for note in role.notes)


def _part_line(part: Part) -> str:
    return f"    {part.name:<22}{_size(part.size)}  {part.how}"


def _size(size: float) -> str:
    return f"{size / GIB:8.2f} GiB"

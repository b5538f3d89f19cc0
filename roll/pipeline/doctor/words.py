"""Texts that describe the waits of a run to a user."""

from __future__ import annotations

from collections.abc import Iterator

from roll.pipeline.doctor.graph import Edge, WaitGraph
from roll.tracking.status import RunStatus, WorkerStatus
from roll.tracking.waits import GROUP


def describe_waits(status: RunStatus, graph: WaitGraph) -> Iterator[str]:
    """Yield one line per stage, per other waiter, per thing that groups wait for, and per worker."""
    for stage in status.stages:
        yield f"{stage.name:<20} {stage.state}, {ago(status, stage.since)}{_tail(status, graph, stage.name)}"
    named = {stage.name for stage in status.stages}
    for who in dict.fromkeys(wait.who for wait in status.waits):
        if who not in named and not who.startswith(GROUP):
            yield f"{who:<20}{_tail(status, graph, who) or ' goes on'}"
    for on, count in status.groups_by_wait.items():
        yield f"{count} groups in flight wait for {spoken(on)}"
    for worker in status.workers:
        yield f"{worker.name:<20} process {worker.pid}, {_state_of(status, worker)}"


def _state_of(status: RunStatus, worker: WorkerStatus) -> str:
    silence = silence_of(status, worker)
    if not worker.has_answered:
        return f"has not answered yet, asked {silence:.0f} s before"
    busy = f"at {worker.place}" if worker.place else "had nothing to do"
    return f"last sign of life {silence:.0f} s before, {busy}"


def _tail(status: RunStatus, graph: WaitGraph, node: str) -> str:
    return "".join(
        f" -> {spoken(edge.on)} ({edge.what}, {ago(status, edge.since)})" for edge in graph.chain(node)[:6]
    )


def sentence(status: RunStatus, edge: Edge) -> str:
    """Return an edge of a ring as text."""
    if edge.what.startswith("who has it"):
        return f"{spoken(edge.who)}: {edge.on} has them{edge.what[len('who has it') :]}, {ago(status, edge.since)}"
    return f"{spoken(edge.who)} waits for {spoken(edge.on)} ({edge.what}), {ago(status, edge.since)}"


def actors_of(status: RunStatus) -> set[str]:
    """Return the nodes that act: stages and all that wait."""
    return {stage.name for stage in status.stages} | {wait.who for wait in status.waits}


def is_thing(node: str, status: RunStatus) -> bool:
    """Return True if a node is only waited for and does nothing itself."""
    return node not in actors_of(status)


def spoken(node: str) -> str:
    """Return a node as text."""
    kind, _, name = node.partition("/")
    return {"items": f"an item from the channel {name!r}", "room": f"room in the channel {name!r}",
            "devices": f"the devices of {name}", "worker": f"worker {name}"}.get(kind, node)


def progress(status: RunStatus) -> str:
    """Return how far a run is, as text."""
    moved = f"something moved {max(0.0, status.loop_beat - status.moved_at):.0f} s before"
    if status.phase in ("preparing", "ending"):
        return f"it is {status.phase}"
    if status.phase == "starting":
        return f"its roles are starting; {moved}"
    return f"{status.step} of {status.max_steps} steps are done; {moved}"


def silence_of(status: RunStatus, worker: WorkerStatus) -> float:
    """Return the seconds since a worker's last sign of life."""
    return max(0.0, status.loop_beat - worker.asked_since)


def ago(status: RunStatus, since: float) -> str:
    """Return the time since ``since`` as text."""
    return f"{max(0.0, status.loop_beat - since):.0f} s"


def listed(names: list[str]) -> str:
    """Join names: "a", "a and b", or "a, b and c"."""
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"

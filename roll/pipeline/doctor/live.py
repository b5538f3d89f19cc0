"""Diagnosis of a live run: a driver in trouble, a ring of waits, a worker in trouble, or a run in which nothing moves.

The surest cause is reported first. The driver uses this module too, when nothing has moved for too long
(`explain_stall`).
"""

from __future__ import annotations

from roll.pipeline.doctor.findings import Diagnosis, Evidence
from roll.pipeline.doctor.graph import Edge, WaitGraph, wait_graph
from roll.pipeline.doctor.words import (
    actors_of,
    ago,
    describe_waits,
    is_thing,
    listed,
    progress,
    sentence,
    silence_of,
    spoken,
)
from roll.tracking.driver_watch import ENDING_SECONDS
from roll.tracking.status import RunStatus, WorkerStatus
from roll.tracking.waits import WORKER

SILENT_SECONDS = 20.0
"""Seconds without a sign of life after which a worker or a driver is reported."""
QUIET_SHARE = 0.5
"""Share of `stall_timeout_seconds` without any movement after which a run is reported as quiet."""
LONG_END_SHARE = 0.5
"""Share of `ENDING_SECONDS` after which the end of a run is reported as too long."""


def of_a_live_run(evidence: Evidence, status: RunStatus) -> Diagnosis:
    """Explain the state of a run whose driver is there."""
    graph = wait_graph(status)
    waits = tuple(describe_waits(status, graph))
    trouble = _driver_trouble(evidence, status)
    if trouble is not None:
        return trouble
    if status.phase == "ending":
        return _ending(status)  # processes are being killed, so their waits mean nothing any more
    return (
        explain_deadlock(status, graph)
        or _worker_trouble(evidence, status, graph)
        or _quiet(status, graph)
        or Diagnosis("working", f"the run works: {progress(status)}", findings=waits)
    )


def _ending(status: RunStatus) -> Diagnosis:
    """Diagnose a run whose processes are being ended on purpose."""
    seconds = status.written - (status.ending_since or status.written)
    if seconds <= LONG_END_SHARE * ENDING_SECONDS:
        return Diagnosis("working", f"the run is ending, {seconds:.0f} s so far")
    return Diagnosis(
        "driver in trouble",
        f"the run has been ending for {seconds:.0f} s",
        "; ".join(status.ending_threads) or "worker processes or Ray do not end",
        f"wait: the process ends itself {ENDING_SECONDS:g} s after the end began",
    )


def explain_stall(status: RunStatus) -> str:
    """Return why nothing moves, as far as the driver itself can see, for its last message."""
    graph = wait_graph(status)
    found = explain_deadlock(status, graph) or _silent_worker(status, graph) or _end_of_chain(status, graph)
    cause = f": {found.culprit}" if found.culprit else ""
    return "\n".join([found.headline + cause, *found.findings])


def _driver_trouble(evidence: Evidence, status: RunStatus) -> Diagnosis | None:
    driver, age = status.driver, evidence.now - status.written
    facts = evidence.processes.get(driver.pid) if driver.host == evidence.host else None
    if facts is not None and facts.stopped:
        return Diagnosis(
            "driver in trouble",
            "the run stands still",
            f"its driver, process {driver.pid}, was stopped by a signal",
            f"kill -CONT {driver.pid}",
        )
    if age > SILENT_SECONDS:
        if facts is None:
            return Diagnosis(
                "out of sight",
                f"the driver on {driver.host} has said nothing for {age:.0f} s",
                f"process {driver.pid} on {driver.host} is dead or cut off, or the clocks of the hosts differ",
                f"run `roll doctor` on {driver.host}",
            )
        return Diagnosis(
            "driver in trouble",
            f"process {driver.pid} is there, but `status.json` has not been written for {age:.0f} s",
            "the disk is full or does not answer, or the process does not get to run",
            f"look at the disk of {evidence.run} and at {driver.host}",
        )
    lag = status.written - status.loop_beat
    if status.loop_place is not None:
        return Diagnosis(
            "driver in trouble",
            f"the driver's event loop has been stuck for {lag:.0f} s, and with it the whole run",
            f"process {driver.pid} is in {status.loop_place}",
            "this code must not block: `await` it, or run it in a thread (`asyncio.to_thread`)",
        )
    return None


def explain_deadlock(status: RunStatus, graph: WaitGraph) -> Diagnosis | None:
    """Return the diagnosis of a ring of waits; None if there is no ring."""
    ring = graph.cycle()
    if not ring:
        return None
    begin = min((edge for edge in ring if not is_thing(edge.who, status)), key=lambda edge: (edge.since, edge.who))
    ring = ring[ring.index(begin) :] + ring[: ring.index(begin)]
    actors = [edge.who for edge in ring if not is_thing(edge.who, status)]
    has = {edge.on: edge.who for edge in ring if edge.what.startswith("who has it")}
    blamed = [
        f"{actor} keeps {spoken(has[actor])} while it waits for {spoken(_next_actor(ring, actor, actors))}"
        for actor in actors
        if actor in has
    ]
    youngest = max(edge.since for edge in ring)
    return Diagnosis(
        "deadlock",
        f"{listed(actors)} wait for each other since {ago(status, youngest)}; none of them can ever go on",
        "; ".join(blamed) or f"{actors[0]} and what it waits for",
        f"end the run (kill {status.driver.pid}); it ends by itself once nothing has moved for "
        f"{status.stall_timeout_seconds:g} s. Let one of them give up what it has before it waits, or wait for nothing "
        "that comes after it",
        (*(sentence(status, edge) for edge in ring), "", *describe_waits(status, graph)),
    )


def _next_actor(ring: list[Edge], actor: str, actors: list[str]) -> str:
    return actors[(actors.index(actor) + 1) % len(actors)]


def _worker_trouble(evidence: Evidence, status: RunStatus, graph: WaitGraph) -> Diagnosis | None:
    for worker in status.workers:
        if not worker.on_driver_host or status.driver.host != evidence.host or worker.pid not in evidence.processes:
            continue
        facts = evidence.processes[worker.pid]
        if facts is None or (worker.started is not None and facts.started != worker.started):
            return _blame(
                status, graph, worker, f"process {worker.pid} is gone", "the driver replaces it or ends the run"
            )
        if facts.stopped:
            return _blame(
                status, graph, worker, f"process {worker.pid} was stopped by a signal", f"kill -CONT {worker.pid}"
            )
    return _silent_worker(status, graph)


def _silent_worker(status: RunStatus, graph: WaitGraph) -> Diagnosis | None:
    for worker in status.workers:
        silence = silence_of(status, worker)
        if silence > SILENT_SECONDS:
            cause = f"process {worker.pid} has given no sign of life for {silence:.0f} s"
            return _blame(status, graph, worker, cause, "look at its host; the call that it is in has a deadline")
    for worker in status.workers:
        if worker.loop_lag > SILENT_SECONDS:
            cause = f"the event loop of process {worker.pid} has been stuck for {worker.loop_lag:.0f} s"
            where = f" in {worker.place}" if worker.place else ""
            return _blame(status, graph, worker, cause + where, "this code must run in a thread of its own")
    return None


def _blame(status: RunStatus, graph: WaitGraph, worker: WorkerStatus, cause: str, advice: str) -> Diagnosis:
    node = f"{WORKER}{worker.name}"
    waiting = [who for who in graph.waiters() if who in actors_of(status) and _reaches(graph, who, node)]
    headline = f"{listed(waiting)} cannot go on without {worker.name}" if waiting else f"{worker.name} is not well"
    findings = tuple(describe_waits(status, graph))
    return Diagnosis("worker in trouble", headline, f"worker {worker.name}: {cause}", advice, findings)


def _reaches(graph: WaitGraph, start: str, end: str) -> bool:
    seen, ahead = {start}, [start]
    while ahead:
        node = ahead.pop()
        if node == end:
            return True
        fresh = {edge.on for edge in graph.of(node)} - seen
        seen |= fresh
        ahead += fresh
    return False


def _quiet(status: RunStatus, graph: WaitGraph) -> Diagnosis | None:
    quiet = status.loop_beat - status.moved_at
    if status.phase != "running" or quiet < QUIET_SHARE * status.stall_timeout_seconds:
        return None  # the waits of a start have deadlines of their own
    return _end_of_chain(status, graph)


def _end_of_chain(status: RunStatus, graph: WaitGraph) -> Diagnosis:
    """Diagnose a quiet run by the last node of the longest chain."""
    quiet = status.loop_beat - status.moved_at
    longest = max((graph.chain(node) for node in graph.waiters()), key=len, default=[])
    left = status.stall_timeout_seconds - quiet
    return Diagnosis(
        "quiet",
        f"nothing has moved for {quiet:.0f} s",
        _end(status, longest),
        f"if that may take so long, wait; the run ends itself in {max(left, 0):.0f} s (stall_timeout_seconds)",
        tuple(describe_waits(status, graph)),
    )


def _end(status: RunStatus, chain: list[Edge]) -> str:
    if not chain:
        working = [stage for stage in status.stages if stage.state == "running"]
        return "; ".join(
            f"{stage.name} runs since {ago(status, stage.since)}" + (f", at {stage.place}" if stage.place else "")
            for stage in working
        ) or "nobody waits for anything that is known"
    last = chain[-1]
    text = f"all wait in the end for {spoken(last.on)} ({last.what}), since {ago(status, last.since)}"
    places = {f"{WORKER}{worker.name}": worker.place for worker in status.workers}
    return f"{text}, which is at {places[last.on]}" if places.get(last.on) else text

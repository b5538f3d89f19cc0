"""From what is known of a run to what is the matter with it. Pure: everything that is looked at is in the evidence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from roll.pipeline.doctor.graph import Edge, WaitGraph, wait_graph
from roll.tracking.processes import ProcessFacts
from roll.tracking.status import RunStatus, WorkerStatus

Verdict = Literal[
    "ended", "working", "quiet", "deadlock", "worker in trouble", "driver in trouble", "failed", "interrupted",
    "killed", "out of sight", "unknown",
]
WELL: tuple[Verdict, ...] = ("ended", "working")

SILENT_SECONDS = 20.0
"""Without a sign of life for so long a worker or a driver is not well."""
QUIET_SHARE = 0.5
"""Of `stall_timeout_seconds`, without any movement, is worth a look."""


@dataclass(frozen=True)
class ResumeFacts:
    """What a resumed run would find."""

    step: int | None
    """Of the newest whole checkpoint."""
    passed_over: tuple[str, ...] = ()
    """What is wrong with newer ones."""
    finished: int = 0
    """Groups in the journal that need not be made again."""
    begin_again: int = 0
    """Groups that were in flight."""


@dataclass(frozen=True)
class Evidence:
    """What was found in a run's folder and on this host."""

    run: Path
    now: float
    host: str
    """This one."""
    status: RunStatus | None
    summary: Mapping[str, Any] | None
    processes: Mapping[int, ProcessFacts | None] = field(default_factory=dict)
    """The driver and its workers on this host; None: gone."""
    resume: ResumeFacts | None = None
    last_words: tuple[str, ...] = ()
    """The end of the driver's log."""


@dataclass(frozen=True)
class Diagnosis:
    """What to tell."""

    verdict: Verdict
    headline: str
    culprit: str | None = None
    advice: str | None = None
    findings: tuple[str, ...] = ()
    """In support of the headline."""

    @property
    def is_well(self) -> bool:
        return self.verdict in WELL


def diagnose(evidence: Evidence) -> Diagnosis:
    """What is the matter with a run, alive or dead."""
    if evidence.status is not None and may_be_alive(evidence):
        return _of_a_live_run(evidence, evidence.status)
    return _of_a_dead_run(evidence)


def may_be_alive(evidence: Evidence) -> bool:
    """Whether the driver is there; of one on another host it is not known."""
    status = evidence.status
    if status is None or status.phase == "ended":
        return False
    driver = status.driver
    if driver.host != evidence.host:
        return (evidence.summary or {}).get("status", "running") == "running"
    facts = evidence.processes.get(driver.pid)
    return facts is not None and facts.started == driver.started


# Dead


def _of_a_dead_run(evidence: Evidence) -> Diagnosis:
    summary = evidence.summary
    if summary is None:
        message = "the run ended before it had begun: there is no summary.json"
        return Diagnosis("unknown", message, None, _go_on(evidence), evidence.last_words)
    steps = f"after step {summary['steps']}"
    if summary["status"] == "success":
        return Diagnosis("ended", f"the run has ended well, {steps}")
    findings = tuple(_last_known(evidence))
    if summary["status"] in ("failed", "interrupted"):
        verdict: Verdict = "failed" if summary["status"] == "failed" else "interrupted"
        cause = summary["error"] or "no cause is on record"
        return Diagnosis(verdict, f"the run {_PAST[verdict]} {steps}", cause, _go_on(evidence), findings)
    pid = evidence.status.driver.pid if evidence.status is not None else None
    who = "its driver" if pid is None else f"its driver (process {pid} on {evidence.status.driver.host})"
    culprit = (
        f"{who} is gone without a word: killed (SIGKILL, as the kernel does when memory runs out: see `dmesg`), or its "
        "host went down"
    )
    return Diagnosis("killed", f"the run is dead {steps}", culprit, _go_on(evidence), findings)


_PAST = {"failed": "failed", "interrupted": "was interrupted"}


def _last_known(evidence: Evidence) -> Iterator[str]:
    """What was the matter when it was last seen."""
    status = evidence.status
    if status is not None:
        yield from ("when it was last seen:", *describe_waits(status, wait_graph(status)))
        silent = [worker for worker in status.workers if _silence(status, worker) > SILENT_SECONDS]
        yield from (f"{worker.name} had been silent for {_silence(status, worker):.0f} s" for worker in silent)
    if evidence.last_words:
        yield from ("last lines of the driver's log:", *(f"  {line}" for line in evidence.last_words))


def _go_on(evidence: Evidence) -> str:
    facts = evidence.resume
    if facts is None or facts.step is None:
        kept = "" if facts is None or not facts.finished else f", with {facts.finished} groups that were finished"
        begin = f"no checkpoint is whole: with resume_from_checkpoint=true the run begins again{kept}"
        return "; ".join([*(facts.passed_over if facts is not None else ()), begin])
    parts = [f"passed over: {damage}" for damage in facts.passed_over]
    parts.append(
        f"the same command with resume_from_checkpoint=true goes on after step {facts.step}, with {facts.finished} "
        f"finished groups; {facts.begin_again} that were in flight begin again"
    )
    return "; ".join(parts)


# Alive


def _of_a_live_run(evidence: Evidence, status: RunStatus) -> Diagnosis:
    graph = wait_graph(status)
    waits = tuple(describe_waits(status, graph))
    trouble = _driver_trouble(evidence, status)
    if trouble is not None:
        return trouble
    return (
        explain_deadlock(status, graph)
        or _worker_trouble(evidence, status, graph)
        or _quiet(status, graph)
        or Diagnosis("working", f"the run works: {_progress(status)}", findings=waits)
    )


def explain_stall(status: RunStatus) -> str:
    """Why nothing moves, as far as the driver itself can see; for its last message."""
    graph = wait_graph(status)
    found = explain_deadlock(status, graph) or _silent_worker(status) or _end_of_chain(status, graph)
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
    """The ring, if there is one."""
    ring = graph.cycle()
    if not ring:
        return None
    begin = min((edge for edge in ring if not _is_thing(edge.who, status)), key=lambda edge: (edge.since, edge.who))
    ring = ring[ring.index(begin) :] + ring[: ring.index(begin)]
    actors = [edge.who for edge in ring if not _is_thing(edge.who, status)]
    has = {edge.on: edge.who for edge in ring if edge.what.startswith("who has it")}
    blamed = [
        f"{actor} keeps {_spoken(has[actor])} while it waits for {_spoken(_next_actor(ring, actor, actors))}"
        for actor in actors
        if actor in has
    ]
    youngest = max(edge.since for edge in ring)
    return Diagnosis(
        "deadlock",
        f"{_listed(actors)} wait for each other since {_ago(status, youngest)}; none of them can ever go on",
        "; ".join(blamed) or f"{actors[0]} and what it waits for",
        f"end the run (kill {status.driver.pid}); it ends by itself once nothing has moved for "
        f"{status.stall_timeout_seconds:g} s. Let one of them give up what it has before it waits, or wait for nothing "
        "that comes after it",
        (*(_sentence(status, edge) for edge in ring), "", *describe_waits(status, graph)),
    )


def _next_actor(ring: list[Edge], actor: str, actors: list[str]) -> str:
    return actors[(actors.index(actor) + 1) % len(actors)]


def _worker_trouble(evidence: Evidence, status: RunStatus, graph: WaitGraph) -> Diagnosis | None:
    for worker in status.workers:
        if not worker.on_driver_host or status.driver.host != evidence.host or worker.pid not in evidence.processes:
            continue
        facts = evidence.processes[worker.pid]
        if facts is None:
            return _blame(
                status, graph, worker, f"process {worker.pid} is gone", "the driver replaces it or ends the run"
            )
        if facts.stopped:
            return _blame(
                status, graph, worker, f"process {worker.pid} was stopped by a signal", f"kill -CONT {worker.pid}"
            )
    return _silent_worker(status)


def _silent_worker(status: RunStatus) -> Diagnosis | None:
    graph = wait_graph(status)
    for worker in status.workers:
        silence = _silence(status, worker)
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
    node = f"worker/{worker.name}"
    waiting = [who for who in graph.waiters() if who in status_actors(status) and _reaches(graph, who, node)]
    headline = f"{_listed(waiting)} cannot go on without {worker.name}" if waiting else f"{worker.name} is not well"
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
        return None  # what a start waits for has deadlines of its own
    return _end_of_chain(status, graph)


def _end_of_chain(status: RunStatus, graph: WaitGraph) -> Diagnosis:
    """Whoever the longest chain leads to."""
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
            f"{stage.name} runs since {_ago(status, stage.since)}" + (f", at {stage.place}" if stage.place else "")
            for stage in working
        ) or "nobody waits for anything that is known"
    last = chain[-1]
    text = f"all wait in the end for {_spoken(last.on)} ({last.what}), since {_ago(status, last.since)}"
    places = {f"worker/{worker.name}": worker.place for worker in status.workers}
    return f"{text}, which is at {places[last.on]}" if places.get(last.on) else text


# Words


def describe_waits(status: RunStatus, graph: WaitGraph) -> Iterator[str]:
    """Who waits for whom, since when: a line for each stage, for others that wait, and for each worker."""
    for stage in status.stages:
        yield f"{stage.name:<20} {stage.state}, {_ago(status, stage.since)}{_tail(status, graph, stage.name)}"
    listed = {stage.name for stage in status.stages}
    for who in dict.fromkeys(wait.who for wait in status.waits):
        if who not in listed and not who.startswith("group/"):
            yield f"{who:<20}{_tail(status, graph, who) or ' goes on'}"
    for on, count in status.groups_by_wait.items():
        yield f"{count} groups in flight wait for {_spoken(on)}"
    for worker in status.workers:
        busy = f", at {worker.place}" if worker.place else ", had nothing to do"
        yield f"{worker.name:<20} process {worker.pid}, last sign of life {_silence(status, worker):.0f} s before{busy}"


def _tail(status: RunStatus, graph: WaitGraph, node: str) -> str:
    return "".join(
        f" -> {_spoken(edge.on)} ({edge.what}, {_ago(status, edge.since)})" for edge in graph.chain(node)[:6]
    )


def _sentence(status: RunStatus, edge: Edge) -> str:
    if edge.what.startswith("who has it"):
        return f"{_spoken(edge.who)}: {edge.on} has them{edge.what[len('who has it') :]}, {_ago(status, edge.since)}"
    return f"{_spoken(edge.who)} waits for {_spoken(edge.on)} ({edge.what}), {_ago(status, edge.since)}"


def status_actors(status: RunStatus) -> set[str]:
    """Those who do something."""
    return {stage.name for stage in status.stages} | {wait.who for wait in status.waits}


def _is_thing(node: str, status: RunStatus) -> bool:
    return node not in status_actors(status)


def _spoken(node: str) -> str:
    kind, _, name = node.partition("/")
    return {"items": f"an item from the channel {name!r}", "room": f"room in the channel {name!r}",
            "devices": f"the devices of {name}", "worker": f"worker {name}"}.get(kind, node)


def _progress(status: RunStatus) -> str:
    moved = f"something moved {max(0.0, status.loop_beat - status.moved_at):.0f} s before"
    if status.phase in ("preparing", "ending"):
        return f"it is {status.phase}"
    if status.phase == "starting":
        return f"its roles are starting; {moved}"
    return f"{status.step} of {status.max_steps} steps are done; {moved}"


def _silence(status: RunStatus, worker: WorkerStatus) -> float:
    return max(0.0, status.loop_beat - worker.asked_since)


def _ago(status: RunStatus, since: float) -> str:
    return f"{max(0.0, status.loop_beat - since):.0f} s"


def _listed(names: list[str]) -> str:
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"

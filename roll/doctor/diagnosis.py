"""What is wrong with a run, alive or dead, as far as its files and this host can tell, and what to do about it.

Collecting the evidence only reads and imports nothing heavy; the diagnosis is a pure function of it. The surest cause
is reported first: of a live run, a driver in trouble, a ring of waits, a worker in trouble, or nothing that moves. The
driver asks here too, when nothing has moved for too long (`explain_stall`).
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from roll.doctor.graph import Edge, WaitGraph, wait_graph
from roll.pipeline.checkpoints import DamagedCheckpoint, checkpoint_folder, read_checkpoint, saved_steps
from roll.rollout.journal import RolloutProgress, read_journal, recover
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import ENDING_SECONDS, ProcessFacts, RunStatus, WorkerStatus, look_at, read_status
from roll.tracking.waits import GROUP, WORKER


def of_a_dead_run(evidence: Evidence) -> Diagnosis:
    """Explain how a dead run ended and how to resume it."""
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
    driver = evidence.status.driver if evidence.status is not None else None
    who = "its driver" if driver is None else f"its driver (process {driver.pid} on {driver.host})"
    culprit = (
        f"{who} is gone without a word: killed (SIGKILL, as the kernel does when memory runs out: see `dmesg`), or its "
        "host went down"
    )
    return Diagnosis("killed", f"the run is dead {steps}", culprit, _go_on(evidence), findings)


_PAST = {"failed": "failed", "interrupted": "was interrupted"}


def _last_known(evidence: Evidence) -> Iterator[str]:
    """Yield the waits, the silent workers and the last log lines from when the run was last seen."""
    status = evidence.status
    if status is not None:
        yield from ("when it was last seen:", *describe_waits(status, wait_graph(status)))
        silent = [worker for worker in status.workers if silence_of(status, worker) > SILENT_SECONDS]
        yield from (f"{worker.name} had been silent for {silence_of(status, worker):.0f} s" for worker in silent)
    if evidence.last_words:
        yield from ("last lines of the driver's log:", *(f"  {line}" for line in evidence.last_words))


def _go_on(evidence: Evidence) -> str:
    facts = evidence.resume
    if facts is not None and facts.step is None and facts.passed_over:
        return "; ".join([*facts.passed_over, "no checkpoint is whole: begin a new run in another folder"])
    if facts is None or facts.step is None:
        kept = "" if facts is None or not facts.finished else f", with {facts.finished} groups that were finished"
        return f"there is no checkpoint yet: with resume_from_checkpoint=true the run begins again{kept}"
    parts = [f"passed over: {damage}" for damage in facts.passed_over]
    parts.append(
        f"the same command with resume_from_checkpoint=true goes on after step {facts.step}, with {facts.finished} "
        f"finished groups; {facts.begin_again} that were in flight begin again"
    )
    return "; ".join(parts)


def diagnose(evidence: Evidence) -> Diagnosis:
    """Explain what is wrong with a run, alive or dead."""
    if evidence.status is not None and may_be_alive(evidence):
        return of_a_live_run(evidence, evidence.status)
    return of_a_dead_run(evidence)


LAST_LINES = 6
_LAST_BYTES = 8192


def gather_evidence(run: RunDirectory) -> Evidence:
    """Collect all evidence on a run. Raises `OSError` for files that cannot be read, `ValueError` for damaged ones."""
    status = read_status(run.status)
    evidence = Evidence(
        run=run.root,
        now=time.time(),
        host=socket.gethostname(),
        status=status,
        summary=_summary(run.summary),
        processes={} if status is None else _processes(status),
    )
    if may_be_alive(evidence):
        return evidence
    return replace(evidence, resume=_resume_facts(run), last_words=_last_lines(run.logs / "driver.log"))


def _processes(status: RunStatus) -> dict[int, ProcessFacts | None]:
    if status.driver.host != socket.gethostname():
        return {}
    pids = [status.driver.pid, *(worker.pid for worker in status.workers if worker.on_driver_host)]
    return {pid: look_at(pid) for pid in pids}


def _summary(path: Path) -> Mapping[str, Any] | None:
    try:
        summary: Mapping[str, Any] = json.loads(path.read_text())
        return summary
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _resume_facts(run: RunDirectory) -> ResumeFacts:
    """Return the facts of the newest whole checkpoint and of what the journal adds to it."""
    passed_over: list[str] = []
    progress, step = RolloutProgress.at_start(), None
    for candidate in reversed(saved_steps(run.checkpoints)):
        try:
            progress = read_checkpoint(checkpoint_folder(run.checkpoints, candidate)).state.progress
        except DamagedCheckpoint as damage:
            passed_over.append(str(damage))
        else:
            step = candidate
            break
    recovered = recover(read_journal(run.journal), progress)
    return ResumeFacts(step, tuple(passed_over), len(recovered.finished), len(recovered.in_flight))


def _last_lines(path: Path) -> tuple[str, ...]:
    try:
        with open(path, "rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LAST_BYTES))
            return tuple(file.read().decode(errors="replace").splitlines()[-LAST_LINES:])
    except FileNotFoundError:
        return ()


Verdict = Literal[
    "ended",
    "working",
    "quiet",
    "deadlock",
    "worker in trouble",
    "driver in trouble",
    "failed",
    "interrupted",
    "killed",
    "out of sight",
    "unknown",
]
WELL: tuple[Verdict, ...] = ("ended", "working")


@dataclass(frozen=True)
class ResumeFacts:
    """State that a resumed run would start from."""

    step: int | None
    """Step of the newest whole checkpoint; None: there is none."""
    passed_over: tuple[str, ...] = ()
    """Damages of newer checkpoints."""
    finished: int = 0
    """Number of groups in the journal that need not be generated again."""
    begin_again: int = 0
    """Number of groups that were in flight."""


@dataclass(frozen=True)
class Evidence:
    """Facts found in a run's folder and on this host."""

    run: Path
    now: float
    host: str
    """Name of this host."""
    status: RunStatus | None
    summary: Mapping[str, Any] | None
    processes: Mapping[int, ProcessFacts | None] = field(default_factory=dict)
    """Process facts of the driver and its workers on this host, by process id; None: the process is gone."""
    resume: ResumeFacts | None = None
    last_words: tuple[str, ...] = ()
    """Last lines of the driver's log."""


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `roll doctor`."""

    verdict: Verdict
    headline: str
    culprit: str | None = None
    advice: str | None = None
    findings: tuple[str, ...] = ()
    """Lines that support the headline."""

    @property
    def is_well(self) -> bool:
        """True if the user need not do anything about the run."""
        return self.verdict in WELL


def may_be_alive(evidence: Evidence) -> bool:
    """Return True if the driver is there. One on another host counts as alive unless the summary records an end."""
    status = evidence.status
    if status is None or status.phase == "ended":
        return False
    driver = status.driver
    if driver.host != evidence.host:
        return (evidence.summary or {}).get("status", "running") == "running"
    facts = evidence.processes.get(driver.pid)
    return facts is not None and facts.started == driver.started


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
        return (
            "; ".join(
                f"{stage.name} runs since {ago(status, stage.since)}" + (f", at {stage.place}" if stage.place else "")
                for stage in working
            )
            or "nobody waits for anything that is known"
        )
    last = chain[-1]
    text = f"all wait in the end for {spoken(last.on)} ({last.what}), since {ago(status, last.since)}"
    places = {f"{WORKER}{worker.name}": worker.place for worker in status.workers}
    return f"{text}, which is at {places[last.on]}" if places.get(last.on) else text


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
    return "".join(f" -> {spoken(edge.on)} ({edge.what}, {ago(status, edge.since)})" for edge in graph.chain(node)[:6])


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
    return {
        "items": f"an item from the channel {name!r}",
        "room": f"room in the channel {name!r}",
        "devices": f"the devices of {name}",
        "worker": f"worker {name}",
    }.get(kind, node)


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

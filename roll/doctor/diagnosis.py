"""`roll doctor`: finds what is wrong with a run, alive or dead, from its files and this host, and advises what to do.

Collecting the evidence only reads files and imports nothing heavy; the diagnosis is a pure function of the evidence.
The surest cause is reported first. The driver of a stalled run uses the diagnosis, too (`explain_stall`).

The wait-for graph has edges from each waiter to the resource it waits for, and from a resource to its holder or
producer. Nodes that cannot continue, whatever the others do, are deadlocked, and a cycle leads through them. Waits that
have just begun do not count, because what they wait for may have happened a moment ago.

Exit code 0: the run works, or has ended well. 1: something is wrong, and the report says what. 2: there is no such run,
or its files cannot be read.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from roll.pipeline.checkpoints import newest_whole
from roll.rollout.journal import RolloutProgress, read_journal, recover
from roll.tracking import waits
from roll.tracking.logs import last_lines
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import ENDING_SECONDS, ProcessFacts, RunStatus, WorkerStatus, look_at, read_status
from roll.tracking.summary import read_summary
from roll.tracking.waits import Wait

WELL, TROUBLE, NO_RUN = 0, 1, 2

LAST_LINES = 6
LAST_BYTES = 8 * 1024
SILENT_SECONDS = 20.0
"""Seconds without a sign of life after which a worker or a driver is reported."""
QUIET_SHARE = 0.5
"""Share of `stall_timeout_seconds` without any movement after which a run is reported as quiet."""
LONG_END_SHARE = 0.5
"""Share of `ENDING_SECONDS` after which the end of a run is reported as too long."""

_EPILOG = """\
examples:
  roll doctor output/quickstart/latest
  roll doctor --json /runs/mine
  roll doctor --gpu                 # no run: do the paths that need GPUs work on this machine
"""


def main(arguments: Sequence[str]) -> int:
    """Examine the run named on the command line; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="roll doctor",
        description="Say how a run is, alive or dead: who waits for whom, since when, and the likely culprit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print the findings for a program")
    options = parser.parse_args(arguments)
    try:
        evidence = gather_evidence(RunDirectory.existing(options.run))
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return NO_RUN
    found = diagnose(evidence)
    print(json.dumps(asdict(found), indent=1) if options.json else _render(options.run, found))
    return WELL if found.is_well else TROUBLE


def _render(run: str, found: Diagnosis) -> str:
    lines = [f"{run}: {found.headline}"]
    if found.culprit:
        lines.append(f"  likely culprit: {found.culprit}")
    if found.advice:
        lines.append(f"  what to do: {found.advice}")
    return "\n".join([*lines, *(["", *found.findings] if found.findings else [])])


LiveVerdict = Literal["working", "quiet", "deadlock", "worker in trouble", "driver in trouble", "out of sight"]
DeadVerdict = Literal["ended", "failed", "interrupted", "killed", "unknown"]


@dataclass(frozen=True)
class Diagnosis:
    """The answer of `roll doctor`."""

    verdict: LiveVerdict | DeadVerdict
    headline: str
    culprit: str | None = None
    advice: str | None = None
    findings: tuple[str, ...] = ()
    """Lines that support the headline."""

    @property
    def is_well(self) -> bool:
        """True if the user need not do anything about the run."""
        return self.verdict in ("ended", "working")


@dataclass(frozen=True)
class Evidence:
    """Facts found in a run's folder and on this host, whose name is ``host``."""

    run: Path
    now: float
    host: str
    status: RunStatus | None
    summary: Mapping[str, Any] | None
    processes: Mapping[int, ProcessFacts | None] = field(default_factory=dict)
    """Process facts of the driver and its workers on this host, by process id; None: the process is gone."""
    resume: str = ""
    """Advice on resuming a dead run."""
    last_words: tuple[str, ...] = ()
    """Last lines of the driver's log."""


def gather_evidence(run: RunDirectory) -> Evidence:
    """Collect all evidence on a run. Raises `OSError` for files that cannot be read, `ValueError` for damaged ones."""
    host, status = socket.gethostname(), read_status(run.status)
    pids: list[int] = []
    if status is not None and status.driver.host == host:
        pids = [status.driver.pid, *(worker.pid for worker in status.workers if worker.on_driver_host)]
    processes = {pid: look_at(pid) for pid in pids}
    try:
        summary = read_summary(run.summary)
    except FileNotFoundError:
        summary = None
    except ValueError as error:
        raise ValueError(f"{run.summary} is damaged: {error}") from error
    evidence = Evidence(run.root, time.time(), host, status, summary, processes)
    if _live_status(evidence) is not None:
        return evidence
    log = run.logs / "driver.log"
    last_words = last_lines(log, LAST_LINES, LAST_BYTES) if log.exists() else ()
    checkpoint, damages = newest_whole(run.checkpoints)
    progress = RolloutProgress.at_start() if checkpoint is None else checkpoint.state.progress
    recovered = recover(read_journal(run.journal), progress)
    step = None if checkpoint is None else checkpoint.step
    resume = how_to_resume(run.root, step, list(map(str, damages)), len(recovered.finished), len(recovered.in_flight))
    return replace(evidence, resume=resume, last_words=tuple(last_words))


def diagnose(evidence: Evidence) -> Diagnosis:
    """Explain what is wrong with a run, alive or dead."""
    status = _live_status(evidence)
    if status is None:
        return _of_a_dead_run(evidence)
    if (trouble := _driver_trouble(evidence, status)) is not None:
        return trouble
    if status.phase == "ending":
        return _ending(status)  # processes are being killed, so their waits mean nothing any more
    graph = wait_graph(status)
    found = (
        _deadlock(status, graph)
        or _worker_trouble(status, graph, evidence.processes)
        or _quiet(status, graph)
        or Diagnosis("working", f"the run works: {_progress(status)}")
    )
    return replace(found, findings=(*found.findings, *_describe_waits(status, graph)))


def _live_status(evidence: Evidence) -> RunStatus | None:
    """Return the status of a run whose driver is alive; None if the run is dead."""
    status = evidence.status
    if status is None or status.phase == "ended":
        return None
    if status.driver.host != evidence.host:  # it counts as alive unless the summary records an end
        return status if (evidence.summary or {}).get("status", "running") == "running" else None
    facts = evidence.processes.get(status.driver.pid)
    return status if facts is not None and facts.started == status.driver.started else None


def _of_a_dead_run(evidence: Evidence) -> Diagnosis:
    summary, advice = evidence.summary, evidence.resume
    if summary is None:
        message = "the run ended before it had begun: there is no summary.json"
        return Diagnosis("unknown", message, None, advice, evidence.last_words)
    steps = f"after step {summary['steps']}"
    if summary["status"] == "success":
        return Diagnosis("ended", f"the run has ended well, {steps}")
    findings = tuple(_last_known(evidence))
    cause = summary["error"] or "no cause is on record"
    if summary["status"] == "failed":
        return Diagnosis("failed", f"the run failed {steps}", cause, advice, findings)
    if summary["status"] == "interrupted":
        return Diagnosis("interrupted", f"the run was interrupted {steps}", cause, advice, findings)
    driver = evidence.status.driver if evidence.status is not None else None
    who = "its driver" if driver is None else f"its driver (process {driver.pid} on {driver.host})"
    culprit = (
        f"{who} disappeared without an error message: killed (SIGKILL, as the kernel does when memory runs out: see "
        "`dmesg`), or its host went down"
    )
    return Diagnosis("killed", f"the run is dead {steps}", culprit, advice, findings)


def _last_known(evidence: Evidence) -> Iterator[str]:
    """Yield the waits, the silent workers and the last log lines from when the run was last seen."""
    status = evidence.status
    if status is not None:
        yield from ("when it was last seen:", *_describe_waits(status, wait_graph(status)))
        for worker in status.workers:
            if (silence := _silence_of(status, worker)) > SILENT_SECONDS:
                yield f"{worker.name} had been silent for {silence:.0f} s"
    if evidence.last_words:
        yield from ("last lines of the driver's log:", *(f"  {line}" for line in evidence.last_words))


def how_to_resume(run: Path, step: int | None, damages: Sequence[str], finished: int, in_flight: int) -> str:
    """Return the advice on how to resume from the newest whole checkpoint and the groups that the journal adds to it.

    ``run``: folder of the run. ``step``: None without a whole checkpoint. ``damages`` are those of newer checkpoints.
    """
    if step is None and damages:
        return "; ".join([*damages, "no checkpoint is whole: begin a new run in another folder"])
    if step is None:
        kept = f", with {finished} groups that were finished" if finished else ""
        return f"there is no checkpoint yet: with resume_from_checkpoint={run} the run begins again{kept}"
    resumed = (
        f"the same command with resume_from_checkpoint={run} goes on after step {step}, with {finished} finished "
        f"groups; {in_flight} that were in flight begin again"
    )
    return "; ".join([*(f"passed over: {damage}" for damage in damages), resumed])


def _driver_trouble(evidence: Evidence, status: RunStatus) -> Diagnosis | None:
    driver, age = status.driver, evidence.now - status.written
    facts = evidence.processes.get(driver.pid) if driver.host == evidence.host else None
    if facts is not None and facts.stopped:
        culprit = f"its driver, process {driver.pid}, was stopped by a signal"
        return Diagnosis("driver in trouble", "the run stands still", culprit, f"kill -CONT {driver.pid}")
    if age > SILENT_SECONDS and facts is None:
        return Diagnosis(
            "out of sight",
            f"the driver on {driver.host} has said nothing for {age:.0f} s",
            f"process {driver.pid} on {driver.host} is dead or cut off, or the clocks of the hosts differ",
            f"run `roll doctor` on {driver.host}",
        )
    if age > SILENT_SECONDS:
        return Diagnosis(
            "driver in trouble",
            f"process {driver.pid} is there, but `status.json` has not been written for {age:.0f} s",
            "the disk is full or does not answer, or the process gets no CPU time",
            f"look at the disk of {evidence.run} and at {driver.host}",
        )
    if status.loop_place is not None:
        lag = status.written - status.loop_beat
        return Diagnosis(
            "driver in trouble",
            f"the driver's event loop has been stuck for {lag:.0f} s, and with it the whole run",
            f"process {driver.pid} is in {status.loop_place}",
            "this code must not block: `await` it, or run it in a thread (`asyncio.to_thread`)",
        )
    return None


def _ending(status: RunStatus) -> Diagnosis:
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
    """Return the reason why nothing moves, as far as the driver itself can see, for the driver's last message."""
    graph = wait_graph(status)
    found = _deadlock(status, graph) or _worker_trouble(status, graph, {}) or _end_of_chain(status, graph)
    return "\n".join([f"{found.headline}: {found.culprit}", *found.findings, *_describe_waits(status, graph)])


def _deadlock(status: RunStatus, graph: WaitGraph) -> Diagnosis | None:
    ring = graph.cycle()
    if not ring:
        return None
    acting = _actors(status)
    begin = min((edge for edge in ring if edge.who in acting), key=lambda edge: (edge.since, edge.who))
    ring = ring[ring.index(begin) :] + ring[: ring.index(begin)]
    actors = [edge.who for edge in ring if edge.who in acting]
    has = {edge.on: edge.who for edge in ring if edge.what.startswith(HOLDER)}
    blamed = [
        f"{actor} keeps {_spoken(has[actor])} while it waits for {_spoken(following)}"
        for actor, following in zip(actors, actors[1:] + actors[:1], strict=True)
        if actor in has
    ]
    return Diagnosis(
        "deadlock",
        f"{_listed(actors)} wait for each other since {_ago(status, max(edge.since for edge in ring))}; none of them "
        "can ever go on",
        "; ".join(blamed) or f"{actors[0]} and what it waits for",
        f"end the run (kill {status.driver.pid}); it ends by itself once nothing has moved for "
        f"{status.stall_timeout_seconds:g} s. Let one of them give up what it has before it waits, or wait for nothing "
        "that comes after it",
        (*(_sentence(status, edge) for edge in ring), ""),
    )


def _sentence(status: RunStatus, edge: Wait) -> str:
    ago = _ago(status, edge.since)
    if edge.what.startswith(HOLDER):
        return f"{_spoken(edge.who)}: {edge.on} has them{edge.what.removeprefix(HOLDER)}, {ago}"
    return f"{_spoken(edge.who)} waits for {_spoken(edge.on)} ({edge.what}), {ago}"


def _worker_trouble(
    status: RunStatus, graph: WaitGraph, processes: Mapping[int, ProcessFacts | None]
) -> Diagnosis | None:
    for worker, cause, advice in _troubled_workers(status, processes):
        stuck = graph.waiting_for(f"{waits.WORKER}{worker.name}")
        waiting = [who for who in graph.waiters() if who in stuck & _actors(status)]
        headline = f"{_listed(waiting)} cannot go on without {worker.name}" if waiting else f"{worker.name} is not well"
        return Diagnosis("worker in trouble", headline, f"worker {worker.name}: {cause}", advice)
    return None


def _troubled_workers(
    status: RunStatus, processes: Mapping[int, ProcessFacts | None]
) -> Iterator[tuple[WorkerStatus, str, str]]:
    """Yield workers in trouble with the cause and the advice, the surest cause first."""
    for worker in status.workers:
        if worker.on_driver_host and worker.pid in processes:
            facts = processes[worker.pid]
            if facts is None or (worker.started is not None and facts.started != worker.started):
                yield worker, f"process {worker.pid} is gone", "the driver replaces it or ends the run"
            elif facts.stopped:
                yield worker, f"process {worker.pid} was stopped by a signal", f"kill -CONT {worker.pid}"
    for worker in status.workers:
        if (silence := _silence_of(status, worker)) > SILENT_SECONDS:
            cause = f"process {worker.pid} has given no sign of life for {silence:.0f} s"
            yield worker, cause, "look at its host; the call that it is in has a deadline"
    for worker in status.workers:
        if worker.loop_lag > SILENT_SECONDS:
            where = f" in {worker.place}" if worker.place else ""
            cause = f"the event loop of process {worker.pid} has been stuck for {worker.loop_lag:.0f} s{where}"
            yield worker, cause, "this code must run in a thread of its own"


def _quiet(status: RunStatus, graph: WaitGraph) -> Diagnosis | None:
    quiet = status.loop_beat - status.moved_at
    if status.phase != "running" or quiet < QUIET_SHARE * status.stall_timeout_seconds:
        return None  # the waits of a start have deadlines of their own
    return _end_of_chain(status, graph)


def _end_of_chain(status: RunStatus, graph: WaitGraph) -> Diagnosis:
    """Diagnose a quiet run by the last node of the longest chain."""
    chain = max((graph.chain(node) for node in graph.waiters()), key=len, default=[])
    if chain:
        last = chain[-1]
        place = next((worker.place for worker in status.workers if f"{waits.WORKER}{worker.name}" == last.on), None)
        culprit = f"in the end all wait for {_spoken(last.on)} ({last.what}), since {_ago(status, last.since)}"
        culprit += f", which is at {place}" if place else ""
    else:
        working = [
            f"{stage.name} runs since {_ago(status, stage.since)}" + (f", at {stage.place}" if stage.place else "")
            for stage in status.stages
            if stage.state == "running"
        ]
        culprit = "; ".join(working) or "no process waits for anything that is known"
    quiet = status.loop_beat - status.moved_at
    left = max(status.stall_timeout_seconds - quiet, 0)
    advice = f"if that may take so long, wait; the run ends itself in {left:.0f} s (stall_timeout_seconds)"
    return Diagnosis("quiet", f"nothing has moved for {quiet:.0f} s", culprit, advice)


def _describe_waits(status: RunStatus, graph: WaitGraph) -> Iterator[str]:
    """Yield one line per stage, per other waiter, per resource that groups wait for, and per worker."""

    def chain(node: str) -> str:
        edges = graph.chain(node)[:6]
        return "".join(f" -> {_spoken(edge.on)} ({edge.what}, {_ago(status, edge.since)})" for edge in edges)

    for stage in status.stages:
        yield f"{stage.name:<20} {stage.state}, {_ago(status, stage.since)}{chain(stage.name)}"
    named = {stage.name for stage in status.stages}
    for who in dict.fromkeys(wait.who for wait in status.waits):
        if who not in named and not who.startswith(waits.GROUP):
            yield f"{who:<20}{chain(who) or ' goes on'}"
    for on, count in status.groups_by_wait.items():
        yield f"{count} groups in flight wait for {_spoken(on)}"
    for worker in status.workers:
        yield f"{worker.name:<20} process {worker.pid}, {_state_of(status, worker)}"


def _state_of(status: RunStatus, worker: WorkerStatus) -> str:
    silence = f"{_silence_of(status, worker):.0f} s before"
    if not worker.has_answered:
        return f"has not answered yet, asked {silence}"
    return f"last sign of life {silence}, " + (f"at {worker.place}" if worker.place else "had nothing to do")


def _actors(status: RunStatus) -> set[str]:
    """Return the nodes that act: stages and all waiters. Other nodes are only waited for."""
    return {stage.name for stage in status.stages} | {wait.who for wait in status.waits}


def _spoken(node: str) -> str:
    kind, _, name = node.partition("/")
    return {
        "items": f"an item from the channel {name!r}",
        "room": f"room in the channel {name!r}",
        "devices": f"the devices of {name}",
        "worker": f"worker {name}",
    }.get(kind, node)


def _progress(status: RunStatus) -> str:
    if status.phase == "preparing":
        return "it is preparing"
    done = "its roles are starting"
    if status.phase == "running":
        done = f"{status.step} of {status.max_steps} steps are done"
    return f"{done}; something moved {_ago(status, status.moved_at)} before"


def _silence_of(status: RunStatus, worker: WorkerStatus) -> float:
    return max(0.0, status.loop_beat - worker.asked_since)


def _ago(status: RunStatus, since: float) -> str:
    return f"{max(0.0, status.loop_beat - since):.0f} s"


def _listed(names: list[str]) -> str:
    """Join names: "a", "a and b", or "a, b and c"."""
    return " and ".join(names) if len(names) < 3 else f"{', '.join(names[:-1])} and {names[-1]}"


YOUNG_SECONDS = 2.0
NEEDED_GROUPS = "groups that the batch needs"
OTHER_GROUPS = "other groups"
"""Node for groups that a status does not list, or that wait for nothing: they continue."""
_WHO_LIFTS = {"budget": waits.TRAIN, "version": waits.PUBLISHER, "paused": waits.PUBLISHER}
"""The stage that must act, by the reason why no group starts."""
HOLDER = "who has it"
"""Prefix of the description of an edge from a resource to the actor that holds it."""


@dataclass(frozen=True)
class WaitGraph:
    """All edges by their first node. An edge is a `Wait`: ``who`` cannot continue without ``on``."""

    edges: Mapping[str, Sequence[Wait]]

    def of(self, node: str) -> Sequence[Wait]:
        """Return the edges that begin at a node; none if it waits for nothing."""
        return self.edges.get(node, ())

    def waiters(self) -> list[str]:
        """Return the nodes that wait for something, the longest wait first."""
        return sorted(self.edges, key=lambda node: min(edge.since for edge in self.edges[node]))

    def deadlocked(self) -> set[str]:
        """Return the nodes that cannot continue, whatever the others do."""
        stuck = set(self.edges)
        while free := {node for node in stuck if self._may_go_on(node, stuck)}:
            stuck -= free
        return stuck

    def cycle(self) -> list[Wait]:
        """Return the edges of a cycle of deadlocked nodes; empty if there is none."""
        deadlocked = self.deadlocked()
        stuck = [node for node in self.waiters() if node in deadlocked]
        if not stuck:
            return []
        among = WaitGraph({node: [edge for edge in self.of(node) if edge.on in deadlocked] for node in stuck})
        path = among.chain(stuck[0])  # ends in a cycle, since each of them waits for another
        return path[[edge.who for edge in path].index(path[-1].on) :]

    def chain(self, node: str) -> list[Wait]:
        """Return the edges from a node along the longest waits to the last node. A cycle is followed once."""
        path: dict[str, Wait] = {}
        while node not in path and self.of(node):
            path[node] = min(self.of(node), key=lambda edge: edge.since)
            node = path[node].on
        return list(path.values())

    def waiting_for(self, node: str) -> set[str]:
        """Return the nodes that wait for a node, directly or through others."""
        found = {node}
        while more := {edge.who for edges in self.edges.values() for edge in edges if edge.on in found} - found:
            found |= more
        return found - {node}

    def _may_go_on(self, node: str, stuck: set[str]) -> bool:
        open_ends = [edge.on not in stuck for edge in self.of(node)]
        return any(open_ends) if _any_will_do(node) else all(open_ends)


def _any_will_do(node: str) -> bool:
    """Return True if a node continues as soon as one of the nodes it waits for does.

    Single processes of a reward model, which have a number after its name, need everything that they wait for.
    """
    return node in (waits.SCHEDULER, waits.REPLICAS) or (node.startswith(waits.REWARD_MODEL) and "/" not in node)


def wait_graph(status: RunStatus) -> WaitGraph:
    """Build the graph of a status."""
    edges: dict[str, list[Wait]] = defaultdict(list)
    for wait in status.waits:
        if status.loop_beat - wait.since >= YOUNG_SECONDS:
            edges[wait.who].append(wait)
    ahead = {edge.on: edge.since for each in edges.values() for edge in each}
    answered: set[str] = set()
    while ahead:
        node, since = ahead.popitem()
        answered.add(node)
        for edge in _answerable(status, node, since):
            edges[node].append(edge)
            if edge.on not in answered:
                ahead.setdefault(edge.on, since)
    return WaitGraph(dict(edges))


def _answerable(status: RunStatus, node: str, since: float) -> list[Wait]:
    """Return the edges from a resource to its holders or producers."""
    held = [wait for wait in status.holdings if wait.on == node]
    if held and _any_will_do(node):
        return [Wait(node, wait.who, wait.what, since) for wait in held]
    if held:
        return [Wait(node, wait.who, f"{HOLDER}, {wait.what}", wait.since) for wait in held]
    for channel in status.channels:
        if node == f"items/{channel.name}":
            return [Wait(node, channel.producer, "to put an item", since)]
        if node == f"room/{channel.name}":
            return [Wait(node, channel.consumer, "to take an item", since)]
    if node == waits.SCHEDULER:
        return _scheduler_waits(status, since)
    if node == NEEDED_GROUPS and status.scheduler is not None:
        return [Wait(node, group, "to finish", since) for group in status.scheduler.holding_up]
    # A stage publishes weights; before the stages run, the start of the roles does.
    publisher = waits.PUBLISHER if any(stage.name == waits.PUBLISHER for stage in status.stages) else waits.START
    if node == waits.PUBLICATION_MEMORY:
        holders = status.memory_holders
        measure = "to measure what lies there"
        work = {
            waits.PUBLISHING: (publisher, "to publish what lies there"),
            waits.STAGE_VALIDATION: (publisher, measure),
            waits.VALIDATION: (waits.VALIDATION, measure),
            waits.LOGP: (waits.LOGP, "to load what lies there"),
        }
        publishing = [Wait(node, who, what, since) for holder, (who, what) in work.items() if holder in holders]
        taking = [Wait(node, each, "to take newer weights", since) for each in holders if each.startswith(waits.WORKER)]
        return publishing + taking
    if node == waits.REPLICAS:
        return [Wait(node, maker, "to bring weights", since) for maker in (publisher, waits.ENGINE)]
    return []


def _scheduler_waits(status: RunStatus, since: float) -> list[Wait]:
    scheduler = status.scheduler
    if scheduler is None:
        return []
    if scheduler.in_flight and scheduler.holding_up:
        return [Wait(waits.SCHEDULER, NEEDED_GROUPS, "to finish", since)]
    if scheduler.in_flight:
        waiting = [wait.who for wait in status.waits if wait.who.startswith(waits.GROUP)]
        groups = sorted(set(waiting))
        if sum(status.groups_by_wait.values()) > len(waiting) or scheduler.in_flight > len(groups):
            groups.append(OTHER_GROUPS)
        return [Wait(waits.SCHEDULER, group, "to finish", since) for group in groups]
    lifts = _WHO_LIFTS.get(scheduler.refusal)
    return [Wait(waits.SCHEDULER, lifts, f"so that groups may start ({scheduler.refusal})", since)] if lifts else []

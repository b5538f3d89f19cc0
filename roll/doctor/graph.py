"""The wait-for graph of a run: edges lead from each waiter to what it waits for, and on to its holder or maker.

Nodes that cannot continue, whatever the others do, are deadlocked, and a cycle leads through them. Waits that have just
begun do not count, because what they wait for may have happened a moment ago.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.tracking import waits
from roll.tracking.status import RunStatus
from roll.tracking.waits import Wait

YOUNG_SECONDS = 2.0
NEEDED_GROUPS = "groups that the batch needs"
OTHER_GROUPS = "other groups"
"""Node for groups that a status does not list, or that wait for nothing: they continue."""
_WHO_LIFTS = {"budget": waits.TRAIN, "version": waits.PUBLISHER, "paused": waits.PUBLISHER}
"""The stage that must act, by the reason why no group starts."""
HOLDER = "who has it"
"""Beginning of the description of an edge from a thing to the actor that holds it."""


@dataclass(frozen=True)
class WaitGraph:
    """All edges, by the node where they begin. An edge is a `Wait`: ``who`` cannot continue without ``on``."""

    edges: Mapping[str, Sequence[Wait]]

    def of(self, node: str) -> Sequence[Wait]:
        """Return the edges of what a node waits for; none if the node waits for nothing."""
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
        """Return a ring of deadlocked nodes; empty if there is none."""
        deadlocked = self.deadlocked()
        stuck = [node for node in self.waiters() if node in deadlocked]
        if not stuck:
            return []
        among = WaitGraph({node: [edge for edge in self.of(node) if edge.on in deadlocked] for node in stuck})
        path = among.chain(stuck[0])  # which ends in a ring: each of them waits for another
        return path[[edge.who for edge in path].index(path[-1].on) :]

    def chain(self, node: str) -> list[Wait]:
        """Follow the longest wait from a node to the last node. A ring is followed once."""
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

    Processes of a reward model have a number after its name and need everything that they wait for.
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
    """Return the edges from a node that is waited for to its holders or makers."""
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
    # The stage publishes weights, or the start of the roles if the stages do not run yet.
    publisher = waits.PUBLISHER if any(stage.name == waits.PUBLISHER for stage in status.stages) else waits.START
    if node == waits.PUBLICATION_MEMORY:
        holders = status.memory_holders
        work = {waits.PUBLISHING: "to publish what lies there", waits.VALIDATION: "to measure what lies there"}
        publishing = [Wait(node, publisher, what, since) for holder, what in work.items() if holder in holders]
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

"""The wait-for graph of a run: edges lead from each waiter to what it waits for, and on to its holder or maker.

Most nodes need everything they wait for; a few (`_any_will_do`) continue as soon as one of several does. Nodes that
cannot continue, whatever the others do, are deadlocked, and a cycle leads through them. Waits that have just begun do
not count, because what they wait for may have happened a moment ago.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from roll.tracking.status import RunStatus
from roll.tracking.waits import (
    ENGINE,
    GROUP,
    PUBLICATION_MEMORY,
    PUBLISHER,
    PUBLISHING,
    REPLICAS,
    REWARD_MODEL,
    SCHEDULER,
    START,
    TRAIN,
    WORKER,
    Wait,
)

YOUNG_SECONDS = 2.0
NEEDED_GROUPS = "groups that the batch needs"
OTHER_GROUPS = "other groups"
"""Node for groups that a status does not list, or that wait for nothing: they continue."""
_WHO_LIFTS = {"budget": TRAIN, "version": PUBLISHER, "paused": PUBLISHER}
"""The stage that must act, by the reason why no group starts."""


@dataclass(frozen=True)
class Edge:
    """Edge of the graph: ``who`` cannot continue without ``on``."""

    who: str
    on: str
    what: str
    since: float


@dataclass(frozen=True)
class WaitGraph:
    """All edges, by the node where they begin."""

    edges: Mapping[str, Sequence[Edge]]

    def of(self, node: str) -> Sequence[Edge]:
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

    def cycle(self) -> list[Edge]:
        """Return a ring of deadlocked nodes; empty if there is none."""
        stuck = self.deadlocked()
        path: list[Edge] = []
        seen: list[str] = []
        node = next((waiter for waiter in self.waiters() if waiter in stuck), None)
        while node is not None and node not in seen:
            seen.append(node)
            edge = next(edge for edge in self.of(node) if edge.on in stuck)
            path.append(edge)
            node = edge.on
        return [] if node is None else path[seen.index(node) :]

    def chain(self, node: str) -> list[Edge]:
        """Follow the longest wait from a node to the last node. A ring is followed once."""
        path: list[Edge] = []
        seen = set()
        while node not in seen and self.of(node):
            seen.add(node)
            path.append(min(self.of(node), key=lambda edge: edge.since))
            node = path[-1].on
        return path

    def _may_go_on(self, node: str, stuck: set[str]) -> bool:
        open_ends = [edge.on not in stuck for edge in self.of(node)]
        return any(open_ends) if _any_will_do(node) else all(open_ends)


def _any_will_do(node: str) -> bool:
    """Return True if a node continues as soon as one of the nodes it waits for does.

    Processes of a reward model have a number after its name and need everything that they wait for.
    """
    return node in (SCHEDULER, REPLICAS) or (node.startswith(REWARD_MODEL) and "/" not in node)


def wait_graph(status: RunStatus) -> WaitGraph:
    """Build the graph of a status."""
    edges: dict[str, list[Edge]] = defaultdict(list)
    for wait in status.waits:
        if status.loop_beat - wait.since >= YOUNG_SECONDS:
            edges[wait.who].append(Edge(wait.who, wait.on, wait.what, wait.since))
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


def _answerable(status: RunStatus, node: str, since: float) -> list[Edge]:
    """Return the edges from a node that is waited for to its holders or makers."""
    held = [wait for wait in status.holdings if wait.on == node]
    if held:
        return [Edge(node, wait.who, wait.what, since) if _any_will_do(node) else _held(wait) for wait in held]
    kind, _, name = node.partition("/")
    if kind in ("items", "room"):
        ends = {channel.name: channel for channel in status.channels}
        if name not in ends:
            return []
        channel = ends[name]
        maker = channel.producer if kind == "items" else channel.consumer
        return [Edge(node, maker, "to put an item" if kind == "items" else "to take an item", since)]
    if node == SCHEDULER:
        return _scheduler_waits(status, since)
    if node == NEEDED_GROUPS and status.scheduler is not None:
        return [Edge(node, group, "to finish", since) for group in status.scheduler.holding_up]
    if node == PUBLICATION_MEMORY:
        return _memory_waits(status, since)
    if node == REPLICAS:
        return [Edge(node, maker, "to bring weights", since) for maker in (_publisher(status), ENGINE)]
    return []


def _memory_waits(status: RunStatus, since: float) -> list[Edge]:
    node, holders = PUBLICATION_MEMORY, status.memory_holders
    publishing = [Edge(node, _publisher(status), "to publish what lies there", since)] if PUBLISHING in holders else []
    taking = [Edge(node, each, "to take newer weights", since) for each in holders if each.startswith(WORKER)]
    return publishing + taking


def _scheduler_waits(status: RunStatus, since: float) -> list[Edge]:
    scheduler = status.scheduler
    if scheduler is None:
        return []
    if scheduler.in_flight and scheduler.holding_up:
        return [Edge(SCHEDULER, NEEDED_GROUPS, "to finish", since)]
    if scheduler.in_flight:
        return [Edge(SCHEDULER, group, "to finish", since) for group in _groups(status)]
    if scheduler.refusal in _WHO_LIFTS:
        lifts = _WHO_LIFTS[scheduler.refusal]
        return [Edge(SCHEDULER, lifts, f"so that groups may start ({scheduler.refusal})", since)]
    return []


def _groups(status: RunStatus) -> list[str]:
    """Return the groups in flight that are known to wait, and `OTHER_GROUPS` if there are more."""
    listed = [wait.who for wait in status.waits if wait.who.startswith(GROUP)]
    groups = sorted(set(listed))
    more = sum(status.groups_by_wait.values()) > len(listed) or (
        status.scheduler is not None and status.scheduler.in_flight > len(groups)
    )
    return [*groups, OTHER_GROUPS] if more else groups


def _publisher(status: RunStatus) -> str:
    """Return the node that publishes weights: the stage, or the start of the roles if the stages do not run yet."""
    return PUBLISHER if any(stage.name == PUBLISHER for stage in status.stages) else START


def _held(wait: Wait) -> Edge:
    return Edge(wait.on, wait.who, f"who has it, {wait.what}", wait.since)

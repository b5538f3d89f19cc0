"""Fault injection: carries out the events of the configuration's `chaos` section.

Each event happens once in the life of a run, however often the run is resumed. It is written to `chaos.jsonl` before it
happens, so a run that it kills does not repeat it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any

from roll.configs.run import PUBLICATION_CHAOS, ChaosEvent, PipelineConfig
from roll.pipeline.stage import StepCounter
from roll.runtime.actors import WorkerHandle
from roll.runtime.process import Fault, inject_fault
from roll.tracking.files import JsonLines, read_json_lines
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import unobserved, waiting

LOOK_SECONDS = 0.5
"""Seconds between two looks for a process that is being replaced."""


def events_to_come(config: PipelineConfig, run: RunDirectory) -> list[ChaosEvent]:
    """Return the events that have not happened yet in this run, earliest first; none unless `chaos` is enabled."""
    if not config.chaos.enabled or not config.chaos.events:
        return []
    done = read_json_lines(run.chaos) if run.chaos.exists() else []
    to_come = [event for event in config.chaos.events if _record(event) not in done]
    return sorted(to_come, key=lambda event: event.at_step)


class Chaos:
    """The remaining fault-injection events of a run."""

    def __init__(
        self,
        events: Iterable[ChaosEvent],
        run: RunDirectory,
        handles: Callable[[], Iterable[WorkerHandle]],
        steps: StepCounter,
        on_event: Callable[[str], None],
    ) -> None:
        self._events = list(events)
        self._run = run
        self._handles = handles
        self._steps = steps
        self._on_event = on_event

    async def run(self) -> None:
        """Apply the events that happen to processes, each at its step."""
        with unobserved():
            for event in self._events:
                if event.kind not in PUBLICATION_CHAOS:
                    await self._steps.reached(event.at_step)
                    await self._happen(event)

    async def publication(self, version: int) -> None:
        """Apply the events of the weight update to ``version``; call it before the version is sent.

        Corruption on the way is only noted here: the sender does it (see `corrupted_versions`).
        """
        for event in self._events:
            if event.kind in PUBLICATION_CHAOS and event.at_step == version:
                self._begin(event)
                if event.kind == "delay_publication":
                    with waiting("delay", f"{event.seconds:g} s to pass (chaos.events: delay_publication)"):
                        await asyncio.sleep(event.seconds or 0.0)

    def _begin(self, event: ChaosEvent) -> None:
        log = JsonLines(self._run.chaos)
        log.append(_record(event))
        log.sync()
        log.close()
        whom = "" if event.kind in PUBLICATION_CHAOS else f" of {_name(event)}"
        self._on_event(f"chaos: {event.kind}{whom} at step {event.at_step}")

    async def _happen(self, event: ChaosEvent) -> None:
        if event.role == "driver":
            self._begin(event)
            inject_fault(_fault(event), event.seconds)
            return
        handle = await self._process(_name(event))
        self._begin(event)
        handle.inject(_fault(event), event.seconds)

    async def _process(self, name: str) -> WorkerHandle:
        """Return the process of this name. While it is being replaced, wait for its successor."""
        while True:
            for handle in self._handles():
                if handle.name == name and handle.pid is not None:
                    return handle
            await asyncio.sleep(LOOK_SECONDS)


def corrupted_versions(events: Iterable[ChaosEvent]) -> frozenset[int]:
    """Return the versions of which one byte is changed on the way."""
    return frozenset(event.at_step for event in events if event.kind == "corrupt_bucket")


def _fault(event: ChaosEvent) -> Fault:
    if event.kind == "delay_publication" or event.kind == "corrupt_bucket":
        raise ValueError(f"{event.kind} happens to a publication, not to a process")
    return event.kind


def _name(event: ChaosEvent) -> str:
    return "driver" if event.role == "driver" else f"{event.role}/{event.rank}"


def _record(event: ChaosEvent) -> Mapping[str, Any]:
    return asdict(event)

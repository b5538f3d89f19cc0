"""Fault injection: executes the events of the `chaos` section of the configuration.

Each event happens once per run, even if the run is resumed several times. It is written to `chaos.jsonl` before it
happens, so an event that kills the run is not repeated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import cast

from roll.configs.run import PUBLICATION_CHAOS, ChaosConfig, ChaosEvent
from roll.pipeline.stage import StepCounter
from roll.runtime.process import Fault, inject_fault
from roll.runtime.workers import WorkerHandle
from roll.tracking.files import JsonLines, read_json_lines
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import unobserved, waiting

LOOK_SECONDS = 0.5
"""Seconds between checks for a process that is being replaced."""


class Chaos:
    """The fault-injection events still to come; none unless `chaos` is enabled."""

    def __init__(self, config: ChaosConfig, run: RunDirectory, on_event: Callable[[str], None]) -> None:
        self._run = run
        self._on_event = on_event
        events = config.events if config.enabled else []
        happened = read_json_lines(run.chaos) if events and run.chaos.exists() else []
        to_come = [event for event in events if asdict(event) not in happened]
        self.events = sorted(to_come, key=lambda event: event.at_step)

    def corrupted_versions(self) -> frozenset[int]:
        """Return the versions in which the sender corrupts one byte during transfer."""
        return frozenset(event.at_step for event in self.events if event.kind == "corrupt_bucket")

    async def run(self, steps: StepCounter, handles: Callable[[], Iterable[WorkerHandle]]) -> None:
        """Inject the faults of worker processes and driver, each at its step. ``handles`` returns the current
        processes."""
        with unobserved():
            for event in list(self.events):
                if event.kind in PUBLICATION_CHAOS:
                    continue
                await steps.reached(event.at_step)
                fault, name = cast(Fault, event.kind), f"{event.role}/{event.rank}"
                if event.role == "driver":
                    self._begin(event, " of driver")
                    inject_fault(fault, event.seconds)
                    continue
                while (handle := _find(name, handles())) is None:  # it is being replaced
                    await asyncio.sleep(LOOK_SECONDS)
                self._begin(event, f" of {name}")
                handle.inject(fault, event.seconds)

    async def publication(self, version: int) -> None:
        """Apply the weight-update events of ``version``. Call it before the version is sent.

        Corruption is only logged here; the sender does it (see `corrupted_versions`).
        """
        for event in list(self.events):
            if event.kind in PUBLICATION_CHAOS and event.at_step == version:
                self._begin(event)
                if event.kind == "delay_publication":
                    with waiting("delay", f"{event.seconds:g} s to pass (chaos.events: delay_publication)"):
                        await asyncio.sleep(event.seconds or 0.0)

    def _begin(self, event: ChaosEvent, of_process: str = "") -> None:
        self.events.remove(event)
        log = JsonLines(self._run.chaos)
        log.append(asdict(event))
        log.sync()
        log.close()
        self._on_event(f"chaos: {event.kind}{of_process} at step {event.at_step}")


def _find(name: str, handles: Iterable[WorkerHandle]) -> WorkerHandle | None:
    running = (handle for handle in handles if handle.name == name and handle.pid is not None)
    return next(running, None)

"""The console: a live view on a terminal, plain lines everywhere else.

Both are drawn from one immutable record, so the thread that redraws the terminal never sees a half-updated one. The
console works with any terminal or none, and problems with it never stop a run.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from rich.console import Console as RichConsole
from rich.console import Group
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.text import Text

from roll.tracking.files import say
from roll.tracking.summary import VALIDATION_LOSS, validation_accuracy

_logger = logging.getLogger(__name__)

_STEPS_OF_ESTIMATE = 20
_REDRAWS_PER_SECOND = 2
REVERSE_KL = "distillation/reverse_kl"
_BAR_WIDTH, _ROLE_BAR_WIDTH = 60, 20


@dataclass(frozen=True)
class Progress:
    """Data that the console shows about a run at one moment."""

    name: str
    max_steps: int
    started: float
    step: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Latest value of each metric."""
    first_accuracy: Mapping[str, float] = field(default_factory=dict)
    """Domain -> accuracy in its first validation."""
    marks: tuple[tuple[float, int], ...] = ()
    """Recent pairs (time, number of completed steps), to estimate the remaining time."""
    message: str = ""
    """Last event."""

    def after(self, metrics: Mapping[str, float], step: int, now: float) -> Progress:
        """Return the progress after ``step`` completed training steps."""
        marks = (*self.marks, (now, step))[-_STEPS_OF_ESTIMATE:]
        return replace(self.validated(metrics), step=step, marks=marks)

    def validated(self, metrics: Mapping[str, float]) -> Progress:
        """Return the progress with newer metrics, such as those of a validation."""
        return replace(
            self,
            metrics={**self.metrics, **metrics},
            first_accuracy={**validation_accuracy(metrics), **self.first_accuracy},
        )

    def seconds_left(self, now: float) -> float | None:
        """Return the estimated remaining time, from the recent steps; None until one step has been timed."""
        if self.step >= self.max_steps:
            return 0.0
        if not self.marks:
            return None
        (first_time, first_step), (last_time, last_step) = self.marks[0], self.marks[-1]
        if last_step <= first_step:
            return None
        seconds_per_step = (last_time - first_time) / (last_step - first_step)
        return max(0.0, (self.max_steps - last_step) * seconds_per_step - (now - last_time))


class Console:
    """The display of a run: a live view if ``stream`` is a terminal that can move its cursor, else plain lines.

    There is a plain line every ``logging_steps`` steps, at the last step, and at each validation. `NO_COLOR` is
    respected.
    """

    def __init__(
        self,
        name: str,
        max_steps: int,
        logging_steps: int = 1,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._clock = clock
        self._logging_steps = max(1, logging_steps)
        self._progress = Progress(self._printable(name), max_steps, started=clock())
        self._broken = False
        self._closed = False
        self._live: Live | None = None
        if self._stream.isatty() and os.environ.get("TERM", "dumb") not in ("", "dumb", "unknown"):
            self._live = Live(
                console=RichConsole(file=self._stream, force_terminal=True, highlight=False, markup=False, emoji=False),
                get_renderable=lambda: live_view(self._progress, self._clock()),
                refresh_per_second=_REDRAWS_PER_SECOND,
                vertical_overflow="crop",
            )
            self._live.start(refresh=True)

    def step(self, metrics: Mapping[str, float], step: int) -> None:
        """Show the metrics after ``step`` completed training steps. Step 0 prints a plain line only if it has a
        validation."""
        now = self._clock()
        printable = {self._printable(name): value for name, value in metrics.items()}
        self._progress = self._progress.after(printable, step, now)
        regular = step > 0 and step % self._logging_steps == 0
        validated = bool(validation_accuracy(metrics)) or VALIDATION_LOSS in metrics
        due = regular or step == self._progress.max_steps or validated
        if self._live is None and due:
            self._print(plain_line(self._progress, now))

    def validation(self, metrics: Mapping[str, float], version: int) -> None:
        """Show the metrics of a validation that ended after the step of its version had been shown."""
        printable = {self._printable(name): value for name, value in metrics.items()}
        self._progress = self._progress.validated(printable)
        self._print(f"validation of version {version}: {', '.join(_accuracy(self._progress))}")

    def resume(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Replace the history by the records of earlier steps that are still valid, without printing them."""
        self._progress = replace(self._progress, step=0, metrics={}, first_accuracy={}, marks=())
        for record in records:
            values = {self._printable(name): value for name, value in record.items() if value is not None}
            self._progress = replace(self._progress.after(values, record["step"], 0.0), marks=())

    def event(self, text: str) -> None:
        """Print a line about an event, such as a restarted worker."""
        text = self._printable(text)
        self._progress = replace(self._progress, message=text.partition("\n")[0])
        self._print(text)

    def close(self, summary: Mapping[str, Any]) -> None:
        """Release the terminal and print how the run ended. ``summary`` has the keys of `summary.json`."""
        if self._closed:
            return
        self._closed = True
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._print(self._printable(closing_text(summary)))

    def _print(self, text: str) -> None:
        """Print a text. If the reader is gone (`| head`, a closed terminal), stop printing without an error."""
        if self._broken:
            return
        try:
            if self._live is not None:
                self._live.console.print(Text(text))
            else:
                self._stream.write(text + "\n")
                self._stream.flush()
        except OSError as error:
            self._broken = True
            _logger.warning("no more console output: %s", error)

    def _printable(self, text: str) -> str:
        """Return the text without control characters, and with `?` for characters that the stream cannot encode."""
        encoding = self._stream.encoding or "utf-8"
        return _without_control(text).encode(encoding, errors="replace").decode(encoding)


def say_beside(text: str) -> None:
    """Print a line on the current `sys.stderr`, so that it appears above a live view. May be called in any thread."""
    say(_without_control(text), error=True)


def plain_line(progress: Progress, now: float) -> str:
    """Return one step as a line of text."""
    facts = " | ".join(f"{label} {text}" for label, text in _facts(progress))
    return f"step {progress.step}/{progress.max_steps} | {facts}{' | ' if facts else ''}{_times(progress, now)}"


def live_view(progress: Progress, now: float) -> Group:
    """Return the live view: a few lines that are cut at the width of the terminal."""
    head = Text(f"{progress.name}  step {progress.step}/{progress.max_steps}  {_times(progress, now)}", style="bold")
    bar = ProgressBar(total=max(1, progress.max_steps), completed=progress.step, width=_BAR_WIDTH)
    facts = [fact for fact in _facts(progress) if fact[0] not in ("tokens/s", "idle")]
    roles = _role_lines(progress.metrics)
    last = [Text.assemble((f"{'last':<10}", "dim"), progress.message)] if progress.message else []
    lines = [*(Text.assemble((f"{label:<10}", "dim"), text) for label, text in facts), *roles, *last]
    for line in (head, *lines):
        line.no_wrap, line.overflow = True, "crop"
    return Group(head, Padding(bar), *lines)


def _role_lines(metrics: Mapping[str, float]) -> list[Text]:
    """Return a line for each role. Numbers come first, because a narrow terminal cuts off the ends of lines."""
    idle, speed = _by_role(metrics, "idle/"), _by_role(metrics, "tokens_per_second/")
    lines = [Text(f"{'idle':>5} {'tokens/s':>9}  role", style="dim")] if idle or speed else []
    for role in dict.fromkeys([*speed, *idle]):
        share = f"{idle[role]:.0%}" if role in idle else ""
        tokens = _thousands(speed[role]) if role in speed else ""
        working = 1 - idle.get(role, 1.0)
        bar = "#" * round(_ROLE_BAR_WIDTH * min(1.0, max(0.0, working))) if math.isfinite(working) else ""
        lines.append(Text.assemble(f"{share:>5} {tokens:>9}  {role}  ", (bar, "dim")))
    return lines


def _without_control(text: str) -> str:
    return "".join(char if char == "\n" or unicodedata.category(char) != "Cc" else " " for char in text)


def closing_text(summary: Mapping[str, Any]) -> str:
    """Return the closing text of a run from its summary: one line, and the error below it if there is one."""
    first, last = summary.get("val/first") or {}, summary.get("val/last") or {}
    accuracy = [f"val {domain} {_change(first.get(domain), last[domain])}" for domain in last]
    lag = [] if summary.get("lag/max") is None else [f"lag max {summary['lag/max']:g}"]
    losses = [summary.get(f"{VALIDATION_LOSS}/{which}") for which in ("first", "last")]
    known = " -> ".join(f"{each:.4f}" for each in losses if each is not None)
    loss = [f"val loss {known}"] if known else []
    facts = [f"{summary['steps']} steps in {duration(summary['seconds'])}", *accuracy, *loss, *lag]
    error = f"\n{summary['error']}" if summary.get("error") else ""
    return f"{summary['status']}: {', '.join(facts)}{error}"


def duration(seconds: float) -> str:
    """Return seconds as text: ``75`` -> ``1:15``, ``3675`` -> ``1:01:15``."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _accuracy(progress: Progress) -> list[str]:
    """Return the first and the last accuracy of each domain as text."""
    first, last = progress.first_accuracy, validation_accuracy(progress.metrics)
    return [f"{domain} {_change(first[domain], value)}" for domain, value in last.items()]


def _facts(progress: Progress) -> list[tuple[str, str]]:
    """Return (label, text) of the available metrics, the most important first."""
    metrics = progress.metrics
    idle, speed = _by_role(metrics, "idle/"), _by_role(metrics, "tokens_per_second/")
    lag = [f"{metrics[f'lag/{kind}']:.3g} {kind}" for kind in ("mean", "max") if f"lag/{kind}" in metrics]
    facts = [
        ("reward", f"{metrics['reward/mean']:.3f}" if "reward/mean" in metrics else ""),
        ("teacher KL", f"{metrics[REVERSE_KL]:.3f}" if REVERSE_KL in metrics else ""),
        # The loss says little if there are rewards.
        ("loss", f"{metrics['actor/loss']:.4f}" if "actor/loss" in metrics and "reward/mean" not in metrics else ""),
        ("val loss", f"{metrics[VALIDATION_LOSS]:.4f}" if VALIDATION_LOSS in metrics else ""),
        ("val", ", ".join(_accuracy(progress))),
        ("lag", ", ".join(lag)),
        ("tokens/s", ", ".join(f"{role} {_thousands(rate)}" for role, rate in speed.items())),
        ("idle", ", ".join(f"{role} {share:.0%}" for role, share in idle.items())),
    ]
    return [(label, text) for label, text in facts if text]


def _change(*first_and_last: float | None) -> str:
    """Return the first and the last accuracy as text, or only one if they are equal."""
    return " -> ".join("?" if share is None else f"{share:.1%}" for share in dict.fromkeys(first_and_last))


def _by_role(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def _thousands(value: float) -> str:
    if value < 1000:
        return f"{value:.0f}"
    return f"{value / 1000:.1f}k" if value < 100_000 else f"{value / 1000:.0f}k"


def _times(progress: Progress, now: float) -> str:
    left = progress.seconds_left(now)
    elapsed = f"{duration(now - progress.started)} elapsed"
    return elapsed if left is None else f"{elapsed}, {duration(left)} left"

"""Charts of metrics: which metrics share a panel, in which order, on which scale, and with how many points.

Every metric of the run is in exactly one panel. If there are too many steps, they are divided into equal stretches, and
the first, the smallest and the largest value of each stretch are kept, plus the very last value. So each point is a
value from the file, and no peak is lost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

MAX_NUMBERS = 42_000
"""Largest number of points of all metrics together; each takes about 25 characters on the page."""
FEWEST_POINTS = 60
"""Number of points that each metric may have at least, even if there are many metrics."""


@dataclass(frozen=True)
class Panel:
    """A chart of the metrics whose full names match a pattern. It is drawn if any of them was recorded."""

    title: str
    pattern: str
    help: str = ""
    unit: str = ""
    """Unit of the values. Values with the unit ``share`` are shown in per cent; other units follow the number."""
    scale: str = "linear"
    metrics: list[str] = field(default_factory=list)
    """Names of matching metrics in the run."""


@dataclass(frozen=True)
class Section:
    """Panels under one heading.

    ``rest``: pattern for metrics that are in no other panel; those with the same first and last part of the name share
    a panel. ``folded``: True if the section is collapsed at first.
    """

    title: str
    panels: Sequence[Panel] = ()
    rest: str = ""
    folded: bool = False


SECTIONS = (
    Section(
        "Learning",
        (
            Panel("Reward", r"reward/mean|reward/[^/]+/mean", "Mean score of a step's samples, all and by domain."),
            Panel("Validation accuracy", r"val/.+/accuracy", "Held-out prompts, one pinned version.", "share"),
            Panel("Validation loss", r"val/(.+/)?loss", "Cross-entropy of held-out examples.", "nats"),
            Panel("Validation, best of its group", r"val/.+/best_of_group", unit="share"),
            Panel("Validation score", r"val/.+/score"),
            Panel("Spread of rewards", r"reward/(std|min|max)"),
            Panel(
                "Samples that teach little",
                r"reward/zero_variance_groups|response/truncated_share",
                "Groups whose samples all score the same have no advantage; truncated responses met the length limit.",
                "share",
            ),
            Panel("Response length", r"response/length_(mean|max)|val/.+/response_length", unit="tokens"),
            Panel("Response tokens", r"response/tokens", "Trained on in a step.", "tokens"),
            Panel("Advantages", r"advantage/(mean|std|min|max)"),
        ),
    ),
    Section(
        "Policy and optimizer",
        (
            Panel("Loss", r"actor/(loss|[^/]*_loss)"),
            Panel("Entropy", r"actor/entropy", "Mean over response tokens.", "nats"),
            Panel("KL to the behaviour policy", r"actor/(kl|k1)", "k3 (kl) and k1, per token.", "nats"),
            Panel(
                "KL to the teacher",
                r"distillation/reverse_kl",
                "Of the tokens as they were sampled, per token.",
                "nats",
            ),
            Panel("Clip fraction", r"actor/[^/]*clip[^/]*", "Tokens whose gradient the loss cut.", "share"),
            Panel(
                "Effective sample size",
                r"actor/(lag_[^/]+/)?ess",
                "1: on-policy; low: few tokens carry the update.",
                "share",
            ),
            Panel("Ratio current / behaviour", r"actor/ratio_(mean|max)", scale="log"),
            Panel("Gradient norm", r"actor/grad_norm", "Before clipping.", scale="log"),
            Panel("Learning rate", r"actor/learning_rate"),
        ),
        rest=r"actor/.+|kl_penalty/.+",
    ),
    Section(
        "Freshness",
        (
            Panel("Lag", r"lag/(mean|max)", "Training step minus the version of a token.", "versions"),
            Panel("Tokens by lag", r"actor/lag_[^/]+/share", unit="share"),
            Panel("Groups on their way", r"ledger/(in_flight|buffered)", "At the end of a step.", "groups"),
        ),
    ),
    Section(
        "Speed",
        (
            Panel("Time of a step", r"time/step", "Wall clock, from the end of the last step.", "s"),
            Panel("Idle", r"idle/.+", "Share of the step in which a role computed nothing.", "share"),
            Panel("Tokens per second", r"tokens_per_second/.+", unit="tokens/s"),
            Panel("Tokens per second and device", r"tokens_per_second_per_device/.+", unit="tokens/s"),
            Panel("Utilisation", r"mfu/.+", "The model's operations, of the peak, while a role computes.", "share"),
            Panel("Requests in an engine", r"engine/(running|waiting)", "Mean over its steps.", "requests"),
            Panel(
                "Keys and values",
                r"engine/(kv_cache_use|prefix_hit_share)",
                "Room in use, mean over an engine's steps; tokens of prompts that were there already.",
                "share",
            ),
            Panel("Preemptions", r"engine/preemptions", "Requests that lost their room, in the step.", "requests"),
            Panel("Memory", r"memory/.+", "Of the process that has most.", "GiB"),
            Panel("Time by stage", r"time/(?!step$).+", "Working, waiting not counted.", "s", "log"),
            Panel("Time inside a trainer", r"seconds/.+", "Mean over its ranks.", "s"),
            Panel("Processor time", r"cpu_seconds/.+", "All processes of a role together, in the step.", "s"),
            Panel("Weight publication", r"weights/.+_seconds", unit="s", scale="log"),
            Panel("Engine repairs", r"engine/(restarts|reissued|resumed_tokens)", "Totals since the last resume."),
        ),
    ),
    Section(
        "Groups",
        (Panel("Ledger", r"ledger/(issued|consumed|dropped/.+)", "Totals over the run.", "groups"),),
        folded=True,
    ),
    Section("Critic", rest=r"critic/.+", folded=True),
    Section("Corrections and mismatch", rest=r"(correction|mismatch|canary|canaries)/.+", folded=True),
    Section("Environments", rest=r"(env|env_workers|environments)/.+", folded=True),
    Section("Everything else", rest=r".+", folded=True),
)


def sections_of(names: Iterable[str]) -> list[Section]:
    """Return the sections with at least one metric. Each of ``names`` is in exactly one panel."""
    left = [name for name in names if name != "step"]
    found = [[replace(panel, metrics=_take(panel.pattern, left)) for panel in section.panels] for section in SECTIONS]
    sections = [
        replace(section, panels=[panel for panel in panels if panel.metrics] + _rest(section.rest, left))
        for section, panels in zip(SECTIONS, found, strict=True)
    ]
    return [section for section in sections if section.panels]


def _take(pattern: str, left: list[str]) -> list[str]:
    """Remove the names that match from ``left``, and return them."""
    taken = {name: None for name in left if re.fullmatch(pattern, name)}
    left[:] = [name for name in left if name not in taken]
    return list(taken)


def _rest(pattern: str, left: list[str]) -> list[Panel]:
    """Return panels of the metrics that match. Those with the same first and last part (``env/*/turns``) share one."""
    by_title: dict[str, list[str]] = {}
    for name in _take(pattern, left):
        first, *between, last = name.split("/") if "/" in name else ("", name)
        title = f"{first}/…/{last}" if between else name
        by_title.setdefault(title, []).append(name)
    return [
        Panel(title if len(names) > 1 else names[0], pattern, metrics=names)
        for title, names in sorted(by_title.items())
    ]


def series_of(records: Sequence[Mapping[str, Any]], max_numbers: int = MAX_NUMBERS) -> dict[str, Any]:
    """Return all metrics as columns: the ``steps`` of the run, and the ``values`` of each metric.

    A metric that was not recorded at exactly these steps has its own ``steps``. A value that was not finite is None.
    ``thinned``: the largest number of points per metric if some are left out, else None.
    """
    names = dict.fromkeys(name for record in records for name in record if name != "step")
    steps = [record["step"] for record in records]
    most = max(FEWEST_POINTS, max_numbers // max(1, len(names)))
    thinned = most if len(records) > most else None
    series = {}
    for name in names:
        points = [(record["step"], record[name]) for record in records if name in record]
        drawn = points if thinned is None else thin(points, most)
        series[name] = {"values": [value for _, value in drawn]}
        if thinned is not None or len(drawn) != len(steps):
            series[name]["steps"] = [step for step, _ in drawn]
    return {"steps": steps if thinned is None else [], "thinned": thinned, "recorded": len(records), "series": series}


def thin(points: Sequence[tuple[int, float | None]], most: int) -> list[tuple[int, float | None]]:
    """Return at most ``most`` of the points; ``most`` must be at least 4.

    The points are divided into equal stretches. The first, the smallest and the largest point of each stretch are kept,
    and the last of all. A point with the value None is never the smallest or largest, but may be the first.
    """
    if len(points) <= most:
        return list(points)
    stretches = max(1, (most - 1) // 3)
    kept = {len(points) - 1}
    for index in range(stretches):
        start, stop = len(points) * index // stretches, len(points) * (index + 1) // stretches
        finite = {place: value for place in range(start, stop) if (value := points[place][1]) is not None}
        kept.add(start)
        if finite:
            kept |= {min(finite, key=finite.__getitem__), max(finite, key=finite.__getitem__)}
    return [points[place] for place in sorted(kept)]

"""Several runs on one page: their curves drawn over each other, how they ended, and what differs in their settings."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from roll.report.files import RunFiles
from roll.report.page import html_page, state_of
from roll.report.panels import MAX_NUMBERS, Panel, sections_of, series_of

SCRIPTS = ("comparison.js",)
NOT_COMPARED = ("output_dir", "exp_name", "resume_from_checkpoint")
"""Keys in which runs differ whatever they do."""
LONGEST_VALUE = 200


def render_comparison(runs: Sequence[RunFiles], now: float | None = None) -> str:
    """Return the whole page. ``now``: seconds since the epoch, for its date (default: the present)."""
    data = comparison_data(runs, time.time() if now is None else now)
    return html_page(f"{' · '.join(data['labels'])} – comparison", data, SCRIPTS)


def comparison_data(runs: Sequence[RunFiles], now: float) -> dict[str, Any]:
    """Return all data that the page shows, as JSON can hold it; in every list, the order of the runs."""
    labels = labels_of(runs)
    series: dict[str, dict[str, Any]] = {}
    for place, (label, run) in enumerate(zip(labels, runs, strict=True)):
        columns = series_of(run.metrics, MAX_NUMBERS // len(runs))
        for name, each in columns["series"].items():
            series[_curve(name, label)] = {"steps": columns["steps"], **each, "place": place}
    names = dict.fromkeys(name for run in runs for record in run.metrics for name in record)
    sections = [
        replace(section, panels=[each for panel in section.panels for each in _panels(panel, labels, series)])
        for section in sections_of(names)
    ]
    longest = max((len(run.metrics) for run in runs), default=0)
    return {
        "labels": labels,
        "folders": [str(run.root.resolve()) for run in runs],
        "made": now,
        "states": [state_of(run) for run in runs],
        "rewards": [_last(run, "reward/mean") for run in runs],
        "differences": differences([run.config for run in runs]),
        "absent": [dict(run.absent) for run in runs],
        "metrics": {"steps": [], "thinned": None, "recorded": longest, "series": series},
        "sections": [asdict(section) for section in sections],
    }


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """Return a short name for each run, unlike all others: its experiment, its folder, or both, or a number too."""
    folders = [run.root.resolve().name for run in runs]
    names = [str(run.config.get("exp_name") or folder) for run, folder in zip(runs, folders, strict=True)]
    both = [f"{name} {folder}" for name, folder in zip(names, folders, strict=True)]
    for labels in (names, folders, both):
        if len(set(labels)) == len(labels):
            return labels
    seen: Counter[str] = Counter()
    numbered = []
    for label in both:
        seen[label] += 1
        numbered.append(f"{label} ({seen[label]})")
    return numbered


def differences(configs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return each key that does not have the same value in all runs, with the values as text; a dash where it is
    missing."""
    flat = [dict(_leaves(config)) for config in configs]
    keys = dict.fromkeys(key for each in flat for key in each)
    rows = [(key, [each.get(key, "–") for each in flat]) for key in keys if key not in NOT_COMPARED]
    return [
        {"key": key, "values": [value[:LONGEST_VALUE] for value in values]}
        for key, values in rows
        if len({*values}) > 1
    ]


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(below, f"{path}.{key}" if path else str(key))
    else:
        yield path, str(value)


def _panels(panel: Panel, labels: Sequence[str], recorded: Mapping[str, Any]) -> Iterator[Panel]:
    """Yield a panel for each metric, with one curve for each run that has it."""
    for metric in panel.metrics:
        curves = [_curve(metric, label) for label in labels if _curve(metric, label) in recorded]
        yield replace(panel, title=metric, metrics=curves)


def _curve(metric: str, label: str) -> str:
    return f"{label}: {metric}"


def _last(run: RunFiles, metric: str) -> float | None:
    return next((record[metric] for record in reversed(run.metrics) if metric in record), None)

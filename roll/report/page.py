"""`roll report`: one self-contained HTML file with style sheet, script and data; it loads nothing else.

For several runs, the page compares them: their curves in common charts, how they ended, and the differences between
their settings.

A content security policy allows only this style sheet and this script, by their hashes. So no text of a model can run
as a script, and the script inserts texts as text, never as markup. The run's files are only read.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import html
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from roll.report.files import NoRun, RunFiles, read_run
from roll.report.findings import findings, idle_shares, ledger_of, settled
from roll.report.lanes import drawn_lanes
from roll.report.panels import MAX_NUMBERS, Panel, sections_of, series_of
from roll.report.pictures import picture_grid, prompt_pictures, spread
from roll.tracking.files import write_atomically
from roll.tracking.run_directory import RunDirectory

WRITTEN, NOT_WRITTEN, NO_RUN = 0, 1, 2

_EPILOG = """\
examples:
  roll report output/quickstart/latest
  roll report output/quickstart/latest --output report.html
  roll report output/quickstart/latest output/quickstart-critic/latest

What slows the run down is said here, too, the most costly first. Works while the run goes on: call it again for a newer
page. docs/report.md says what each part means.
exit codes: 0 written; 1 the file cannot be written; 2 the folder holds no run.
"""


def main(arguments: Sequence[str]) -> int:
    """Write the page of a run, or the comparison of several; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="roll report",
        description="Write one HTML page that shows a run: curves, who worked and who waited, lags, waste, samples.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs", type=Path, nargs="+", metavar="RUN_DIR", help="folder of the run (its `output_dir`); several: compared"
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: RUN_DIR/report.html; of several, comparison.html)",
    )
    options = parser.parse_intermixed_args(arguments)
    try:
        runs = [read_run(root) for root in options.runs]
    except NoRun as error:
        print(error, file=sys.stderr)
        return NO_RUN
    if len(runs) > 1:
        target = options.output or Path("comparison.html")
        return _write(render_comparison(runs), target) or _say(f"comparison of {len(runs)} runs", target)
    (run,) = runs
    target = options.output or run.root / "report.html"
    if _write(render_page(run), target):
        return NOT_WRITTEN
    for reason in run.absent.values():
        print(f"left out: {reason}")
    for place, finding in enumerate(findings(run), start=1):
        print(f"{place}. {finding.text} {finding.remedy}".rstrip())
    return _say(f"report of {run.root}", target)


def _write(page: str, target: Path) -> int:
    try:
        write_atomically(target, page)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; choose another place with --output", file=sys.stderr)
        return NOT_WRITTEN
    return WRITTEN


def _say(what: str, target: Path) -> int:
    print(f"{what}: {target.resolve()} ({target.stat().st_size / 1e6:.2f} MB)")
    return WRITTEN


LONGEST_CONFIG = 100_000
"""Largest number of characters of the configuration on the page."""
_ASSETS = Path(__file__).parent / "assets"
_SCRIPTS = ("elements.js", "charts.js", "lanes.js", "samples.js", "pictures.js", "main.js")

_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<noscript>This report is drawn by its own script, which is switched off in this browser. The data is in the page's \
source, under "run-data".</noscript>
<div id="report"></div>
<script type="application/json" id="run-data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


def render_page(run: RunFiles, now: float | None = None) -> str:
    """Return the page of a run as HTML. ``now``: date of the page in seconds since 1970 (default: the current time)."""
    data = page_data(run, time.time() if now is None else now)
    return html_page(f"{data['name']} – run report", data)


def html_page(title: str, data: Any, scripts: Sequence[str] = ()) -> str:
    """Return an HTML page with ``data`` and the script of the report, preceded by the additional ``scripts``."""
    style, *sources = ((_ASSETS / name).read_text(encoding="utf-8") for name in ("report.css", *scripts, *_SCRIPTS))
    script = '(() => {\n"use strict";\n' + "".join(sources) + "})();\n"
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return _PAGE.format(
        policy=html.escape(policy, quote=False),
        title=html.escape(title),
        style=style,
        data=embedded(data),
        script=script,
    )


def page_data(run: RunFiles, now: float) -> dict[str, Any]:
    """Return all data of the page of a run, ready for JSON."""
    names = dict.fromkeys(name for record in run.metrics for name in record)
    resumed_at = list(run.summary.get("resumed_at") or [])
    shown, pictures = excerpts(run.samples), RunDirectory(run.root).pictures
    return {
        "name": str(run.config.get("exp_name") or run.root.resolve().name),
        "folder": str(run.root.resolve()),
        "made": now,
        "state": state_of(run),
        "findings": [asdict(finding) for finding in findings(run)],
        "idle": idle_shares(run),
        "absent": dict(run.absent),
        "metrics": series_of(run.metrics),
        "sections": [asdict(section) for section in sections_of(names)],
        "timeline": None if not run.trace.lanes else drawn_lanes(run.trace, [0, *resumed_at][-1] + 1),
        "resumed_at": resumed_at,
        "lags": lag_shares(run.training_steps),
        "ledger": ledger_of(run),
        "tokens": token_totals(run.training_steps),
        "weights": publication_times(settled(run)),
        "samples": shown,
        "samples_recorded": len(run.samples),
        "prompt_pictures": prompt_pictures(pictures, shown),
        "pictures": picture_grid(pictures, run.samples),
        "config": run.config_text[:LONGEST_CONFIG],
        "config_characters": len(run.config_text),
        "log": run.log_tail[-20_000:],
        "files": run.files,
    }


_UNSAFE = {ord(char): f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"}


def embedded(data: Any) -> str:
    """Return ``data`` as compact JSON that is safe inside a `<script>` element.

    Characters that could begin or end markup become JSON escapes. So the text cannot contain ``</script>`` or ``<!--``,
    and still parses to exactly the same data. Numbers are written without loss of precision. Raises `ValueError` for a
    number that is not finite.
    """
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate(_UNSAFE)


MAX_BYTES = 700_000
LONGEST_TEXT = 4_000
"""Largest number of characters of a prompt or a response on the page."""


def excerpts(samples: Sequence[Mapping[str, Any]], max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """Return the samples of as many steps as fit into ``max_bytes``: the first, the last, and steps evenly between."""
    by_step: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        by_step[sample["step"]].append(sample)
    steps = sorted(by_step)
    of_step = cache(lambda step: [_sized(sample) for sample in by_step[step]])
    chosen = steps
    while len(chosen) > 2 and not _fit((size for step in chosen for size, _ in of_step(step)), max_bytes):
        chosen = spread(steps, len(chosen) * 3 // 4)
    room, kept = max_bytes, []
    for size, sample in (each for step in chosen for each in of_step(step)):
        room -= size
        if room > 0:
            kept.append(sample)
    return kept


def _sized(sample: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the size of a sample on the page in bytes, and the sample as it is on the page.

    If all its tokens are there, the text of the response is left out.
    """
    tokens = sample.get("tokens")
    response = "" if tokens and not tokens["left_out"] else _cut(sample["response"])
    shortened = {**sample, "prompt": _cut(sample["prompt"]), "response": response}
    return len(embedded(shortened).encode(errors="backslashreplace")), shortened


def _fit(sizes: Iterable[int], room: int) -> bool:
    """Return True if all sizes fit; stop at the first that does not."""
    return all(total <= room for total in accumulate(sizes))


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"


def lag_shares(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the share of trained tokens at each lag, as a mean over the steps that recorded lags."""
    by_step = (_named(r"actor/lag_(.+)/share", step) for step in steps)
    recorded = [{lag: share or 0.0 for lag, share in shares.items()} for shares in by_step if shares]
    lags = sorted({lag for shares in recorded for lag in shares}, key=lambda lag: (int(lag.rstrip("+")), lag))
    return [{"lag": lag, "share": sum(shares.get(lag, 0.0) for shares in recorded) / len(recorded)} for lag in lags]


def token_totals(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the number of tokens that the engines generated (for any purpose), and of response tokens trained on.

    The result is empty if a needed metric is missing in any step.
    """
    rate, seconds, trained = names = ("tokens_per_second/actor_infer", "time/step", "response/tokens")
    if not steps or any(step.get(name) is None for step in steps for name in names):
        return {}
    generated = sum(step[rate] * step[seconds] for step in steps)
    return {"generated": generated, "trained": sum(step[trained] for step in steps)}


def publication_times(steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the mean, longest and last duration in seconds of each part of a weight update."""
    seconds: dict[str, list[float]] = defaultdict(list)
    for step in steps:
        for part, value in _named(r"weights/(.+)_seconds", step).items():
            if value is not None:
                seconds[part].append(value)
    return [
        {"part": part, "mean": sum(values) / len(values), "longest": max(values), "last": values[-1]}
        for part, values in seconds.items()
    ]


def _named(pattern: str, step: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step whose full names match ``pattern``, with the pattern's first group as key."""
    return {match[1]: value for name, value in step.items() if (match := re.fullmatch(pattern, name))}


def status_of(summary: Mapping[str, Any], held: bool) -> str:
    """Return the status of a run. ``held``: True if a process is using the run now."""
    status = str(summary.get("status") or "unknown")
    return "died" if status == "running" and not held else status


def state_of(run: RunFiles) -> dict[str, Any]:
    """Return the state of the run from its summary, or from its metrics if there is no summary."""
    summary = run.summary
    last_step = run.metrics[-1]["step"] if run.metrics else 0
    return {
        "status": status_of(summary, run.held),
        "pipeline": run.config.get("pipeline"),
        "steps": summary.get("steps", last_step),
        "max_steps": run.config.get("max_steps"),
        "seconds": summary.get("seconds"),
        "first_step_seconds": summary.get("first_step_seconds"),
        "validation_first": summary.get("val/first") or {},
        "validation_last": summary.get("val/last") or {},
        "lag_max": summary.get("lag/max"),
        "error": summary.get("error"),
    }


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


NOT_COMPARED = ("output_dir", "exp_name", "resume_from_checkpoint")
"""Keys that usually differ between runs and are not compared."""
LONGEST_VALUE = 200


def render_comparison(runs: Sequence[RunFiles]) -> str:
    """Return the comparison page of several runs as HTML."""
    data = comparison_data(runs, time.time())
    return html_page(f"{' · '.join(data['labels'])} – comparison", data, ("comparison.js",))


def comparison_data(runs: Sequence[RunFiles], now: float) -> dict[str, Any]:
    """Return all data of the comparison page, ready for JSON. Lists by run keep the order of ``runs``."""
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
    """Return a short unique name for each run: its experiment, its folder, or both, with a number if needed."""
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
    """Return each key whose value is not the same in all runs, with the values as text; a dash for a missing key."""
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
    """Yield a panel for each metric of ``panel``, with one curve for each run that has the metric."""
    for metric in panel.metrics:
        curves = [_curve(metric, label) for label in labels if _curve(metric, label) in recorded]
        yield replace(panel, title=metric, metrics=curves)


def _curve(metric: str, label: str) -> str:
    return f"{label}: {metric}"


def _last(run: RunFiles, metric: str) -> float | None:
    return next((record[metric] for record in reversed(run.metrics) if metric in record), None)

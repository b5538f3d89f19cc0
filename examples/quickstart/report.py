"""Say in a few lines what a finished run learned, from its `summary.json`; exit 1 if the run did not succeed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def report(summary: dict[str, Any]) -> str:
    """Return accuracy before and after in each domain, and the duration of the run."""
    first, last = summary["val/first"] or {}, summary["val/last"] or {}
    learned = [f"{domain}: accuracy {first[domain]:.1%} -> {last[domain]:.1%}" for domain in sorted(last)]
    took = f"{summary['steps']} steps in {summary['seconds']:.0f} s, largest lag {summary['lag/max']}"
    return "\n".join([f"status: {summary['status']}", *learned, took])


def main(run: Path) -> int:
    """Print the report of the run in this folder."""
    summary = json.loads((run / "summary.json").read_text())
    print(report(summary))
    print(f"files of the run: {run.resolve()}")
    return 0 if summary["status"] == "success" else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

"""`roll doctor`: how is this run, what waits for what, and what should be done?

Exit code 0: the run works, or has ended well. 1: something is wrong, and the report says what. 2: there is no such run,
or its files cannot be read.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from roll.doctor.diagnosis import Diagnosis, diagnose, gather_evidence
from roll.tracking.run_directory import RunDirectory

WELL, TROUBLE, NO_RUN = 0, 1, 2

_EPILOG = """\
examples:
  roll doctor output/quickstart/latest
  roll doctor --json /runs/mine
"""


def main(arguments: Sequence[str]) -> int:
    """Examine the run named on the command line; return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        run = RunDirectory.existing(options.run)
        evidence = gather_evidence(run)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return NO_RUN
    found = diagnose(evidence)
    print(json.dumps(asdict(found), indent=1) if options.json else render(options.run, found))
    return WELL if found.is_well else TROUBLE


def render(run: str, found: Diagnosis) -> str:
    """Return the diagnosis as text for a user."""
    lines = [f"{run}: {found.headline}"]
    if found.culprit:
        lines.append(f"  likely culprit: {found.culprit}")
    if found.advice:
        lines.append(f"  what to do: {found.advice}")
    return "\n".join([*lines, *(["", *found.findings] if found.findings else [])])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll doctor",
        description="Say how a run is, alive or dead: who waits for whom, since when, and the likely culprit.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN_DIR", help="folder of the run")
    parser.add_argument("--json", action="store_true", help="print the findings for a program")
    return parser

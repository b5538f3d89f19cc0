"""`roll report`: the page of a run, finished or not.

Exit code 0: the page is written. 1: it cannot be written. 2: the folder holds no run. The run's own files are only
read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from roll.tracking.files import write_atomically
from roll.tracking.report.findings import findings
from roll.tracking.report.page import render_page
from roll.tracking.report.run_files import NoRun, read_run

WRITTEN, NOT_WRITTEN, NO_RUN = 0, 1, 2

_EPILOG = """\
examples:
  roll report output/quickstart/latest
  roll report output/quickstart/latest --output report.html

What slows the run down is said here, too, the most costly first. Works while the run goes on: call it again for a newer
page. docs/report.md says what each part means.
exit codes: 0 written; 1 the file cannot be written; 2 the folder holds no run.
"""


def main(arguments: Sequence[str]) -> int:
    """Write the page of a run; return the exit code."""
    options = _parser().parse_args(arguments)
    root: Path = options.run
    target: Path = options.output or root / "report.html"
    try:
        run = read_run(root)
    except NoRun as error:
        print(error, file=sys.stderr)
        return NO_RUN
    page = render_page(run)
    try:
        write_atomically(target, page)
    except OSError as error:
        print(f"{error.filename}: {error.strerror}; choose another place with --output", file=sys.stderr)
        return NOT_WRITTEN
    for reason in run.absent.values():
        print(f"left out: {reason}")
    for place, finding in enumerate(findings(run), start=1):
        print(f"{place}. {finding.text} {finding.remedy}".rstrip())
    print(f"report of {root}: {target.resolve()} ({target.stat().st_size / 1e6:.2f} MB)")
    return WRITTEN


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="roll report",
        description="Write one HTML page that shows a run: curves, who worked and who waited, lags, waste, samples.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path, metavar="RUN_DIR", help="folder of the run (its `output_dir`)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="the page (default: RUN_DIR/report.html)")
    return parser

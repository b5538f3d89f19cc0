"""The notebook runs from top to bottom, cell by cell, in a process that has done nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm_workers import search_path

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook" / "first_run.ipynb"
KERNEL = """
import ast, asyncio, json, sys

async def run(cells):
    namespace = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        tree = ast.parse(cell, f"cell {number}")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {number}", "exec"), namespace)
        if last is not None:
            shown = eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), namespace)
            print("shown:", type(shown).__name__, len(getattr(shown, "_repr_html_", lambda: repr(shown))()))

asyncio.run(run(json.load(sys.stdin)))
"""
"""Runs cells as a kernel does: within a running event loop, in `__main__`, and showing the last value of each."""


def cells():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_is_saved_without_outputs():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert all(not cell.get("outputs") for cell in notebook["cells"]) and notebook["nbformat"] == 4


@pytest.mark.tier("all")
@pytest.mark.timeout(900)
def test_the_notebook_runs_from_top_to_bottom(tmp_path, warm):
    """With fewer and smaller steps, which change what is learned and nothing else."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    written = cells()
    for cell, long, short in (
        (0, "STEPS, WARM_UP = 20, 1000", "STEPS, WARM_UP = 2, 20"),
        (2, 'f"max_steps={STEPS}",', 'f"max_steps={STEPS}", "rollout_batch_size=8", "val_batch_size=16",'),
    ):
        assert long in written[cell]
        written[cell] = written[cell].replace(long, short)
    done = subprocess.run(
        [sys.executable, "-c", KERNEL],
        input=json.dumps(written),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": search_path(ROOT)},
        capture_output=True,
        text=True,
        timeout=880,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("step 2/2") == 2 and "shown: Check" in done.stdout
    assert done.stdout.count("shown: Run") == 2 and done.stdout.count("shown: Page") == 2
    page = (tmp_path / "output" / "notebook" / "comparison.html").read_text()
    assert "given from Python: gentle" in page and "plain: reward/mean" in page

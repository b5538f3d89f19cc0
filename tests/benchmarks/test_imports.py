"""Every benchmark finds what it imports of `roll`, although most of them are run rarely."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in (Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_benchmark_can_be_imported(script):
    try:
        importlib.import_module(script)
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] in ("roll", *SCRIPTS):
            raise
        pytest.skip(f"not installed: {missing.name}")

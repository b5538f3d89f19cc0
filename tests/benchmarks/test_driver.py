"""The driver's benchmark runs on the code as it is. Its stand-ins answer the calls of the real pool."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.tier("all")
def test_a_small_run_of_the_drivers_benchmark_has_its_figures():
    size = ["--replicas", "4", "--requests", "16", "--tokens", "64", "--no-ray"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "driver.py"), *size],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert figures["virtual_seconds"] > 0

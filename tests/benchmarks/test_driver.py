"""The driver's benchmark runs on the code as it is. Its stand-ins answer the calls of the real pool."""

import asyncio
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import driver
import pytest

ROOT = Path(__file__).parents[2]


def test_what_stand_ins_compute_is_left_out_however_it_ends(monkeypatch):
    spent = 0

    def compute() -> None:
        nonlocal spent
        spent += 1

    monkeypatch.setattr(driver, "time", SimpleNamespace(thread_time=lambda: spent, process_time=lambda: spent))
    meter = driver.Meter()

    async def answer(end: str) -> str:
        compute()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(0 if end == "at once" else 1)
        compute()
        if end == "error":
            raise KeyError(end)
        return end

    async def measure() -> None:
        for end in ("at once", "late"):
            assert await driver.Outside(meter, answer(end)) == end
            compute()
        with pytest.raises(KeyError, match="error"):
            await driver.Outside(meter, answer("error"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await driver.Outside(meter, asyncio.sleep(1))
        compute()

    asyncio.run(measure())
    assert (meter.outside.seconds, meter.cpu_seconds()) == (6, 3)
    with pytest.raises(RuntimeError, match="twice"), meter.outside, meter.outside:
        pass


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

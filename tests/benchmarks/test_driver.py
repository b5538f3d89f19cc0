"""The driver's benchmark runs on the code as it is. Its stand-ins answer the calls of the real pool."""

import asyncio
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import driver
import pytest

ROOT = Path(__file__).parents[2]


def test_what_stand_ins_compute_is_left_out_however_it_ends():
    meter = driver.Meter()

    def compute(seconds: float = 0.03) -> None:
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    async def answer(end: str) -> str:
        compute()
        with suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.sleep(1 if end != "at once" else 0)
        compute()
        if end == "error":
            raise KeyError(end)
        return end

    async def measure() -> float:
        began, known = time.thread_time(), meter.outside.seconds
        for end in ("at once", "late"):
            assert await driver.Outside(meter, answer(end)) == end
        with pytest.raises(KeyError, match="error"):
            await driver.Outside(meter, answer("error"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.005):
                await driver.Outside(meter, asyncio.sleep(1))
        compute(0.02)
        return time.thread_time() - began - (meter.outside.seconds - known)

    assert asyncio.run(measure()) == pytest.approx(0.02, abs=0.01)
    assert meter.outside.seconds == pytest.approx(0.18, abs=0.02)
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

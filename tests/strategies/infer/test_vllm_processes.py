"""vLLM's processes end with whoever started them, and their death is told by name. Real processes, killed by id."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
OWNER = """
import asyncio, sys, torch
import psutil
from roll.strategies.infer.base import EngineFailed
from tests.strategies.infer.vllm_helpers import RunningEngine, request
from tests.strategies.infer.test_vllm_processes import engine_process


async def crash(strategy):
    running = [asyncio.ensure_future(strategy.generate(request(str(i), 150, ignore_eos=True))) for i in range(4)]
    while min([len(each.token_ids) for each in strategy._requests.responses_inside()], default=0) < 8:
        await asyncio.sleep(0.005)
    engine_process(psutil.Process()).kill()
    failures = await asyncio.gather(*running, return_exceptions=True)
    later = await asyncio.gather(strategy.generate(request("later")), strategy.progress({}), return_exceptions=True)
    print("failures", {type(error).__name__ for error in [*failures, *later]}, flush=True)


if __name__ == "__main__":
    engine = RunningEngine(sys.argv[1])
    engine.run(crash, engine.strategy)
    engine = RunningEngine(sys.argv[1])
    print("engine", engine_process(psutil.Process()).pid, flush=True)
    sys.stdin.read()
"""


def engine_process(owner: psutil.Process) -> psutil.Process:
    """vLLM's engine process among the children."""
    (engine,) = [
        child for child in owner.children() if "VLLM" in child.name() or "spawn_main" in "".join(child.cmdline())
    ]
    return engine


@pytest.mark.timeout(300)
def test_a_dead_engine_is_reported_and_a_dead_owner_leaves_no_engine_behind(vllm_path, tmp_path):
    script = tmp_path / "owner.py"
    script.write_text(textwrap.dedent(OWNER))
    owner = subprocess.Popen(
        [sys.executable, str(script), vllm_path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        lines = {}
        for line in owner.stdout:
            word, _, rest = line.strip().partition(" ")
            lines[word] = rest
            if word == "engine":
                break
        assert lines["failures"] == "{'EngineFailed'}"
        engine = psutil.Process(int(lines["engine"]))
        owner.kill()
        owner.wait()
        engine.wait(timeout=30)
    finally:
        owner.kill()

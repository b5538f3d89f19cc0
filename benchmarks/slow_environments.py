"""Measure thousands of episodes in slow environments on one machine: steps a second, memory, lost time.

Every step sleeps a log-normal time (99th percentile 20 times the median) in a thread of a worker process. The next
action follows at once, without a policy in between, so this is the most steps that so many environments can make.
`reached` is the share of the steps' time that was sleep: 1 if nothing else took time. `delay` is the driver's wait for
a step beyond its sleep. Memory is the proportional set size of the worker processes while all episodes run, the largest
of several samples.

    python benchmarks/slow_environments.py --episodes 2000 --workers 2
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import ray

from roll.agentic.pool import EnvPool, PoolSettings
from roll.configs.run import CustomEnvConfig, EnvWorkersConfig

SAMPLE_SECONDS = 1.0
MEBIBYTE = 2**20


@dataclass
class Measured:
    """Measurements, filled while the episodes run."""

    process_ids: set[int] = field(default_factory=set)
    slept: list[float] = field(default_factory=list)
    waited: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)


async def conduct(pool: EnvPool, seed: int, ready: asyncio.Barrier, measured: Measured) -> None:
    """Conduct one episode until it is cancelled. All begin their steps together, once every environment exists."""
    session = pool.session("slow")
    measured.process_ids.add(int((await session.reset(seed)).messages[0]["content"]))
    await ready.wait()
    while True:
        started = time.perf_counter()
        observation = await session.step("go on")
        measured.waited.append(time.perf_counter() - started)
        measured.slept.append(float(observation.messages[0]["content"]))


async def watch_memory(measured: Measured) -> None:
    while True:
        await asyncio.sleep(SAMPLE_SECONDS)
        measured.memory.append(sum(proportional_bytes(pid) for pid in measured.process_ids))
        measured.threads.append(sum(len(os.listdir(f"/proc/{pid}/task")) for pid in measured.process_ids))


def proportional_bytes(process_id: int) -> int:
    """Return the proportional set size: a shared page is divided among the processes that share it."""
    lines = Path(f"/proc/{process_id}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


def processor_seconds(process_ids: set[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in process_ids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def own_processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def measure(arguments: argparse.Namespace) -> dict[str, float]:
    limits = {"reset_timeout_seconds": 600.0, "step_timeout_seconds": 600.0}
    envs = {"slow": CustomEnvConfig("slow", {"median_seconds": arguments.median_seconds}, **limits)}
    settings = PoolSettings(
        EnvWorkersConfig(num_workers=arguments.workers, max_sessions=arguments.episodes),
        thread_stack_bytes=arguments.stack_kib * 1024,
        make_env="_slow_environment:make",
        observe="_slow_environment:observe",
    )
    pool = EnvPool(envs, settings)
    started = time.perf_counter()
    await pool.start()
    start_seconds = time.perf_counter() - started
    try:
        return {"start seconds": start_seconds, **await run_episodes(pool, arguments)}
    finally:
        await pool.shutdown()


async def run_episodes(pool: EnvPool, arguments: argparse.Namespace) -> dict[str, float]:
    measured, ready = Measured(), asyncio.Barrier(arguments.episodes + 1)
    begun = time.perf_counter()
    episodes = [asyncio.create_task(conduct(pool, seed, ready, measured)) for seed in range(arguments.episodes)]
    await ready.wait()
    watcher = asyncio.create_task(watch_memory(measured))
    started = time.perf_counter()
    before, own_before = processor_seconds(measured.process_ids), own_processor_seconds()
    await asyncio.sleep(arguments.seconds)
    seconds = time.perf_counter() - started
    for task in (watcher, *episodes):
        task.cancel()
    steps = len(measured.slept)
    delays = sorted(waited - slept for waited, slept in zip(measured.waited, measured.slept, strict=True))
    return {
        "reset seconds": started - begun,
        "steps": steps,
        "steps per second": steps / seconds,
        "mean sleep": statistics.mean(measured.slept),
        "reached": sum(measured.slept) / sum(measured.waited),
        "delay median": delays[steps // 2],
        "delay p99": delays[int(0.99 * steps)],
        "memory MiB": max(measured.memory) / MEBIBYTE,
        "memory KiB per episode": max(measured.memory) / 1024 / arguments.episodes,
        "threads": max(measured.threads),
        "worker CPU us per step": 1e6 * (processor_seconds(measured.process_ids) - before) / steps,
        "driver CPU us per step": 1e6 * (own_processor_seconds() - own_before) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=2000, help="at the same time")
    parser.add_argument("--seconds", type=float, default=20.0, help="of stepping")
    parser.add_argument("--median-seconds", type=float, default=1.0, help="that a step sleeps")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--stack-kib", type=int, default=1024, help="of each thread")
    arguments = parser.parse_args()
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    results = asyncio.run(measure(arguments))
    for name, value in results.items():
        print(f"{name:<26}{value:12.4g}")
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], **vars(arguments), "results": results}))


if __name__ == "__main__":
    main()

"""Measure the cost of weight updates: end to end against a plain copy of the same bytes, and how long each part stops.

A synthetic model of about 1 GiB, made on the spot, runs in the product's own processes: one trainer rank, the replicas,
the pool, the double buffer. Publications are timed one after the other and as a whole: from the request to gather to
the last replica's attested load. They are timed with idle engines, and again while requests run. The copy they are
compared with (`np.copyto` between warm buffers) runs in this process before each of them, under the same conditions;
the best of several counts. The first publications are left out: they touch each buffer's memory for the first time.

    python benchmarks/weight_publication.py --transports shared_memory object_store
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.configs.roles import StrategyArguments, WorkerConfig
from roll.configs.run import ClusterConfig
from roll.engines.base import GenerateRequest, SamplingParams
from roll.engines.pool import InferencePool, PoolSettings
from roll.engines.worker import EngineSpec, InferWorker
from roll.runtime.placement import Placement, ray_session
from roll.runtime.workers import start_group, start_worker
from roll.trainers.base import TrainerSetup
from roll.trainers.worker import TrainerGroup, TrainerSpec, TrainWorker
from roll.weights.transports import TransportSpec

WARM_UP = 3
"""Publications before the timed ones: both buffers, and the engine's first swap."""
DEADLINE_SECONDS = 600.0
VOCABULARY = 1024
GIB = 1024**3
MAX_LENGTH = 4096


@dataclass(frozen=True)
class Setting:
    """Settings of one measurement."""

    engine: str
    transport: str
    replicas: int
    bucket_bytes: int
    publications: int
    requests: int
    """Requests that run while weights are published; 0: the engines are idle."""


def make_model(folder: Path, layers: int) -> None:
    """Make a model whose layers have 256 MiB of float32 weights each."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=4096,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


@asynccontextmanager
async def roles(setting: Setting, model: Path, files: Path) -> AsyncIterator[tuple[TrainerGroup, InferencePool]]:
    """Start one trainer rank and the replicas as the pipeline does; one computing thread each."""
    devices = setting.replicas + 1
    cluster = ClusterConfig(num_devices_per_node=devices, cpu_threads_per_device=1)
    with ray_session(cluster):
        placement = Placement(cluster)
        await placement.reserve()

        def worker(kind, role, rank, world_size, device):
            return start_worker(
                kind, placement, role=role, rank=rank, world_size=world_size, devices=[device], log_dir=None
            )

        group = await start_group(lambda rank: worker(TrainWorker, "actor_train", 0, 1, 0), 1, DEADLINE_SECONDS)
        trainer = TrainerGroup(group, start_timeout_seconds=DEADLINE_SECONDS, call_timeout_seconds=DEADLINE_SECONDS)
        pool = InferencePool(
            "actor_infer",
            setting.replicas,
            lambda index: worker(InferWorker, "actor_infer", index, setting.replicas, index + 1),
            EngineSpec(
                setting.engine, {}, str(model), "float32", "sdpa", False, MAX_LENGTH, transport=setting.transport
            ),
            PoolSettings(
                in_flight="keep",
                max_restarts=0,
                start_timeout_seconds=DEADLINE_SECONDS,
                request_timeout_seconds=DEADLINE_SECONDS,
                publish_timeout_seconds=DEADLINE_SECONDS,
                load_bucket_bytes=setting.bucket_bytes,
                dual_buffer=True,
                silence_timeout_seconds=DEADLINE_SECONDS,
                max_unavailable=1.0,
            ),
            print,
        )
        transport = TransportSpec(setting.transport, buffers=2, directory=files)
        try:
            config = WorkerConfig(device_mapping=[0], strategy_args=StrategyArguments("fsdp2_train"))
            setup = TrainerSetup(config, str(model), total_optimizer_steps=1, seed=0)
            await trainer.start(TrainerSpec(setup, transport))
            await pool.start()
            pool.buffers.on_free = trainer.release
            yield trainer, pool
        finally:
            pool.kill()
            group.kill()
            placement.release()


async def publish(trainer: TrainerGroup, pool: InferencePool, version: int, bucket_bytes: int) -> dict[str, float]:
    """Make one publication as the stages do. Return the seconds of each part, and GiB."""
    started = time.perf_counter()
    buffer = await pool.buffers.acquire(version)
    await trainer.gather(version, buffer, pool.dtype, bucket_bytes)
    gathered = time.perf_counter()
    publication = await trainer.send(version)
    loaded = await pool.publish(publication)
    return {
        "total": time.perf_counter() - started,
        "training blocked": gathered - started,
        **publication.seconds,
        **loaded.seconds,
        "gib": publication.total_bytes / GIB,
    }


@asynccontextmanager
async def requests_running(pool: InferencePool, count: int) -> AsyncIterator[None]:
    """Run this many requests, which do not end by themselves; yield once they decode."""
    supervising = asyncio.create_task(pool.run())
    sampling = SamplingParams(max_new_tokens=4000, ignore_eos=True)
    prompt = np.arange(16, dtype=np.int32)
    requests = [GenerateRequest(f"r{index}", prompt, sampling) for index in range(count)]
    running = [asyncio.create_task(pool.generate(request)) for request in requests]
    try:
        while await tokens(pool) < count and count:
            await asyncio.sleep(0.05)
        yield
        assert not any(task.done() for task in running), "requests ended while weights were published"
    finally:
        for task in (*running, supervising):
            task.cancel()
        await asyncio.wait([*running, supervising])


async def tokens(pool: InferencePool) -> int:
    return sum(engine["generated_tokens"] for engine in await pool.stats())


class PlainCopy:
    """`np.copyto` between two warm buffers of the publication's size."""

    def __init__(self, size: int) -> None:
        self._source, self._target = np.ones(size, dtype=np.uint8), np.ones(size, dtype=np.uint8)

    def seconds(self) -> float:
        """Return the seconds of one copy."""
        started = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - started


async def measure(setting: Setting, model: Path, files: Path) -> dict[str, float]:
    """Return medians over the publications, the rate of a plain copy beside the same engines, and the ratios."""
    async with roles(setting, model, files) as (trainer, pool):
        for version in range(WARM_UP):
            warm = await publish(trainer, pool, version, setting.bucket_bytes)
        async with requests_running(pool, setting.requests):
            copy = PlainCopy(int(warm["gib"] * GIB))
            before, started = await tokens(pool), time.perf_counter()
            runs = []
            for version in range(WARM_UP, WARM_UP + setting.publications):
                copied = await asyncio.to_thread(copy.seconds)
                parts = await publish(trainer, pool, version, setting.bucket_bytes)
                runs.append({**parts, "memcpy": copied})
            token_rate = (await tokens(pool) - before) / (time.perf_counter() - started)
    return figures(runs) | ({"tokens per second": token_rate} if setting.requests else {})


def figures(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return medians of the parts in seconds, the rate end to end and its ratio to a plain copy (median and best
    publication, each against the best copy), and the share of the time that one replica stands still."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    copy = min(run["memcpy"] for run in runs)
    return {
        **medians,
        "GiB/s": medians["gib"] / medians["total"],
        "memcpy GiB/s": medians["gib"] / copy,
        "of memcpy": copy / medians["total"],
        "best of memcpy": copy / min(run["total"] for run in runs),
        "stall share": statistics.median(run["stall"] / run["total"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="hf_infer", choices=("hf_infer", "vllm"))
    parser.add_argument("--layers", type=int, default=4, help="of 256 MiB each")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--bucket-mb", type=float, default=256.0)
    parser.add_argument("--publications", type=int, default=9)
    parser.add_argument("--requests", type=int, default=8, help="running in the second buffer of the measurement")
    parser.add_argument("--transports", nargs="+", default=["shared_memory", "object_store"])
    arguments = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory(prefix="roll-bench-") as folder:
        model = Path(folder) / "model"
        make_model(model, arguments.layers)
        for transport in arguments.transports:
            for requests in (0, arguments.requests):
                setting = Setting(
                    arguments.engine,
                    transport,
                    arguments.replicas,
                    int(arguments.bucket_mb * 2**20),
                    arguments.publications,
                    requests,
                )
                name = f"{transport}, {f'{requests} requests running' if requests else 'idle engine'}"
                results[name] = asyncio.run(measure(setting, model, Path(folder) / "published"))
                print(name)
                for part, value in results[name].items():
                    print(f"  {part:<18}{value:9.4f}")
    print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], "results": results}))


if __name__ == "__main__":
    main()

"""Guard parts of the pipeline against becoming slow: ratios to plain loops on the same work, in one run.

- `training step`: a trainer process of the pipeline, including its messages and allocator, against a plain PyTorch step
  (transformers, autograd, AdamW) in a process of its own, at three sizes of model and batch;
- `generation`: `hf_infer` against `model.generate`, equal and long-tailed lengths;
- `packing`: packed rows against sorted padded ones, with spread lengths;
- `weight update`: a whole update through shared memory against a plain copy of the same bytes;
- `scheduler`: the life of a group against a bare asyncio task, in CPU time.

The two sides of a part take turns, and the median of the ratios of neighbours counts, so a machine that is slow for a
while is slow for both. A part that fails is measured at most twice more, and its best ratio counts. Prints one JSON
line; exit code 1 if a ratio is beyond its bound. Bounds are wide: they catch a broken change and are not a measurement.

    python benchmarks/guard.py [--parts "training step" ...]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import hf_infer_vs_generate
import numpy as np
import packing
import scheduler_cost
import torch
import weight_publication
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import StrategyArguments, TrainingArguments, WorkerConfig
from roll.configs.run import ClusterConfig
from roll.data.records import SampleBatch
from roll.runtime.placement import Placement, ray_session
from roll.runtime.workers import start_group, start_worker
from roll.trainers.base import TrainerSetup
from roll.trainers.worker import TrainerGroup, TrainerSpec, TrainPlan, TrainWorker
from roll.weights.transports import TransportSpec

ATTEMPTS = 3
DEADLINE_SECONDS = 120.0
LEARNING_RATE = 1e-4
PROMPT_TOKENS = 6


@dataclass(frozen=True)
class Size:
    """A model and a batch of it."""

    hidden: int
    layers: int
    vocabulary: int
    samples: int
    length: int
    """Tokens of each sample."""
    micro_batch: int
    """Samples of one micro-batch."""


SIZES = {
    # The quick start's model, with the whole batch at once: large activations of a small model.
    "0.8 M, 256 x 70": Size(128, 4, 99, 256, 70, 256),
    "7 M, 8 x 256": Size(256, 6, 8192, 8, 256, 4),
    "41 M, 2 x 256": Size(512, 8, 32_000, 2, 256, 2),
}


BOUNDS = {
    **{f"training step, {name}": 1.25 for name in SIZES},
    "generation, equal lengths": 1.5,
    "generation, long-tailed lengths": 0.7,
    "packing, spread lengths": 1.05,
    "weight update": 4.0,
    "scheduler": 4.0,
}
"""Largest ratios of seconds (for the scheduler: CPU seconds), the product's divided by the plain loop's."""


def make_model(folder: Path, size: Size) -> None:
    """Make a random Qwen2 model."""
    torch.manual_seed(0)
    heads = size.hidden // 32
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=3 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def make_batch(size: Size) -> SampleBatch:
    """Make random tokens; everything after the prompt is trained on."""
    generator, total = np.random.default_rng(0), size.samples * size.length
    return SampleBatch(
        np.full(size.samples, size.length, dtype=np.int64),
        {
            "token_ids": generator.integers(0, size.vocabulary, total).astype(np.int32),
            "response_mask": np.tile(np.arange(size.length) >= PROMPT_TOKENS, size.samples),
            "behaviour_logprobs": np.full(total, -np.log(size.vocabulary), dtype=np.float32),
            "versions": np.zeros(total, dtype=np.int32),
            "advantages": np.repeat(generator.normal(size=size.samples), size.length).astype(np.float32),
        },
    )


class PlainTrainer:
    """One process that takes plain PyTorch steps on padded rows, without any code of `roll`."""

    def __init__(self, model: str, size: Size, batch: SampleBatch) -> None:
        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE)
        shape = (size.samples, size.length)
        self._tokens = torch.from_numpy(batch.tokens["token_ids"].reshape(shape)).long()
        self._old = torch.from_numpy(batch.tokens["behaviour_logprobs"].reshape(shape))[:, PROMPT_TOKENS:]
        self._advantages = torch.from_numpy(batch.tokens["advantages"].reshape(shape))[:, PROMPT_TOKENS:]
        self._micro_batch = size.micro_batch

    def step(self) -> None:
        """Compute PPO's clipped loss (arXiv 1707.06347) over the response tokens, and take one optimizer step."""
        rows = self._micro_batch
        for start in range(0, len(self._tokens), rows):
            part = slice(start, start + rows)
            tokens, advantages = self._tokens[part], self._advantages[part]
            logits = self._model(tokens, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
            logprobs = logits.log_softmax(-1)
            chosen = logprobs.gather(-1, tokens[:, PROMPT_TOKENS:, None])[..., 0]
            with torch.no_grad():
                # Every trainer reports this metric.
                -(logprobs.exp() * logprobs).sum(-1)
            ratio = (chosen - self._old[part]).exp()
            loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
            (loss.sum() / self._advantages.numel()).backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def serve_plain_steps(calls: Connection, model: str, size: Size, batch: SampleBatch) -> None:
    """Take a plain step for each call, in a process of its own."""
    trainer = PlainTrainer(model, size, batch)
    while calls.recv():
        trainer.step()
        calls.send(True)


@contextmanager
def plain_steps(model: Path, size: Size, batch: SampleBatch) -> Iterator[Callable[[], None]]:
    """Yield a function that takes a plain step in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_plain_steps, args=(theirs, str(model), size, batch))
    process.start()

    def step() -> None:
        ours.send(True)
        if not ours.poll(DEADLINE_SECONDS):
            raise RuntimeError("the plain step did not end")
        ours.recv()

    try:
        yield step
    finally:
        ours.send(False)
        process.join()


@asynccontextmanager
async def trainer_of(model: Path, size: Size, files: Path) -> AsyncIterator[TrainerGroup]:
    """Start one rank of the default trainer as the pipeline starts it. Needs a running Ray."""
    placement = Placement(ClusterConfig(num_devices_per_node=1, cpu_threads_per_device=1))
    await placement.reserve()

    def worker(rank: int) -> Any:
        return start_worker(
            TrainWorker, placement, role="actor_train", rank=rank, world_size=1, devices=[0], log_dir=None
        )

    group = await start_group(worker, 1, DEADLINE_SECONDS)
    trainer = TrainerGroup(group, start_timeout_seconds=DEADLINE_SECONDS, call_timeout_seconds=DEADLINE_SECONDS)
    config = WorkerConfig(
        device_mapping=[0],
        strategy_args=StrategyArguments("fsdp2_train"),
        training_args=TrainingArguments(learning_rate=LEARNING_RATE, max_grad_norm=1.0),
        max_tokens_per_microbatch_in_train=size.micro_batch * size.length,
    )
    try:
        transport = TransportSpec("object_store", buffers=2, directory=files)
        setup = TrainerSetup(config, str(model), total_optimizer_steps=1000, seed=0)
        await trainer.start(TrainerSpec(setup, transport))
        yield trainer
    finally:
        group.kill()
        placement.release()


async def training_step(folder: Path, size: Size, repeats: int) -> list[float]:
    """Return the ratios of neighbouring steps."""
    model, batch = folder / "model", make_batch(size)
    make_model(model, size)
    objective = PolicyObjective(size.length - PROMPT_TOKENS, "ppo", {}, "token-mean")
    ratios = []
    with plain_steps(model, size, batch) as plain:
        async with trainer_of(model, size, folder) as trainer:
            for number in range(WARM_UP + repeats):
                started = time.perf_counter()
                await trainer.train(batch, objective, TrainPlan(number, 1, size.samples, 1.0))
                between = time.perf_counter()
                await asyncio.to_thread(plain)
                ratios.append((between - started) / (time.perf_counter() - between))
    return ratios[WARM_UP:]


WARM_UP = 2
"""First steps, which touch memory for the first time and create the optimizer's state."""


def measure_training(folder: Path, wanted: set[str]) -> dict[str, list[float]]:
    """Measure each wanted size."""
    ratios = {}
    with ray_session(ClusterConfig(num_devices_per_node=1, cpu_threads_per_device=1)):
        for name, size in SIZES.items():
            if f"training step, {name}" in wanted:
                with tempfile.TemporaryDirectory(dir=folder) as place:
                    ratios[f"training step, {name}"] = asyncio.run(training_step(Path(place), size, repeats=5))
    return ratios


def measure_generation(folder: Path, wanted: set[str]) -> dict[str, list[float]]:
    """Measure both loads, with 128 rows filled once and twice."""
    hf_infer_vs_generate.make_model(str(folder))
    arguments = argparse.Namespace(batch=128, requests=128, threads=1, repeats=3)
    figures = asyncio.run(hf_infer_vs_generate.measure(str(folder), arguments))
    names = {"generation, equal lengths": "equal", "generation, long-tailed lengths": "long_tailed"}
    return {name: [1 / figures[load]["ratio"]] for name, load in names.items()}


def measure_packing(folder: Path, wanted: set[str]) -> dict[str, list[float]]:
    """Measure spread lengths, against dynamic batching."""
    shape = argparse.Namespace(vocabulary=8192, hidden=256, layers=4, longest=512)
    packing.make_model(str(folder), shape)
    generator = np.random.default_rng(0)
    batch = packing.make_batch(packing.spread_lengths(32, 512, generator), 8192, generator)
    sides = packing.make_sides(str(folder), 4096)
    del sides["padded"]
    figures = packing.measure(sides, batch, repeats=3)
    return {"packing, spread lengths": [1 / figures["ratio"]["padded, sorted"]]}


def measure_weight_update(folder: Path, wanted: set[str]) -> dict[str, list[float]]:
    """Measure 256 MiB through shared memory to an idle engine."""
    weight_publication.make_model(folder / "model", layers=1)
    setting = weight_publication.Setting("hf_infer", "shared_memory", 1, 256 * 2**20, 5, 0)
    figures = asyncio.run(weight_publication.measure(setting, folder / "model", folder / "published"))
    return {"weight update": [1 / figures["of memcpy"]]}


def measure_scheduler(folder: Path, wanted: set[str]) -> dict[str, list[float]]:
    """Measure 2,000 groups in flight."""
    plan = scheduler_cost.plan_for(2_000, 256, 40, "ready_first")
    ratios = []
    for _ in range(3):
        ours, _, _ = scheduler_cost.measure_scheduler(plan)
        ratios.append(ours / scheduler_cost.measure_bare_tasks(plan, 2_000))
    return {"scheduler": ratios}


PARTS: dict[str, Callable[[Path, set[str]], dict[str, list[float]]]] = {
    "training step": measure_training,
    "generation": measure_generation,
    "packing": measure_packing,
    "weight update": measure_weight_update,
    "scheduler": measure_scheduler,
}


def measure(part: str, wanted: set[str]) -> dict[str, float]:
    """Return the median ratio of each measurement of a part."""
    with tempfile.TemporaryDirectory(prefix="roll-guard-") as folder:
        ratios = PARTS[part](Path(folder), wanted)
    return {name: round(statistics.median(values), 3) for name, values in ratios.items()}


def beyond(ratios: dict[str, float]) -> set[str]:
    """Return the names of the ratios above their bounds."""
    return {name for name, ratio in ratios.items() if ratio > BOUNDS[name]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ratios: dict[str, float] = {}
    for part in arguments.parts:
        measured = measure(part, set(BOUNDS))
        for _ in range(ATTEMPTS - 1):
            again = beyond(measured)
            if again:
                measured |= {name: min(ratio, measured[name]) for name, ratio in measure(part, again).items()}
        ratios |= measured
        for name, ratio in measured.items():
            verdict = "TOO SLOW" if name in beyond(measured) else "ok"
            print(f"{name:<36}{ratio:6.2f} of the plain loop's time, at most {BOUNDS[name]:.2f}  {verdict}", flush=True)
    print(json.dumps({"benchmark": "guard", "ratios": ratios, "beyond": sorted(beyond(ratios))}))
    sys.exit(bool(beyond(ratios)))


if __name__ == "__main__":
    main()

"""Measure what a run's driver costs with 256 engine replicas, and what passes through it.

Everything is the driver's own code: scheduler, stages, gate, pool of replicas, router, groups of RLVR, journal, batch,
advantages, records of the run, status. Stand-ins begin below the handle of a worker process: engines that make tokens
at a fixed rate in virtual time, one trainer and one reference rank, a reward that answers at once. What crosses to a
process is pickled, and what comes back is unpickled, as Ray does; what the stand-ins compute is not counted, but for
their timers in the loop. Ray's cost of a call is measured beside it, on one real actor.

- ``cpu``: CPU seconds of the driver for a million generated tokens. At a million tokens a second that is the number of
  cores that it needs. A sample costs the same whatever its length, so shorter responses cost more a token.
- ``block``: longest turn of the event loop, in CPU seconds of its thread.
- ``bytes``: bytes a sample through the driver, in either direction, by what they are.

Figures count from the end of the warm-up on, the longest turn from the first request on. By default a replica has 64
requests in flight instead of 256, each four times as fast: as many tokens, samples and calls a second, in a quarter of
the memory and of the time. Twice as many begin, because a group is in flight until the last of its samples has ended.

    python benchmarks/driver.py --replicas 256 --requests 256 --tokens 1024
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import pickle
import random
import select
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from roll.configs import derived
from roll.configs.loader import load_config
from roll.configs.run import RLVRConfig
from roll.data.prompts import PromptStream
from roll.data.records import Group, Prompt
from roll.engines.base import Completion, GenerateRequest, TokenChunk
from roll.engines.pool import InferencePool, PoolSettings
from roll.engines.worker import PATIENCE, Outbox
from roll.pipeline.algorithm import build_algorithms
from roll.pipeline.context import build_scheduler, paced
from roll.pipeline.journal import JournalKeeper
from roll.pipeline.main import build_stages, publish_initial
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.records import StepRecords
from roll.pipeline.rlvr import Rewards, RolloutFunction
from roll.pipeline.roles import engine_spec
from roll.pipeline.rollouts import EngineGate, sampling_params
from roll.pipeline.stage import StageGraph, StepCounter
from roll.pipeline.stages import stage_chain
from roll.pipeline.status import StatusKeeper
from roll.pipeline.streaming import PartsOfBatch, StreamedStep, least_groups
from roll.rewards.base import RewardInput, RewardOutput
from roll.rollout.clock import VirtualTimeLoop
from roll.rollout.scheduler import GroupRequest
from roll.runtime.locks import build_device_locks
from roll.runtime.process import collect_rarely
from roll.runtime.usage import Usage
from roll.runtime.workers import WorkerGroup
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import WRITE_SECONDS
from roll.trainers.worker import TrainerGroup
from roll.weights.buckets import HeldWeights
from roll.weights.publisher import Publication

EXAMPLE = Path(__file__).parents[1] / "examples" / "quickstart" / "rlvr.yaml"
TOKENS_A_SECOND = 1e6
"""Tokens that all engines together generate in a virtual second, if they are full."""
LOAD_SECONDS = 0.5
TRAIN_SECONDS = 0.5
PROMPT_TOKENS = 200
VOCABULARY = 32_000


class LeftOut:
    """Measures blocks in which stand-ins compute. They do not nest. Each sample has several, so this is no generator,
    which costs more."""

    __slots__ = ("_began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began: float | None = None

    def __enter__(self) -> None:
        if self._began is not None:
            raise RuntimeError("this would be left out twice")
        self._began = time.thread_time()

    def __exit__(self, *failure: object) -> None:
        if self._began is not None:
            self.seconds += time.thread_time() - self._began
        self._began = None


class Meter:
    """The CPU time and the bytes of the driver, without those of the stand-ins."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.longest_turn = 0.0
        self.has_requests = False
        self.tokens = self.samples = 0
        self.outside = LeftOut()
        self._turn: tuple[float, float] = (0.0, 0.0)
        self.start()

    def start(self) -> None:
        """Count from here."""
        self.bytes.clear()
        self.calls.clear()
        self.tokens = self.samples = 0
        self._began = time.process_time() - self.outside.seconds

    def cpu_seconds(self) -> float:
        """Return the driver's CPU seconds since `start`."""
        return time.process_time() - self.outside.seconds - self._began

    def first_request(self) -> None:
        """Measure turns from here on: what came before, above all a collection of garbage, keeps nothing waiting."""
        if not self.has_requests:
            self.has_requests, self.longest_turn = True, 0.0

    def turn_begins(self) -> None:
        """Note the beginning of a turn of the event loop."""
        self._turn = time.thread_time(), self.outside.seconds

    def turn_ends(self) -> None:
        """Note its end."""
        began, outside = self._turn
        self.longest_turn = max(self.longest_turn, time.thread_time() - began - (self.outside.seconds - outside))

    def to_process(self, kind: str, value: object) -> bytes:
        """Return what Ray would send, at the driver's cost."""
        sent = pickle.dumps(value, protocol=5)
        self.bytes[kind] += len(sent)
        return sent

    def from_process(self, kind: str, value: object) -> Any:
        """Return what the driver would get, at the driver's cost. Arrays are views of what was received, as in Ray."""
        arrays: list[pickle.PickleBuffer] = []
        with self.outside:
            sent = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
            received = [bytes(array.raw()) for array in arrays]
        self.bytes[kind] += len(sent) + sum(map(len, received))
        return pickle.loads(sent, buffers=received)


class MeteredLoop(VirtualTimeLoop):
    """A loop in virtual time, which stands still while threads work for the loop. Its turns are measured."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._in_threads = 0
        self.is_over = False
        super().__init__()

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, function: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        """Count the work until it ends."""
        work = asyncio.SelectorEventLoop.run_in_executor(self, executor, function, *args)
        self._in_threads += 1
        work.add_done_callback(self._thread_ended)
        return work

    def _thread_ended(self, work: asyncio.Future[Any]) -> None:
        self._in_threads -= 1

    def _skip(self, seconds: float | None) -> None:
        if self._in_threads or self.is_over:
            select.select([self._ssock], [], [], 0.1)  # to which threads write, and signals
        else:
            super()._skip(seconds)

    def _run_once(self) -> None:
        self._meter.turn_begins()
        super()._run_once()  # type: ignore[misc]
        self._meter.turn_ends()


@dataclass
class Outside:
    """Awaits what a stand-in does, whose own steps are left out of the measurement."""

    meter: Meter
    work: Coroutine[Any, Any, Any]

    def __await__(self) -> Iterator[Any]:
        """Run the work to its end, and return its result."""
        proceed = partial(self.work.send, None)
        while True:
            with self.meter.outside:
                try:
                    awaited = proceed()
                except StopIteration as end:
                    return end.value
            try:
                yield awaited
            except BaseException as error:
                proceed = partial(self.work.throw, error)
            else:
                proceed = partial(self.work.send, None)


Running = tuple[float, int, int, bool]
"""A request in an engine: when it began, its length and seed, and if the text is wanted. Garbage collections of the
driver do not visit plain tuples of numbers; an object would be visited as if it were the driver's."""


class Handle:
    """Stand-in for a `WorkerHandle`: its methods answer at once, or when the virtual time has come."""

    pid = None
    is_local = False
    host, node, port = "", "node", 0

    def __init__(self, name: str, meter: Meter) -> None:
        self.name, self._meter = name, meter
        self._alive: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def create(self, timeout: float) -> None:
        """Start nothing."""

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """Carry a call there and its answer back."""
        self._meter.calls[method] += 1
        sent = self._meter.to_process(f"{method}, to", args)
        with self._meter.outside:
            received = pickle.loads(sent)
        answer = await Outside(self._meter, getattr(self, method)(*received))
        return self._meter.from_process(f"{method}, from", answer)

    def tell(self, method: str, *args: Any) -> None:
        """Ignore what needs no answer."""

    def kill(self) -> None:
        """End nothing."""

    async def wait_for_death(self) -> Any:
        """Wait for ever."""
        return await self._alive


class EngineHandle(Handle):
    """One engine replica."""

    def __init__(self, name: str, meter: Meter, tokens: int, token_seconds: float, letters: int) -> None:
        super().__init__(name, meter)
        self._tokens = tokens
        self._running: dict[str, Running] = {}
        self._token_seconds = token_seconds
        self._ends: list[tuple[float, str]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._versions: list[int] = []
        self._switches: list[float] = []
        self._outbox = Outbox()
        self._looks = 0
        generator = np.random.default_rng(0)
        self._token_ids = generator.integers(0, VOCABULARY, 1 << 16, dtype=np.int32)
        self._logprobs = -generator.random(1 << 16, dtype=np.float32)
        self._text = "ab cd " * (1 << 16)
        self._letters = letters

    async def start(self, spec: object) -> None:
        """Start nothing."""

    async def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Begin these requests. Lengths are log-normal."""
        self._meter.first_request()
        now = asyncio.get_running_loop().time()
        for request in requests:
            drawn = random.Random(request.sampling.seed).lognormvariate(-0.125, 0.5)
            length = min(max(1, round(self._tokens * drawn)), request.sampling.max_new_tokens)
            self._running[request.request_id] = now, length, request.sampling.seed, request.with_text
            heapq.heappush(self._ends, (now + length * self._token_seconds, request.request_id))
        self._wait_for_next()

    def _wait_for_next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(self._ends[0][0], self._end_due) if self._ends else None

    def _end_due(self) -> None:
        with self._meter.outside:
            now = asyncio.get_running_loop().time()
            while self._ends and self._ends[0][0] <= now:
                name = heapq.heappop(self._ends)[1]
                began, length, seed, with_text = self._running.pop(name)
                text = self._text[: self._letters * length] if with_text else None
                ended = Completion(name, *self._content(began, seed, 0, length), "stop", text)
                self._outbox.add(ended, PATIENCE * (now - began))
                self._meter.tokens += length
                self._meter.samples += 1
            self._wait_for_next()

    def _content(self, began: float, seed: int, start: int, end: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        first = seed % (1 << 15)
        chosen = slice(first + start, first + end)
        times = began + self._token_seconds * np.arange(start, end)
        versions = np.array(self._versions, np.int32)[np.searchsorted(self._switches, times, side="right") - 1]
        return self._token_ids[chosen], self._logprobs[chosen], versions

    async def collect(self, wait_seconds: float) -> list[Any]:
        """Return the finished requests."""
        return await self._outbox.collected(wait_seconds)

    async def progress(self, known: dict[str, int] | None = None) -> tuple[int, dict[str, TokenChunk]]:
        """Return how many tokens there are, and the new ones of the running requests if asked for them."""
        self._looks += 1
        if known is None:
            return self._looks, {}
        now = asyncio.get_running_loop().time()
        chunks = {}
        for name, (began, length, seed, _) in self._running.items():
            there, before = int((now - began) / self._token_seconds), known.get(name, 0)
            if there > before:
                chunks[name] = TokenChunk(*self._content(began, seed, before, min(there, length)))
        return self._looks, chunks

    async def verify_weights(self, publication: Publication) -> float:
        """Compare nothing."""
        return 0.0

    async def load_weights(self, publication: Publication, bucket_bytes: int, mode: str, verified: bool) -> Any:
        """Hold the version after a while."""
        await asyncio.sleep(LOAD_SECONDS)
        self._versions.append(publication.version)
        self._switches.append(asyncio.get_running_loop().time() if self._switches else 0.0)
        return HeldWeights(publication.version, 0, {}), {"fetch": 0.0, "load": LOAD_SECONDS, "stall": 0.0}

    async def stats(self) -> dict[str, Any]:
        """Return little."""
        return {"generated_tokens": 0, "busy_seconds": 0.0, "busy_spans": [], "cpu_seconds": 0.0, "process_id": 0}


class TrainerHandle(Handle):
    """One rank of the trainer or of the reference."""

    def __init__(self, name: str, meter: Meter, store: Store) -> None:
        super().__init__(name, meter)
        self._store = store

    async def log_probs(self, batch: int, temperature: float) -> np.ndarray:
        """Return zeros."""
        return np.zeros(self._store.sizes[batch], np.float32)

    async def train(self, batch: int, objective: object, plan: object) -> dict[str, float]:
        """Take a while."""
        await asyncio.sleep(TRAIN_SECONDS)
        return {"loss": 0.0}

    async def usage(self) -> Usage:
        """Have used nothing."""
        return Usage()

    async def gather(self, version: int, buffer: int, dtype: str, bucket_bytes: int) -> None:
        """Copy nothing."""

    async def send(self, version: int) -> Publication:
        """Send nothing."""
        return Publication(version, [], 0, {}, 0)


class Store:
    """Stand-in for Ray's object store."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.sizes: list[int] = []

    def put(self, batch: Any) -> int:
        """Copy what Ray would copy into its memory, and forget it."""
        self._meter.calls["put"] += 1
        buffers: list[pickle.PickleBuffer] = []
        head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
        self._meter.bytes["put"] += len(head) + sum(len(bytes(buffer.raw())) for buffer in buffers)
        self.sizes.append(int(batch.lengths.sum()))
        return len(self.sizes) - 1


@dataclass
class Reward:
    """Stand-in for a `RewardPool`."""

    meter: Meter
    counts: Counts = field(default_factory=lambda: Counts())
    busy: Any = field(default_factory=lambda: SimpleNamespace(recent=list))

    async def score(self, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Return a score for each response."""
        self.meter.calls["judge"] += 1
        self.meter.to_process("judge, to", records)
        outputs = await Outside(self.meter, self._judged(len(records)))
        return self.meter.from_process("judge, from", outputs)

    async def _judged(self, number: int) -> list[RewardOutput]:
        await asyncio.sleep(0.05)
        return [RewardOutput(float(index % 2)) for index in range(number)]


@dataclass
class Counts:
    """Totals of the reward."""

    calls: int = 0


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with a vocabulary of the usual kind: made-up words."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    generator = random.Random(0)
    words = dict.fromkeys(letters)
    while len(words) < VOCABULARY:
        word = "".join(generator.choices("etaoinshrdlu", k=generator.randint(2, 6)))
        words["Ġ" * generator.randint(0, 1) + word] = None
    tokenizer = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=letters[0], pad_token=letters[1])


def make_config(arguments: argparse.Namespace) -> RLVRConfig:
    """Return the configuration of a run that keeps every engine full."""
    # Of the samples of a group half have ended when the last one does.
    in_flight = 2 * arguments.replicas * arguments.requests // arguments.group
    batch = in_flight // arguments.batches
    return derived.prompted(
        load_config(
            EXAMPLE,
            [
                f"rollout_batch_size={batch}",
                f"num_return_sequences_in_group={arguments.group}",
                f"async_generation_ratio={arguments.batches - 1}",
                f"max_steps={arguments.warm_up + arguments.steps + arguments.batches}",
                f"prompt_length={PROMPT_TOKENS}",
                f"response_length={4 * arguments.tokens}",
                "eval_steps=0",
                "save_steps=1000",
                "use_kl_loss=true",
                "reference.device_mapping=[2]",
                "cluster.num_devices_per_node=3",
                "logging_steps=1000",
            ],
        )
    )


class Measured(Exception):
    """Raised to end the run."""


class DriverRun:
    """A run of the whole driver."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.meter = Meter()
        self._arguments, self._folder = arguments, folder
        self._config = make_config(arguments)
        self._tokenizer = make_tokenizer()
        self._step_seconds: list[float] = []

    async def main(self) -> None:
        """Run to the last step."""
        config, meter, arguments = self._config, self.meter, self._arguments
        store = Store(meter)
        ray.put = store.put
        algorithms = build_algorithms(config)
        directory = RunDirectory.create(str(self._folder / "run"), config.exp_name)
        recorder = RunRecorder(config, directory, started=time.monotonic(), decoder=self._tokenizer)
        locks = build_device_locks({"actor_train": [0], "actor_infer": [1], "reference": [2]})
        pool = self._pool()
        gate = EngineGate(pool, locks["actor_infer"], "actor_infer")
        rewards = Rewards({"addition": "addition"}, {"addition": Reward(meter)})  # type: ignore[dict-item]
        make_group = RolloutFunction(
            gate,
            rewards,
            self._tokenizer,
            sampling_params(config.actor_infer.generating_args, config.response_length),
            config.num_return_sequences_in_group,
            config.seed,
            "train",
            decoded_there=True,
        )

        async def rollout(request: GroupRequest[Prompt]) -> Group:
            return await make_group(request.group_id, request.item, request.start_version)

        side = SimpleNamespace(
            source=partial(iter, PromptStream(self._prompts(), seed=0, shuffle=True)),
            metrics=rewards.metrics,
            sample_metrics="reward",
            workers=rewards,
        )
        journal = JournalKeeper(self._folder / "journal")
        scheduler = build_scheduler(config, side, paced(rollout, arguments.group, recorder.waits), journal)  # type: ignore[arg-type]
        scheduler.pause_admission()

        async def nothing(*_: object) -> None:
            return None

        def role(name: str) -> TrainerGroup:
            handle: Any = TrainerHandle(f"{name}/0", meter, store)
            return TrainerGroup(WorkerGroup([handle]), start_timeout_seconds=60, call_timeout_seconds=600)

        checkpoints: Any = SimpleNamespace(due=lambda step: False, progress=lambda: ())
        run: Any = SimpleNamespace(
            config=config,
            scheduler=scheduler,
            trainer=role("actor_train"),
            compared={"reference": role("reference")},
            teacher_prompts={},
            critic=None,
            logp=None,
            routing=None,
            pool=pool,
            gate=gate,
            side=side,
            validator=None,
            locks=locks,
            holder=lambda name: name,
            hold=lambda name: lambda: locks[name].hold(name),
            recorder=recorder,
            objective=algorithms.objective,
            advantages=algorithms.advantages,
            correction=None,
            needs_proximal=False,
            parity_check=SimpleNamespace(score=nothing),
            max_staleness=derived.resolved_max_staleness(config),
            train_temperature=1.0,
            streams=False,
            least_groups=least_groups(config, streams=False),
            parts=PartsOfBatch(),
            streamed=StreamedStep(),
            records=StepRecords(recorder, checkpoints, pool, None),
            checkpoints=checkpoints,
            chaos=SimpleNamespace(publication=nothing),
            first_step=0,
            steps=StepCounter(),
            critic_steps=StepCounter(),
            published=StepCounter(),
        )
        status = StatusKeeper(config, recorder, list)
        graph = StageGraph(build_stages(stage_chain({}), run), recorder.waits)
        status.running(run, graph.stages)

        async def keep_status() -> None:
            while True:
                await asyncio.sleep(WRITE_SECONDS)
                status.now()

        async def measure_steps() -> None:
            await run.steps.reached(self._arguments.warm_up)
            meter.start()
            began = asyncio.get_running_loop().time()
            await run.steps.reached(self._arguments.warm_up + self._arguments.steps)
            self.cpu_seconds, self.longest_turn = meter.cpu_seconds(), meter.longest_turn
            self.virtual_seconds = asyncio.get_running_loop().time() - began
            raise Measured

        await pool.start()
        background = {
            "scheduler": scheduler.run,
            "engine": pool.run,
            "gate": gate.run,
            "status": keep_status,
            "meter": measure_steps,
            "garbage": collect_rarely,
            "records": run.records.run,
        }
        try:
            await graph.run(background, first=partial(publish_initial, run))
        except* Measured:
            journal.close()
            recorder.close("cancelled")
        asyncio.get_running_loop().is_over = True  # type: ignore[attr-defined]

    def _prompts(self) -> list[Prompt]:
        generator = np.random.default_rng(1)
        return [
            Prompt(
                f"prompts.jsonl:{number}",
                "addition",
                generator.integers(0, VOCABULARY, PROMPT_TOKENS).astype(np.int32),
                "what is the sum? " * (PROMPT_TOKENS // 4),
                ground_truth="17",
            )
            for number in range(4096)
        ]

    def _pool(self) -> InferencePool:
        settings = PoolSettings(
            in_flight="keep",
            max_restarts=3,
            start_timeout_seconds=600.0,
            request_timeout_seconds=600.0,
            publish_timeout_seconds=600.0,
            load_bucket_bytes=1,
            dual_buffer=True,
            silence_timeout_seconds=60.0,
            max_unavailable=0.25,
        )
        spec = engine_spec(self._config, "object_store")
        spec = replace(spec, max_length=PROMPT_TOKENS + 4 * self._arguments.tokens)

        token_seconds = self._arguments.replicas * self._arguments.requests / TOKENS_A_SECOND

        letters = len(self._tokenizer.decode(range(VOCABULARY))) // VOCABULARY

        def start_worker(index: int) -> Any:
            return EngineHandle(f"actor_infer/{index}", self.meter, self._arguments.tokens, token_seconds, letters)

        return InferencePool("actor_infer", self._arguments.replicas, start_worker, spec, settings, print)


class Echo:
    """A real Ray actor to call."""

    async def invoke(self, method: str, *args: Any) -> Any:
        """Return what was sent."""
        return args


def ray_call_seconds(calls: int = 3000, at_once: int = 64) -> float:
    """Return the driver's CPU seconds of one call of an actor by Ray, all its threads included."""
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        actor = ray.remote(Echo).options(max_concurrency=1000).remote()

        async def call_some(number: int) -> None:
            for _ in range(number):
                await asyncio.wait_for(asyncio.wrap_future(actor.invoke.remote("echo", b"x" * 1000).future()), 60)

        async def call(total: int) -> None:
            await asyncio.gather(*(call_some(total // at_once) for _ in range(at_once)))

        asyncio.run(call(500))
        began = time.process_time()
        asyncio.run(call(calls))
        return (time.process_time() - began) / (calls // at_once * at_once)
    finally:
        ray.shutdown()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a run."""
    call_seconds = ray_call_seconds() if arguments.ray else 0.0
    with tempfile.TemporaryDirectory() as folder:
        run = DriverRun(arguments, Path(folder))
        began = time.perf_counter()
        with asyncio.Runner(loop_factory=partial(MeteredLoop, run.meter)) as runner:
            runner.run(run.main())
        wall = time.perf_counter() - began
    meter = run.meter
    millions, samples = meter.tokens / 1e6, meter.samples
    calls = meter.calls.total() - meter.calls["put"]
    return {
        "cpu_seconds_per_million_tokens": round(run.cpu_seconds / millions, 3),
        "calls_of_ray_besides": round(calls * call_seconds / millions, 3),
        "longest_turn_seconds": round(run.longest_turn, 3),
        "bytes_per_sample": round(meter.bytes.total() / samples),
        "bytes_by_kind": {kind: round(count / samples) for kind, count in meter.bytes.most_common() if count > samples},
        "calls_per_sample": {name: round(count / samples, 2) for name, count in meter.calls.most_common(6)},
        "microseconds_per_sample": round(1e6 * run.cpu_seconds / samples),
        "microseconds_per_call_of_ray": round(1e6 * call_seconds),
        "tokens": meter.tokens,
        "samples": samples,
        "virtual_seconds": round(run.virtual_seconds, 1),
        "wall_seconds": round(wall, 1),
    }


def main() -> None:
    """Print the figures as one line of JSON."""
    parser = argparse.ArgumentParser(description="Cost of the driver with many engine replicas.")
    parser.add_argument("--replicas", type=int, default=256)
    parser.add_argument("--requests", type=int, default=64, help="requests in flight at each replica")
    parser.add_argument("--tokens", type=int, default=1024, help="mean length of a response")
    parser.add_argument("--group", type=int, default=8, help="samples per group")
    parser.add_argument("--batches", type=int, default=8, help="training batches that the requests in flight make")
    parser.add_argument("--warm-up", type=int, default=4, help="training steps before anything is counted")
    parser.add_argument("--steps", type=int, default=4, help="measured training steps")
    parser.add_argument("--profile", help="file for a profile of the loop's thread (slows it down)")
    parser.add_argument("--no-ray", dest="ray", action="store_false", help="leave out the cost of Ray's calls")
    arguments = parser.parse_args()
    if arguments.profile:
        import cProfile

        profile = cProfile.Profile()
        profile.runcall(measure, arguments)
        profile.dump_stats(arguments.profile)
        return
    json.dump(measure(arguments), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()

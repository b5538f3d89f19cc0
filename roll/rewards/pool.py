"""The reward workers seen from the driver: they judge responses, whatever happens to the processes.

Every call ends before a deadline in one of three ways: an output for every response, `RewardFailed` naming reward,
prompt and cause, or cancellation. A process that dies or hangs is replaced. The responses it held are judged again, one
by one if needed, so a response that kills its process does not fail the others.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from roll.configs.derived import reward_timeout
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.rewards.base import RewardFailed, RewardInput, RewardOutput
from roll.rewards.registry import Verifier, resolve_verifier
from roll.rewards.worker import AsyncRewardWorker, RewardWorker, Verdict
from roll.runtime.actors import ACTOR_GONE, memory_death
from roll.runtime.process import driver_folders
from roll.tracking.timeline import BusySpans

logger = logging.getLogger(__name__)

ASYNC_CALLS_PER_WORKER = 256
"""Number of calls that one process of an async verifier handles at a time; each may have many responses."""

EXIT_TIMEOUT_SECONDS = 10.0

Result = TypeVar("Result")


@dataclass(frozen=True)
class PoolSettings:
    """Settings that all reward workers of a run share."""

    actor_options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the Ray actors besides `num_cpus=0`, such as a scheduling strategy."""
    start_timeout_seconds: float = 120.0
    kill_grace_seconds: float = 5.0
    """Extra time after a limit before an unresponsive process is killed."""


@dataclass
class RewardCounts:
    """Totals over a run."""

    calls: int = 0
    samples: int = 0
    errors: int = 0
    """Number of attempts that ended with an exception, an invalid output or the death of the process."""
    timeouts: int = 0
    restarts: int = 0
    """Number of worker processes replaced."""
    seconds: float = 0.0
    """Time that verifiers spent on samples."""


class RewardPool:
    """The workers of all rewards of a run."""

    def __init__(
        self, rewards: Mapping[str, RewardConfig], *, path: str = "rewards", settings: PoolSettings | None = None
    ) -> None:
        """Resolve the verifiers without starting anything.

        ``path`` is the configuration path of ``rewards``. Raises `ConfigError` if a verifier cannot be resolved.
        """
        self._workers = {
            name: RewardWorkers(
                name, config, resolve_verifier(config, f"{path}.{name}"), f"{path}.{name}", settings or PoolSettings()
            )
            for name, config in rewards.items()
        }

    async def start(self) -> None:
        """Start all worker processes. If one does not start, stop the others and raise `RewardFailed`."""
        try:
            await _all_or_none(workers.start() for workers in self._workers.values())
        except BaseException:
            await self.shutdown()
            raise

    async def score(self, name: str, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Judge responses, usually those of one group, with one reward, and return outputs in the same order.

        Raises `RewardFailed` if one of them cannot be judged after all retries.
        """
        return await self._workers[name].score(records)

    def busy_spans(self) -> dict[str, list[tuple[float, float]]]:
        """Return, by reward, the spans in which at least one of its processes was judging; see `BusySpans`."""
        return {f"rewards.{name}": workers.busy.recent() for name, workers in self._workers.items()}

    def counts(self) -> dict[str, dict[str, float]]:
        """Return the totals of `RewardCounts` by reward name."""
        return {name: asdict(workers.counts) for name, workers in self._workers.items()}

    async def shutdown(self) -> None:
        """Kill all worker processes and cancel running calls. May be called twice."""
        await asyncio.gather(*(workers.shutdown() for workers in self._workers.values()))


class _WorkerLost(Exception):
    """A process died or hung during a call. ``timed_out``: it hung."""

    def __init__(self, cause: str, timed_out: bool) -> None:
        super().__init__(cause)
        self.verdict = Verdict("timeout" if timed_out else "error", cause=cause)


class _Worker:
    """A slot for one process; the process in it may be replaced."""

    def __init__(self) -> None:
        self.handle: ActorHandle | None = None
        self.calls = 0
        self.changing = asyncio.Lock()


class RewardWorkers:
    """The processes of one reward."""

    def __init__(self, name: str, config: RewardConfig, verifier: Verifier, path: str, settings: PoolSettings) -> None:
        self.counts = RewardCounts()
        self.busy = BusySpans()
        self._name = name
        self._config = config
        self._verifier = verifier
        self._path = path
        self._settings = settings
        self._timeout_seconds = reward_timeout(config)
        self._workers = [_Worker() for _ in range(config.num_workers)]
        calls_per_worker = ASYNC_CALLS_PER_WORKER if verifier.is_async else 1
        calls = verifier.max_concurrency or config.num_workers * calls_per_worker
        self._slots = asyncio.Semaphore(calls)  # first come, first served
        self._quarantine = _Worker()
        self._one_suspect = asyncio.Lock()
        self._tasks: set[asyncio.Task[list[Verdict]]] = set()
        self._closed = False

    async def start(self) -> None:
        """Start the processes and load the verifier in each."""
        await _all_or_none(self._fill(worker) for worker in self._workers)

    async def score(self, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """See `RewardPool.score`."""
        if self._verifier.max_concurrency is None or len(records) < 2:
            return await self._score_together(records)
        # The limit counts responses, so each response becomes a call of its own.
        outputs = await _all_or_none(self._score_together([record]) for record in records)
        return [output for (output,) in outputs]

    async def _score_together(self, records: Sequence[RewardInput]) -> list[RewardOutput]:
        outputs: list[RewardOutput | None] = [None] * len(records)
        failures = [0] * len(records)
        pending = list(range(len(records)))
        self.counts.samples += len(records)
        while pending:
            verdicts = await self._attempt([records[index] for index in pending])
            for index, verdict in zip(pending, verdicts, strict=True):
                self._count(verdict)
                outputs[index] = self._output(verdict)
                if outputs[index] is None and verdict.kind != "unjudged":
                    failures[index] += 1
                    if verdict.kind == "gave_up" or failures[index] > self._config.max_retries:
                        raise self._failure(records[index], verdict, failures[index])
            pending = [index for index in pending if outputs[index] is None]
        return [output for output in outputs if output is not None]

    async def shutdown(self) -> None:
        """See `RewardPool.shutdown`."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        places = [*self._workers, self._quarantine]
        handles = [place.handle for place in places if place.handle is not None]
        for place in places:
            place.handle = None
        await asyncio.gather(*(_kill(handle) for handle in handles))

    def _count(self, verdict: Verdict) -> None:
        self.counts.errors += verdict.kind in ("error", "gave_up")
        self.counts.timeouts += verdict.kind == "timeout"
        self.counts.seconds += verdict.seconds

    def _output(self, verdict: Verdict) -> RewardOutput | None:
        if verdict.kind == "timeout" and self._verifier.timeout_score is not None:
            return RewardOutput(self._verifier.timeout_score, {"timeout": 1.0})
        return verdict.output

    def _failure(self, record: RewardInput, verdict: Verdict, attempts: int) -> RewardFailed:
        return RewardFailed(
            f"reward `{self._name}` (verifier `{self._verifier.name}`) could not judge a response to prompt "
            f"{record.prompt_id} in {count(attempts, 'attempt')}; the last one ended with: {verdict.cause}"
        )

    async def _attempt(self, records: list[RewardInput]) -> list[Verdict]:
        """Judge each response once. Responses that the call had no time for stay `unjudged`."""
        if len(records) == 1 and not self._verifier.is_async:
            return [await self._judge_alone(records[0])]
        # A plain verifier's process held only these responses. An async one's also held those of other calls, and one
        # of them may be at fault. So a second attempt together comes before judging each in quarantine, which is slow.
        for _ in range(2 if self._verifier.is_async else 1):
            try:
                return await self._run(self._judge_in_slot(records))
            except _WorkerLost:
                continue
        return await asyncio.gather(*(self._judge_alone(record) for record in records))

    async def _judge_alone(self, record: RewardInput) -> Verdict:
        """Judge a response in a process that holds no other one. If the process is lost, this response is at fault."""
        judge = self._judge_in_quarantine if self._verifier.is_async else self._judge_in_slot
        try:
            return (await self._run(judge([record])))[0]
        except _WorkerLost as lost:
            return lost.verdict

    async def _run(self, call: Coroutine[Any, Any, list[Verdict]]) -> list[Verdict]:
        """Await a call that continues if the caller is cancelled: its process stays busy, so its slot stays taken."""
        task = asyncio.create_task(call)
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[list[Verdict]]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks the exception as retrieved: the caller has seen it, or was cancelled

    async def _judge_in_slot(self, records: list[RewardInput]) -> list[Verdict]:
        async with self._slots:
            worker = min(self._workers, key=lambda each: each.calls)
            return await self._call(worker, records)

    async def _judge_in_quarantine(self, records: list[RewardInput]) -> list[Verdict]:
        async with self._one_suspect:
            return await self._call(self._quarantine, records)

    async def _call(self, worker: _Worker, records: list[RewardInput]) -> list[Verdict]:
        """Make one remote call within its deadline. Raises `_WorkerLost` once the process has been replaced."""
        worker.calls += 1
        try:
            handle = await self._fill(worker)
            self.counts.calls += 1
            try:
                with self.busy.working():
                    return await asyncio.wait_for(handle.judge.remote(records), self._deadline(len(records)))
            except RayTaskError as cause:
                return [Verdict("error", cause=_first_line(cause.cause or cause)) for _ in records]
            except ACTOR_GONE as cause:
                because = memory_death(cause) or _first_line(cause)
                lost = _WorkerLost(f"the worker process died ({because})", timed_out=False)
            except RayError as cause:
                lost = _WorkerLost(f"the worker process cannot be reached ({_first_line(cause)})", timed_out=False)
            except TimeoutError:
                limit = self._timeout_seconds
                lost = _WorkerLost(f"no answer within {limit:g} s, and the process had to be killed", timed_out=True)
            await self._replace(worker, handle)
            raise lost
        finally:
            worker.calls -= 1

    def _deadline(self, samples: int) -> float:
        """Return the seconds after which a call must be stuck (`judge_all` explains the two limits of a long call)."""
        limits = 1 if samples == 1 or self._verifier.is_async else 2
        return limits * self._timeout_seconds + self._settings.kill_grace_seconds

    async def _fill(self, worker: _Worker) -> ActorHandle:
        """Return the process of this slot, starting a new one if there is none."""
        async with worker.changing:
            if worker.handle is None:
                worker.handle = await self._started()
            return worker.handle

    async def _replace(self, worker: _Worker, lost: ActorHandle) -> None:
        """Replace a lost process, unless another call already did."""
        async with worker.changing:
            if worker.handle is not lost:
                return
            worker.handle = None
            self.counts.restarts += 1
            await _kill(lost)
            worker.handle = await self._started()

    async def _started(self) -> ActorHandle:
        if self._closed:
            raise RewardFailed(f"reward `{self._name}` has been shut down")
        body = AsyncRewardWorker if self._verifier.is_async else RewardWorker
        options = {"num_cpus": 0, **self._settings.actor_options}
        secrets = {name: os.environ[name] for name in self._verifier.secrets if name in os.environ}
        handle = ray.remote(body).options(**options).remote(self._config, self._path, driver_folders(), secrets)
        try:
            await asyncio.wait_for(handle.ready.remote(), self._settings.start_timeout_seconds)
        except (RayError, TimeoutError) as cause:
            await _kill(handle)
            reason = f"{type(cause).__name__}: {_last_lines(cause)}"
            raise RewardFailed(f"a worker process of reward `{self._name}` did not start ({reason})") from cause
        except asyncio.CancelledError:
            ray.kill(handle)
            raise
        return handle


async def _all_or_none(calls: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run all calls. If one fails, stop the others before raising its error: nothing may start after a shutdown."""
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        raise


async def _kill(handle: ActorHandle) -> None:
    """Kill a process, whatever it is doing, and wait until Ray reports its death."""
    ray.kill(handle)
    try:
        await asyncio.wait_for(handle.ready.remote(), EXIT_TIMEOUT_SECONDS)
    except RayError:
        return
    except TimeoutError:
        logger.warning("a reward worker was killed and is still there after %g s", EXIT_TIMEOUT_SECONDS)


def _first_line(cause: BaseException) -> str:
    return str(cause).strip().split("\n")[0]


def _last_lines(cause: BaseException) -> str:
    """Return the end of a remote traceback: the error itself, at most two lines."""
    return " ".join(line.strip() for line in str(cause).strip().split("\n")[-2:])

"""A reward model seen from the driver, and the process of one copy: it scores responses, whatever happens to processes.

Responses of many groups share a batch. A call ends in one of three ways: an output for every response, `RewardFailed`
naming reward, prompt and cause, or cancellation. A process that dies or hangs is replaced. The groups in its batch are
scored again, each in its own batch. So a group whose responses kill the process (for example, too long for the memory)
makes no other group fail. The reward's devices are held while it computes, and may belong to other roles in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from roll.configs.derived import reward_timeout
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.configs.strategies import SCORERS, strategy_class
from roll.rewards.base import RewardFailed, RewardInput, RewardOutput
from roll.rewards.model import Conversation, Scored, ScorerSetup, ScoreStrategy
from roll.runtime.actors import Worker, WorkerDied, WorkerFailed, WorkerHandle, WorkerTimeout
from roll.runtime.locks import DeviceLock
from roll.tracking.timeline import BusySpans
from roll.tracking.waits import apart, holding

logger = logging.getLogger(__name__)

EXIT_SECONDS = 10.0
"""Longest wait for a killed process to disappear."""


class ScoreWorker(Worker):
    """Worker of one copy of a reward model: runs a `ScoreStrategy`."""

    _strategy: ScoreStrategy

    async def start(self, strategy_name: str, setup: ScorerSetup, strategy_cls: str | None = None) -> None:
        """Load the model."""
        await self.in_thread(self._start, strategy_name, setup, strategy_cls)

    def _start(self, strategy_name: str, setup: ScorerSetup, strategy_cls: str | None) -> None:
        self.set_threads()
        self._strategy = strategy_class(SCORERS, strategy_name, strategy_cls)(setup)

    async def score(self, conversations: Sequence[Conversation]) -> list[Scored]:
        """Return the scores in the order of the conversations."""
        return await self.in_thread(self._strategy.score, conversations)

    async def offload_states(self) -> None:
        """Move the device's tensors to host memory."""
        await self.in_thread(self._strategy.offload_states)

    async def load_states(self) -> None:
        """Undo `offload_states`."""
        await self.in_thread(self._strategy.load_states)


@dataclass(frozen=True)
class ScoreSettings:
    """Settings of a reward model."""

    reward: RewardConfig
    setup: ScorerSetup
    wait_seconds: float
    """Longest wait of a batch for responses of other groups, in seconds. With 0 a batch never mixes groups."""
    start_timeout_seconds: float


@dataclass
class ScoreCounts:
    """Totals over a run."""

    samples: int = 0
    calls: int = 0
    restarts: int = 0
    """Number of processes replaced."""
    truncated: int = 0
    """Number of samples whose beginning was cut off."""


@dataclass
class _Request:
    """The responses of one group."""

    records: Sequence[RewardInput]
    answer: asyncio.Future[list[Scored]]
    failures: int = 0
    alone: bool = False
    """True if it must not share a batch, because it may be the one that made its last batch fail."""


@dataclass
class _Replica:
    """A slot for one process; the process in it may be replaced."""

    index: int
    handle: WorkerHandle | None = None


@dataclass
class _Queue:
    """Waiting requests, first come, first served."""

    batch_size: int
    requests: deque[_Request] = field(default_factory=deque)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    full: asyncio.Event = field(default_factory=asyncio.Event)

    async def batch(self, wait_seconds: float) -> None:
        """Return when work is waiting and either fills a batch or has waited long enough for more."""
        await self.arrived.wait()
        if wait_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self.full.wait()

    def put(self, request: _Request) -> None:
        self.requests.append(request)
        self._signal()

    def put_back(self, requests: Sequence[_Request]) -> None:
        self.requests.extendleft(reversed(requests))
        self._signal()

    def take(self, together: bool) -> list[_Request]:
        """Return the next batch, without requests whose callers are gone. Empty if nothing waits."""
        taken: list[_Request] = []
        samples = 0
        while self.requests and samples < self.batch_size:
            if taken and (self.requests[0].alone or not together):
                break
            request = self.requests.popleft()
            if request.answer.done():
                continue
            taken.append(request)
            samples += len(request.records)
            if request.alone:
                break
        self._signal()
        return taken

    def _signal(self) -> None:
        waiting = sum(len(request.records) for request in self.requests)
        for event, is_so in ((self.arrived, bool(self.requests)), (self.full, waiting >= self.batch_size)):
            if is_so:
                event.set()
            else:
                event.clear()


class ScorePool:
    """The processes of one reward model."""

    def __init__(
        self,
        role: str,
        start: Callable[[int], WorkerHandle],
        replicas: int,
        settings: ScoreSettings,
        devices: DeviceLock,
        on_event: Callable[[str], None],
    ) -> None:
        """Prepare the pool without starting anything.

        ``role`` is the reward's path (``rewards.chat``); ``start`` starts the process of a replica.
        """
        self.counts = ScoreCounts()
        self.busy = BusySpans()
        self._role = role
        self._start_process = start
        self._replicas = [_Replica(index) for index in range(replicas)]
        self._settings = settings
        self._devices = devices
        self._on_event = on_event
        self._queue = _Queue(settings.setup.batch_size)
        self._tasks: list[asyncio.Task[None]] = []
        self._failure: BaseException | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the processes and load the model in each. Raises an `ExceptionGroup` of `RewardFailed`."""
        async with self._devices.hold(self._role):
            async with asyncio.TaskGroup() as tasks:
                for replica in self._replicas:
                    tasks.create_task(self._fill(replica))
            self._devices.register(self._role, self)
        for replica in self._replicas:
            with apart(f"{self._role}/{replica.index}"):
                self._tasks.append(asyncio.create_task(self._serve(replica)))

    def handles(self) -> list[WorkerHandle]:
        """Return the current processes."""
        return [replica.handle for replica in self._replicas if replica.handle is not None]

    async def score(self, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Return outputs in the order of the responses, which usually belong to one group. Raises `RewardFailed`."""
        if self._failure is not None or self._closed:
            cause = f": {type(self._failure).__name__}: {self._failure}" if self._failure is not None else ""
            raise RewardFailed(f"{self._role} is no longer running{cause}") from self._failure
        request = _Request(records, asyncio.get_running_loop().create_future())
        self.counts.samples += len(records)
        self._queue.put(request)
        results = await request.answer
        for record, scored in zip(records, results, strict=True):
            if scored.problem:
                raise RewardFailed(
                    f"{self._role} could not score a response to prompt {record.prompt_id}: {scored.problem}"
                )
        self.counts.truncated += sum(scored.cut_tokens > 0 for scored in results)
        return [
            RewardOutput(
                scored.score,
                {"scored_tokens": float(scored.tokens), "truncated_left": float(scored.cut_tokens > 0)},
            )
            for scored in results
        ]

    async def shutdown(self) -> None:
        """Kill the processes and cancel running scores. May be called twice."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for replica in self._replicas:
            self._kill(replica)
        for request in self._queue.requests:
            request.answer.cancel()

    async def load_states(self) -> None:
        """Load the models onto their devices."""
        await self._on_all("load_states")

    async def offload_states(self) -> None:
        """Offload the models from their devices."""
        await self._on_all("offload_states")

    async def _on_all(self, method: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            for replica in self._replicas:
                tasks.create_task(self._move(replica, method))

    async def _move(self, replica: _Replica, method: str) -> None:
        """Load or offload one process. A process that fails to do so is killed, which also frees the devices."""
        if replica.handle is None:
            return
        try:
            await replica.handle.call(method, timeout=self._settings.start_timeout_seconds)
        except (WorkerDied, WorkerFailed, WorkerTimeout) as failure:
            await self._lose(replica, failure)

    async def _serve(self, replica: _Replica) -> None:
        """Score batches until cancelled."""
        wait_seconds = self._settings.wait_seconds
        try:
            with holding(self._role, "to score"):
                while True:
                    await self._queue.batch(wait_seconds)
                    async with self._devices.hold(self._role):
                        while requests := self._queue.take(together=wait_seconds > 0):
                            await self._score(replica, requests)
                            if self._devices.contended:
                                break
        except Exception as failure:
            # Nothing here is expected to fail, but if it does, waiting callers must not hang.
            logger.error("%s broke down", self._role, exc_info=failure)
            self._failure = failure
            message = f"{self._role} broke down: {type(failure).__name__}: {failure}"
            while requests := self._queue.take(together=True):
                for request in requests:
                    request.answer.set_exception(RewardFailed(message))

    async def _score(self, replica: _Replica, requests: list[_Request]) -> None:
        """Score one batch, and deliver, retry or fail its requests."""
        conversations = [_conversation(record) for request in requests for record in request.records]
        try:
            handle = await self._fill(replica)
            self.counts.calls += 1
            with self.busy.working():
                results = await handle.call("score", conversations, timeout=reward_timeout(self._settings.reward))
        except RewardFailed as failure:  # the process did not start; the requests are not to blame
            self._score_again(requests, failure, each_failed=True)
        except (WorkerDied, WorkerTimeout) as failure:
            self._score_again(requests, failure)
            await self._lose(replica, failure)
        except WorkerFailed as failure:
            self._score_again(requests, failure)
            if len(requests) == 1:
                # After an error the device may stay unusable in this process (CUDA errors do that).
                await self._lose(replica, failure)
        except BaseException:
            self._queue.put_back(requests)  # which fails them if the pool breaks down, and cancels them at a shutdown
            raise
        else:
            for request in requests:
                own, results = results[: len(request.records)], results[len(request.records) :]
                if not request.answer.done():
                    request.answer.set_result(own)

    def _score_again(self, requests: list[_Request], failure: Exception, *, each_failed: bool = False) -> None:
        """Queue the requests again; unless ``each_failed``, each one for a batch of its own.

        A request that was alone in its batch (with ``each_failed``: every request) counts a failure. After more than
        ``max_retries`` failures it fails.
        """
        kept = []
        for request in requests:
            request.failures += each_failed or len(requests) == 1
            request.alone = request.alone or not each_failed
            if request.failures <= self._settings.reward.max_retries:
                kept.append(request)
            elif not request.answer.done():
                message = (
                    f"{self._role} could not score the responses to prompt {request.records[0].prompt_id} in "
                    f"{count(request.failures, 'attempt')}; the last one ended with: {failure}"
                )
                request.answer.set_exception(RewardFailed(message))
        self._queue.put_back(kept)

    async def _fill(self, replica: _Replica) -> WorkerHandle:
        """Return the process of this slot, starting a new one and loading the model if there is none.

        Raises `RewardFailed` if it does not start.
        """
        if replica.handle is not None:
            return replica.handle
        replica.handle = self._start_process(replica.index)
        engine, timeout = self._settings.reward.strategy_args, self._settings.start_timeout_seconds
        try:
            await replica.handle.create(timeout)
            strategy = engine.strategy_name, self._settings.setup, engine.strategy_cls
            await replica.handle.call("start", *strategy, timeout=timeout)
        except (WorkerDied, WorkerFailed, WorkerTimeout) as failure:
            await self._end(replica)
            raise RewardFailed(f"a process of {self._role} did not start: {failure}") from failure
        except BaseException:
            self._kill(replica)
            raise
        return replica.handle

    async def _lose(self, replica: _Replica, failure: Exception) -> None:
        self.counts.restarts += 1
        self._on_event(f"{failure}; {self._role} starts it again")
        await self._end(replica)

    async def _end(self, replica: _Replica) -> None:
        """Kill a process and wait until it is gone, so that its device memory is free."""
        handle = replica.handle
        self._kill(replica)
        if handle is None:
            return
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await handle.wait_for_death()
        except TimeoutError:
            logger.warning("%s was killed and is still there after %g s", handle.name, EXIT_SECONDS)

    def _kill(self, replica: _Replica) -> None:
        if replica.handle is not None:
            replica.handle.kill()
            replica.handle = None


def _conversation(record: RewardInput) -> Conversation:
    """Return prompt and response as messages; a prompt without messages becomes one user message of its text."""
    prompt = record.messages or [{"role": "user", "content": record.prompt_text}]
    return [*prompt, {"role": "assistant", "content": record.response_text}]

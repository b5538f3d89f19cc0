"""A pool of processes that score responses with a reward model, and replace processes that fail.

Responses of many groups share a batch. A call ends in one of three ways: an output for every response, `RewardFailed`
naming reward, prompt and cause, or cancellation. A process that dies or hangs is replaced. The groups in its batch are
scored again, each in a batch of its own. So a group whose responses kill the process (for example, because they are too
long for the memory) does not make other groups fail. The reward holds its devices only while it computes; other roles
may use them in between.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from roll.configs.derived import reward_timeout
from roll.configs.errors import count
from roll.configs.rewards import RewardConfig
from roll.configs.strategies import SCORERS, strategy_class
from roll.rewards.base import RewardFailed, RewardInput, RewardOutput
from roll.rewards.model import Conversation, Scored, ScorerSetup, ScoreStrategy
from roll.runtime.locks import DeviceLock
from roll.runtime.pool import Slot, Tasks
from roll.runtime.workers import CALL_ERRORS, Worker, WorkerFailed, WorkerHandle
from roll.tracking.timeline import BusySpans
from roll.tracking.waits import apart, holding

logger = logging.getLogger(__name__)


class ScoreWorker(Worker):
    """Worker process with one copy of a reward model; it runs a `ScoreStrategy`."""

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
    """Longest time that a batch waits for responses of other groups, in seconds. 0: batches never mix groups."""
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
    """True if the request must not share a batch, because it may have made its last batch fail."""


@dataclass
class _Queue:
    """Waiting requests, first come, first served."""

    batch_size: int
    requests: deque[_Request] = field(default_factory=deque)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def batch(self, wait_seconds: float) -> None:
        """Wait until there is a request, then until requests fill a batch or ``wait_seconds`` have passed."""
        await self._samples(1)
        if wait_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_seconds):
                    await self._samples(self.batch_size)

    async def _samples(self, enough: int) -> None:
        while sum(len(request.records) for request in self.requests) < enough:
            self._arrived.clear()
            await self._arrived.wait()

    def put(self, request: _Request) -> None:
        self.requests.append(request)
        self._arrived.set()

    def put_back(self, requests: Sequence[_Request]) -> None:
        self.requests.extendleft(reversed(requests))
        self._arrived.set()

    def take(self, together: bool) -> list[_Request]:
        """Return the next batch, without requests whose callers are gone; empty if no request is waiting."""
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
        return taken


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

        ``role`` is the reward's configuration path (``rewards.chat``); ``start`` starts the process of a replica.
        """
        self.counts = ScoreCounts()
        self.busy = BusySpans()
        self._role = role
        self._slots = [Slot(partial(start, index), self._load) for index in range(replicas)]
        self._settings = settings
        self._devices = devices
        self._on_event = on_event
        self._queue = _Queue(settings.setup.batch_size)
        self._tasks = Tasks()
        self._failure: BaseException | None = None
        self._closed = False

    async def start(self) -> None:
        """Start the processes and load the model in each. Raises an `ExceptionGroup` of `RewardFailed`."""
        async with self._devices.hold(self._role):
            async with asyncio.TaskGroup() as tasks:
                for slot in self._slots:
                    tasks.create_task(slot.filled())
            self._devices.register(self._role, self)
        for index, slot in enumerate(self._slots):
            with apart(f"{self._role}/{index}"):
                self._tasks.start(self._serve(slot))

    def handles(self) -> list[WorkerHandle]:
        """Return the current processes."""
        return [slot.process for slot in self._slots if slot.process is not None]

    async def score(self, records: Sequence[RewardInput]) -> list[RewardOutput]:
        """Return outputs in the order of the responses, which usually belong to one group. Raises `RewardFailed`."""
        if self._failure is not None or self._closed:
            cause = f": {type(self._failure).__name__}: {self._failure}" if self._failure is not None else ""
            raise RewardFailed(f"{self._role} is no longer running{cause}") from self._failure
        if not records:
            return []  # no batch would be made for them
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
        await self._tasks.cancel()
        await asyncio.gather(*(slot.close() for slot in self._slots))
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
            for slot in self._slots:
                tasks.create_task(self._move(slot, method))

    async def _move(self, slot: Slot[WorkerHandle], method: str) -> None:
        """Load or offload one process. A process that fails to do so is killed, which also frees the devices."""
        if (process := slot.process) is None:
            return
        try:
            await process.call(method, timeout=self._settings.start_timeout_seconds)
        except CALL_ERRORS as failure:
            await self._lose(slot, process, failure)

    async def _serve(self, slot: Slot[WorkerHandle]) -> None:
        """Score batches until cancelled."""
        wait_seconds = self._settings.wait_seconds
        try:
            with holding(self._role, "to score"):
                while True:
                    await self._queue.batch(wait_seconds)
                    async with self._devices.hold(self._role):
                        while requests := self._queue.take(together=wait_seconds > 0):
                            await self._score(slot, requests)
                            if self._devices.contended:
                                break
        except Exception as failure:
            # No failure is expected here, but if there is one, waiting callers must not hang.
            logger.error("%s broke down", self._role, exc_info=failure)
            self._failure = failure
            message = f"{self._role} broke down: {type(failure).__name__}: {failure}"
            while requests := self._queue.take(together=True):
                for request in requests:
                    request.answer.set_exception(RewardFailed(message))

    async def _score(self, slot: Slot[WorkerHandle], requests: list[_Request]) -> None:
        """Score one batch, and deliver, retry or fail its requests."""
        conversations = [_conversation(record) for request in requests for record in request.records]
        try:
            process = await slot.filled()
            self.counts.calls += 1
            with self.busy.working():
                results = await process.call("score", conversations, timeout=reward_timeout(self._settings.reward))
        except RewardFailed as failure:  # the process did not start, which is no fault of the requests
            self._score_again(requests, failure, each_failed=True)
        except CALL_ERRORS as failure:
            self._score_again(requests, failure)
            # After an error the device may be unusable in this process, as after CUDA errors.
            if len(requests) == 1 or not isinstance(failure, WorkerFailed):
                await self._lose(slot, process, failure)
        except BaseException:
            self._queue.put_back(requests)  # `_serve` fails them if the pool breaks down, `shutdown` cancels them
            raise
        else:
            for request in requests:
                own, results = results[: len(request.records)], results[len(request.records) :]
                if not request.answer.done():
                    request.answer.set_result(own)

    def _score_again(self, requests: list[_Request], failure: Exception, *, each_failed: bool = False) -> None:
        """Queue the requests again; unless ``each_failed`` is True, each for a batch of its own.

        A failure is counted for a request that was alone in its batch, or with ``each_failed`` for every request. A
        request with more than ``max_retries`` failures fails.
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

    async def _load(self, process: WorkerHandle) -> None:
        """Wait until the process has loaded the model. Raises `RewardFailed`."""
        engine, timeout = self._settings.reward.strategy_args, self._settings.start_timeout_seconds
        try:
            await process.create(timeout)
            strategy = engine.strategy_name, self._settings.setup, engine.strategy_cls
            await process.call("start", *strategy, timeout=timeout)
        except CALL_ERRORS as failure:
            raise RewardFailed(f"a process of {self._role} did not start: {failure}") from failure

    async def _lose(self, slot: Slot[WorkerHandle], process: WorkerHandle, failure: Exception) -> None:
        self.counts.restarts += 1
        self._on_event(f"{failure}; {self._role} starts it again")
        await slot.lose(process)


def _conversation(record: RewardInput) -> Conversation:
    """Return prompt and response as messages. A prompt without messages becomes one user message."""
    prompt = record.messages or [{"role": "user", "content": record.prompt_text}]
    return [*prompt, {"role": "assistant", "content": record.response_text}]

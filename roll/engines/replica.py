"""One engine process and its open requests, as seen by the driver.

The engine's heartbeat are its results and, if none came for two seconds, its number of generated tokens. A request
fails if its engine produces no token for any request for too long. Neither the length of a response nor the time in the
engine's queue (before the first token, or after a preemption) counts towards this timeout. A request that an engine has
lost therefore fails only when the engine has nothing else to do.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from roll.engines.base import Completion, GenerateRequest
from roll.engines.response import PartialResponse
from roll.engines.worker import RequestFailed
from roll.runtime.pool import Pace
from roll.runtime.workers import WorkerDied, WorkerFailed, WorkerHandle, WorkerTimeout
from roll.tracking.waits import WORKER, holding, unobserved, waiting

if TYPE_CHECKING:
    from roll.engines.pool import PoolSettings

COLLECT_WAIT_SECONDS = 10.0
SILENCE_SECONDS = 60.0
"""Grace period of the long poll `InferWorker.collect`. If the reply is later, the replica counts as dead, because a
process that was stopped (not killed) does not close its connections."""
PROGRESS_SECONDS = 2.0
"""Interval between two progress checks of an engine."""
SUBMIT_TURNS = 8
"""Event loop iterations for which a request waits for others to be submitted in the same remote call. In an idle loop
they take far less than a millisecond; in a busy one, a remote call costs as much as several requests."""


class RequestError(RuntimeError):
    """The engine rejected or lost a request, and a retry would not help."""


@dataclass
class OpenRequest:
    """A request that was sent to a replica and has not ended."""

    sent: GenerateRequest
    response: PartialResponse
    future: asyncio.Future[Completion]
    sent_at: float


class Replica:
    """One engine process and its open requests."""

    def __init__(
        self,
        handle: WorkerHandle,
        settings: PoolSettings,
        *,
        fetches: Iterator[bool],
        looks: Pace,
        on_death: Callable[[Replica, WorkerDied], None],
        on_tokens: Callable[[int], None],
        on_abandoned: Callable[[int], None],
    ) -> None:
        """``fetches`` yields, for each progress check, True if new tokens are to be fetched. ``looks`` sets the pace of
        checks.

        ``on_death`` is called with the replica and the cause when it dies, ``on_tokens`` with each increase of its
        token count, ``on_abandoned`` with the number of sampled tokens of each request that was cancelled."""
        self.handle = handle
        self.version = -1
        self.asleep = False
        self._silence_seconds = settings.silence_timeout_seconds
        self._request_silence_seconds = settings.request_timeout_seconds
        self._fetches, self._looks, self._tokens_seen = fetches, looks, 0
        self._on_death, self._on_tokens, self._on_abandoned = on_death, on_tokens, on_abandoned
        self._death: WorkerDied | None = None
        self._changing = asyncio.Lock()
        self._changed_at = self._heard_at = asyncio.get_running_loop().time()
        self._delivered = False
        """True if a result has arrived since the last progress check."""
        self._numbers = itertools.count()
        self._pending: dict[str, OpenRequest] = {}
        self._outgoing: list[GenerateRequest] = []
        self._submitting: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """The worker's name, such as ``actor_infer/0``."""
        return self.handle.name

    def __str__(self) -> str:
        return f"{WORKER}{self.name}"

    async def change(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a change (load weights, sleep or wake), one at a time.

        Each remote call in it has its own timeout, so the engine's silence meanwhile does not count as death. A change
        that has begun runs to its end even if the caller is cancelled."""
        with waiting(f"changes of {self.name}", "another change of its weights"):
            await self._changing.acquire()
        changing = asyncio.ensure_future(self._to_its_end(work))
        changing.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # the caller may be gone
        await asyncio.shield(changing)

    async def _to_its_end(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            with holding(f"changes of {self.name}", "changing its weights"):
                await work()
        finally:
            self._changed_at = asyncio.get_running_loop().time()
            self._changing.release()

    async def generate(self, response: PartialResponse) -> Completion:
        """Generate the missing part of a response. Requests within a few event loop iterations share a remote call, and
        so do those that come while another call submits.

        Each attempt has its own request id in the engine, so a retry never receives results of an aborted attempt.
        After `WorkerDied`, ``response`` contains the tokens of this attempt that were fetched so far.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        request = response.remaining()
        sent = replace(request, request_id=f"{request.request_id}#{next(self._numbers)}")
        self._pending[sent.request_id] = OpenRequest(sent, response, future, loop.time())
        if not self._outgoing:
            loop.call_soon(self._submit_outgoing, SUBMIT_TURNS)
        self._outgoing.append(sent)
        try:
            with waiting(f"{WORKER}{self.name}", "a response"):
                return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                self._on_abandoned(len(future.result().token_ids))
            else:
                self._abandon(sent)
            raise
        finally:
            del self._pending[sent.request_id]

    def _submit_outgoing(self, turns: int) -> None:
        """Submit the queued requests after ``turns`` more event loop iterations, and after those that are submitted."""
        loop = asyncio.get_running_loop()
        if turns:
            loop.call_soon(self._submit_outgoing, turns - 1)
        elif self._submitting is None or self._submitting.done():
            self._submitting = loop.create_task(self._submit_all())

    async def _submit_all(self) -> None:
        while self._outgoing:
            requests, self._outgoing = self._outgoing, []
            await self._submit(requests)

    async def _submit(self, requests: Sequence[GenerateRequest]) -> None:
        try:
            await self.handle.call("submit", requests)
        except WorkerDied as error:
            self.fail_all(error)
        except WorkerFailed as error:
            for request in requests:
                self._deliver(RequestFailed(request.request_id, str(error)))

    def _abandon(self, request: GenerateRequest) -> None:
        if any(request is waiting for waiting in self._outgoing):
            self._outgoing = [waiting for waiting in self._outgoing if waiting is not request]
            return
        # Not immediately: the call that submits the request may not have been sent yet.
        asyncio.get_running_loop().call_soon(self.handle.tell, "abort", [request.request_id])

    async def serve(self) -> WorkerDied:
        """Deliver results and record progress until the process dies or its engine fails. Fail all open requests, and
        return the cause."""
        with unobserved():
            watches = [asyncio.ensure_future(self._collect()), asyncio.ensure_future(self._follow())]
        try:
            await asyncio.gather(*watches)
        except WorkerDied as cause:
            death = cause
        except (WorkerFailed, WorkerTimeout) as error:
            death = WorkerDied(self.name, str(error))
        finally:
            for watch in watches:
                watch.cancel()
        return self.fail_all(death)

    async def _collect(self) -> None:
        """Deliver results until the process dies."""
        timeout = COLLECT_WAIT_SECONDS + SILENCE_SECONDS
        while True:
            for item in await self.handle.call("collect", COLLECT_WAIT_SECONDS, timeout=timeout):
                self._deliver(item)

    async def _follow(self) -> None:
        """Check the engine's progress until the process dies or its engine does not answer for too long."""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            await self._looks.turn()
            await self._look()

    async def _look(self) -> None:
        """Ask the engine for its token count, and at times for the new tokens. Skipped if results have just arrived.

        A timeout during or soon after a change is ignored; the next check asks again.
        """
        known, fetches = None, next(self._fetches)
        delivered, self._delivered = self._delivered, False
        if fetches:
            known = {request_id: open_.response.attempt_tokens for request_id, open_ in self._pending.items()}
        elif delivered:
            return
        try:
            tokens_seen, chunks = await self.handle.call("progress", known, timeout=self._silence_seconds)
        except WorkerTimeout:
            quiet_since = asyncio.get_running_loop().time() - self._changed_at
            if self._changing.locked() or quiet_since < self._silence_seconds:
                return
            cause = f"its engine did not answer for {self._silence_seconds:g} s (actor_infer.silence_timeout_seconds)"
            raise WorkerDied(self.name, cause) from None
        now = asyncio.get_running_loop().time()
        for request_id, chunk in chunks.items():
            open_request = self._pending.get(request_id)
            if open_request is not None:
                open_request.response.add(chunk)
        if tokens_seen > self._tokens_seen:
            self._heard_at = now
            self._on_tokens(tokens_seen - self._tokens_seen)
            self._tokens_seen = tokens_seen
        self._fail_silent(now)

    def _fail_silent(self, now: float) -> None:
        """Fail requests if the engine has produced no token for too long. Times of sleep and changes do not count."""
        if self.asleep or self._changing.locked():
            return
        for open_request in self._pending.values():
            heard_at = max(open_request.sent_at, self._changed_at, self._heard_at)
            if now - heard_at > self._request_silence_seconds and not open_request.future.done():
                open_request.future.set_exception(
                    RequestError(
                        f"{self.name}, request {open_request.sent.request_id}: no new token for "
                        f"{self._request_silence_seconds:g} s (actor_infer.request_timeout_seconds)"
                    )
                )
                self._abandon(open_request.sent)

    def _deliver(self, ended: Completion | RequestFailed) -> None:
        self._heard_at, self._delivered = asyncio.get_running_loop().time(), True
        open_request = self._pending.get(ended.request_id)
        if open_request is None or open_request.future.done():
            if isinstance(ended, Completion):
                self._on_abandoned(len(ended.token_ids))
            return
        if isinstance(ended, RequestFailed):
            cause = RequestError(f"{self.name}, request {ended.request_id}: {ended.cause}")
            open_request.future.set_exception(cause)
        else:
            open_request.future.set_result(ended)

    def fail_all(self, death: WorkerDied) -> WorkerDied:
        """Fail all open requests and report the death, with the first cause that was reported. Return that cause."""
        self._death = self._death or death
        self._on_death(self, self._death)
        for open_request in self._pending.values():
            if not open_request.future.done():
                open_request.future.set_exception(WorkerDied(self._death.worker, self._death.cause))
        return self._death

    def give_up(self, cause: str) -> WorkerDied:
        """Kill a process that is alive but unusable. Return its `WorkerDied` with this cause."""
        death = self.fail_all(WorkerDied(self.name, cause))
        self.handle.kill()
        return death

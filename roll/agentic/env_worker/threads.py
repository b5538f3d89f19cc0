"""Threads for calls that may never return.

Every call has its own thread, so no call waits for another. Python cannot end a thread: a late call keeps its thread,
which counts as stuck until the call returns, if ever. Threads are daemons, because a stuck one must not keep the
process alive. They are reused, the one that became idle last first.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any


class CallHung(Exception):
    """A call did not return before its deadline."""


@dataclass(frozen=True)
class Outcome:
    """Result of a call: a value, or an error of any class."""

    value: Any = None
    error: BaseException | None = None


@dataclass
class _Call:
    function: Callable[[], Any]
    done: asyncio.Future[Outcome]
    on_late: Callable[[Outcome], None]
    late: bool = False


_Inbox = SimpleQueue["_Call | None"]


class CallThreads:
    """A pool with as many threads as calls ever ran at once. Belongs to one event loop."""

    def __init__(self, stack_bytes: int) -> None:
        self.count = 0
        self.stuck = 0
        self._stack_bytes = stack_bytes
        self._loop = asyncio.get_running_loop()
        self._idle: list[_Inbox] = []

    async def call(
        self,
        function: Callable[[], Any],
        deadline_seconds: float,
        on_late: Callable[[Outcome], None] = lambda outcome: None,
    ) -> Outcome:
        """Run ``function`` in a thread.

        Raises `CallHung` at the deadline; ``on_late`` is called with an outcome that comes after that.
        """
        call = _Call(function, self._loop.create_future(), on_late)
        inbox = self._idle.pop() if self._idle else self._new_thread()
        inbox.put(call)
        try:
            await asyncio.wait([call.done], timeout=deadline_seconds)
            if not call.done.done():
                raise CallHung
        except BaseException:
            call.late = not call.done.done()
            self.stuck += call.late
            raise
        return call.done.result()

    def end(self) -> None:
        """Let the idle threads end. Running calls continue and keep their threads."""
        while self._idle:
            self._idle.pop().put(None)
            self.count -= 1

    def _new_thread(self) -> _Inbox:
        inbox: _Inbox = SimpleQueue()
        thread = threading.Thread(target=self._serve, args=[inbox], name="environment", daemon=True)
        # The stack size is a setting of the whole process, which the environments' own threads should not inherit.
        usual = threading.stack_size(self._stack_bytes)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
        self.count += 1
        return inbox

    def _serve(self, inbox: _Inbox) -> None:
        while (call := inbox.get()) is not None:
            outcome = _outcome(call.function)
            # Mark the thread idle before delivering the outcome, so that the receiver's next call reuses it.
            self._idle.append(inbox)
            try:
                self._loop.call_soon_threadsafe(self._deliver, call, outcome)
            except RuntimeError:
                return  # the event loop is closed, and nothing waits for the outcome
            del call, outcome

    def _deliver(self, call: _Call, outcome: Outcome) -> None:
        if call.late:
            self.stuck -= 1
            call.on_late(outcome)
        elif not call.done.done():
            call.done.set_result(outcome)


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(function())
    except BaseException as error:  # includes `SystemExit`, which environments raise by calling `sys.exit`
        return Outcome(error=error)

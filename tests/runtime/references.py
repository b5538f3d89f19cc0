"""References to answers, as actors return them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any

from ray.exceptions import ActorDiedError


class Reference:
    """What an actor's call returns; giving up the wait for it does not end the call."""

    def __init__(self, answer: asyncio.Future[Any]) -> None:
        self._answer = answer

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.shield(self._answer).__await__()

    def future(self) -> Future[Any]:
        """For threads, or for `asyncio.wrap_future`."""
        outside: Future[Any] = Future()

        def pass_on(answer: asyncio.Future[Any]) -> None:
            if not outside.set_running_or_notify_cancel():
                return
            if answer.cancelled() or answer.exception() is not None:
                outside.set_exception(ActorDiedError() if answer.cancelled() else answer.exception())
            else:
                outside.set_result(answer.result())

        self._answer.add_done_callback(pass_on)
        return outside

"""A client of services that answer with JSON: judges and scoring services.

The service is untrusted: it may be busy, slow, broken or gone. Temporary failures are retried with growing waits;
permanent ones fail at once. The error names the address and the last cause, and never contains the key.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import aiohttp

from roll.configs.errors import count
from roll.rewards.base import RewardGaveUp

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
LONGEST_RETRY_AFTER_SECONDS = 300.0
PASSING_STATUS = frozenset({408, 409, 425, 429})
"""Status codes that are worth a retry, besides 5xx."""
NO_SUCH_CALL = frozenset({404, 405, 501})
LONGEST_BODY = 4 * 1024 * 1024
"""Largest number of bytes read from an answer."""
SHOWN_BODY = 300

Result = TypeVar("Result")


class RequestFailed(Exception):
    """One request failed. ``passing``: a retry may succeed; ``wait``: seconds that the service asked for; ``status``:
    HTTP status of the answer, if there was one."""

    def __init__(self, cause: str, passing: bool, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(cause)
        self.passing = passing
        self.wait = wait
        self.status = status


class ServiceGaveUp(RewardGaveUp):
    """A service gave no usable answer. ``status`` is that of a permanent refusal; None: all retries were used up."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class JsonClient:
    """A connection pool, opened by the first request. Belongs to one event loop."""

    def __init__(
        self,
        key: str | None,
        timeout_seconds: float,
        retries: int,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """Prepare without connecting.

        ``key`` is sent as a bearer token; ``timeout_seconds`` limits one request, and ``retries`` is the number of
        requests after the first. ``sleep`` waits between attempts; tests pass their own.
        """
        self._key = key
        self._timeout_seconds = timeout_seconds
        self._retries = retries
        self._sleep = sleep
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def ask(
        self, url: str, body: Mapping[str, Any], read: Callable[[dict[str, Any]], Result]
    ) -> tuple[Result, int]:
        """Post a request. Return what ``read`` makes of the answer, and the number of failed requests before it.

        An answer for which ``read`` raises `ValueError` is a temporary failure. Raises `ServiceGaveUp` after the last
        attempt, or at the first permanent failure.
        """
        attempt = 0
        while True:
            try:
                return self._read_by(read, await self.request("POST", url, body)), attempt
            except RequestFailed as failed:
                if not failed.passing or attempt == self._retries:
                    times = count(attempt + 1, "attempt")
                    message = f"{url} gave no answer in {times}; the last one: {failed}"
                    raise ServiceGaveUp(message, None if failed.passing else failed.status) from None
                await self._sleep(backoff(attempt) if failed.wait is None else failed.wait)
                attempt += 1

    async def request(self, method: str, url: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return the JSON object of its answer. Raises `RequestFailed`."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
                timeout=aiohttp.ClientTimeout(total=self._timeout_seconds),
                connector=aiohttp.TCPConnector(limit=0),
            )
        try:
            async with self._session.request(method, url, json=body, allow_redirects=False) as response:
                text = await self._body_of(response)
                if response.status != 200:
                    raise self._refusal(response, text)
        except TimeoutError:
            raise RequestFailed(f"no answer within {self._timeout_seconds:g} s", passing=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise RequestFailed(self._without_key(f"{type(error).__name__}: {error}"), passing=True) from None
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise RequestFailed(f"200, but no JSON object: {self._shown(text)}", passing=True)
        return answer

    def _read_by(self, read: Callable[[dict[str, Any]], Result], answer: dict[str, Any]) -> Result:
        try:
            return read(answer)
        except ValueError as cause:
            shown = self._shown(json.dumps(answer, ensure_ascii=False))
            raise RequestFailed(f"200, but {cause}: {shown}", passing=True) from None

    async def _body_of(self, response: aiohttp.ClientResponse) -> str:
        pieces, size = [], 0
        async for piece in response.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST_BODY:
                raise RequestFailed(f"an answer of more than {LONGEST_BODY} bytes", passing=False)
        return b"".join(pieces).decode("utf-8", "replace")

    def _refusal(self, response: aiohttp.ClientResponse, text: str) -> RequestFailed:
        place = response.headers.get("Location")
        what = f"redirect to {place}, which is not followed" if place else self._shown(text)
        passing = response.status in PASSING_STATUS or response.status >= 500
        wait = retry_after(response.headers.get("Retry-After"), time.time()) if passing else None
        cause = self._without_key(f"{response.status} {response.reason or ''}: {what}")
        return RequestFailed(cause, passing, wait, response.status)

    def _shown(self, text: str) -> str:
        # Redact before shortening: a key that is cut in two would not be found.
        text = " ".join(self._without_key(text).split())
        return text if len(text) <= SHOWN_BODY else text[:SHOWN_BODY] + "..."

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "***") if self._key else text


def backoff(attempt: int) -> float:
    """Return the seconds to wait after attempt number ``attempt`` (from 0).

    The wait doubles each time and is partly random, so that many callers do not come back at once.
    """
    longest = min(FIRST_WAIT_SECONDS * 2**attempt, LONGEST_WAIT_SECONDS)
    return longest * random.uniform(0.5, 1.0)


def retry_after(value: str | None, now: float) -> float | None:
    """Return the seconds that a `Retry-After` header asks for, as a number or a date; None if it is unreadable.

    ``now`` is a POSIX time.
    """
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - now
        except ValueError:
            return None
    if seconds != seconds:
        return None
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER_SECONDS)

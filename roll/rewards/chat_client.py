"""Client for chat completions from an OpenAI-compatible service that may be busy, slow, broken or gone.

Temporary failures are retried with growing waits; permanent ones fail at once. The error names the address and the last
cause, and never contains the key.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

from roll.rewards.records import RewardGaveUp

FIRST_WAIT_SECONDS = 0.5
LONGEST_WAIT_SECONDS = 30.0
LONGEST_RETRY_AFTER_SECONDS = 300.0
PASSING_STATUS = frozenset({408, 409, 425, 429})
"""Status codes that are worth a retry, besides 5xx."""
NO_SUCH_CALL = frozenset({404, 405, 501})
LONGEST_BODY = 4 * 1024 * 1024
"""Largest number of bytes read from an answer."""
SHOWN_BODY = 300


@dataclass(frozen=True)
class Reply:
    """The model's answer."""

    text: str
    retries: int
    """Number of failed requests before this answer."""


class _Failed(Exception):
    """One request failed. ``passing``: a retry may succeed; ``wait``: seconds that the service asked for; ``status``:
    HTTP status of the answer, if there was one."""

    def __init__(self, cause: str, passing: bool, wait: float | None = None, status: int | None = None) -> None:
        super().__init__(cause)
        self.passing = passing
        self.wait = wait
        self.status = status


class ChatClient:
    """A connection pool to one address. Belongs to one event loop."""

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        *,
        timeout_seconds: float,
        retries: int,
        sleep: Callable[[float], Awaitable[Any]] = asyncio.sleep,
    ) -> None:
        """Open the connection pool. ``timeout_seconds`` limits one request."""
        self._base_url = base_url.rstrip("/")
        self._api_key = api_key
        self._retries = retries
        self._sleep = sleep
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=aiohttp.ClientTimeout(total=timeout_seconds),
            connector=aiohttp.TCPConnector(limit=0),
        )
        self._timeout_seconds = timeout_seconds

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def chat(self, body: Mapping[str, Any]) -> Reply:
        """Send a chat request. Raises `RewardGaveUp` after the last attempt, or at the first permanent failure."""
        url = f"{self._base_url}/chat/completions"
        attempt = 0
        while True:
            try:
                return Reply(self._text_of(await self._request("POST", url, body)), attempt)
            except _Failed as failed:
                if not failed.passing or attempt == self._retries:
                    times = "1 attempt" if attempt == 0 else f"{attempt + 1} attempts"
                    raise RewardGaveUp(f"{url} gave no answer in {times}; the last one: {failed}") from None
                await self._sleep(backoff(attempt) if failed.wait is None else failed.wait)
                attempt += 1

    async def models(self) -> list[str] | None:
        """Return the names of the service's models; None if it does not list them. Raises `RewardGaveUp`."""
        url = f"{self._base_url}/models"
        try:
            answer = await self._request("GET", url, None)
        except _Failed as failed:
            if failed.status in NO_SUCH_CALL:
                return None
            raise RewardGaveUp(f"{url}: {failed}") from None
        entries = answer.get("data")
        if not isinstance(entries, list):
            return None
        return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    async def _request(self, method: str, url: str, body: Mapping[str, Any] | None) -> dict[str, Any]:
        """Send one request and return the JSON object of its answer. Raises `_Failed`."""
        try:
            async with self._session.request(method, url, json=body, allow_redirects=False) as response:
                text = await self._read(response)
                if response.status != 200:
                    raise self._refusal(response, text)
        except TimeoutError:
            raise _Failed(f"no answer within {self._timeout_seconds:g} s", passing=True) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise _Failed(self._without_key(f"{type(error).__name__}: {error}"), passing=True) from None
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = None
        if not isinstance(answer, dict):
            raise _Failed(f"200, but no JSON object: {self._shown(text)}", passing=True)
        return answer

    async def _read(self, response: aiohttp.ClientResponse) -> str:
        pieces, size = [], 0
        async for piece in response.content.iter_any():
            pieces.append(piece)
            size += len(piece)
            if size > LONGEST_BODY:
                raise _Failed(f"an answer of more than {LONGEST_BODY} bytes", passing=False)
        return b"".join(pieces).decode("utf-8", "replace")

    def _refusal(self, response: aiohttp.ClientResponse, text: str) -> _Failed:
        place = response.headers.get("Location")
        what = f"redirect to {place}, which is not followed" if place else self._shown(text)
        passing = response.status in PASSING_STATUS or response.status >= 500
        wait = retry_after(response.headers.get("Retry-After"), time.time()) if passing else None
        cause = self._without_key(f"{response.status} {response.reason or ''}: {what}")
        return _Failed(cause, passing, wait, response.status)

    def _text_of(self, answer: Mapping[str, Any]) -> str:
        """Return the message's text; empty if the model wrote none (all tokens spent on thinking)."""
        try:
            content = answer["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            shown = self._shown(json.dumps(answer, ensure_ascii=False))
            raise _Failed(f"200, but no choice with a message: {shown}", passing=True) from None
        return content if isinstance(content, str) else ""

    def _shown(self, text: str) -> str:
        # Redact before shortening: a key that is cut in two would not be found.
        return _shortened(self._without_key(text))

    def _without_key(self, text: str) -> str:
        return text.replace(self._api_key, "***") if self._api_key else text


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


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_BODY else text[:SHOWN_BODY] + "..."

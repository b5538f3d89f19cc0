"""The verifier `scoring_service`: a service over HTTP that scores batches of pictures.

A picture is sent as soon as it is there and a request is free; those that wait meanwhile share the next request. The
service is untrusted, see `roll.rewards.http`: an answer that has not exactly one finite score for each picture is a
failure, and retried. A request that is refused for its content is split, so that one picture cannot fail the others.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

from PIL import Image
from pydantic import Field

from roll.rewards.base import PreparedVerifier, RewardGaveUp, VerifierUnavailable, png_base64
from roll.rewards.http import JsonClient, ServiceGaveUp

REFUSED_CONTENT = frozenset({400, 413, 422})
"""Status codes that may be due to one picture of a request."""
PROBE = ("a grey square", Image.new("RGB", (64, 64), "grey"))
"""Prompt and picture that a service has to score before a run."""

Scores = dict[str, float]


@dataclass(frozen=True, eq=False)
class _Waiting:
    """A picture that waits for its scores."""

    prompt: str
    image: Image.Image
    scores: asyncio.Future[Scores]


class ScoringService(PreparedVerifier):
    """Score pictures by a service, which is posted ``{"prompts": [...], "images": [...]}`` and answers ``{"scores":
    [...]}``.

    Images are PNGs in base64. A score is a number, or an object of numbers by name with a ``score`` among them (other
    names need `weights` of the reward). ``scoring_retries`` (failed requests before the answer) and ``scoring_batch``
    (pictures in the request) are among the metrics.
    """

    def __init__(
        self,
        *,
        url: str,
        timeout_seconds: float,
        batch_size: Annotated[int, Field(ge=1)] = 16,
        max_requests: Annotated[int, Field(ge=1)] = 2,
        api_key_env: str | None = None,
        request_timeout_seconds: Annotated[float, Field(gt=0)] = 60.0,
        request_retries: Annotated[int, Field(ge=0)] = 6,
    ) -> None:
        """A process has at most ``max_requests`` requests of ``batch_size`` pictures under way.

        ``api_key_env`` names the environment variable with the key of the address. Failed requests are repeated
        ``request_retries`` times, as those of a judge. Raises `ValueError` for an unusable address, a missing key, or
        a request that may take longer than ``timeout_seconds``, the limit for all attempts on a picture.
        """
        _check_address(url)
        if api_key_env is not None and not os.environ.get(api_key_env):
            raise ValueError("`api_key_env` is no environment variable that is set; write its name, and `export` it")
        if request_timeout_seconds > timeout_seconds:
            raise ValueError(
                f"`request_timeout_seconds` {request_timeout_seconds:g} is more than the {timeout_seconds:g} s for all "
                "attempts; lower it, or raise `timeout_seconds` of the reward"
            )
        self.secrets = () if api_key_env is None else (api_key_env,)
        self._url = url
        self._batch_size, self._max_requests = batch_size, max_requests
        key = None if api_key_env is None else os.environ[api_key_env]
        self._make_client = partial(JsonClient, key, request_timeout_seconds)
        self._client = self._make_client(request_retries)
        self._waiting: deque[_Waiting] = deque()
        self._senders: set[asyncio.Task[Any] | None] = set()

    def check_machine(self) -> Scores:
        """Return the service's numbers for a grey picture. Raises `VerifierUnavailable` if it cannot score it. Must not
        be called on an event loop."""
        return asyncio.run(self._probe())

    async def __call__(self, image: Image.Image, prompt: str) -> Scores:
        """Return the numbers of a picture. Raises `RewardGaveUp` naming the address and the cause."""
        waiting = _Waiting(prompt, image, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        if len(self._senders) < self._max_requests:
            self._senders.add(asyncio.create_task(self._send()))
        return await waiting.scores

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _send(self) -> None:
        """Send what waits, batch by batch, until nothing does."""
        try:
            while batch := self._next_batch():
                await self._score(batch)
        finally:
            # Not as a callback: before it is called, a picture could come that this task will not send any more.
            self._senders.discard(asyncio.current_task())

    def _next_batch(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._batch_size:
            waiting = self._waiting.popleft()
            if not waiting.scores.done():  # its time may be up
                batch.append(waiting)
        return batch

    async def _score(self, batch: Sequence[_Waiting]) -> None:
        """Give each picture of a batch its scores or its error."""
        try:
            scores, retries = await self._asked(self._client, [(each.prompt, each.image) for each in batch])
        except Exception as cause:  # whatever it is, nobody may wait for ever
            if len(batch) > 1 and isinstance(cause, ServiceGaveUp) and cause.status in REFUSED_CONTENT:
                for each in batch:
                    await self._score([each])
                return
            message = str(cause) if isinstance(cause, RewardGaveUp) else f"{type(cause).__name__}: {cause}"
            for each in batch:
                if not each.scores.done():
                    each.scores.set_exception(RewardGaveUp(message))
            return
        counted = {"scoring_retries": float(retries), "scoring_batch": float(len(batch))}
        for each, numbers in zip(batch, scores, strict=True):
            if not each.scores.done():
                each.scores.set_result({**numbers, **counted})

    async def _asked(self, client: JsonClient, pictures: Sequence[tuple[str, Image.Image]]) -> tuple[list[Scores], int]:
        prompts, images = zip(*pictures, strict=True)
        encoded = await asyncio.to_thread(lambda: [png_base64(image) for image in images])
        body = {"prompts": list(prompts), "images": encoded}
        return await client.ask(self._url, body, partial(_scores_of, number=len(pictures)))

    async def _probe(self) -> Scores:
        client = self._make_client(0)
        try:
            (scores,), _ = await self._asked(client, [PROBE])
            return scores
        except ServiceGaveUp as cause:
            raise VerifierUnavailable(f"the scoring service cannot be asked: {cause}") from cause
        finally:
            await client.close()


def _check_address(url: str) -> None:
    """Raise `ValueError` unless ``url`` is an address of HTTP without a password in it."""
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"`url` {url!r} is no address; write it like `http://127.0.0.1:8765/score`")
    if "@" in parts.netloc:
        raise ValueError("`url` contains a user or a password; name an environment variable in `api_key_env` instead")


def _scores_of(answer: dict[str, Any], number: int) -> list[Scores]:
    """Return the numbers of each picture. Raises `ValueError` unless each of ``number`` pictures has finite ones."""
    scores = answer.get("scores")
    if not isinstance(scores, list):
        raise ValueError("no list of `scores`")
    if len(scores) != number:
        raise ValueError(f"{len(scores)} scores for {number} pictures")
    return [_numbers(score) for score in scores]


def _numbers(score: Any) -> Scores:
    named = score if isinstance(score, dict) else {"score": score}
    for value in named.values():
        if isinstance(value, bool) or not isinstance(value, int | float) or not _is_finite(value):
            raise ValueError(f"{str(value)[:40]!r} is no finite number")
    return {name: float(value) for name, value in named.items()}


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that no float can hold
        return False

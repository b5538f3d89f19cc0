"""The HTTP server through which agents call the policy, in a separate thread with its own event loop.

Each episode has a path and a key. A request needs the key and may use the path, too; both must belong to the same
episode. An answer is recorded before its last byte is sent. Each request gets one answer, even if a client repeats it:
a repeated request joins the running call, or gets the same answer again. Sampling continues if a client disconnects,
because it may come back for the answer. Answers that no client received are excluded from training.

The server can also serve a trained model instead of episodes (`Endpoint.serve`). Requests then need no path, nothing is
recorded, and sampling stops if the client disconnects.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import hmac
import json
import logging
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from roll.agentic.endpoint.dialects import Dialect, model_list
from roll.agentic.endpoint.json_text import parsed
from roll.agentic.endpoint.messages import Messages
from roll.agentic.endpoint.records import Answerer, ModelAnswer, ModelRequest, Pause, RequestRefused
from roll.agentic.endpoint.tool_calls import THOUGHT_END

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

LARGEST_BODY = 64 * 2**20
"""Largest request body in bytes."""
LONG_BODY = 2**18
"""Size in bytes above which a request body is parsed in a thread, so that other requests do not wait."""
THREADS = min(4, 1 + (os.cpu_count() or 1) // 8)
"""Number of threads for long requests. They compete with the event loop for processors and the interpreter lock."""
KEEP_ALIVE_SECONDS = 10.0
"""Interval of keep-alive comments in a stream while its answer is sampled."""
ANSWERS_KEPT = 32
"""Number of answers per episode that are kept for clients that repeat a request."""
ENDED_KEPT = 4096
"""Number of ended episodes whose keys are remembered, to tell clients that the episode is over."""
START_SECONDS = STOP_SECONDS = 30.0
RETRY_HEADER = "x-stainless-retry-count"
"""Header in which the OpenAI and Anthropic client libraries send the number of earlier attempts."""
MODELS, COUNT_TOKENS = "models", "messages/count_tokens"


@dataclass(eq=False)
class _Call:
    """One request of an agent and its answer. A client may send the request several times."""

    asked: str
    """Digest of the request."""
    task: asyncio.Task[_Answered]
    stream: _Stream
    attempt: int = 0
    """Highest value of `RETRY_HEADER` among the requests that belong to this call."""
    readers: int = 0
    """Number of connections that wait for the answer or are receiving it."""
    delivered: bool = False
    """True if the whole answer was sent to a client."""

    @property
    def failed(self) -> bool:
        """True if the task ended without an answer."""
        return self.task.done() and (self.task.cancelled() or self.task.exception() is not None)


class _Stream:
    """The event stream of one answer, which grows while the answer is sampled."""

    def __init__(self, dialect: Dialect, asked: ModelRequest) -> None:
        self._dialect, self._asked = dialect, asked
        self.body = b""
        self._told: ModelAnswer | None = None
        self.more: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that is done when there is more to send; it is then replaced by a new one."""

    def tell(self, answer: ModelAnswer) -> None:
        """Append the new part of an unfinished answer."""
        self._write(answer, ended=False)
        self.more.set_result(None)
        self.more = asyncio.get_running_loop().create_future()

    def whole(self, answer: ModelAnswer) -> bytes:
        """Append the rest of a finished answer, and return the whole stream."""
        self._write(answer, ended=True)
        return self.body

    def _write(self, answer: ModelAnswer, *, ended: bool) -> None:
        told = self._told
        if told is not None and told.text and not told.reasoning and answer.reasoning:
            # The end of the reasoning was found only now, and its text was already sent as text: keep it as text.
            answer = replace(answer, reasoning=None, text=f"{answer.reasoning}{THOUGHT_END}{answer.text}")
        self.body += "".join(self._dialect.events(self._asked, answer, told, ended=ended)).encode()
        self._told = answer


@dataclass(frozen=True)
class _Answered:
    answer_id: str
    body: bytes


@dataclass(eq=False)
class _Episode:
    """An episode, or a served model, with its calls."""

    session: Answerer
    key: str
    """API key; empty if no key is needed."""
    calls: list[_Call] = field(default_factory=list)
    """Calls in the order of arrival; for a served model, only running ones."""

    def joined(self, asked: str, attempt: int, is_named: bool) -> _Call | None:
        """Return the call that a request repeats; None if the request is a new one.

        ``attempt``: value of `RETRY_HEADER`. ``is_named``: True if the request has an idempotency key. Any request can
        repeat an equal call whose clients disconnected without the answer; only one that is named or has an attempt can
        repeat an equal call otherwise.
        """
        calls = [call for call in self.calls if call.asked == asked and not call.failed]
        abandoned = next((call for call in calls if not call.delivered and not call.readers), None)
        if abandoned is not None or not (attempt or is_named):
            return abandoned
        return next((call for call in reversed(calls) if is_named or call.attempt < attempt), None)

    def keep(self, call: _Call) -> None:
        """Add a new call. Forget failed calls, and the oldest answers if there are more than `ANSWERS_KEPT`."""
        ended = [each for each in self.calls if each.task.done() and not each.readers]
        answers = [each for each in ended if not each.failed]
        forgotten = set(ended) - set(answers[-ANSWERS_KEPT:])
        for each in forgotten:
            self.settle(each)
        self.calls = [*(each for each in self.calls if each not in forgotten), call]

    def settle(self, call: _Call) -> None:
        """Exclude the answer of a call from training if no client received it."""
        if not call.delivered and call.task.done() and not call.failed:
            self.session.leave_out(call.task.result().answer_id, "unread")


class Endpoint:
    """The HTTP server. Its thread runs from `start` to `stop`."""

    def __init__(
        self,
        dialects: Iterable[Dialect],
        *,
        model: str = "policy",
        host: str = "127.0.0.1",
        port: int = 0,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
        on_refusal: Callable[[RequestRefused], None] = lambda refused: None,
    ) -> None:
        """Prepare the server without starting it.

        ``model``: name in the list of models; requests may use any name. ``port`` 0: choose a free port. ``on_refusal``
        is called in the server's thread with each request that is refused before it reaches the policy.
        """
        self._dialects: Mapping[str, Dialect] = {dialect.path: dialect for dialect in dialects}
        self._model, self._host, self._port = model, host, port
        self._keep_alive_seconds = keep_alive_seconds
        self._on_refusal = on_refusal
        self._created = int(time.time())
        self._episodes: dict[str, _Episode] = {}
        self._names: dict[str, str] = {}
        """Key -> name of its episode, running or remembered in ``_ended``."""
        self._ended: OrderedDict[str, str] = OrderedDict()
        """Name of an ended episode -> its key, oldest first."""
        self._closing: set[concurrent.futures.Future[None]] = set()
        """Calls of `_close` that other threads wait for."""
        self._told: set[str] = set()
        """Names of ineffective fields that were logged."""
        self._stopping = False
        self._over = threading.Event()
        """Set when the event loop has ended."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped: asyncio.Event | None = None
        self._turn = asyncio.Lock()
        self._failure: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="agent-endpoint", daemon=True)
        self.address = ""
        """`http://host:port`; empty before the start."""

    def start(self) -> None:
        """Start the thread and listen. Raises `RuntimeError` if the address cannot be used."""
        self._thread.start()
        if not self._ready.wait(START_SECONDS) or self._failure is not None:
            raise RuntimeError(f"the endpoint cannot listen at {self._host}:{self._port}: {self._failure}")

    def stop(self) -> None:
        """Answer waiting clients with status 503, and end the thread. Raises `RuntimeError` if it does not end."""
        self._stopping = True
        loop, stopped = self._loop, self._stopped
        if loop is not None and stopped is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stopped.set)
        if self._thread.ident is not None:
            self._thread.join(STOP_SECONDS)
        if self._thread.is_alive():
            raise RuntimeError(f"the endpoint did not end within {STOP_SECONDS:.0f} s")

    def open(self, session: Answerer) -> tuple[str, str]:
        """Add an episode. Return its address, which ends with `/v1`, and its key.

        Raises `RuntimeError` if the server is not running.
        """
        if self._stopping or not self._thread.is_alive():
            raise RuntimeError(f"the endpoint does not run: {self._failure or 'it was stopped'}")
        name, key = secrets.token_hex(8), f"sk-{secrets.token_urlsafe(24)}"
        self._episodes[name] = _Episode(session, key)
        self._names[key] = name
        return f"{self.address}/e/{name}/v1", key

    def serve(self, model: Answerer, key: str = "") -> str:
        """Serve a model to all requests that name no episode. Return its address, which ends with `/v1`.

        If ``key`` is not empty, requests must send it.
        """
        self._episodes[""] = _Episode(model, key)
        return f"{self.address}/v1"

    async def close(self, session: Answerer) -> None:
        """End an episode: cancel running calls, and answer later requests with status 409.

        After this the session does not change any more. Calling it twice is harmless.
        """
        if self._loop is None or self._over.is_set():
            session.close()
            return
        closing = self._close(session)
        try:
            ended = asyncio.run_coroutine_threadsafe(closing, self._loop)
        except RuntimeError:  # the event loop has ended meanwhile, and all calls with it
            closing.close()
            session.close()
            return
        self._closing.add(ended)
        try:
            if self._over.is_set():
                ended.cancel()
            await asyncio.wait([asyncio.wrap_future(ended)])
        finally:
            self._closing.discard(ended)
        if ended.cancelled():
            closing.close()
            session.close()
        else:
            ended.result()

    async def _close(self, session: Answerer) -> None:
        session.close()
        # A copy, because other threads may add episodes during the iteration.
        for name in [name for name, episode in self._episodes.copy().items() if episode.session is session]:
            episode = self._episodes.pop(name)
            self._ended[name] = episode.key
            await _ended(episode)
        while len(self._ended) > ENDED_KEPT:
            del self._names[self._ended.popitem(last=False)[1]]

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:
            self._failure = error
            logger.exception("the endpoint failed")
        finally:
            self._over.set()
            for ended in list(self._closing):  # those that came too late for the event loop
                ended.cancel()
            self._ready.set()

    async def _serve(self) -> None:
        from aiohttp import web

        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(THREADS))
        app = web.Application(client_max_size=LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=5.0)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
            host, port = runner.addresses[0][:2]
            self.address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            self._ready.set()
            await self._stopped.wait()
            for episode in list(self._episodes.values()):
                episode.session.close()
                await _ended(episode)
        finally:
            await runner.cleanup()

    # Requests

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        name, path = _split(request.path)
        dialect = self._dialects.get(Messages.path if path == COUNT_TOKENS else path)
        try:
            if self._stopping:
                raise RequestRefused("the run ends", status=503, code="run_ends")
            wanted = "GET" if path == MODELS else "POST"
            if request.method != wanted or (dialect is None and path != MODELS):
                raise RequestRefused(self._what_is_there(request), status=404, code="not_found")
            episode = self._episode(name, request)
            if dialect is None:
                session = episode.session
                return _json(model_list(self._model, created=self._created, max_model_len=session.room))
            body = await self._body(request)
            if len(body) > LONG_BODY:
                asked, digest = await asyncio.to_thread(_asked, dialect, body)
            else:
                await self._pause()
                asked, digest = _asked(dialect, body)
            self._tell(asked)
            if path == COUNT_TOKENS and isinstance(dialect, Messages):
                return _json(dialect.token_count(await episode.session.count_tokens(asked)))
            call = self._call(episode, dialect, asked, request, f"{path}\n{digest}")
        except RequestRefused as refused:
            self._on_refusal(refused)
            return _refusal(refused, dialect)
        call.readers += 1
        try:
            response = await self._deliver(request, call, dialect, asked)
        except ConnectionError:  # the client has disconnected, which is no error of the handler
            raise asyncio.CancelledError from None
        finally:
            call.readers -= 1
            if not episode.session.keeps_answers:
                episode.calls.remove(call)
                call.task.cancel()  # stops sampling if the client has disconnected; else the task is done already
        return response

    def _call(
        self, episode: _Episode, dialect: Dialect, asked: ModelRequest, request: web.Request, digest: str
    ) -> _Call:
        """Return the call that answers a request: a new one, unless the request repeats an earlier one.

        ``digest``: digest of path and body.
        """
        count = request.headers.get(RETRY_HEADER, "0")
        attempt = int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0
        given = request.headers.get("idempotency-key", "")
        key = f"{digest}\n{given}"
        call = episode.joined(key, attempt, bool(given)) if episode.session.keeps_answers else None
        if call is None:
            stream = _Stream(dialect, asked)
            answered = _answered(episode.session, dialect, asked, stream, self._pause)
            call = _Call(key, asyncio.ensure_future(answered), stream)
            call.task.add_done_callback(_seen)
            episode.keep(call)
        call.attempt = max(call.attempt, attempt)
        return call

    async def _deliver(
        self, request: web.Request, call: _Call, dialect: Dialect, asked: ModelRequest
    ) -> web.StreamResponse:
        """Wait for the answer and send it. A stream gets its parts as they come, with keep-alive comments between."""
        from aiohttp import web

        response: web.StreamResponse | None = None
        sent, patience, first = 0, self._keep_alive_seconds, asyncio.FIRST_COMPLETED
        while not call.task.done():
            if not asked.stream:
                await asyncio.wait([call.task])
                continue
            if len(call.stream.body) == sent:
                news: list[asyncio.Future[Any]] = [call.task, call.stream.more]
                await asyncio.wait(news, timeout=patience, return_when=first)
            if call.task.done():
                continue
            if response is None:
                response = _stream()
                await response.prepare(request)
            more = call.stream.body[sent:]
            sent += len(more)
            await response.write(more or b": wait\n\n")
        try:
            if call.task.cancelled():
                raise self._cancelled()
            body = call.task.result().body[sent:]
        except RequestRefused as refused:
            if response is None:
                return _refusal(refused, dialect)
            body = dialect.error_event(refused).encode()
            await response.write(body)
            await response.write_eof()
            return response
        if asked.stream:
            if response is None:
                response = _stream()
                await response.prepare(request)
            await response.write(body)
        else:
            response = web.Response(body=body, content_type="application/json")
            await response.prepare(request)
        await response.write_eof()
        call.delivered = True
        return response

    def _cancelled(self) -> RequestRefused:
        if self._stopping:
            return RequestRefused("the run ends", status=503, code="run_ends")
        return _over()

    def _episode(self, name: str | None, request: web.Request) -> _Episode:
        """Return the episode for the name in the path and the key of a request. Raises `RequestRefused`."""
        authorization = request.headers.get("authorization", "")
        bearer = authorization[7:].strip() if authorization[:7].lower() == "bearer " else ""
        keys = [key for key in (bearer, request.headers.get("x-api-key", "")) if key]
        if name is None and keys:
            name = self._names.get(keys[0])
        episode = self._episodes.get(name or "")
        right = episode.key if episode is not None else self._ended.get(name or "")
        fits = keys and right and all(hmac.compare_digest(key.encode(), right.encode()) for key in keys)
        if right != "" and not fits:
            raise RequestRefused(
                "this is no key of this address: send the right one as `Authorization: Bearer` or `x-api-key`",
                status=401,
                code="invalid_api_key",
            )
        if episode is None:
            raise _over()
        return episode

    async def _pause(self) -> None:
        """Let one caller continue per iteration of the event loop, so that many at once do not block it."""
        async with self._turn:
            await asyncio.sleep(0)

    async def _body(self, request: web.Request) -> bytes:
        from aiohttp import web

        try:
            return await request.read()
        except web.HTTPRequestEntityTooLarge:
            limit = f"the body is larger than {LARGEST_BODY // 2**20} MiB"
            raise RequestRefused(limit, status=413, code="body_too_large") from None

    def _what_is_there(self, request: web.Request) -> str:
        posts = ", ".join(f"POST /v1/{path}" for path in [*self._dialects, COUNT_TOKENS])
        return f"there is no {request.method} {request.path[:200]} here; there is GET /v1/{MODELS}, {posts}"

    def _tell(self, asked: ModelRequest) -> None:
        """Log the name of each field without effect, once per name."""
        for name in asked.without_effect:
            if name not in self._told and len(self._told) < 200:
                self._told.add(name)
                logger.info("clients send `%s`, which has no effect", name)


async def _answered(
    session: Answerer, dialect: Dialect, asked: ModelRequest, stream: _Stream, pause: Pause
) -> _Answered:
    """Get the answer to a request from the session, which records it, and encode it for the client."""
    try:
        answer = await session.respond(asked, tell=stream.tell if asked.stream else None, pause=pause)
        body = stream.whole(answer) if asked.stream else json.dumps(dialect.answer(asked, answer)).encode()
    except RequestRefused:
        raise
    except Exception as error:
        session.failure = session.failure or error
        raise RequestRefused(f"the endpoint failed: {error}", status=500, code="endpoint_failed") from error
    return _Answered(answer.id, body)


async def _ended(episode: _Episode) -> None:
    """Cancel the running calls of an episode, and exclude answers from training that no client received."""
    running = [call.task for call in episode.calls if not call.task.done()]
    for task in running:
        task.cancel()
    if running:
        await asyncio.wait(running)
    for call in episode.calls:
        episode.settle(call)


def _seen(task: asyncio.Task[_Answered]) -> None:
    """Retrieve the error of a call, so that asyncio does not warn if no client waits for it any more."""
    if not task.cancelled():
        task.exception()


def _split(path: str) -> tuple[str | None, str]:
    """Split a path into the name of an episode (None if there is none) and the rest without `v1`."""
    parts = [part for part in path.split("/") if part]
    name = None
    if len(parts) > 1 and parts[0] == "e":
        name, parts = parts[1], parts[2:]
    while parts and parts[0] == "v1":  # some clients add it to an address that ends with it
        parts = parts[1:]
    return name, "/".join(parts)


def _asked(dialect: Dialect, body: bytes) -> tuple[ModelRequest, str]:
    """Parse a body. Return the request and a digest of the body. Raises `RequestRefused`."""
    try:
        value = parsed(body.decode())
    except ValueError as error:
        raise RequestRefused(f"the body is no JSON: {error}") from error
    return dialect.read(value), hashlib.blake2b(body, digest_size=16).hexdigest()


def _over() -> RequestRefused:
    return RequestRefused("the episode of this key is over", status=409, code="episode_over")


def _json(value: Any, status: int = 200) -> web.Response:
    from aiohttp import web

    return web.json_response(value, status=status)


def _stream() -> web.StreamResponse:
    from aiohttp import web

    return web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})


def _refusal(refused: RequestRefused, dialect: Dialect | None) -> web.Response:
    if dialect is not None:
        return _json(dialect.error(refused), refused.status)
    error = {"message": str(refused), "type": "invalid_request_error", "param": refused.field, "code": refused.code}
    return _json({"error": error}, refused.status)

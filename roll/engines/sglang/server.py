"""SGLang's server as a child process: start, HTTP calls on the loopback address, stop.

A call that cannot reach the server raises `EngineFailed`, with the exit status if the process has ended. A call that
the server refuses raises `CallRefused`. The child process reads its arguments as JSON from standard input, and ends
when its owner does. It is started with ``python -m``, so that SGLang's own processes, which import the main module
first, can find it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import roll
from roll.engines.base import EngineFailed
from roll.weights.buckets import end_with

if TYPE_CHECKING:
    import aiohttp

SERVER_COMMAND = (sys.executable, "-m", "roll.engines.sglang.server")
_MESSAGE_BYTES = 16 * 1024**2
"""Half the maximum size of a message, which is one line. Sampling masks of wide distributions take megabytes."""
_POLL_SECONDS = 0.1
_ENDING_SECONDS = 10.0
"""Time for the server to end after SIGTERM, before it is killed."""


class CallRefused(RuntimeError):
    """The server answered with an error."""


class SGLangServer:
    """A running SGLang server process, and the HTTP connection to it."""

    def __init__(self, process: asyncio.subprocess.Process, session: aiohttp.ClientSession) -> None:
        self._process = process
        self._session = session

    @classmethod
    async def start(cls, arguments: Mapping[str, Any]) -> SGLangServer:
        """Start a server process and wait until it is ready. Raises `EngineFailed` if it ends instead."""
        import aiohttp

        process = await asyncio.create_subprocess_exec(
            *SERVER_COMMAND, stdin=asyncio.subprocess.PIPE, env=server_environment(), start_new_session=True
        )
        if process.stdin is None:
            raise EngineFailed("the process of SGLang's server has no standard input")
        process.stdin.write(json.dumps({"owner": os.getpid(), "arguments": dict(arguments)}).encode())
        process.stdin.close()
        session = aiohttp.ClientSession(
            f"http://{arguments['host']}:{arguments['port']}",
            headers={"Authorization": f"Bearer {arguments['api_key']}"},
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_MESSAGE_BYTES,
        )
        server = cls(process, session)
        try:
            await server._ready()
        except BaseException:
            await server.stop()
            raise
        return server

    async def call(self, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call ``path`` (a POST if there is a ``body``, else a GET) and return the answer's JSON object.

        Raises `CallRefused` if the server refuses, `EngineFailed` if it cannot be reached."""
        method = "GET" if body is None else "POST"
        async with self._reaching(path), self._session.request(method, path, json=body) as reply:
            text = await reply.text()
        content = _parsed(text)
        if reply.status != 200 or content.get("success") is False:
            raise CallRefused(f"SGLang refused {path} ({reply.status}): {_message(content, text)}")
        return content

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """POST ``body`` to ``path`` and yield the messages of the streamed answer.

        Raises `CallRefused` if the server refuses, `EngineFailed` if the stream breaks off."""
        async with self._reaching(path), self._session.post(path, json=body) as reply:
            if reply.status != 200:
                text = await reply.text()
                raise CallRefused(_message(_parsed(text), text))
            done = False
            async for line in reply.content:  # read to the end, so that the connection can be reused
                field, _, content = line.partition(b":")
                if field != b"data" or not line.endswith(b"\n"):
                    continue
                if content.strip() == b"[DONE]":
                    done = True
                else:
                    yield json.loads(content)
        if not done:
            raise EngineFailed(f"SGLang's answer to {path} broke off")

    async def stop(self) -> None:
        """Stop the server and all its processes."""
        await self._session.close()
        if self._process.returncode is None:
            self._process.terminate()
            try:
                await asyncio.wait_for(self._process.wait(), _ENDING_SECONDS)
            except TimeoutError:
                os.killpg(self._process.pid, signal.SIGKILL)
                await self._process.wait()

    async def _ready(self) -> None:
        """Wait until the health check succeeds. Raises `EngineFailed` if the process ends first."""
        import aiohttp

        while True:
            if self._process.returncode is not None:
                raise EngineFailed(f"SGLang's server did not start: it ended with status {self._process.returncode}")
            with suppress(aiohttp.ClientError, OSError):  # Nothing may listen yet.
                async with self._session.get("/health") as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(_POLL_SECONDS)

    @asynccontextmanager
    async def _reaching(self, path: str) -> AsyncIterator[None]:
        """Convert connection errors to `EngineFailed`. Waits a moment for the process to end, to report its exit
        status."""
        import aiohttp

        if self._session.closed:
            raise EngineFailed("SGLang's server was stopped")
        try:
            yield
        except (aiohttp.ClientError, OSError) as error:
            cause = f"{path} failed with {type(error).__name__}: {error}"
            with suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), 1.0)
                cause = f"its server ended with status {self._process.returncode}"
            raise EngineFailed(f"SGLang cannot go on: {cause}") from error


def server_environment() -> dict[str, str]:
    """Return the environment variables of the server: this process's own, PYTHONPATH for this package, and settings for
    SGLang."""
    paths = [str(Path(roll.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        # Report log-probabilities of the distribution after temperature, not before it.
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "false",
        # The run never sends longer sequences than its own limit; the server's has a few tokens of headroom.
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "true",
    }


def _parsed(text: str) -> dict[str, Any]:
    """Parse the answer as a JSON object (another JSON value under the key ``value``); {} if it is plain text."""
    try:
        content = json.loads(text)
    except ValueError:
        return {}
    return content if isinstance(content, dict) else {"value": content}


def _message(content: Mapping[str, Any], text: str) -> str:
    error = content.get("error", content.get("message", text))
    return str(error["message"] if isinstance(error, dict) and "message" in error else error)[:1000]


def main() -> None:
    """Run the server in this process, with arguments read from standard input. Returns when the server ends."""
    orders = json.load(sys.stdin)
    # SGLang's own processes end with this one.
    end_with(orders["owner"])
    from sglang.srt.server_args import ServerArgs

    arguments = ServerArgs(**orders["arguments"])
    from sglang.launch_server import run_server

    run_server(arguments)


if __name__ == "__main__":
    main()

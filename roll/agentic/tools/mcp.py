"""Tools of a server that speaks the Model Context Protocol (MCP), through the official package `mcp`.

Only the configuration decides what is started and where; nothing that the policy writes reaches a command line. The
server starts when its tools are first requested. A server that dies, hangs or violates the protocol is dropped: the
policy is told that its call failed, and the next call starts a new server. The protocol's event loop runs in its own
thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, TypeVar

from roll.agentic.tools.base import Answer, Deadline, Tool, ToolUnavailable

if TYPE_CHECKING:
    from mcp import Client

_Result = TypeVar("_Result")
_CLOSE_SECONDS = 10.0
"""Longest wait for a server to end before it is left to the operating system."""
_MOST_PAGES = 100
_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False, repr=False)  # no repr, because `env` may contain secrets
class McpServer:
    """The toolset `mcp`: the tools of one server, which runs as a child process or at a URL.

    Nothing starts before the tools are requested. Raises `ValueError` unless exactly one of ``command`` and ``url`` is
    given.
    """

    command: str | None = None
    """A server program that communicates over its standard input and output."""
    args: Sequence[str] = ()
    env: Mapping[str, str] | None = None
    """Environment variables of the program. It inherits only a few harmless ones (PATH, HOME, ...)."""
    url: str | None = None
    """URL of a server that speaks streamable HTTP."""
    only: Sequence[str] | None = None
    """Names of the tools to offer; None: all."""
    prefix: str = ""
    """Prefix for the names of the tools."""
    start_timeout_seconds: float = 30.0

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError("give either `command` (and `args`, `env`) or `url`")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"`url` is {self.url!r}, which is no http address")
        if self.url is not None and (self.args or self.env):
            raise ValueError("`args` and `env` belong to `command`; a server at a `url` is not started from here")
        self._session: _Session | None = None
        self._tools: list[Tool] | None = None

    @property
    def where(self) -> str:
        """The server's command line or URL, for messages."""
        return self.url or " ".join([self.command or "", *self.args])

    def tools(self) -> list[Tool]:
        """Return the server's tools; they are requested once and cached. Raises `ToolUnavailable`."""
        if self._tools is None:
            deadline = Deadline.after(self.start_timeout_seconds)
            try:
                listed = self.session(deadline).do(_listed, deadline)
            except McpFailed as error:
                self.close()
                raise ToolUnavailable(f"the MCP server `{self.where}` does not list its tools: {error}") from error
            self._tools = self._offered(listed)
        return list(self._tools)

    def session(self, deadline: Deadline) -> _Session:
        """Return the connection, opening one if necessary. Raises `McpFailed`."""
        if self._session is None:
            seconds = min(self.start_timeout_seconds, deadline.seconds_left())
            self._session = _Session(self._connect, self.where, seconds)
        return self._session

    def close(self) -> None:
        """Close the connection, and end the process if it is ours. The next call opens a new connection."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _offered(self, listed: Sequence[Any]) -> list[Tool]:
        names = [each.name for each in listed]
        for name in self.only or ():
            if name not in names:
                raise ToolUnavailable(f"the MCP server `{self.where}` has no tool `{name}`; it has {', '.join(names)}")
        return [
            McpTool(self, each.name, f"{self.prefix}{each.name}", each.description or "", dict(each.input_schema))
            for each in listed
            if self.only is None or each.name in self.only
        ]

    def _connect(self, error_output: IO[str]) -> Client:
        from mcp import Client, StdioServerParameters, stdio_client

        if self.url is not None:
            return Client(self.url)
        parameters = StdioServerParameters(command=self.command or "", args=list(self.args), env=dict(self.env or {}))
        return Client(stdio_client(parameters, errlog=error_output))


@dataclass(eq=False, repr=False)
class McpTool(Tool):
    """One tool of an MCP server."""

    server: McpServer
    remote_name: str
    name: str
    description: str
    parameters: dict[str, Any]

    def call(self, arguments: dict[str, Any], deadline: Deadline) -> Answer:
        try:
            result = self.server.session(deadline).do(
                lambda client: client.call_tool(self.remote_name, arguments), deadline
            )
        except McpRefused as error:
            return Answer(f"the tool `{self.name}` refused: {error}", is_error=True)
        except McpFailed as error:
            _logger.warning("a call of `%s` of the MCP server `%s` failed: %s", self.name, self.server.where, error)
            self.server.close()
            return Answer(f"the tool `{self.name}` failed: {error}", is_error=True)
        return Answer(_text_of(result), is_error=result.is_error)


class McpFailed(Exception):
    """The server answered incorrectly or not at all. The connection cannot be used any more."""


class McpRefused(Exception):
    """The server answered the call with an error."""


class _Session:
    """One connection, kept open by a task in an event loop in its own thread."""

    def __init__(self, connect: Any, where: str, seconds: float) -> None:
        """Open the connection within ``seconds``. Raises `McpFailed`."""
        self._connect = connect
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp {where[:40]}", daemon=True)
        self._closing = asyncio.Event()
        self._opened: concurrent.futures.Future[Client] = concurrent.futures.Future()
        self._keeping = asyncio.run_coroutine_threadsafe(self._keep_open(), self._loop)
        self._thread.start()
        try:
            self._opened.result(seconds)
        except BaseException as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise McpFailed("it did not answer in time") from None
            raise

    def do(self, what: Any, deadline: Deadline) -> Any:
        """Run the coroutine ``what(client)``. Raises `McpFailed` and `McpRefused`."""
        client = self._opened.result(0)
        running = asyncio.run_coroutine_threadsafe(_awaited(what(client)), self._loop)
        # Calls may outlast their connection.
        ends = [running, self._keeping]
        done, _ = concurrent.futures.wait(ends, deadline.seconds_left(), concurrent.futures.FIRST_COMPLETED)
        if running in done:
            return running.result()
        running.cancel()
        raise McpFailed("the connection ended" if done else "it did not answer in time")

    def close(self) -> None:
        """Close the connection. Never raises."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        concurrent.futures.wait([self._keeping], _CLOSE_SECONDS / 2)
        self._keeping.cancel()
        concurrent.futures.wait([self._keeping], _CLOSE_SECONDS / 2)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            _logger.warning("the thread `%s` does not end and is left behind", self._thread.name)
        else:
            self._loop.close()

    async def _keep_open(self) -> None:
        """Open and close the connection in the same task, as the library requires."""
        with tempfile.TemporaryFile("w+", errors="replace") as error_output:
            try:
                async with self._connect(error_output) as client:
                    if not self._closing.is_set():
                        self._opened.set_result(client)
                        await self._closing.wait()
            except Exception as error:
                if self._opened.done():
                    _logger.warning("a connection to an MCP server did not end well: %s", _cause(error))
                else:
                    self._opened.set_exception(McpFailed(_with_last_words(_cause(error), error_output)))


async def _awaited(call: Coroutine[Any, Any, _Result]) -> _Result:
    """Await a call. Raises `McpRefused` if the server answers with an error, `McpFailed` if something fails."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED, REQUEST_TIMEOUT

    try:
        return await call
    except MCPError as error:
        if error.error.code in (CONNECTION_CLOSED, REQUEST_TIMEOUT):
            raise McpFailed(str(error)) from error
        raise McpRefused(str(error)) from error
    except Exception as error:
        raise McpFailed(_cause(error)) from error


async def _listed(client: Client) -> list[Any]:
    tools, cursor = [], None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return tools
    raise ValueError(f"its list of tools has more than {_MOST_PAGES} pages")


def _cause(error: BaseException) -> str:
    """Describe the first real error in an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"


def _with_last_words(cause: str, error_output: IO[str]) -> str:
    error_output.seek(0)
    lines = error_output.read().strip().splitlines()[-5:]
    return f"{cause}; it wrote: {' | '.join(lines)}" if lines else cause


def _text_of(result: Any) -> str:
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    return "\n".join(parts) or "[no answer]"

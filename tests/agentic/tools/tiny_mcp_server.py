"""A server of the Model Context Protocol for tests: tools that answer, refuse, hang, and end the process."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tiny")
CALLS = []


@server.tool()
def add(a: int, b: int) -> str:
    """Adds two numbers."""
    return str(a + b)


@server.tool()
def count() -> str:
    """How often this process was asked so."""
    CALLS.append(None)
    return str(len(CALLS))


@server.tool()
def process() -> str:
    """The process id."""
    return str(os.getpid())


@server.tool()
def variable(key: str) -> str:
    """An environment variable."""
    return os.environ.get(key, "is not set")


@server.tool()
def fail() -> str:
    """Raises."""
    raise ToolError("this went wrong")


@server.tool()
def die() -> str:
    """Ends the process in the call."""
    os.kill(os.getpid(), 9)
    return "never"


@server.tool()
def hang() -> str:
    """Blocks the whole server."""
    time.sleep(10**6)
    return "never"


if __name__ == "__main__":
    if "--no-answer" in sys.argv:
        time.sleep(10**6)
    if "--broken" in sys.argv:
        sys.exit("this server cannot start")
    if "--port" in sys.argv:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[-1]))
    else:
        server.run("stdio")

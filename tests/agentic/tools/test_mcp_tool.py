"""A real server as a process of its own, and what it does to us when it dies, hangs, refuses or does not start."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from roll.agentic.tools.base import Answer, Deadline, Tool, Toolset, ToolUnavailable, function_schema
from roll.agentic.tools.mcp import McpServer
from roll.runtime.placement import free_port
from tests.tiers import need

need("mcp")
SCRIPT = str(Path(__file__).with_name("tiny_mcp_server.py"))


def server_at(*arguments: str, **options) -> McpServer:
    return McpServer(command=sys.executable, args=[SCRIPT, *arguments], **options)


@pytest.fixture(scope="module")
def server():
    """One for all tests: what they do to its process, it survives."""
    server = server_at()
    yield server
    server.close()


def call(server: McpServer, name: str, seconds: float = 60.0, **arguments) -> Answer:
    (tool,) = (tool for tool in server.tools() if tool.name == name)
    return tool.call(arguments, Deadline.after(seconds))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def mcp_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("mcp ")}


def test_tools_are_listed_with_their_schemas(server):
    assert isinstance(server, Toolset)
    tools = {tool.name: tool for tool in server.tools()}
    assert {"add", "fail", "die"} <= set(tools)
    assert isinstance(tools["add"], Tool)
    schema = function_schema(tools["add"])["function"]
    assert schema["description"] == "Adds two numbers."
    assert set(schema["parameters"]["properties"]) == {"a", "b"}


def test_calls_are_answered_by_one_lasting_server(server):
    assert call(server, "add", a=2, b=3) == Answer("5")
    first = int(call(server, "count").text)
    assert [int(call(server, "count").text) for _ in range(2)] == [first + 1, first + 2]


def test_nothing_starts_before_tools_are_asked_for():
    McpServer(command="/no/such/program")  # would fail


def test_an_error_of_the_tool_is_an_answer_and_the_server_lives_on(server):
    first = call(server, "process").text
    answer = call(server, "fail")
    assert answer.is_error and "this went wrong" in answer.text
    assert call(server, "process").text == first


def test_wrong_arguments_are_an_answer(server):
    answer = call(server, "add", a="two", b=3)
    assert answer.is_error
    assert call(server, "add", a=1, b=1) == Answer("2")


def test_a_server_that_dies_in_a_call_is_replaced(server):
    before = call(server, "process").text
    answer = call(server, "die")
    assert answer.is_error and "`die` failed" in answer.text
    assert call(server, "process").text != before
    assert call(server, "add", a=1, b=1) == Answer("2")


@pytest.mark.tier("all")
def test_a_server_that_dies_between_calls_is_replaced(server):
    os.kill(int(call(server, "process").text), 9)
    answers = [call(server, "add", a=1, b=1) for _ in range(2)]  # the first may be the one to find out
    assert answers[-1] == Answer("2")


@pytest.mark.tier("all")
def test_a_server_that_hangs_is_killed_and_replaced(server):
    before = int(call(server, "process").text)
    answer = call(server, "hang", seconds=1.0)
    assert answer.is_error and "did not answer in time" in answer.text
    assert not is_running(before)
    assert call(server, "add", a=1, b=1) == Answer("2")


@pytest.mark.tier("all")
def test_closing_ends_the_process_and_the_thread_and_may_be_repeated(server):
    server.close()
    threads = mcp_threads()
    pid = int(call(server, "process").text)
    server.close()
    server.close()
    assert not is_running(pid)
    assert mcp_threads() <= threads
    assert call(server, "add", a=1, b=1) == Answer("2")  # opened anew


def test_a_server_sees_the_variables_of_its_configuration_only(monkeypatch):
    monkeypatch.setenv("CANARY", "bird")
    server = server_at(env={"GIVEN": "value"})
    try:
        assert call(server, "variable", key="CANARY").text == "is not set"
        assert call(server, "variable", key="GIVEN").text == "value"
    finally:
        server.close()


@pytest.mark.parametrize(
    ("server", "words"),
    [
        (McpServer(command="/no/such/program"), "/no/such/program"),
        (server_at("--broken"), "this server cannot start"),
        pytest.param(
            server_at("--no-answer", start_timeout_seconds=1.0), "did not answer in time", marks=pytest.mark.tier("all")
        ),
        (McpServer(url="http://127.0.0.1:9/mcp", start_timeout_seconds=20.0), "127.0.0.1:9"),
        (server_at(only=["add", "subtract"]), "no tool `subtract`"),
    ],
)
def test_a_server_that_cannot_be_had_is_named_with_the_cause(server, words):
    threads = mcp_threads()
    try:
        with pytest.raises(ToolUnavailable, match="MCP server `") as caught:
            server.tools()
        assert words in str(caught.value)
    finally:
        server.close()
    assert mcp_threads() <= threads


def test_some_tools_may_be_chosen_and_renamed():
    server = server_at(only=["add"], prefix="tiny_")
    try:
        assert [tool.name for tool in server.tools()] == ["tiny_add"]
        assert call(server, "tiny_add", a=1, b=1) == Answer("2")
    finally:
        server.close()


@pytest.mark.tier("all")
def test_a_server_at_an_address_is_used_and_may_come_back():
    port = free_port()
    process = start_at(port)
    server = McpServer(url=f"http://127.0.0.1:{port}/mcp")
    try:
        assert call(server, "add", a=2, b=3) == Answer("5")
        process.kill()
        process.wait()
        assert call(server, "add", a=2, b=3).is_error
        process = start_at(port)
        assert call(server, "add", a=2, b=3) == Answer("5")
    finally:
        server.close()
        process.kill()
        process.wait()


def start_at(port: int) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--port", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process
        except OSError:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    "options", [{}, {"command": "a", "url": "http://b"}, {"url": "b"}, {"url": "http://b", "args": ["c"]}]
)
def test_options_that_cannot_be_meant_are_refused(options):
    with pytest.raises(ValueError):
        McpServer(**options)

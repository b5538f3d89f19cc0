from __future__ import annotations

import pytest

from roll.agentic.library.math_tools import MathToolsEnv
from roll.agentic.tools.base import Answer, Deadline, Tool, ToolUnavailable
from roll.agentic.tools.python import PythonTool
from roll.sandbox.sandbox import Sandbox
from tests.sandbox.sandboxes import needs_sandbox

pytestmark = needs_sandbox


def run(code: str, seconds: float = 60.0, **limits) -> Answer:
    tool = PythonTool(**limits)
    assert isinstance(tool, Tool)
    return tool.call({"code": code}, Deadline.after(seconds))


def test_what_is_printed_is_the_answer():
    assert run("print(6 * 7)") == Answer("42")


def test_silence_is_explained():
    assert run("6 * 7") == Answer("[the program printed nothing; print what you want to see]")


def test_an_exception_is_an_error_with_what_was_printed_before():
    answer = run("print('before')\nunknown")
    assert answer.is_error and answer.text.startswith("before\n") and "NameError" in answer.text


@pytest.mark.parametrize(
    ("code", "limits", "words"),
    [
        ("while True: pass", {"wall_seconds": 0.5}, "ran for too long"),
        ("while True: pass", {"cpu_seconds": 1, "wall_seconds": 30}, "processor time"),
        ("while True: print('x')", {}, "printed too much"),
        ("import os; os.kill(os.getpid(), 11)", {}, "ended by signal 11"),
        ("raise SystemExit(3)", {}, "ended with status 3"),
    ],
)
def test_an_end_by_force_is_told(code, limits, words):
    answer = run(code, **limits)
    assert answer.is_error and words in answer.text


def test_the_deadline_of_the_call_counts_too():
    assert "ran for too long" in run("while True: pass", seconds=0.5).text


def test_a_machine_without_a_sandbox_is_told_to_people_not_to_the_policy(monkeypatch):
    monkeypatch.setattr("roll.agentic.tools.python.default_sandbox", lambda: Sandbox(levels=[]))
    with pytest.raises(ToolUnavailable, match="Remedy: allow user namespaces"):
        run("print(1)")


def test_without_a_sandbox_the_tool_is_not_even_offered(monkeypatch):
    """Else only the episodes that call it would fail, and the policy would learn not to."""
    monkeypatch.setattr("roll.agentic.tools.python.default_sandbox", lambda: Sandbox(levels=[]))
    env = MathToolsEnv(tools=["python"])
    with pytest.raises(ToolUnavailable, match="Remedy"):
        env.reset(seed=0)

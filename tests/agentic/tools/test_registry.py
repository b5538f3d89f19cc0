from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import roll
from roll.agentic.tools.base import TOOLS, Answer, make_tools
from roll.configs.errors import problems_of
from roll.distribution import install_command

OWN = "tests.agentic.tools.test_registry:"


class Lamp:
    """A tool of a user's own."""

    name = "lamp"
    description = "Light."
    parameters = {"type": "object"}

    def __init__(self, watts: float, colour: str = "white") -> None:
        self.watts = watts
        self.colour = colour

    def call(self, arguments, deadline):
        return Answer("on")

    def close(self):
        pass


class NoTool:
    pass


def test_tools_are_made_by_name_and_by_path_with_their_options():
    specs = ["calculator", {"tool": "python", "wall_seconds": 3}, {"tool": OWN + "Lamp", "watts": "40"}]
    calculator, python, lamp = make_tools(specs, "tools")
    assert (calculator.name, python.name, lamp.name) == ("calculator", "python", "lamp")
    assert (lamp.watts, lamp.colour) == (40.0, "white")


@pytest.mark.parametrize(
    ("spec", "path", "words"),
    [
        ("calculater", "tools[0]", "did you mean `calculator`?"),
        ({"wall_seconds": 3}, "tools[0]", "names no tool"),
        (3, "tools[0]", "names no tool"),
        ({"tool": "python", "wall_secnds": 3}, "tools[0].wall_secnds", "did you mean `wall_seconds`?"),
        ({"tool": "python", "wall_seconds": "long"}, "tools[0].wall_seconds", "does not fit"),
        ({"tool": "python", "wall_seconds": 0}, "tools[0]", "must be positive"),
        ({"tool": "mcp"}, "tools[0]", "either `command`"),
        ({"tool": "calculator", "x": 1}, "tools[0].x", "no argument `x`"),
        (OWN + "Lamp", "tools[0].watts", "needs `watts`"),
        (OWN + "Lmap", "tools[0]", "has no 'Lmap'"),
        (OWN + "NoTool", "tools[0]", "is no tool"),
        (OWN + "OWN", "tools[0]", "is a str"),
    ],
)
def test_problems_name_the_place_and_the_remedy(spec, path, words):
    (problem,) = problems_of(lambda: make_tools([spec], "tools"))
    assert problem.path == path and words in str(problem)


def test_all_problems_are_told_at_once():
    problems = problems_of(lambda: make_tools(["a", "calculator", "b"], "t"))
    assert [each.path for each in problems] == ["t[0]", "t[2]"]


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = problems_of(lambda: make_tools([{"tool": "mcp", "url": "http://x"}], "tools"))
    assert "needs the module `mcp`" in problem.message and problem.remedy == install_command("mcp")


def test_tools_load_nothing_heavy():
    modules = [built_in.path.split(":")[0] for built_in in TOOLS.built_in.values()]
    modules += ["roll.agentic.tools.environment", "roll.agentic.library.math_tools"]
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "sys.exit(' '.join({'torch', 'transformers', 'vllm', 'ray', 'mcp'} & set(sys.modules)) or None)"
    )
    folder = Path(roll.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr

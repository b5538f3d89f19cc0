"""Who may know whom: every import of the package, also inside functions and under TYPE_CHECKING, follows the arrows.

api -> cli -> {doctor, report, simulation} -> pipeline -> {trainers, engines} -> {rewards, agentic, pictures, weights,
check} -> {data, algorithms, runtime} -> {configs, rollout}; `tracking` may be used by anyone, `sandbox` from rewards
and agentic on, and neither uses another room. Some rooms stay free of heavy libraries, in their sources and when
loaded.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "roll"

LEVELS = {
    "configs": 0,
    "rollout": 0,
    "data": 1,
    "algorithms": 1,
    "runtime": 1,
    "rewards": 2,
    "agentic": 2,
    "pictures": 2,
    "weights": 2,
    "check": 2,
    "trainers": 3,
    "engines": 3,
    "pipeline": 4,
    "doctor": 5,
    "report": 5,
    "simulation": 5,
    "cli": 6,
    "api": 7,
}
LEAVES = {"tracking": 0, "sandbox": 2}
"""Rooms that use no other one, and the lowest level of those that may use them."""
UPWARDS = {("pipeline/status.py", "doctor"), ("check/__init__.py", "api")}
"""Imports against the arrows: a run that stands still says why with the doctor's words before it ends, and the package
`roll.check` is called as the function of that name."""
FORBIDDEN_LIBRARIES = {
    "configs": {"torch", "ray", "transformers", "vllm", "sglang", "deepspeed", "megatron"},
    "rollout": {"torch", "ray"},
    "tracking": {"torch", "ray"},
    "sandbox": {"torch", "ray", "numpy", "pydantic"},
}


def may_import(importer: str, imported: str) -> bool:
    """Whether one room may use another."""
    if imported == importer:
        return True
    if imported in LEAVES:
        return importer in LEVELS and LEVELS[importer] >= LEAVES[imported]
    return importer in LEVELS and imported in LEVELS and LEVELS[imported] < LEVELS[importer]


def imported_modules(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of everything that a module of the package imports.

    ``from x import y`` counts as ``x.y``: whether ``y`` is a module or a name in one, the room is the same.
    """
    inside = (package.name, *path.relative_to(package).with_suffix("").parts)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [*inside[: len(inside) - node.level]] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            yield from ((node.lineno, ".".join([*parts, alias.name])) for alias in node.names)
        elif isinstance(node, ast.Call) and _is_dynamic_import(node):
            yield from ((node.lineno, str(name.value)) for name in node.args[:1] if isinstance(name, ast.Constant))


def _is_dynamic_import(call: ast.Call) -> bool:
    return ast.unparse(call.func).split(".")[-1] in ("import_module", "__import__")


def violations(package: Path) -> list[str]:
    """Every import that breaks the rule, as ``room/file.py:line: what``."""
    found = []
    for path in sorted(package.rglob("*.py")):
        place = path.relative_to(package)
        if len(place.parts) == 1:
            continue  # the package's own top modules wire the rooms together
        room = place.parts[0]
        if room not in LEAVES and room not in LEVELS:
            found.append(f"{place}: {room!r} is no room of the design")
            continue
        for line, name in imported_modules(path, package):
            problem = _problem(room, name.split("."), package.name)
            if problem and (str(place), ".".join(name.split(".")[1:2])) not in UPWARDS:
                found.append(f"{place}:{line}: {problem}")
    return found


def _problem(room: str, name: list[str], package: str) -> str | None:
    if name[0] != package:
        return f"{room} must not import {name[0]}" if name[0] in FORBIDDEN_LIBRARIES.get(room, ()) else None
    imported = name[1] if len(name) > 1 else ""
    if imported in (*LEAVES, *LEVELS) and not may_import(room, imported):
        return f"{room} must not import {imported}"
    return None


def test_the_package_keeps_the_rule():
    assert violations(PACKAGE) == []


def test_the_mathematics_reads_no_configuration():
    """Arguments reach it as plain values; how they are checked is the same for every kind of plug-in."""
    known = ("roll.configs.plugins.", "roll.configs.errors.")
    imported = {
        name
        for path in (PACKAGE / "algorithms").rglob("*.py")
        for _, name in imported_modules(path, PACKAGE)
        if name.startswith("roll.configs")
    }
    assert all(name.startswith(known) for name in imported)


def test_the_sandbox_needs_the_standard_library_only():
    """Its supervisor runs in a bare interpreter."""
    imported = {
        name.split(".")[0]
        for path in (PACKAGE / "sandbox").rglob("*.py")
        for _, name in imported_modules(path, PACKAGE)
    }
    assert imported <= {"roll", *sys.stdlib_module_names}


@pytest.mark.parametrize("room", sorted(FORBIDDEN_LIBRARIES))
def test_loading_a_light_room_loads_no_heavy_library(room):
    """What the sources do not import, they might still pull in through a room below."""
    modules = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts) for path in (PACKAGE / room).rglob("*.py")
    ]
    code = (
        "import importlib, sys\n"
        f"for name in {sorted(modules)!r}: importlib.import_module(name)\n"
        f"sys.exit(' '.join(sorted({FORBIDDEN_LIBRARIES[room]!r} & set(sys.modules))) or None)"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=PACKAGE.parent, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def synthetic(tmp_path: Path, place: str, source: str) -> list[str]:
    """Violations of a package with this one module."""
    path = tmp_path / "roll" / place
    path.parent.mkdir(parents=True)
    path.write_text(source)
    return violations(tmp_path / "roll")


@pytest.mark.parametrize(
    ("place", "source", "problem"),
    [
        ("configs/a.py", "import torch", "configs must not import torch"),
        ("configs/a.py", "import torch.nn as nn", "configs must not import torch"),
        ("configs/a.py", "from transformers import AutoModel", "configs must not import transformers"),
        ("configs/a.py", "from roll.data import records", "configs must not import data"),
        ("rollout/a.py", "def f():\n    import ray", "rollout must not import ray"),
        ("rollout/a.py", "import importlib\nimportlib.import_module('torch')", "rollout must not import torch"),
        ("rollout/a.py", "from roll.rewards.math import judge", "rollout must not import rewards"),
        ("rollout/a.py", "if TYPE_CHECKING:\n    import roll.pipeline.stage", "rollout must not import pipeline"),
        ("rollout/a.py", "from .. import trainers", "rollout must not import trainers"),
        ("data/a.py", "from ..rewards.math import judge", "data must not import rewards"),
        ("data/deep/a.py", "from ...rewards import math", "data must not import rewards"),
        ("data/a.py", "from roll import rewards", "data must not import rewards"),
        ("algorithms/a.py", "from roll.data.records import Sample", "algorithms must not import data"),
        ("runtime/a.py", "import roll.engines.hf.engine", "runtime must not import engines"),
        ("trainers/a.py", "from roll.engines.base import Engine", "trainers must not import engines"),
        ("pipeline/a.py", "from roll.doctor.diagnosis import WaitGraph", "pipeline must not import doctor"),
        ("tracking/a.py", "from roll.configs.run import RLVRConfig", "tracking must not import configs"),
        ("sandbox/a.py", "from roll.configs.run import RLVRConfig", "sandbox must not import configs"),
        ("sandbox/a.py", "from roll.tracking.timeline import Timeline", "sandbox must not import tracking"),
        ("data/a.py", "from roll.sandbox.sandbox import Sandbox", "data must not import sandbox"),
        ("tracking/a.py", "from ..sandbox.sandbox import Sandbox", "tracking must not import sandbox"),
        ("cellar/a.py", "", "no room of the design"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, place, source, problem):
    (found,) = synthetic(tmp_path, place, source)
    assert problem in found


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("data/a.py", "from roll.rollout.ledger import Ledger\nfrom roll.configs.run import RLVRConfig"),
        ("rollout/a.py", "from roll.tracking.timeline import Timeline\nfrom .ledger import Ledger"),
        ("data/__init__.py", "from . import prompts\nfrom ..rollout import clock"),
        ("trainers/megatron/a.py", "import torch\nfrom .. import base\nfrom ...weights import buckets"),
        ("configs/a.py", "from .errors import ConfigError\nimport torchless"),
        ("rewards/a.py", "from roll.sandbox.sandbox import Sandbox"),
        ("agentic/tools/a.py", "from ...sandbox.sandbox import Sandbox"),
        ("sandbox/a.py", "from roll.sandbox.filesystem import remove_folder"),
        ("pipeline/a.py", "import ray\nfrom roll.runtime import worker"),
        ("cli.py", "from roll.pipeline import rlvr"),
    ],
)
def test_a_right_import_is_let_through(tmp_path, place, source):
    assert synthetic(tmp_path, place, source) == []

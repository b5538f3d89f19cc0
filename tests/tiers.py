"""Which tests a command runs, and what a machine must have for them.

`make test` runs what a person waits for, `make test-all` everything that a change may break, `make soak` what takes
hours. A test says which it needs by `@pytest.mark.tier("all")` or `@pytest.mark.tier("soak")`; unmarked ones run in all
but the last. pytest without `--tier` runs what it is asked for, but for soak tests.
"""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Collection, Container, Iterable
from typing import Any

import pytest

TIERS = ("quick", "all", "soak")
BUDGETS = {"quick": 0.2, "all": 0.5, "soak": 20.0}
"""Share of the examples that a property test names."""
PACKAGES = (
    *("vllm", "deepspeed", "megatron.core", "peft", "mcp", "textarena", "aiohttp", "datasets", "diffusers"),
    *("wandb", "swanlab", "trackio", "openai", "anthropic", "websockets"),
)
PROGRAMS = {"chromium": ("chromium", "chromium-browser", "google-chrome")}
"""The names that a program goes by."""
INSTALL_HINTS = {
    "chromium": "Debian's package of that name",
}
MISSING = "not installed: "

_tier = "all"


def choose(tier: str | None) -> None:
    """Set the tier of this process, before tests are collected."""
    global _tier
    _tier = tier or "all"


def examples(count: int) -> int:
    """Hypothesis examples of a property test in the chosen tier; ``count`` is what its author found enough."""
    return max(5, round(count * BUDGETS[_tier]))


def quick(names: Iterable[str], *chosen: str, soaked: Collection[str] = ()) -> list[Any]:
    """Names as parameters of a test: the chosen ones run for each change, others in `make test-all` or `make soak`."""
    names = [*names]
    assert {*chosen} <= {*names}
    marks = {name: pytest.mark.tier("soak" if name in soaked else "all") for name in names if name not in chosen}
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


def soak_but(chosen: Container[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters of a test, each a value or a tuple: the chosen ones run as the test does, others in `make soak`."""
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)),
            marks=() if each in chosen else pytest.mark.tier("soak"),
        )
        for each in every
    ]


def is_soak() -> bool:
    """Whether examples are to be other ones each time."""
    return _tier == "soak"


def runs_in(tier: str | None, smallest: str) -> bool:
    """Whether a test marked with the tier ``smallest`` runs in ``tier`` (None: no tier was chosen)."""
    if tier is None or tier == "all":
        return smallest != "soak"
    return smallest == tier


def is_here(name: str) -> bool:
    """Whether a package can be imported, or a program is on the path."""
    if name in PROGRAMS:
        return program(name) is not None
    parent = name.partition(".")[0]
    return importlib.util.find_spec(parent) is not None and importlib.util.find_spec(name) is not None


def program(name: str) -> str | None:
    """The path of a program under one of its names."""
    return next(filter(None, map(shutil.which, PROGRAMS[name])), None)


def missing() -> list[str]:
    """Packages and programs that `make test-all` must have and this machine lacks."""
    return [name for name in (*PACKAGES, *PROGRAMS) if not is_here(name)]


def need(*names: str) -> None:
    """Skip a test, or from its top level a module, where a package or program is not installed."""
    absent = [name for name in names if not is_here(name)]
    if absent:
        pytest.skip(MISSING + ", ".join(absent), allow_module_level=True)

"""The Python interface, described in `docs/python.md`.

Every name is imported on first use. So ``import roll`` takes milliseconds and needs neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from roll.api.checks import Check
    from roll.api.checks import check as check
    from roll.api.configuration import load_config
    from roll.api.runs import Page, Run, compare, open_run
    from roll.api.training import RunFailed, train
    from roll.configs.errors import ConfigError, ConfigProblem
    from roll.configs.run import AgenticConfig, ImageConfig, RLVRConfig, SFTConfig

    __version__: str

_PLACES = {
    "AgenticConfig": "roll.configs.run",
    "Check": "roll.api.checks",
    "ConfigError": "roll.configs.errors",
    "ConfigProblem": "roll.configs.errors",
    "ImageConfig": "roll.configs.run",
    "Page": "roll.api.runs",
    "RLVRConfig": "roll.configs.run",
    "Run": "roll.api.runs",
    "RunFailed": "roll.api.training",
    "SFTConfig": "roll.configs.run",
    "compare": "roll.api.runs",
    "load_config": "roll.api.configuration",
    "open_run": "roll.api.runs",
    "train": "roll.api.training",
}
_ROOMS = ("algorithms", "check")
"""Packages that are public. `roll.check` can also be called as a function."""

__all__ = [
    "AgenticConfig",
    "Check",
    "ConfigError",
    "ConfigProblem",
    "ImageConfig",
    "Page",
    "RLVRConfig",
    "Run",
    "RunFailed",
    "SFTConfig",
    "__version__",
    "algorithms",
    "check",
    "compare",
    "load_config",
    "open_run",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        found: Any = import_module("roll.distribution").version()
    elif name in _ROOMS:
        found = import_module(f"roll.{name}")
    elif name in _PLACES:
        found = getattr(import_module(_PLACES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

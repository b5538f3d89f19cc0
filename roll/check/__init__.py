"""Checks of a configuration before anything loads: can it work, what does it compute, which memory does it need?

Nothing here imports torch, ray or an engine, or touches a model or a GPU. The package is also the public function
`roll.check`: calling it checks a configuration (`roll.api.checks`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that can be called. `roll.check` cannot be a plain function, since the package has its name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from roll.api.checks import check

        return check(*arguments, **options)


sys.modules[__name__].__class__ = _Callable

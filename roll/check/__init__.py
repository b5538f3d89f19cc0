"""What a configuration means: whether it can work, its arithmetic, its memory and its needs.

Nothing here imports torch, ray or an engine, or touches a model or a GPU. This package is also the function
`roll.check` of the public face: calling it checks a configuration (`roll.api.checks`).
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    """A package that is called: `roll.check` cannot be a function, since importing the package takes the name."""

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from roll.api.checks import check

        return check(*arguments, **options)


sys.modules[__name__].__class__ = _Callable

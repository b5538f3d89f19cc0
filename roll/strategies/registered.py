"""Turns a registered name into a strategy's class. The class is imported only now, so naming a strategy costs
nothing."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from roll.data.imports import import_object


def registered_class(registered: Mapping[str, str], name: str, own: str | None = None) -> type:
    """Return the class under ``name`` in ``registered`` (name -> ``module:class``), or its subclass at the import path
    ``own``.

    Raises ``ImportError`` if a module or class is missing, ``TypeError`` if ``own`` is not derived from the registered
    class.
    """
    module, _, class_name = registered[name].partition(":")
    base: type = getattr(importlib.import_module(module), class_name)
    if own is None:
        return base
    found = import_object(own)
    if not (isinstance(found, type) and issubclass(found, base)):
        raise TypeError(f"{own!r} is not a subclass of {module}.{class_name}")
    return found

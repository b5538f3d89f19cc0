"""Objects of the user's own code, named in a configuration as `package.module:attribute`.

Importable is what is installed, what is on `PYTHONPATH`, and what is in the working folder: a console command does not
look there by itself, and a user who writes a file beside the configuration expects it to be found.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def import_object(path: str) -> Any:
    """The object at ``package.module:attribute`` (the attribute may be dotted).

    The working folder is appended to this process' import path, so that it never hides what is installed.

    Raises `ImportError` that says which part was not found; an error raised by the module itself is shown as its cause.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ImportError(f"{path!r} is not of the form `package.module:attribute`")
    try:
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ImportError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ImportError(f"module {module_name!r} has no {attribute!r}") from None
    return found

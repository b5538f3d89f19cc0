"""Users' code: its import by `package.module:attribute`, and its arguments, converted to the types that it asks for.

Importable are installed packages, `PYTHONPATH` and the working folder. A console command does not search the working
folder by itself, but a user who writes a file beside the configuration expects it to be found. All processes of a run
find the same modules, and relative paths mean the same to them, even if their Ray was started elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from roll.configs.errors import ConfigProblem, shown


def converted_arguments(
    arguments: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter], path: str
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Convert arguments to the types that the annotations of their parameters name.

    A regular expression is compiled, for example. Arguments without a type stay unchanged. ``path`` is the
    configuration path of ``arguments``. Returns the arguments and the problems of those that do not fit.
    """
    converted, problems = dict(arguments), []
    for key, value in arguments.items():
        annotation = parameters[key].annotation if key in parameters else inspect.Parameter.empty
        if annotation is inspect.Parameter.empty or isinstance(annotation, str):
            continue
        try:
            converted[key] = _type_adapter(annotation).validate_python(value)
        except ValidationError as cause:
            reason = cause.errors()[0]["msg"]
            wanted = annotation.__name__ if isinstance(annotation, type) else annotation
            message = f"{shown(value, key)} does not fit ({reason})"
            problems.append(ConfigProblem(f"{path}.{key}", message, f"a value for `{wanted}`"))
    return converted, problems


def _type_adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except PydanticUserError:  # the type has its own settings
        return TypeAdapter(annotation)


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriverFolders:
    """Working folder and import path of a driver, which its workers take over."""

    work: str | None = None
    """None if the folder does not exist any more, or if a worker stays in its own."""
    imports: tuple[str, ...] = ()

    def enter(self) -> None:
        """Make them this process's own. Folders that only this process searches come last."""
        sys.path[:] = [*self.imports, *(entry for entry in sys.path if entry not in self.imports)]
        if self.work is not None:
            with suppress(OSError):  # the folder does not exist on another host
                os.chdir(self.work)


def driver_folders() -> DriverFolders:
    """Return the folders of this process."""
    work = working_folder()
    if work is None:
        logger.warning("the working folder has been deleted: relative paths have no meaning, here and in workers")
    return DriverFolders(work, tuple(dict.fromkeys(_import_folders(work))))


def working_folder() -> str | None:
    """Return this process's working folder, or None if it was deleted: only relative paths need it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def look_in_working_folder() -> None:
    """Append the working folder to the import path of this process, so that it never hides what is installed."""
    folder = working_folder()
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def _import_folders(work: str | None) -> Iterator[str]:
    """Yield the import path; the working folder comes last unless it stands earlier."""
    for entry in filter(None, sys.path) if work is None else (*sys.path, work):
        is_relative = work is not None and os.path.exists(os.path.join(work, entry))
        yield os.path.abspath(entry) if is_relative else entry  # otherwise it may be a key of a path hook


def import_object(path: str) -> Any:
    """Return the object at ``package.module:attribute`` (the attribute may be dotted).

    Searches the working folder last.

    Raises `ImportError` with the part that was not found; an error raised by the module itself is its cause.
    """
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ImportError(f"{path!r} is not of the form `package.module:attribute`")
    try:
        look_in_working_folder()
        found: Any = importlib.import_module(module_name)
    except Exception as error:
        raise ImportError(f"module {module_name!r} cannot be imported: {type(error).__name__}: {error}") from error
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise ImportError(f"module {module_name!r} has no {attribute!r}") from None
    return found


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

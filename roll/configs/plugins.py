"""Plug-ins: turn a name in a configuration into an object and its checked arguments, in the same way for every kind.

A name is built in, or an entry point of an installed package in the group of its kind, or an import path
`package.module:object`, or the token of an object that a Python program passed (`roll.configs.given`). Modules are
imported from installed packages, `PYTHONPATH` and the working folder. A console command does not search the working
folder by itself, but a user who writes a file beside the configuration expects it to be found.

The arguments are those of the object's signature. Their types are its annotations; a range and a help text are
written as ``Annotated[float, Field(gt=0, description="...")]``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import entry_points
from typing import Annotated, Any, Generic, Literal, TypeVar, get_args, get_origin

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic.fields import FieldInfo

from roll.configs.errors import ConfigError, ConfigProblem, choose_among, nearest, nearest_name_hint, shown
from roll.configs.fields import describe
from roll.configs.given import NotGiven, given_object, is_given
from roll.distribution import EXTRAS, PACKAGES, install_command


@dataclass(frozen=True)
class PlugIn:
    """Import path and requirements of a plug-in. Subclasses add facts that are needed before it is imported."""

    path: str
    """Import path, ``package.module:object``."""
    requires: tuple[str, ...] = ()
    """Modules that are not installed with `roll`."""
    extra: str | None = field(default=None, kw_only=True)
    """The extra that installs them, if it differs from the usual extra of the module (`roll.distribution`)."""


Record = TypeVar("Record", bound=PlugIn)


@dataclass(frozen=True)
class Kind(Generic[Record]):
    """One kind of plug-in. A new built-in plug-in needs a file, and a line in ``built_in``."""

    name: str
    """Singular noun for messages, for example ``policy loss``."""
    group: str
    """Entry-point group in which packages name their plug-ins, for example ``roll.policy_losses``."""
    built_in: Mapping[str, Record]
    record: Callable[[str], Record]
    """Function that makes the record of a plug-in that is not built in, from its import path."""
    form: str = "package.module:function"
    """Form of an import path, for messages."""
    base: str | None = None
    """Import path of the base class that each class of this kind must have."""
    members: tuple[str, ...] = ()
    """Names of the attributes that each class of this kind must have; for kinds without a base class."""

    def names(self) -> list[str]:
        """Return the names that need no import path, sorted."""
        return sorted({*self.built_in, *self._entry_points()})

    def find(self, name: str, where: str) -> Record:
        """Return the record of a plug-in; imports nothing. ``where`` is the configuration path that named it.

        Raises `ConfigError` for a name that is not known.
        """
        if name in self.built_in:
            return self.built_in[name]
        if ":" in name:
            return self.record(name)
        installed = self._entry_points()
        if name in installed:
            return self.record(installed[name])
        hint, known = nearest_name_hint(name, self.names()), nearest(name, self.names())
        remedy = f"{hint} Or use" if known else f"{hint}; or use"
        raise problem(where, f"there is no {self.name} `{name}`", f"{remedy} an import path `{self.form}`")

    def load(self, name: str, where: str) -> Callable[..., Any]:
        """Return the class or function of a plug-in.

        Raises `ConfigError` if it is not known, needs a package that is not installed, cannot be imported, cannot be
        called, or is not a class of this kind.
        """
        found = self.find(name, where)
        require(found.requires, name, where, found.extra)
        if name in self.built_in:
            return load_object(found.path, where)
        if self.base is not None:
            return load_subclass(found.path, import_object(self.base), where)
        loaded = load_object(found.path, where)
        lacking = [member for member in self.members if isinstance(loaded, type) and not hasattr(loaded, member)]
        if lacking:
            message = f"`{name}` is no {self.name}: it has no {' and no '.join(f'`{each}`' for each in lacking)}"
            raise problem(where, message, "name a class that has")
        return loaded

    def _entry_points(self) -> dict[str, str]:
        look_in_working_folder()
        return {each.name: each.value for each in _installed(_path_now()).select(group=self.group)}


def _path_now() -> tuple[tuple[str, int], ...]:
    """Return the folders of ``sys.path`` with their modification times, which change with the installed packages."""
    folders = map(os.path.abspath, sys.path)
    return tuple((folder, os.stat(folder).st_mtime_ns if os.path.exists(folder) else 0) for folder in folders)


@lru_cache(maxsize=1)
def _installed(_path: tuple[tuple[str, int], ...]) -> Any:
    """Return all entry points, cached for each state of the path: reading them takes tens of milliseconds."""
    return entry_points()


def problem(path: str, message: str, remedy: str) -> ConfigError:
    """Return a `ConfigError` with a single problem."""
    return ConfigError([ConfigProblem(path, message, remedy)])


def require(modules: Collection[str], name: str, where: str, extra: str | None = None) -> None:
    """Raise `ConfigError` if a module that ``name`` needs is not installed. ``extra``: see `PlugIn`."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            known = module in EXTRAS or module in PACKAGES
            remedy = install_command(module, extra) if known else "install it as its documentation says"
            raise problem(where, f"`{name}` needs the module `{module}`, which is not installed", remedy)


IMPORT_REMEDY = "correct it, or make the module importable from the working folder or PYTHONPATH"
GIVE_REMEDY = "give it again to `roll.train`, or put it in a file and write `package.module:object`"


def load_object(path: str, where: str) -> Callable[..., Any]:
    """Return the class or function at an import path. Raises `ConfigError` with the path ``where``."""
    try:
        found = import_object(path)
    except NotGiven as cause:
        raise problem(where, str(cause), GIVE_REMEDY) from cause
    except ImportError as cause:
        raise problem(where, str(cause), IMPORT_REMEDY) from cause
    if not callable(found):
        raise problem(where, f"`{path}` is a {type(found).__name__}", "name a class or a function")
    return found


def load_subclass(path: str, base: type, where: str) -> type:
    """Return the class at an import path. Raises `ConfigError` if it is not derived from ``base``."""
    found = load_object(path, where)
    if not (isinstance(found, type) and issubclass(found, base)):
        message = f"`{path}` is not a subclass of {base.__name__}"
        raise problem(where, message, f"derive it from {base.__module__}.{base.__name__}")
    return found


def import_object(path: str) -> Any:
    """Return the object at ``package.module:attribute`` (the attribute may be dotted), or the object of a token.

    Searches the working folder last. Raises `ImportError` with the part that was not found; an error raised by the
    module itself is its cause.
    """
    if is_given(path):
        return given_object(path)
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


def working_folder() -> str | None:
    """Return this process's working folder, or None if the folder was deleted. Only relative paths need it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def look_in_working_folder() -> None:
    """Append the working folder to the import path of this process; at the end it never hides installed modules."""
    folder = working_folder()
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)


def parameters_of(function: Callable[..., Any], name: str, where: str) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a plug-in by name. Raises `ConfigError` if there is no signature to read."""
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # annotations that only a type checker can resolve: their values are not converted
        return inspect.signature(function).parameters
    except (TypeError, ValueError) as cause:
        message = f"the signature of `{name}` cannot be read ({cause})"
        raise problem(where, message, "wrap it in a Python function") from cause


def by_name(parameters: Mapping[str, inspect.Parameter], filled: Collection[str] = ()) -> dict[str, inspect.Parameter]:
    """Return the parameters that can be given by name, except those in ``filled``."""
    return {key: each for key, each in parameters.items() if each.kind in _BY_NAME and key not in filled}


def takes_anything(parameters: Mapping[str, inspect.Parameter]) -> bool:
    """Return True if the parameters include ``**kwargs``."""
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())


def checked_arguments(
    name: str,
    parameters: Mapping[str, inspect.Parameter],
    arguments: Mapping[str, Any],
    where: str,
    *,
    filled: Collection[str] = (),
    strict: bool = False,
    owners: Callable[[str], list[str]] = lambda key: [],
) -> dict[str, Any]:
    """Return a user's arguments, checked and converted to the types of the parameters.

    ``name`` is the name of the plug-in in messages. ``where`` is the configuration path of the arguments. ``filled``
    holds the parameters that the run fills itself. With ``strict``, integers become floats and nothing else is
    converted; without it, a string may become a regular expression, for example. ``owners`` returns the other plug-ins
    that have an argument of a given name. Raises `ConfigError` with every unknown or missing name and every value that
    does not fit.
    """
    named = by_name(parameters, filled)
    anything = takes_anything(parameters)
    problems, checked = [], dict(arguments)
    for key, each in parameters.items():
        if each.default is not inspect.Parameter.empty or each.kind in _OPEN:
            continue
        if each.kind is inspect.Parameter.POSITIONAL_ONLY:
            message = f"`{name}` takes `{key}` by position only"
            problems.append(ConfigProblem(where, message, "arguments are given by name"))
        elif key not in arguments and key not in filled:
            message = f"`{name}` needs `{key}`, which is not set"
            others = f"; the run itself fills {', '.join(f'`{each}`' for each in sorted(filled))}" if filled else ""
            meant = nearest(key, filled)
            others = f"; did you mean `{meant}`? The run fills that" if meant else others
            problems.append(ConfigProblem(f"{where}.{key}", message, f"set `{where}.{key}`{others}"))
    for key, value in arguments.items():
        if key in filled:
            problems.append(ConfigProblem(f"{where}.{key}", f"`{key}` is filled by the run", "leave it out"))
        elif key in named:
            try:
                checked[key] = converted(value, named[key].annotation, strict)
            except ValidationError as cause:
                problems.append(_misfit(f"{where}.{key}", key, value, named[key].annotation, cause))
        elif not anything:
            others = " and ".join(f"`{other}`" for other in owners(key))
            message = f"`{name}` has no argument `{key}`" + (f", which belongs to {others}" if others else "")
            problems.append(ConfigProblem(f"{where}.{key}", message, choose_among(str(key), sorted(named))))
    if problems:
        raise ConfigError(problems)
    return checked


Made = TypeVar("Made")


def made(
    name: str,
    factory: Callable[..., Made],
    arguments: Mapping[str, Any],
    where: str,
    owners: Callable[[str], list[str]] = lambda key: [],
    *,
    filled: Collection[str] = (),
    strict: bool = True,
) -> Made:
    """Check a user's arguments (`checked_arguments`), and return the result of calling ``factory`` with them.

    Raises `ConfigError`, also where the factory itself rejects a combination of arguments with ``ValueError``.
    """
    parameters = parameters_of(factory, name, where)
    checked = checked_arguments(name, parameters, arguments, where, filled=filled, strict=strict, owners=owners)
    try:
        return factory(**checked)
    except ValueError as cause:
        raise problem(where, f"`{name}`: {cause}", "change one of them") from cause


def help_text(annotation: Any) -> str:
    """Return the help text of an annotation: the description of its outermost `Field` with one; empty without any."""
    notes = get_args(annotation)[1:] if get_origin(annotation) is Annotated else ()
    return next((note.description for note in reversed(notes) if isinstance(note, FieldInfo) and note.description), "")


def _misfit(path: str, key: str, value: Any, annotation: Any, cause: ValidationError) -> ConfigProblem:
    message = f"{shown(value, key)} does not fit ({cause.errors()[0]['msg']})"
    inside = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    if get_origin(inside) is Literal and isinstance(value, str):
        return ConfigProblem(path, message, nearest_name_hint(value, map(str, get_args(inside))))
    return ConfigProblem(path, message, f"write {describe(annotation)}")


def converted(value: Any, annotation: Any, strict: bool) -> Any:
    """Return a value converted to the annotated type, or raise pydantic's ``ValidationError``.

    ``strict``: see `checked_arguments`.
    """
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return value
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True, strict=strict))
    except PydanticUserError:  # the type has its own settings
        adapter = TypeAdapter(annotation)
    return adapter.validate_python(value)


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_OPEN = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)

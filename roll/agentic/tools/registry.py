"""Tools by name or import path, checked against their signature before anything runs.

A tool in a configuration is a name, or a mapping of `tool` and the keyword arguments of its class. A new built-in tool
is one file and one line in `BUILT_IN`; a user's own tool is `package.module:Class`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from roll.agentic.tools.base import Tool, Toolset
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.wording import shown
from roll.data.imports import import_object
from roll.data.names import nearest_name_hint


@dataclass(frozen=True)
class BuiltIn:
    """The import path of a built-in tool, and the optional package that it needs."""

    import_path: str
    package: str | None = None


BUILT_IN = {
    "python": BuiltIn("roll.agentic.tools.python_tool:PythonTool"),
    "calculator": BuiltIn("roll.agentic.tools.calculator:Calculator"),
    "mcp": BuiltIn("roll.agentic.tools.mcp_tool:McpServer", package="mcp"),
}

ToolSpec = str | Mapping[str, Any]


def check_tools(specs: Sequence[ToolSpec], path: str) -> list[ConfigProblem]:
    """Return the problems of the tools configured at ``path``. Starts nothing."""
    problems = []
    for index, spec in enumerate(specs):
        try:
            _made(spec, f"{path}[{index}]")
        except ConfigError as error:
            problems += error.problems
    return problems


def make_tools(specs: Sequence[ToolSpec], path: str) -> list[Tool | Toolset]:
    """Return the tools configured at ``path``. Raises `ConfigError` with every problem."""
    problems = check_tools(specs, path)
    if problems:
        raise ConfigError(problems)
    return [_made(spec, f"{path}[{index}]") for index, spec in enumerate(specs)]


def _made(spec: ToolSpec, path: str) -> Tool | Toolset:
    name, options = _name_and_options(spec, path)
    made_by = _found(name, path)
    arguments = _checked_options(name, made_by, options, path)
    try:
        tool = made_by(**arguments)
    except ValueError as cause:
        raise _error(path, f"`{name}` cannot be made: {cause}", "correct its options") from cause
    if not isinstance(tool, Tool | Toolset):
        remedy = "see roll.agentic.tools.base for what a `Tool` or a `Toolset` has"
        raise _error(path, f"`{name}` gives a {type(tool).__name__}, which is no tool", remedy)
    return tool


def _name_and_options(spec: ToolSpec, path: str) -> tuple[str, dict[str, Any]]:
    options: dict[str, Any] = {}
    if isinstance(spec, str):
        options = {"tool": spec}
    elif isinstance(spec, Mapping):
        options = dict(spec)
    name = options.pop("tool", None)
    if not isinstance(name, str) or not name:
        remedy = "write a name such as `calculator`, or a mapping with `tool` and the tool's options"
        raise _error(path, f"{shown(spec)} names no tool", remedy)
    return name, options


def _found(name: str, path: str) -> Any:
    if name not in BUILT_IN and ":" not in name:
        hint = nearest_name_hint(name, BUILT_IN)
        raise _error(path, f"there is no tool `{name}`", f"{hint}; or use an import path `package.module:Class`")
    built_in = BUILT_IN.get(name, BuiltIn(name))
    if built_in.package is not None and importlib.util.find_spec(built_in.package) is None:
        message = f"the tool `{name}` needs the package `{built_in.package}`"
        raise _error(path, message, f"pip install {built_in.package}")
    try:
        found = import_object(built_in.import_path)
    except ImportError as cause:
        remedy = "correct it, or make the module importable from the working folder or PYTHONPATH"
        raise _error(path, str(cause), remedy) from cause
    if not callable(found):
        raise _error(path, f"`{name}` is a {type(found).__name__}", "name a class")
    return found


def _checked_options(name: str, made_by: Any, options: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Return the options, converted to the types of the signature. Raises `ConfigError`."""
    try:
        parameters = inspect.signature(made_by, eval_str=True).parameters
    except (NameError, TypeError, ValueError) as cause:
        raise _error(path, f"the signature of `{name}` cannot be read ({cause})", "wrap it in a class") from cause
    takes_anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    named = {key: each for key, each in parameters.items() if each.kind not in _NOT_BY_NAME}
    problems, values = [], dict(options)
    for key, each in named.items():
        if each.default is inspect.Parameter.empty and key not in options:
            problems.append(ConfigProblem(f"{path}.{key}", f"`{name}` needs it", "set it"))
    for key, value in options.items():
        if key in named:
            try:
                values[key] = _converted(value, named[key].annotation)
            except ValidationError as cause:
                message = f"{shown(value, key)} does not fit ({cause.errors()[0]['msg']})"
                problems.append(ConfigProblem(f"{path}.{key}", message, f"a value for `{named[key].annotation}`"))
        elif not takes_anything:
            message = f"`{name}` has no option `{key}`"
            problems.append(ConfigProblem(f"{path}.{key}", message, nearest_name_hint(key, named)))
    if problems:
        raise ConfigError(problems)
    return values


_NOT_BY_NAME = (
    inspect.Parameter.VAR_KEYWORD,
    inspect.Parameter.VAR_POSITIONAL,
    inspect.Parameter.POSITIONAL_ONLY,
)


def _converted(value: Any, annotation: Any) -> Any:
    return value if annotation is inspect.Parameter.empty else TypeAdapter(annotation).validate_python(value)


def _error(path: str, message: str, remedy: str) -> ConfigError:
    return ConfigError([ConfigProblem(path, message, remedy)])

"""Keyword arguments from a configuration, converted to the types that a user's function or class asks for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from roll.configs.errors import ConfigProblem
from roll.configs.wording import shown


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

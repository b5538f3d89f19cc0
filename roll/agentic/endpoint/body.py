"""Parsing of request bodies field by field, with type checks and errors that name the field.

Fields that are never read have no effect; their names are collected. A field that would change the answer but is not
supported is refused, with a remedy. Whatever a client sends, only `RequestRefused` is raised.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NoReturn

from roll.agentic.endpoint.json_text import loaded, problem_of
from roll.agentic.endpoint.records import RequestRefused
from roll.agentic.episode import Message

_MOST_NAMES = 64
_KINDS = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    dict: "an object",
}


class Body:
    """A JSON object of a request: the whole body, or an object inside it."""

    def __init__(self, value: Any, path: str = "", without_effect: dict[str, None] | None = None) -> None:
        """Check that the value is an object, and the whole request valid JSON. Raises `RequestRefused`.

        ``path``: where the object is in the request. ``without_effect``: names collected so far, for a nested object.
        """
        if without_effect is None and (problem := problem_of(value)):
            raise RequestRefused(f"the request {problem}")
        if not isinstance(value, dict):
            raise RequestRefused(f"{f'`{path}`' if path else 'the request'} must be an object", field=path or None)
        self._values = {name: each for name, each in value.items() if each is not None}
        self._path = path
        self._taken: set[str] = set()
        self._without_effect = {} if without_effect is None else without_effect

    def refuse(self, name: str, why: str) -> NoReturn:
        """Raise `RequestRefused` because of a field."""
        path = self.where(name)
        raise RequestRefused(f"`{path}` {why}", field=path)

    def take(self, name: str, *kinds: type) -> Any:
        """Return a field whose type is one of ``kinds`` (keys of `_KINDS`); None if it is absent."""
        self._taken.add(name)
        value = self._values.get(name)
        if value is not None and type(value) not in kinds:
            self.refuse(name, f"must be {' or '.join(_KINDS[kind] for kind in kinds)}")
        return value

    def text(self, name: str, *, required: bool = False) -> str:
        """Return a string field; empty if it is absent. A ``required`` field may not be empty."""
        value = self.take(name, str) or ""
        if required and not value:
            self.refuse(name, "is missing")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean field, or ``default`` if it is absent."""
        value = self.take(name, bool)
        return default if value is None else value

    def count(self, name: str) -> int | None:
        """Return an integer field of at least 1; None if it is absent."""
        value = self.take(name, int)
        if value is not None and value < 1:
            self.refuse(name, "must be at least 1")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """Return a number field within bounds; None if it is absent."""
        value = self.take(name, float, int)
        if value is not None and not least <= value <= most:
            self.refuse(name, f"must be from {least:g} to {most:g}")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a field that is a non-empty string or a list of them."""
        value = self.take(name, str, list)
        found = tuple([value] if isinstance(value, str) else value or ())
        if not all(isinstance(each, str) and each for each in found):
            self.refuse(name, "must be texts that are not empty")
        return found

    def part(self, name: str) -> Body | None:
        """Return a nested object; None if it is absent."""
        value = self.take(name, dict)
        return None if value is None else self._inside(value, name)

    def parts(self, name: str) -> list[Body]:
        """Return a list of nested objects."""
        return [self._inside(each, f"{name}[{i}]") for i, each in enumerate(self.take(name, list) or ())]

    def forbid(self, name: str, remedy: str, *allowed: Any) -> None:
        """Refuse the field, unless it is absent or has one of the ``allowed`` values, which change nothing."""
        self._taken.add(name)
        value = self._values.get(name)
        if value is not None and not any(
            value == each and isinstance(value, bool) == isinstance(each, bool) for each in allowed
        ):
            self.refuse(name, f"is not served: {remedy}")

    def has_no_effect(self, name: str) -> None:
        """Collect the name of a field that is accepted but changes nothing."""
        if len(self._without_effect) < _MOST_NAMES:
            shown = re.sub(r"\[\d+\]", "", self.where(name))[:100]
            self._without_effect["".join(filter(str.isprintable, shown))] = None  # printable, as it is logged

    def done(self) -> None:
        """Collect the names of all fields that were not read."""
        for name in self._values:
            if name not in self._taken:
                self.has_no_effect(name)

    @property
    def without_effect(self) -> tuple[str, ...]:
        """Collected names of the whole request, in order; at most 64."""
        return tuple(self._without_effect)

    def content(self, name: str, kinds: Sequence[str] = ("text",)) -> str:
        """Return a message's text: a string, or content parts of these ``kinds`` as lines. Empty if it is absent."""
        value = self.take(name, str, list)
        if value is None or isinstance(value, str):
            return value or ""
        return "\n".join(filter(None, (part.piece(kinds) for part in self.parts(name))))

    def piece(self, kinds: Sequence[str] = ("text",)) -> str:
        """Return the text of this content part, which must be of one of these ``kinds``."""
        kind = self.text("type", required=True)
        if kind not in kinds:
            self.refuse("type", f"is `{kind[:40]}`, and only text is taken: leave it out, or say it in words")
        text = self.text("refusal" if kind == "refusal" else "text")
        self.done()
        return text

    def function(self, schema: str = "parameters") -> dict[str, Any]:
        """Return the function that this object describes, in the format of chat templates.

        ``schema``: name of the field with the schema of its arguments.
        """
        return {
            "type": "function",
            "function": {
                "name": self.text("name", required=True),
                "description": self.take("description", str),
                "parameters": self.take(schema, dict),
            },
        }

    def call(self, identifier: str) -> Message:
        """Return the function call that this object describes, with its arguments decoded if they are a JSON object."""
        name, arguments = self.text("name", required=True), self.take("arguments", str, dict)
        return call(identifier, name, arguments)

    def may_call(self, free: Sequence[str] = ("auto",), forced: Sequence[str] = ("required",)) -> bool:
        """Read `tool_choice`. Return False for `none`, else True.

        ``free``: values that leave the choice to the policy. ``forced``: values that demand a call; they are accepted,
        but reported as without effect, because the policy is never forced to call. Raises `RequestRefused` for any
        other string.
        """
        value = self.take("tool_choice", str, dict)
        word = value.get("type") if isinstance(value, dict) else value
        if word is None or word in free:
            if isinstance(value, dict) and value.keys() - {"type"}:
                self.has_no_effect("tool_choice")
            return True
        if word == "none":
            return False
        if not isinstance(value, dict) and word not in forced:
            self.refuse("tool_choice", f"must be one of {', '.join((*free, 'none', *forced))}")
        self.has_no_effect("tool_choice")
        return True

    def where(self, name: str) -> str:
        """Return the path of a field within the request."""
        return f"{self._path}.{name}" if self._path else name

    def _inside(self, value: Any, name: str) -> Body:
        return Body(value, self.where(name), self._without_effect)


def call(identifier: str, name: str, arguments: str | dict[str, Any] | None) -> Message:
    """Return a function call in the format of chat templates. Arguments that are not a JSON object stay text."""
    value: Any = arguments or {}
    if isinstance(value, str):
        try:
            inside = loaded(value)
            value = inside if isinstance(inside, dict) else value
        except ValueError:
            pass
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": value}}

"""What SGLang's own sources say of its server, and whether a call fits. They are recorded in `sglang_interface.json`
(`record_sglang_interface.py` says how to renew it), or are those of a release that `tests/contracts/check.py` unpacked.
The real server ignores names that it does not know, so what was misspelt would be lost without a word; here it is a
problem.
"""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tests.contracts.sources import unpacked


def _table() -> dict[str, Any]:
    chosen = unpacked("sglang")
    if chosen is None:
        return json.loads(Path(__file__).with_name("sglang_interface.json").read_text())
    from tests.engines.record_sglang_interface import interface_of

    return interface_of(chosen, "another")


TABLE = _table()
ARGUMENTS = frozenset(TABLE["server_arguments"].split())


def problems_of_call(method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any] | None) -> list[str]:
    """What is wrong with a call of the server; empty if nothing."""
    body = body or {}
    endpoint = TABLE["endpoints"].get(path)
    if endpoint is None or method not in endpoint["methods"]:
        return [f"there is no {method} {path}"]
    problems = [f"{path} has no query parameter {name!r}" for name in query if name not in endpoint["query"]]
    if endpoint["body"] is None:
        return problems + [f"{path} takes no {name!r}" for name in body]
    fields = TABLE["bodies"][endpoint["body"]]
    problems += [f"{path} wants {name!r}" for name, field in fields.items() if field["required"] and name not in body]
    types = {name: field["type"] for name, field in fields.items()}
    if path == "/generate":
        schema = TABLE["schema"]
        problems += _misfits("sampling_params", body["sampling_params"], schema["SamplingParams"])
        types |= {name: schema["GenerateRequest"].get(name, type_) for name, type_ in types.items()}
    return problems + list(_misfits(path, body, types))


def unknown_in_answer(path: str, content: object) -> set[str]:
    """Names in an answer that the real server does not use there."""
    known = set(TABLE["answers"][path])
    if path in ("/generate", "/v1/loads"):
        return set(_names(content)) - known - set(TABLE["finish_reasons"])
    return set(content) - known if isinstance(content, dict) else set()


def _misfits(what: str, values: Mapping[str, Any], types: Mapping[str, str]) -> Iterator[str]:
    for name, value in values.items():
        if name not in types:
            yield f"{what} has no {name!r}"
            continue
        try:
            _adapter(types[name]).validate_python(value, strict=True)
        except ValidationError:
            yield f"{what}: {name!r} is {value!r}, not {types[name]}"


class _Types(dict[str, Any]):
    """What names in annotations mean. Types of SGLang's own are checked by nobody here."""

    def __missing__(self, name: str) -> Any:
        return Any


_KNOWN = _Types(vars(typing) | {kind.__name__: kind for kind in (str, int, float, bool, list, dict)})


@cache
def _adapter(annotation: str) -> TypeAdapter[Any]:
    return TypeAdapter(eval(annotation, {"__builtins__": {}}, _KNOWN))


def _names(content: object) -> Iterator[str]:
    if isinstance(content, dict):
        yield from content
        for value in content.values():
            yield from _names(value)
    if isinstance(content, list):
        for value in content:
            yield from _names(value)

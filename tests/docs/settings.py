"""Judges settings within sentences, `dotted.key=value` and `dotted.key: value`: each key is one of ours and takes the
value. Only code that begins with a key of the top level is taken for one; relations between keys are not judged."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from typing import Any

from roll.configs.errors import ConfigError
from roll.configs.loader import PIPELINES, config_from_tree, parse_yaml
from tests.docs.pages import Page

PLACEHOLDERS = ("n",)
"""What stands for a value of the reader's own."""
_TOP = "|".join(sorted({item.name for pipeline in PIPELINES.values() for item in fields(pipeline)}))
_OVERRIDE = re.compile(rf"((?:{_TOP})(?:\.[\w<>-]+)*)=(.+)")
_LINE = re.compile(rf"((?:{_TOP})(?:\.[\w<>-]+)*): (.+)")


def settings_of(code: str) -> list[tuple[str, str]]:
    """Keys and values that code sets: several overrides, or one line of YAML; none if it is something else."""
    line = _LINE.fullmatch(code)
    if line is not None:
        return [(line[1], line[2])]
    try:
        found = [_OVERRIDE.fullmatch(word) for word in shlex.split(code)]
    except ValueError:
        return []
    return [(match[1], match[2]) for match in found if match is not None] if all(found) else []


def problems_of_settings(page: Page) -> list[str]:
    """What is wrong with the settings within the sentences of a page."""
    found = []
    for number, code in page.inline:
        for key, value in settings_of(code):
            if value not in PLACEHOLDERS and (reason := _problem(key, value)):
                found.append(f"{page.name}:{number}: {code}: {reason}")
    return found


def _problem(key: str, value: str) -> str | None:
    """Why neither pipeline takes it."""
    tree: Any = parse_yaml(value, key)
    for part in reversed(key.split(".")):
        tree = {part: tree}
    reason = None
    for pipeline in PIPELINES:
        try:
            config_from_tree({"pipeline": pipeline, **tree})
        except ConfigError as error:
            reason = str(error.problems[0])
        else:
            return None
    return reason

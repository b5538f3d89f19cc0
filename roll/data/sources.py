"""Sources of prompts: JSONL files and reasoning-gym's procedural tasks.

Each reader returns all rows it could read and all problems it met, so that a user sees every broken line at once. Files
are untrusted: a line that is not UTF-8, JSON or a prompt is reported with its file and number.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from roll.configs.errors import ConfigProblem
from roll.configs.schema import ReasoningGymSource
from roll.data.names import nearest_name_hint
from roll.data.templates import Message, PromptRow

DEFAULT_DOMAIN = "default"
MAX_PROBLEMS_PER_FILE = 8

REASONING_GYM_KEY = "reasoning_gym"
"""Metadata key of a procedural task: ``{"dataset": name, "config": arguments}``, which the verifier needs to score."""


class _BadRow(ValueError):
    """Raised for a line that is no prompt; the message is the reason."""


def read_jsonl(file_name: str, path: str) -> tuple[list[PromptRow], list[ConfigProblem]]:
    """Return all prompts of a JSONL file, and the problems of the other lines.

    ``path`` is the configuration key of the file.
    """
    file = Path(file_name)
    try:
        content = file.read_bytes()
    except OSError as cause:
        reason = cause.strerror or type(cause).__name__
        return [], [
            ConfigProblem(path, f"cannot read `{file_name}` ({reason})", "give the path of an existing JSONL file")
        ]
    rows: list[PromptRow] = []
    problems: list[ConfigProblem] = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(_parse_line(line, f"{file.name}:{number}", f"{file_name}:{number}"))
        except _BadRow as bad:
            problems.append(ConfigProblem(path, f"{file_name}:{number}: {bad}", "correct or delete the line"))
    if not rows and not problems:
        remedy = "give a file with one JSON object per line"
        problems.append(ConfigProblem(path, f"`{file_name}` has no prompts", remedy))
    return rows, _shortened(problems, file_name, path)


def _shortened(problems: list[ConfigProblem], file_name: str, path: str) -> list[ConfigProblem]:
    if len(problems) <= MAX_PROBLEMS_PER_FILE:
        return problems
    rest = len(problems) - MAX_PROBLEMS_PER_FILE
    return problems[:MAX_PROBLEMS_PER_FILE] + [
        ConfigProblem(path, f"{rest} more lines of `{file_name}` are wrong", "check the format of the whole file")
    ]


def _parse_line(line: bytes, prompt_id: str, origin: str) -> PromptRow:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as cause:
        raise _BadRow(f"not UTF-8 (byte {cause.start} of the line)") from cause
    except json.JSONDecodeError as cause:
        raise _BadRow(f"not JSON ({cause.msg} at column {cause.colno})") from cause
    except (RecursionError, ValueError) as cause:  # nested too deeply, or a number of thousands of digits
        raise _BadRow(f"not JSON that can be read ({cause})") from cause
    if not isinstance(row, dict):
        raise _BadRow(f"a line must be a JSON object, this one is a {type(row).__name__}")
    text, messages = _take_text(row), _take_messages(row)
    if text is None and messages is None:
        raise _BadRow("neither `prompt` nor `messages`")
    return PromptRow(
        prompt_id=prompt_id,
        origin=origin,
        text=text,
        messages=messages,
        ground_truth=_take_first(row, "ground_truth", "answer"),
        domain=_take_domain(row),
        metadata=row,
    )


def _take_first(row: dict[str, Any], *keys: str) -> Any:
    """Remove and return the first key that has a value in the row; later keys stay in the row."""
    for key in keys:
        if row.get(key) is not None:
            return row.pop(key)
    return None


def _take_text(row: dict[str, Any]) -> str | None:
    text = row.pop("prompt", None)
    if text is None:
        return None
    if not isinstance(text, str):
        raise _BadRow(f"`prompt` must be text, not a {type(text).__name__} (a list of messages goes under `messages`)")
    if not text:
        raise _BadRow("`prompt` is empty")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise _BadRow("`prompt` has half of a surrogate pair, which is no text")
    return text


def _take_messages(row: dict[str, Any]) -> list[Message] | None:
    messages = row.pop("messages", None)
    if isinstance(messages, str):  # some data sets keep the list as JSON text
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError as cause:
            raise _BadRow(f"`messages` is text, but not JSON ({cause.msg})") from cause
    if messages is None:
        return None
    if not isinstance(messages, list) or not messages:
        raise _BadRow("`messages` must be a list with at least one message")
    for message in messages:
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            raise _BadRow("each of `messages` must be an object with the texts `role` and `content`")
    return messages


def _take_domain(row: dict[str, Any]) -> str:
    domain = _take_first(row, "domain", "tag")
    if domain is None:
        return DEFAULT_DOMAIN
    if not isinstance(domain, str) or not domain:
        raise _BadRow(f"`domain` must be text, not {domain!r}")
    return domain


def read_reasoning_gym(
    source: ReasoningGymSource, position: int, path: str
) -> tuple[list[PromptRow], list[ConfigProblem]]:
    """Return the tasks of one procedural data set, with the entry itself as ground truth, and the problems.

    ``position`` is the data set's place in the list.
    """
    problems = _reasoning_gym_problems(source, path)
    if problems:
        return [], problems
    from reasoning_gym import create_dataset

    try:
        entries = list(create_dataset(source.dataset, size=source.size, seed=source.seed, **source.config))
    except Exception as cause:  # each data set checks its arguments in its own way, mostly by assertions
        reason = f"{type(cause).__name__}: {cause}"
        return [], [
            ConfigProblem(
                f"{path}.config",
                f"`{source.dataset}` refuses its arguments ({reason})",
                "use values that this data set accepts",
            )
        ]
    task_set = {"dataset": source.dataset, "config": dict(source.config)}
    return [
        PromptRow(
            prompt_id=f"reasoning_gym[{position}].{source.dataset}:{index}",
            origin=f"{path}, task {index}",
            text=entry["question"],
            messages=None,
            ground_truth=entry,
            domain=source.domain or source.dataset,
            metadata={REASONING_GYM_KEY: task_set},
        )
        for index, entry in enumerate(entries)
    ], []


def _reasoning_gym_problems(source: ReasoningGymSource, path: str) -> list[ConfigProblem]:
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError:
        return [ConfigProblem(path, "the package `reasoning-gym` is not installed", "pip install reasoning-gym")]
    if source.dataset not in DATASETS:
        hint = nearest_name_hint(source.dataset, DATASETS)
        return [ConfigProblem(f"{path}.dataset", f"reasoning-gym has no data set `{source.dataset}`", hint)]
    problems = []
    if source.size < 1:
        problems.append(ConfigProblem(f"{path}.size", f"{source.size} tasks are no data set", "at least 1"))
    known = {each.name for each in dataclasses.fields(DATASETS[source.dataset][1])} - {"size", "seed"}
    for key in source.config:
        if key in ("size", "seed"):
            problems.append(ConfigProblem(f"{path}.config.{key}", "is set in two places", f"use `{path}.{key}`"))
        elif key not in known:
            message = f"`{source.dataset}` has no argument `{key}`"
            problems.append(ConfigProblem(f"{path}.config.{key}", message, nearest_name_hint(key, known)))
    return problems

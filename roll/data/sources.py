"""Readers of rows, from which prompts and examples are made, from files, data sets and task generators.

Files are untrusted: a line that is not UTF-8, JSON or a prompt is reported with its file and number, and a missing
column with its name. Parquet files and data sets of the hub are read by the package `datasets`, which runs no loading
scripts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.configs.errors import ConfigError, ConfigProblem, Problems, nearest_name_hint
from roll.configs.plugins import problem, require
from roll.configs.roles import (
    DataArguments,
    ExampleColumns,
    HubSource,
    PromptColumns,
    ReasoningGymSource,
    RowArguments,
    RowColumns,
)
from roll.data.pictures import PLACE
from roll.data.records import derive_seed
from roll.distribution import install_command

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset
    from transformers import PreTrainedTokenizerBase

    from roll.data.encoding import ContentEncoder

Message = dict[str, str]
SHOWN_OFFENDERS = 5
"""Maximum number of prompts named in one message."""
DEFAULT_DOMAIN = "default"
PICTURES = "images"
"""Column of the pictures of a row."""
MAX_PROBLEMS_PER_FILE = 8

REASONING_GYM_KEY = "reasoning_gym"
"""Metadata key of a procedural task, with what its verifier needs: ``{"dataset": name, "config": arguments}``."""


@dataclass(frozen=True)
class PromptRow:
    """One row of a source: a prompt or an example, as text, as chat messages, or as both."""

    prompt_id: str
    origin: str
    """Place it was read from, for error messages: ``data/train.jsonl:17``."""
    text: str | None
    messages: list[Message] | None
    ground_truth: Any
    domain: str
    metadata: dict[str, Any]
    pictures: list[Any] = dataclasses.field(default_factory=list)
    """Source of each picture (see `roll.data.pictures.read_picture`); `PLACE` marks its place in the texts."""
    folder: Path = Path()
    """Folder to which the paths of pictures are relative."""


class BadRow(ValueError):
    """Raised for a row that is not usable, or that the template cannot render; the message is the reason."""


def usable_rows(
    data_args: RowArguments, tokenizer: PreTrainedTokenizerBase, path: str, problems: Problems, seed: int
) -> list[PromptRow]:
    """Return the rows of a data section that are used: all, or ``max_samples`` of them.

    Raises `ConfigError` for bad rows, and for `template: chat` if the tokenizer has no chat template.
    """
    rows = read_rows(data_args, path, problems)
    if data_args.template == "chat" and not tokenizer.chat_template:
        remedy = "use `template: raw`, or a model with a chat template"
        problems.add(f"{path}.template", "the tokenizer has no chat template", remedy)
    problems.raise_any()
    return select_rows(rows, data_args.max_samples, data_args.shuffle, seed)


def read_rows(data_args: RowArguments, path: str, problems: Problems) -> list[PromptRow]:
    """Return the good rows of all sources, and note the problems of the others. Unused columns become metadata."""
    file_names = [data_args.file_name] if isinstance(data_args.file_name, str) else data_args.file_name
    columns = _columns(data_args.columns)
    rows = []
    for name in file_names:
        read = read_parquet if name.endswith(".parquet") else read_jsonl
        rows += read(name, f"{path}.file_name", problems, columns)
    for index, hub in enumerate(data_args.hub):
        rows += read_hub(hub, f"{path}.hub.{index}", problems, columns)
    task_sets = data_args.reasoning_gym if isinstance(data_args, DataArguments) else []
    for position, source in enumerate(task_sets):
        rows += read_reasoning_gym(source, position, f"{path}.reasoning_gym.{position}", problems)
    if not (file_names or data_args.hub or task_sets):
        problems.add(path, "names no prompts", f"set `{path}.file_name`, `{path}.hub` or `{path}.reasoning_gym`")
    origins: dict[str, str] = {}
    for row in rows:
        if row.prompt_id in origins:
            message = f"two prompts would be called `{row.prompt_id}` ({origins[row.prompt_id]} and {row.origin})"
            problems.add(f"{path}.file_name", message, "name each file once, and give files different names")
            break
        origins[row.prompt_id] = row.origin
    return rows


def _columns(columns: RowColumns) -> dict[str, str]:
    """Return field -> column for the fields whose columns have other names."""
    named = {"prompt": columns.prompt, "messages": columns.messages, "domain": columns.domain}
    if isinstance(columns, PromptColumns):
        named["ground_truth"] = columns.ground_truth
    if isinstance(columns, ExampleColumns):
        named["response"] = columns.response
    return {field: column for field, column in named.items() if column is not None}


def select_rows(rows: list[PromptRow], max_samples: int | None, shuffle: bool, seed: int) -> list[PromptRow]:
    """Return at most ``max_samples`` rows: a random choice by the seed (the first ones without ``shuffle``)."""
    if max_samples is None or not shuffle:
        return rows[:max_samples]
    chosen = np.random.default_rng(derive_seed(seed, "max_samples")).permutation(len(rows))[:max_samples]
    return [rows[index] for index in np.sort(chosen)]


def read_jsonl(file_name: str, path: str, problems: Problems, columns: Mapping[str, str]) -> list[PromptRow]:
    """Return all good rows of a JSONL file, and note the problems of the other lines.

    ``path`` is the configuration path of the problems. ``columns``: field -> column.
    """
    file = Path(file_name)
    try:
        content = file.read_bytes()
    except OSError as cause:
        reason = cause.strerror or type(cause).__name__
        problems.add(path, f"cannot read `{file_name}` ({reason})", "give the path of an existing JSONL file")
        return []
    numbered = ((number, line) for number, line in enumerate(content.split(b"\n"), start=1) if line.strip())
    return _rows((numbered, _parse_line), (file.name, file_name), path, problems, columns)


def read_parquet(file_name: str, path: str, problems: Problems, columns: Mapping[str, str]) -> list[PromptRow]:
    """Return all good rows of a Parquet file, and note the problems of the others; see `read_jsonl`."""
    if not Path(file_name).is_file():
        problems.add(path, f"cannot read `{file_name}` (no such file)", "give the path of an existing Parquet file")
        return []
    table = problems.attempt(_data_set, path, file_name, "parquet", data_files=file_name, split="train")
    if table is None:
        return []
    return _rows((enumerate(table, start=1), _plain), (Path(file_name).name, file_name), path, problems, columns)


def read_hub(source: HubSource, path: str, problems: Problems, columns: Mapping[str, str]) -> list[PromptRow]:
    """Return all good rows of a data set on the hub, and note the problems of the others; see `read_jsonl`."""
    options = {"name": source.subset, "split": source.split, "revision": source.revision}
    given = {key: value for key, value in options.items() if value is not None}
    table = problems.attempt(_data_set, path, source.dataset, source.dataset, **given)
    if table is None:
        return []
    name = ":".join(filter(None, (source.dataset, source.subset, source.split)))
    rows = _rows((enumerate(table, start=1), _plain), (name, name), path, problems, columns)
    if source.domain is None:
        return rows
    own = {DEFAULT_DOMAIN: source.domain}
    return [dataclasses.replace(row, domain=own.get(row.domain, row.domain)) for row in rows]


def _data_set(path: str, name: str, builder: str, **options: Any) -> Iterable[Any]:
    """Return the rows of a data set, read by the package `datasets`. Raises `ConfigError`."""
    require(("datasets",), name, path)
    from datasets import load_dataset

    try:
        return load_dataset(builder, **options)
    except Exception as cause:  # its readers, its servers and its caches raise errors of many libraries
        first_line = str(cause).strip().split("\n")[0]
        remedy = "check name, subset and split, and that this machine reaches the hub or has the data set in its cache"
        raise problem(path, f"`{name}` cannot be read ({type(cause).__name__}: {first_line})", remedy) from cause


def _plain(row: Any) -> dict[str, Any]:
    """Return a row of a data set as JSON values; dates and the like become text. Pictures stay as they are. Raises
    `BadRow` for bytes elsewhere."""

    def text_of(value: Any) -> str:
        if isinstance(value, bytes):
            raise BadRow(f"column `{column}` has bytes: remove it, or name it `{PICTURES}` if it holds pictures")
        return str(value)

    plain: dict[str, Any] = {}
    for column, value in row.items():
        plain[column] = value if column == PICTURES else json.loads(json.dumps(value, default=text_of))
    return plain


def _rows(
    source: tuple[Iterable[tuple[int, Any]], Callable[[Any], dict[str, Any]]],
    names: tuple[str, str],
    path: str,
    problems: Problems,
    columns: Mapping[str, str],
) -> list[PromptRow]:
    """Return the good rows of a source, and note the problems of the others.

    ``source``: the numbered raw rows, and the function that parses one into a mapping. ``names``: the source's name in
    prompt ids, and in messages.
    """
    numbered, parse = source
    rows: list[PromptRow] = []
    bad = 0
    for number, raw in numbered:
        try:
            row = _renamed(parse(raw), columns)
            rows.append(_prompt_row(row, f"{names[0]}:{number}", f"{names[1]}:{number}", Path(names[1]).parent))
        except BadRow as cause:
            bad += 1
            if bad <= MAX_PROBLEMS_PER_FILE:
                remedy = "correct or delete the line, or name its columns under `columns`"
                problems.add(path, f"{names[1]}:{number}: {cause}", remedy)
    if not rows and not bad:
        problems.add(path, f"`{names[1]}` has no prompts", "give a file with one JSON object per line")
    if bad > MAX_PROBLEMS_PER_FILE:
        message = f"{bad - MAX_PROBLEMS_PER_FILE} more lines of `{names[1]}` are wrong"
        problems.add(path, message, "check the format of the whole file")
    return rows


def _renamed(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row whose columns are renamed to our fields, so that they are not kept as metadata as well."""
    found: dict[str, Any] = {}
    for field, column in columns.items():
        value: Any = row
        for part in [column] if column in row else column.split("."):
            if not isinstance(value, dict) or part not in value:
                known = ", ".join(f"`{name}`" for name in row)
                raise BadRow(f"no column `{column}`, which `columns.{field}` names; it has {known}")
            value = value[part]
        found[field] = value
    return {key: value for key, value in row.items() if key not in columns.values()} | found


def _parse_line(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))  # some editors begin a file with a byte order mark
    except UnicodeDecodeError as cause:
        raise BadRow(f"not UTF-8 (byte {cause.start} of the line)") from cause
    except json.JSONDecodeError as cause:
        raise BadRow(f"not JSON ({cause.msg} at column {cause.colno})") from cause
    except (RecursionError, ValueError) as cause:  # nested too deeply, or a number of thousands of digits
        raise BadRow(f"not JSON that can be read ({cause})") from cause
    if not isinstance(row, dict):
        raise BadRow(f"a line must be a JSON object, this one is a {type(row).__name__}")
    return row


def _prompt_row(row: dict[str, Any], prompt_id: str, origin: str, folder: Path) -> PromptRow:
    text, (messages, inline) = _take_text(row), _take_messages(row)
    pictures = _take_pictures(row, inline)
    text, messages = _with_places(text, messages, len(pictures))
    if text is None and messages is None:
        raise BadRow(
            "neither `prompt` nor `messages`" + (f"; it has {', '.join(f'`{key}`' for key in row)}" if row else "")
        )
    return PromptRow(
        prompt_id=prompt_id,
        origin=origin,
        text=text,
        messages=messages,
        ground_truth=_take_first(row, "ground_truth", "answer"),
        domain=_take_domain(row),
        metadata=row,
        pictures=pictures,
        folder=folder,
    )


def _take_pictures(row: dict[str, Any], inline: list[Any]) -> list[Any]:
    """Return the sources of a row's pictures: those in its messages, or those of its column, a list or one source.

    A picture in a message without a source of its own takes the next one of the column. Raises `BadRow`.
    """
    column = row.pop(PICTURES, None)
    listed = [] if column is None else list(column) if isinstance(column, list | tuple) else [column]
    written = [source for source in inline if source is not None]
    if written and (listed or len(written) < len(inline)):
        raise BadRow(f"some pictures are in `messages`, and others in `{PICTURES}`; write all of them in one place")
    return written or listed


def _with_places(
    text: str | None, messages: list[Message] | None, pictures: int
) -> tuple[str | None, list[Message] | None]:
    """Return the texts with a `PLACE` for each picture. Without any, pictures come before the first user message.

    Raises `BadRow` if there are not as many places as pictures. In rows without pictures, `PLACE` is plain text.
    """
    if not pictures:
        return text, messages
    contents = [message["content"] for message in messages] if messages else [text or ""]
    places = sum(content.count(PLACE) for content in contents)
    if places not in (0, pictures):
        raise BadRow(f"the texts have {places} times `{PLACE}` for {pictures} pictures")
    if places:
        return text, messages
    asked = [number for number, message in enumerate(messages or []) if message["role"] == "user"]
    if messages and not asked:
        raise BadRow("there are pictures, but no user message to put them into")
    if messages:
        first = messages[asked[0]]
        return text, [
            {**first, "content": PLACE * pictures + first["content"]} if message is first else message
            for message in messages
        ]
    return PLACE * pictures + (text or ""), messages


def _take_first(row: dict[str, Any], *keys: str) -> Any:
    """Remove and return the value of the first key that has one in the row; other keys stay in the row."""
    for key in keys:
        if row.get(key) is not None:
            return row.pop(key)
    return None


def _take_text(row: dict[str, Any]) -> str | None:
    text = row.pop("prompt", None)
    if text is None:
        return None
    if not isinstance(text, str):
        raise BadRow(f"`prompt` must be text, not a {type(text).__name__} (a list of messages goes under `messages`)")
    if not text:
        raise BadRow("`prompt` is empty")
    required_text(text, "`prompt`")
    return text


def required_text(text: str, what: str) -> str:
    """Return the text. Raises `BadRow` if it has an unpaired surrogate, which cannot be encoded."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise BadRow(f"{what} has half of a surrogate pair, which is no text")
    return text


def require_unspelled(contents: ContentEncoder, texts: Any) -> None:
    """Raise `BadRow` if a text, or any structure of texts, spells a control token."""
    spelled = contents.spelled_in(texts)
    if spelled is not None:
        raise BadRow(f"a text spells the control token {spelled!r} (`on_control_tokens: refuse`)")


def _take_messages(row: dict[str, Any]) -> tuple[list[Message] | None, list[Any]]:
    """Return the messages, with texts as contents, and the source of each picture in them (None: in the column)."""
    messages = row.pop("messages", None)
    if isinstance(messages, str):  # some data sets keep the list as JSON text
        try:
            messages = json.loads(messages)
        except json.JSONDecodeError as cause:
            raise BadRow(f"`messages` is text, but not JSON ({cause.msg})") from cause
    if messages is None:
        return None, []
    if not isinstance(messages, list) or not messages:
        raise BadRow("`messages` must be a list with at least one message")
    inline: list[Any] = []
    messages = [_without_parts(message, inline) for message in messages]
    for message in messages:
        is_message = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not is_message:
            raise BadRow("each of `messages` must be an object with the texts `role` and `content`")
        required_text(message["content"], "a `content` of `messages`")
    return messages, inline


def _without_parts(message: Any, inline: list[Any]) -> Any:
    """Return a message whose parts are joined into one text, and append the source of each picture to ``inline``."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    texts = []
    for part in message["content"]:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "text" and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif kind in ("image", "image_url"):
            source = part.get("image_url") or part.get("image") or part.get("url") or part.get("path")
            inline.append(source)
            texts.append(PLACE)
        else:
            raise BadRow(f"a part of a `content` is `text`, `image` or `image_url`, not {kind!r}")
    return {**message, "content": "".join(texts)}


def _take_domain(row: dict[str, Any]) -> str:
    domain = _take_first(row, "domain", "tag")
    if domain is None:
        return DEFAULT_DOMAIN
    if not isinstance(domain, str) or not domain:
        raise BadRow(f"`domain` must be text, not {domain!r}")
    return domain


def read_reasoning_gym(source: ReasoningGymSource, position: int, path: str, problems: Problems) -> list[PromptRow]:
    """Return the tasks of the data set at ``position``, each entry as its own ground truth; note the problems."""
    dataset = problems.attempt(reasoning_gym_dataset, source, f"{path}.")
    if dataset is None:
        return []
    try:
        entries = list(dataset)
    except Exception as cause:  # some data sets notice wrong arguments only when they make a task
        problems.found.append(_refused_arguments(source, f"{path}.", cause))
        return []
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
    ]


def reasoning_gym_dataset(source: ReasoningGymSource, at: str) -> ProceduralDataset:
    """Return the data set of a source. ``at`` is the prefix of its configuration paths. Raises `ConfigError`."""
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as cause:
        message = "the package `reasoning-gym` is not installed"
        raise problem(at.removesuffix("."), message, install_command("reasoning_gym")) from cause
    name = source.dataset
    if name not in DATASETS:
        raise problem(f"{at}dataset", f"reasoning-gym has no data set `{name}`", nearest_name_hint(name, DATASETS))
    problems = Problems()
    known = {each.name for each in dataclasses.fields(DATASETS[name][1])} - {"size", "seed"}
    for key in source.config:
        if key in ("size", "seed"):
            problems.add(f"{at}config.{key}", "is set in two places", f"use `{at}{key}`")
        elif key not in known:
            problems.add(f"{at}config.{key}", f"`{name}` has no argument `{key}`", nearest_name_hint(key, known))
    problems.raise_any()
    try:
        return create_dataset(name, size=source.size, seed=source.seed, **source.config)
    except Exception as cause:  # each data set checks its arguments in its own way, mostly by assertions
        raise ConfigError([_refused_arguments(source, at, cause)]) from cause


def _refused_arguments(source: ReasoningGymSource, at: str, cause: Exception) -> ConfigProblem:
    message = f"`{source.dataset}` refuses its arguments ({type(cause).__name__}: {cause})"
    return ConfigProblem(f"{at}config", message, "use values that this data set accepts")


def conversation(row: PromptRow, system_prompt: str | None) -> list[Message]:
    """Return a row as messages: its text becomes a user message; ``system_prompt`` is added unless it has its own."""
    messages = row.messages or [{"role": "user", "content": row.text or ""}]
    if system_prompt is not None and messages[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *messages]
    return messages


def named(names: Sequence[str]) -> str:
    """Format the first of many names, and the number of the others."""
    rest = len(names) - SHOWN_OFFENDERS
    return ", ".join(names[:SHOWN_OFFENDERS]) + (f" and {rest} more" if rest > 0 else "")


def check_lengths(
    lengths: Mapping[str, int], most: int, words: tuple[str, str], may_drop: bool, path: str, problems: Problems
) -> set[str]:
    """Return the ids of prompts or examples with more than ``most`` tokens, and note a problem unless ``may_drop``.

    ``lengths``: id -> tokens. ``words``: the noun for the rows, and the key of the limit. If all are too long, that is
    always a problem.
    """
    what, key = words
    overlong = {name: length for name, length in lengths.items() if length > most}
    if overlong and not may_drop:
        names = named([f"{name} ({length} tokens)" for name, length in overlong.items()])
        problems.add(
            f"{path}.overlong_prompts",
            f"{len(overlong)} of {len(lengths)} {what} are longer than `{key}: {most}`: {names}",
            f"set `overlong_prompts: drop` to leave them out, or `{key}` to at least {max(overlong.values())}",
        )
    elif len(overlong) == len(lengths) and not problems.found:
        problems.add(path, f"all {len(lengths)} {what} are longer than {most} tokens", f"raise `{key}`")
    return set(overlong)


def check_shares(shares: dict[str, float] | None, domains: set[str], path: str, problems: Problems) -> None:
    """Require a share for each domain that has prompts, and for no other."""
    if shares is None:
        return
    for domain in shares:
        if domain not in domains:
            hint = nearest_name_hint(domain, domains)
            problems.add(f"{path}.{domain}", f"no prompt has the domain `{domain}`", hint)
    for domain in sorted(domains - set(shares)):
        problems.add(path, f"the prompts of domain `{domain}` get no share", f"add `{domain}`; 0 leaves them out")

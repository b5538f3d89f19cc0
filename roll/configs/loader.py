"""Loader: turns a YAML file and overrides into a typed configuration, or reports every problem at once.

Order: read, merge the file into the defaults, apply `dotted.key=value` overrides, resolve `${...}`, validate against
the dataclasses, turn shares of devices into device mappings. Nothing is executed, nothing heavy is imported, and no key
is silently ignored. Plain values follow YAML 1.2: `1e-6` is a float, and `no`, `12:30` or `2024-01-01` are text. A
repeated key, a tag such as `!!python/object` and an alias that grows without bound are reported with line and column.

An unknown key gets the nearest valid name at its level, or the section where a key of that name belongs. A wrong value
gets the expected type. A value that fits no member of a union is reported once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import cache, reduce
from operator import getitem
from pathlib import Path
from types import GenericAlias
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import OmegaConfGrammarParser, parse
from pydantic import TypeAdapter, ValidationError

from roll.configs.derived import place_shares
from roll.configs.dialects import foreign_hint, spelling_hint
from roll.configs.dialects import roll as rolls_dialect
from roll.configs.errors import RENAMED, ConfigError, ConfigProblem, choose_among, masked, nearest, shown
from roll.configs.fields import (
    PathPart,
    alternatives,
    dataclass_of,
    describe,
    field_types,
    is_optional,
    join,
    kind_at,
    member,
    walk,
)
from roll.configs.plugins import problem
from roll.configs.roles import UNREAD_PATHS
from roll.configs.run import AgenticConfig, ImageConfig, RLVRConfig, RunConfig, SFTConfig
from roll.tracking.logs import redact

_MOST_NAMES_LISTED = 12


def validated(cls: type, tree: dict[str, Any]) -> tuple[Any, list[ConfigProblem]]:
    """Return ``tree`` as the dataclass, None if it does not fit, and a problem for each wrong key or value."""
    found = {parts: _wrong_value(parts, cls, value) for parts, value in _truth_values(cls, tree, ())}
    try:
        return _adapter(cls).validate_python(tree), list(found.values())
    except ValidationError as error:
        kinds: dict[tuple[PathPart, ...], str] = {}
        for entry in error.errors(include_url=False):
            kinds.setdefault(_path_in_tree(entry["loc"], tree), entry["type"])
    for parts, kind in kinds.items():
        holds_another = any(len(other) > len(parts) and other[: len(parts)] == parts for other in kinds)
        if parts in found or holds_another:
            continue
        if kind == "unexpected_keyword_argument":
            found[parts] = _unknown_key(parts, cls, tree)
        else:
            found[parts] = _wrong_value(parts, cls, _value_at(parts, tree))
    return None, list(found.values())


@cache
def _adapter(cls: type) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


def _truth_values(kind: Any, value: Any, parts: tuple[PathPart, ...]) -> Iterator[tuple[tuple[PathPart, ...], Any]]:
    """Yield path and value of each boolean where a number is expected, and of each non-boolean where a boolean is."""
    if isinstance(value, (dict, list)):
        for part, below in value.items() if isinstance(value, dict) else enumerate(value):
            expected = member(kind, part)
            if expected is not None:
                yield from _truth_values(expected, below, (*parts, part))
        return
    kinds = alternatives(kind)
    if isinstance(value, bool):
        wrong = bool not in kinds and bool({int, float} & set(kinds))
    else:
        left_out = value is None and is_optional(kind)
        valid = {"true", "false", *(name for option in kinds for name in get_args(option) if isinstance(name, str))}
        wrong = bool in kinds and str not in kinds and not left_out and str(value).lower() not in valid
    if wrong:
        yield parts, value


def _path_in_tree(location: Sequence[PathPart], tree: Any) -> tuple[PathPart, ...]:
    """Return the part of an error's location that leads through the tree, without names of union members."""
    parts: list[PathPart] = []
    for part in location:
        if isinstance(tree, dict) and part in tree:
            tree = tree[part]
        elif isinstance(tree, list) and isinstance(part, int):
            tree = tree[part]
        else:
            continue
        parts.append(part)
    return tuple(parts)


def _value_at(parts: Sequence[PathPart], tree: Any) -> Any:
    return reduce(getitem, parts, tree)


def _wrong_value(parts: tuple[PathPart, ...], root: type, value: Any) -> ConfigProblem:
    kind = kind_at(root, parts)
    expected = describe(kind)
    remedy = spelling_hint(parts, value) or _value_remedy(kind, expected, value)
    return ConfigProblem(join(parts), f"{shown(value, str(parts[-1]))} is not {expected}", remedy)


def _value_remedy(kind: Any, expected: str, value: Any) -> str:
    names = [name for option in alternatives(kind) for name in get_args(option) if isinstance(name, str)]
    if names:
        return choose_among(str(value), names)
    if value is None:
        return "write its value, or leave the key out for its default"
    if alternatives(kind) == (str,) and isinstance(value, (int, float)) and not isinstance(value, bool):
        return f'text is expected; in quotes it would be: "{value}"'
    if GenericAlias(list, (type(value),)) in alternatives(kind):
        return f"write it as a list: {shown([value])}"
    nothing = " (leave the key out for its default)" if is_optional(kind) else ""
    return f"write {expected}{nothing}"


def _unknown_key(parts: tuple[PathPart, ...], root: type, tree: dict[str, Any]) -> ConfigProblem:
    name = str(parts[-1])
    level = dataclass_of(kind_at(root, parts[:-1]))
    known = list(field_types(level)) if level is not None else []
    message = f"unknown key (its value: {shown(_value_at(parts, tree), name)})"
    remedy = _remedy_in_sft(parts) if root is SFTConfig else None
    return ConfigProblem(join(parts), message, remedy or _name_remedy(parts, tree, known, root))


_NAMES_IN_SFT = dict(
    rollout_batch_size="train_batch_size", prompt_length="sequence_length", response_length="sequence_length"
)


def _remedy_in_sft(parts: tuple[PathPart, ...]) -> str | None:
    """Return the remedy for a key of another pipeline in a file with `pipeline: sft`; None for any other key."""
    name = str(parts[-1])
    owners = [f"`{pipeline}`" for pipeline, cls in PIPELINES.items() if kind_at(cls, parts) is not None]
    if not owners:
        return None
    if name in _NAMES_IN_SFT:
        return f"write `{_NAMES_IN_SFT[name]}` in place of it in `pipeline: sft`"
    return f"remove it: it is a key of {' and '.join(owners)}, and nothing in `pipeline: sft` reads it"


def _name_remedy(parts: tuple[PathPart, ...], tree: dict[str, Any], known: Sequence[str], root: type) -> str:
    name, sections = str(parts[-1]), _sections(root)
    close, near = nearest(name, known, cutoff=0.75), nearest(name, known)
    elsewhere = nearest(name, sections, cutoff=0.75)
    if name in rolls_dialect.ADVICE:
        return rolls_dialect.ADVICE[name]
    if close:
        return f"did you mean `{close}`?"
    if name in sections:
        return f"`{name}` belongs under {_under(sections[name])}"
    if name in RENAMED:
        return f"this is called `{RENAMED[name]}` here"
    if (foreign := foreign_hint(parts, _value_at(parts, tree))) is not None:
        return foreign
    if near:
        return f"did you mean `{near}`?"
    if elsewhere:
        return f"did you mean `{elsewhere}`, which belongs under {_under(sections[elsewhere])}?"
    if len(known) > _MOST_NAMES_LISTED:
        return "remove it; `docs/configuration.md` lists every key"
    return f"remove it; known here: {', '.join(f'`{item}`' for item in known)}"


def _sections(root: type) -> dict[str, list[str]]:
    """Map each key that is read to the paths of the sections it may stand in; the top level is an empty path."""
    sections: dict[str, list[str]] = {}
    for path, item, _ in walk(root, without=UNREAD_PATHS):
        sections.setdefault(item.name, []).append(path.removesuffix(item.name).rstrip("."))
    return sections


def _under(sections: Iterable[str]) -> str:
    return " or ".join(f"`{section}`" if section else "the top level" for section in list(sections)[:3])


PIPELINES: dict[str, type[RunConfig]] = {
    "rlvr": RLVRConfig,
    "agentic": AgenticConfig,
    "image": ImageConfig,
    "sft": SFTConfig,
}
"""Value of the key `pipeline` -> its configuration class."""

_UNRESOLVED = object()


def load_config(
    path: str | Path, overrides: Sequence[str] = (), tell: Callable[[str], None] = lambda text: None
) -> RunConfig:
    """Read, merge, resolve and validate a configuration. Raises `ConfigError` with every problem found.

    ``overrides`` are ``dotted.key=value`` with the value in YAML; list entries are ``key[0]`` or ``key.0``. A mapping
    is merged into the one in the file, anything else replaces it. If the file is in ROLL's dialect, ``tell`` is called
    with a text that explains how it is read.
    """
    return config_from_tree(read_mapping(Path(path)), overrides, tell, str(path))


def config_from_tree(
    written: dict[str, Any],
    overrides: Sequence[str] = (),
    tell: Callable[[str], None] = lambda text: None,
    name: str = "the configuration",
) -> RunConfig:
    """Load a configuration from a tree in memory, such as one built by a test or a sweep; see `load_config`.

    ``name`` is its name in the text for ``tell``.
    """
    references = _References()
    if rolls_dialect.is_roll(written):
        tree, problems = _resolved(written, overrides, references)
        file = tree if not overrides else _resolved(written, (), _References())[0]
        reading = rolls_dialect.translate(tree, file)
        about = f"{name} is in ROLL's dialect (docs/migration/roll.md); read as follows:"
        tell("\n  ".join([about, *reading.lines]))
        problems += reading.problems
        tree = reading.tree()
        cls = _config_class(tree, ())
        tree = _laid_over(asdict(cls()), tree)
    else:
        cls = _config_class(written, overrides)
        tree, problems = _resolved(_laid_over(asdict(cls()), written), overrides, references)
    valid, wrong = validated(cls, tree)
    problems += references.problems
    pipeline = tree.get("pipeline")
    if not isinstance(pipeline, str) or pipeline not in PIPELINES:
        remedy = choose_among(str(pipeline), PIPELINES)
        problems.append(ConfigProblem("pipeline", f"{shown(pipeline)} is no pipeline", remedy))
    reported = {each.path for each in problems}
    problems += [each for each in wrong if each.path not in reported]
    if problems:
        raise ConfigError(problems, valid or _without(cls, tree, problems))
    config: RunConfig = valid
    problems = place_shares(config)
    if problems:
        raise ConfigError(problems)
    return config


def resolved_tree(tree: dict[str, Any]) -> dict[str, Any]:
    """Return a tree with its references `${...}` resolved; those that cannot be resolved are left out."""
    return _resolved(tree, (), _References())[0]


def dump_config(config: RunConfig) -> str:
    """Return the resolved configuration as YAML that loads to an equal configuration. Secrets are masked."""
    return dump_yaml(_with_texts(masked(asdict(config)), _escaped))


def redacted_config(config: RunConfig) -> dict[str, Any]:
    """Return the resolved configuration as a plain tree, with secrets masked by key name and inside strings."""
    redacted: dict[str, Any] = _with_texts(masked(asdict(config)), redact)
    return redacted


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a plain tree with each text changed."""
    if isinstance(value, dict):
        return {key: _with_texts(below, change) for key, below in value.items()}
    if isinstance(value, list):
        return [_with_texts(below, change) for below in value]
    return change(value) if isinstance(value, str) else value


def _resolved(
    tree: dict[str, Any], overrides: Sequence[str], references: _References
) -> tuple[dict[str, Any], list[ConfigProblem]]:
    """Return the tree with overrides and references applied, and the problems of the overrides."""
    vetted = references.vetted(tree, ())
    if not overrides and _is_settled(vetted):  # OmegaConf takes most of the time of reading a configuration
        return references.resolved(vetted, ()), []
    merged = OmegaConf.create(vetted)
    problems = _apply(overrides, merged, references)
    return references.resolved(merged, ()), problems


def _is_settled(value: Any) -> bool:
    """Return True if OmegaConf would leave a tree unchanged: plain values, no text with ``${`` or equal to ``???``."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_settled(below) for key, below in value.items())
    if isinstance(value, list):
        return all(map(_is_settled, value))
    if isinstance(value, str):
        return "${" not in value and not _LOOKS_MISSING.fullmatch(value)
    return value is None or type(value) in (bool, int, float)


def _without(cls: type[RunConfig], tree: dict[str, Any], problems: Sequence[ConfigProblem]) -> Any:
    """Return the configuration without the reported keys; None if the rest is not valid either."""
    reported = {each.path for each in problems}

    def kept(value: Any, parts: tuple[PathPart, ...]) -> Any:
        if isinstance(value, dict):
            return {
                key: kept(each, (*parts, key)) for key, each in value.items() if join((*parts, key)) not in reported
            }
        if isinstance(value, list):
            return [kept(each, (*parts, at)) for at, each in enumerate(value) if join((*parts, at)) not in reported]
        return value

    return validated(cls, kept(tree, ()))[0]


def _config_class(tree: dict[str, Any], overrides: Sequence[str]) -> type[RunConfig]:
    """Return the class of the pipeline; for an unknown name that of the most similar one, so that keys are checked."""
    overridden = [text.partition("=")[2].strip() for text in overrides if text.startswith("pipeline=")]
    name = overridden[-1] if overridden else tree.get("pipeline", "rlvr")
    return PIPELINES[nearest(str(name), PIPELINES) or "rlvr"]


def read_mapping(path: Path) -> dict[str, Any]:
    """Return the top level of a YAML file, with references unresolved. Raises `ConfigError`."""
    tree = parse_yaml(_read_text(path), str(path))
    if tree is None:
        raise problem(str(path), "the file is empty", "write at least `pretrain` and the data")
    if not isinstance(tree, dict):
        raise problem(str(path), f"the top level is {shown(tree)}, not a mapping", "write `key: value` lines")
    return tree


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        message, remedy = "there is no such file", f"check the path; the current folder is {Path.cwd()}"
    except IsADirectoryError:
        message, remedy = "is a folder", "give the YAML file itself"
    except UnicodeDecodeError as error:
        message, remedy = f"is not UTF-8 text (byte {error.start})", "save the file as UTF-8"
    except (OSError, ValueError) as error:
        message, remedy = f"cannot be read: {error}", "check the path and its permissions"
    raise problem(str(path), message, remedy)


def _apply(overrides: Sequence[str], config: DictConfig, references: _References) -> list[ConfigProblem]:
    problems: list[ConfigProblem] = []
    for text in overrides:
        key, equals, written = text.partition("=")
        key = key.strip()
        if not equals or not re.fullmatch(r"(?!-)[^\s.\[\]]+(\.[^\s.\[\]]+|\[[^\s\[\]]+\])*", key):
            remedy = "write dotted.key=value, for example max_steps=10 or rewards.math.tag_included[0]=gsm8k"
            problems.append(ConfigProblem("command line", f"`{text}` is no override", remedy))
            continue
        try:
            value = references.vetted(parse_yaml(written, f"command line, {key}"), (key,))
        except ConfigError as error:
            problems += error.problems
            continue
        if value is _UNRESOLVED:
            continue
        try:
            OmegaConf.update(config, key, value, merge=True, force_add=True)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            message = f"the override {shown(value, key)} does not fit: {_first_line(error)}"
            remedy = "a list entry is named by the number of one that the file has; to change its length give the list"
            problems.append(ConfigProblem(key, message, remedy))
    return problems


def _laid_over(defaults: Any, written: Any) -> Any:
    """Return ``written`` with missing keys taken from ``defaults``, at every depth."""
    if not (isinstance(defaults, dict) and isinstance(written, dict)):
        return written
    merged = {key: _laid_over(value, written[key]) if key in written else value for key, value in defaults.items()}
    return merged | {key: value for key, value in written.items() if key not in defaults}


class _References:
    """A resolver of `${...}` that collects problems: references that are refused or cannot be resolved.

    References may only name other keys and `oc.env`: other OmegaConf resolvers could import modules. Texts are checked
    with the same grammar that resolves them.
    """

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.values = 0

    def vetted(self, value: Any, parts: tuple[PathPart, ...]) -> Any:
        """Return the value without texts whose references are malformed or refused."""
        if isinstance(value, dict):
            pairs = [(key, self.vetted(below, (*parts, key))) for key, below in value.items()]
            return {key: below for key, below in pairs if below is not _UNRESOLVED}
        if isinstance(value, list):
            entries = [self.vetted(below, (*parts, index)) for index, below in enumerate(value)]
            return [below for below in entries if below is not _UNRESOLVED]
        if isinstance(value, str) and "${" in value:
            refused = _text_problem(value, parts)
            if refused is not None:
                self.problems.append(refused)
                return _UNRESOLVED
        return value

    def resolved(self, node: Any, parts: tuple[PathPart, ...]) -> Any:
        """Return a plain tree with each reference replaced; references that cannot be resolved are left out."""
        self.values += 1
        if len(parts) > MAX_DEPTH or self.values > MAX_NODES:
            message = f"references refer back to themselves, or grow beyond {MAX_NODES} values"
            remedy = "let no section refer to one that refers to it"
            raise ConfigError([*self.problems, ConfigProblem(join(parts[:4]), message, remedy)])
        if not isinstance(node, (dict, list, DictConfig, ListConfig)):
            return node
        is_mapping = isinstance(node, (dict, DictConfig))
        names: Sequence[Any] = list(node) if is_mapping else range(len(node))
        plain = {}
        for name in names:
            path = (*parts, name)
            try:
                value = node[name]
            except (OmegaConfBaseException, RecursionError) as error:
                remedy = "refer by its full path to a key that has a value, and that does not refer back"
                if "Environment variable" in str(error):
                    remedy = "set the variable, or give a default: `${oc.env:NAME,default}`"
                self.problems.append(ConfigProblem(join(path), _first_line(error), remedy))
                continue
            plain[name] = self.resolved(value, path)
        return plain if is_mapping else list(plain.values())


def _text_problem(text: str, parts: tuple[PathPart, ...]) -> ConfigProblem | None:
    what = shown(text, str(parts[-1]))
    try:
        names = set(_resolver_names(parse(text)))
    except GrammarParseError:
        remedy = "close the reference with `}`, or write `\\${` for the characters themselves"
        return ConfigProblem(join(parts), f"the reference in {what} cannot be read", remedy)
    if names <= {"oc.env"}:
        return None
    remedy = "only `${other.key}` and `${oc.env:NAME,default}` are resolved"
    return ConfigProblem(join(parts), f"the reference in {what} is refused", remedy)


def _resolver_names(grammar: Any) -> Iterator[str]:
    if isinstance(grammar, OmegaConfGrammarParser.InterpolationResolverContext):
        yield grammar.resolverName().getText()
    for index in range(grammar.getChildCount()):
        yield from _resolver_names(grammar.getChild(index))


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.removeprefix("KeyError raised while resolving interpolation: ").strip('"')


def _escaped(text: str) -> str:
    """Escape a text that looks like a reference or a missing value, so that it loads as itself."""
    if _LOOKS_MISSING.fullmatch(text):
        return "\\" + text
    return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", text)


_LOOKS_MISSING = re.compile(r"\\*\?\?\?")

MAX_NODES = 10_000
"""Number of values that a file may hold once its aliases are expanded."""
MAX_DEPTH = 40

_CORE = "tag:yaml.org,2002:"
_MERGE = _CORE + "merge"
_PLAIN_TAGS = {_CORE + name for name in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_PLAIN_VALUES = (
    ("null", r"~|null|Null|NULL|", "~nN"),
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        "-+.0123456789",
    ),
    ("merge", r"<<", "<"),
)


class _Loader(yaml.SafeLoader):
    """A loader that reads plain values by `_PLAIN_VALUES`."""

    yaml_implicit_resolvers: dict[str, Any] = {}


_UNICODE_LINE_BREAKS = {"\x85", "\u2028", "\u2029"}


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes the texts that `_Loader` would not read back as text."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Use double quotes for Unicode line breaks, which single quotes would fold away."""
        style = '"' if _UNICODE_LINE_BREAKS & set(data) else None
        return self.represent_scalar(_CORE + "str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


for _name, _pattern, _first in _PLAIN_VALUES:
    _starts: list[Any] = list(_first) + ([""] if _name == "null" else [])
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(_CORE + _name, re.compile(f"(?:{_pattern})\\Z"), _starts)


def parse_yaml(text: str, source: str) -> Any:
    """Return the value of a YAML text; ``source`` names it in problems. Raises `ConfigError`."""
    try:
        node = yaml.compose(text, Loader=_Loader)
        if node is None:
            return None
        problems = _node_problems(node, source)
        if problems:
            raise ConfigError(problems)
        return _Loader("").construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, source)]) from error
    except RecursionError as error:
        raise ConfigError([_too_large(source)]) from error
    except ValueError as error:
        remedy = "shorten the number, or put it in quotes if it is text"
        raise problem(source, f"a number cannot be read: {error}", remedy) from error


def dump_yaml(tree: Any) -> str:
    """Return a plain tree as YAML that `parse_yaml` reads back to an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _syntax_problem(error: yaml.YAMLError, source: str) -> ConfigProblem:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        where = _at(source, error.problem_mark)
        reason = " ".join(filter(None, (error.context, error.problem)))
    else:
        where, reason = source, " ".join(str(error).split())
    return ConfigProblem(
        where, f"not valid YAML: {reason}", "correct the line; check its indentation, colons, quotes and brackets"
    )


def _too_large(source: str) -> ConfigProblem:
    return ConfigProblem(
        source,
        f"aliases refer to themselves, or the values go beyond {MAX_NODES} or {MAX_DEPTH} levels",
        "write a smaller file with plain values",
    )


def _node_problems(root: yaml.Node, source: str) -> list[ConfigProblem]:
    """Return a problem for each tag and key that is refused, or a single one if the expanded tree is too large."""
    # Keyed by place and message, since the node of an alias is visited once for each use.
    found: dict[tuple[int, int, str], ConfigProblem] = {}

    def report(mark: yaml.Mark, message: str, remedy: str) -> None:
        found[mark.line, mark.column, message] = ConfigProblem(_at(source, mark), message, remedy)

    seen, nodes = 0, [(root, 0)]
    while nodes:
        node, depth = nodes.pop()
        seen += 1
        if seen + len(nodes) > MAX_NODES or depth > MAX_DEPTH:
            return [_too_large(source)]
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace(_CORE, "!!")
            report(node.start_mark, f"tag {tag} is refused", "a configuration holds plain values only; drop the tag")
        if isinstance(node, yaml.SequenceNode):
            nodes += [(child, depth + 1) for child in node.value]
        elif isinstance(node, yaml.MappingNode):
            nodes += [(child, depth + 1) for pair in node.value for child in pair]
            lines: dict[str, int] = {}
            for key, _ in node.value:
                if key.tag not in (_CORE + "str", _MERGE):
                    name = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
                    report(key.start_mark, f"the key {name} is not text", "put the key in quotes")
                elif key.tag != _MERGE and key.value in lines:
                    message = f"the key `{key.value}` stands already at line {lines[key.value]}"
                    report(key.start_mark, message, "keep one of the two: the second would silently replace the first")
                else:
                    lines[key.value] = key.start_mark.line + 1
    return [found[place] for place in sorted(found)]


def _at(source: str, mark: yaml.Mark) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}"

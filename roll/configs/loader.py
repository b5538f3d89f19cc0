"""From a YAML file and overrides to a typed configuration, or to every problem at once.

Order: read, lay the file over the defaults, apply `dotted.key=value` overrides, resolve `${...}`, validate against the
dataclasses. Nothing is executed, nothing heavy is imported, and no key is silently ignored. Plain values follow YAML
1.2: `1e-6` is a float, and `no`, `12:30` or `2024-01-01` are text. A repeated key, a tag such as `!!python/object` and
an alias that grows without bound are reported with line and column.

An unknown key gets the nearest valid name at its level, or the place where a key of that name belongs. A wrong value
gets the expected type. If several readings of one value fail, one problem is reported. The loader, the checks and the
reference page all walk the same dataclasses, so a new key is validated, suggested and documented without another line
anywhere.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import GenericAlias
from typing import Any, get_args

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import OmegaConfGrammarParser, parse
from pydantic import TypeAdapter, ValidationError

from roll.configs.errors import ADVICE, RENAMED, ConfigError, ConfigProblem, choose_among, masked, nearest, shown
from roll.configs.roles import UNREAD_PATHS
from roll.configs.run import AgenticConfig, PipelineConfig, RLVRConfig
from roll.tracking.logs import redact

_MOST_NAMES_LISTED = 12


def validation_problems(error: ValidationError, root: type, tree: dict[str, Any]) -> list[ConfigProblem]:
    """Return one problem per wrong key or value of ``tree``, which could not be validated as ``root``."""
    paths: dict[tuple[PathPart, ...], str] = {}
    for entry in error.errors(include_url=False):
        paths.setdefault(_path_in_tree(entry["loc"], tree), entry["type"])
    return [
        _unknown_key(parts, root, tree)
        if kind == "unexpected_keyword_argument"
        else _wrong_value(parts, root, _value_at(parts, tree))
        for parts, kind in paths.items()
        if not any(len(other) > len(parts) and other[: len(parts)] == parts for other in paths)
    ]


def truth_value_problems(root: type, tree: dict[str, Any]) -> list[ConfigProblem]:
    """Report `true` where a number is expected, and anything but true or false where a truth value is."""
    return [_wrong_value(parts, root, value) for parts, value in _truth_values(root, tree, ())]


def _truth_values(kind: Any, value: Any, parts: tuple[PathPart, ...]) -> Iterator[tuple[tuple[PathPart, ...], Any]]:
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
        wrong = bool in kinds and str not in kinds and not left_out and str(value).lower() not in ("true", "false")
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
    for part in parts:
        tree = tree[part]
    return tree


def _wrong_value(parts: tuple[PathPart, ...], root: type, value: Any) -> ConfigProblem:
    kind = kind_at(root, parts)
    expected = describe(kind)
    return ConfigProblem(
        join(parts), f"{shown(value, str(parts[-1]))} is not {expected}", _value_remedy(kind, expected, value)
    )


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
    return ConfigProblem(join(parts), message, _name_remedy(name, known, root))


def _name_remedy(name: str, known: Sequence[str], root: type) -> str:
    if name in ADVICE:
        return ADVICE[name]
    near = nearest(name, known, cutoff=0.75)
    if near:
        return f"did you mean `{near}`?"
    places = _places(root)
    if name in places:
        return f"`{name}` belongs under {_under(places[name])}"
    if name in RENAMED:
        return f"this is called `{RENAMED[name]}` here"
    near = nearest(name, known)
    if near:
        return f"did you mean `{near}`?"
    elsewhere = nearest(name, places, cutoff=0.75)
    if elsewhere:
        return f"did you mean `{elsewhere}`, which belongs under {_under(places[elsewhere])}?"
    if len(known) > _MOST_NAMES_LISTED:
        return "remove it; `docs/configuration.md` lists every key"
    return f"remove it; known here: {', '.join(f'`{item}`' for item in known)}"


def _places(root: type) -> dict[str, list[str]]:
    """Map each key that is read to the paths of the sections it may stand in; the top level is an empty path."""
    places: dict[str, list[str]] = {}
    for path, item, _ in walk(root, without=UNREAD_PATHS):
        places.setdefault(item.name, []).append(path.removesuffix(item.name).rstrip("."))
    return places


def _under(sections: Iterable[str]) -> str:
    return " or ".join(f"`{section}`" if section else "the top level" for section in list(sections)[:3])


PIPELINES: dict[str, type[PipelineConfig]] = {"rlvr": RLVRConfig, "agentic": AgenticConfig}
"""Value of the key `pipeline` -> its configuration class."""

_UNRESOLVED = object()


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> PipelineConfig:
    """Read, merge, resolve and validate a configuration. Raises `ConfigError` with every problem found.

    ``overrides`` are ``dotted.key=value`` with the value in YAML; list entries are ``key[0]`` or ``key.0``. A mapping
    is merged into the one in the file, anything else replaces it.
    """
    return _typed(_read_mapping(Path(path)), overrides)


def config_from_tree(tree: dict[str, Any]) -> PipelineConfig:
    """Load a configuration from a tree in memory, such as one built by a test or a sweep; see `load_config`."""
    return _typed(tree, ())


def dump_config(config: PipelineConfig) -> str:
    """Return the resolved configuration as YAML that loads to an equal configuration. Secrets are masked."""
    return dump_yaml(_escaped(masked(asdict(config))))


def redacted_config(config: PipelineConfig) -> dict[str, Any]:
    """Return the resolved configuration, redacted: secrets are masked by key name and inside texts."""
    return _redacted(masked(asdict(config)))


def _redacted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _redacted(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_redacted(below) for below in value]
    return redact(value) if isinstance(value, str) else value


def _typed(written: dict[str, Any], overrides: Sequence[str]) -> PipelineConfig:
    cls = _config_class(written, overrides)
    references = _References()
    config = OmegaConf.create(references.vetted(_laid_over(asdict(cls()), written), ()))
    problems = _apply(overrides, config, references)
    tree = references.resolved(config, ())
    problems += references.problems + truth_value_problems(cls, tree) + _pipeline_problems(tree.get("pipeline"))
    known = {problem.path for problem in problems}
    try:
        valid = _adapter(cls).validate_python(tree)  # type: ignore[arg-type]  # mypy: a dataclass is as unhashable as its instances
    except ValidationError as error:
        problems += [item for item in validation_problems(error, cls, tree) if item.path not in known]
        raise ConfigError(problems) from None
    if problems:
        raise ConfigError(problems)
    return valid


@cache
def _adapter(cls: type[PipelineConfig]) -> TypeAdapter[PipelineConfig]:
    return TypeAdapter(cls)


def _config_class(tree: dict[str, Any], overrides: Sequence[str]) -> type[PipelineConfig]:
    """Return the class of the pipeline; for an unknown name the most likely one, so that its keys are checked."""
    overridden = [text.partition("=")[2].strip() for text in overrides if text.startswith("pipeline=")]
    name = overridden[-1] if overridden else tree.get("pipeline", "rlvr")
    return PIPELINES[nearest(str(name), PIPELINES) or "rlvr"]


def _pipeline_problems(name: Any) -> list[ConfigProblem]:
    if isinstance(name, str) and name in PIPELINES:
        return []
    return [ConfigProblem("pipeline", f"{shown(name)} is no pipeline", choose_among(str(name), PIPELINES))]


def _read_mapping(path: Path) -> dict[str, Any]:
    tree = parse_yaml(_read_text(path), str(path))
    if tree is None:
        raise ConfigError([ConfigProblem(str(path), "the file is empty", "write at least `pretrain` and the data")])
    if not isinstance(tree, dict):
        message = f"the top level is {shown(tree)}, not a mapping"
        raise ConfigError([ConfigProblem(str(path), message, "write `key: value` lines")])
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
    raise ConfigError([ConfigProblem(str(path), message, remedy)])


def _apply(overrides: Sequence[str], config: DictConfig, references: _References) -> list[ConfigProblem]:
    problems: list[ConfigProblem] = []
    for text in overrides:
        try:
            key, value = _split_override(text)
            value = references.vetted(value, (key,))
            if value is not _UNRESOLVED:
                _set(config, key, value)
        except ConfigError as error:
            problems += error.problems
    return problems


def _split_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"(?!-)[^\s.\[\]]+(\.[^\s.\[\]]+|\[[^\s\[\]]+\])*", key):
        remedy = "write dotted.key=value, for example max_steps=10 or rewards.math.tag_included[0]=gsm8k"
        raise ConfigError([ConfigProblem("command line", f"`{text}` is no override", remedy)])
    return key, parse_yaml(value, f"command line, {key}")


def _set(config: DictConfig, key: str, value: Any) -> None:
    try:
        OmegaConf.update(config, key, value, merge=True, force_add=True)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        message = f"the override {shown(value, key)} does not fit: {_first_line(error)}"
        remedy = "a list entry is named by the number of an entry that the file has; to change its length give the list"
        raise ConfigError([ConfigProblem(key, message, remedy)]) from error


def _laid_over(defaults: Any, written: Any) -> Any:
    """Return ``written`` with missing keys taken from ``defaults``, at every depth."""
    if not (isinstance(defaults, dict) and isinstance(written, dict)):
        return written
    merged = {key: _laid_over(value, written[key]) if key in written else value for key, value in defaults.items()}
    return merged | {key: value for key, value in written.items() if key not in defaults}


class _References:
    """A resolver of `${...}` that collects the references that are refused or lead nowhere.

    Only other values and `oc.env` may be referred to: other OmegaConf resolvers could import modules. A text is checked
    with the same grammar that resolves it.
    """

    def __init__(self) -> None:
        self.problems: list[ConfigProblem] = []
        self.values = 0

    def vetted(self, value: Any, parts: tuple[PathPart, ...]) -> Any:
        """Return the value without the texts whose references are malformed or refused."""
        if isinstance(value, (dict, list)):
            return _map_below(value, parts, self.vetted)
        if isinstance(value, str) and "${" in value:
            problem = _text_problem(value, parts)
            if problem is not None:
                self.problems.append(problem)
                return _UNRESOLVED
        return value

    def resolved(self, node: Any, parts: tuple[PathPart, ...]) -> Any:
        """Return a plain tree with each reference replaced; references that lead nowhere are left out."""
        self.values += 1
        if len(parts) > MAX_DEPTH or self.values > MAX_NODES:
            message = f"references refer back to themselves, or grow beyond {MAX_NODES} values"
            remedy = "let no section refer to one that refers to it"
            raise ConfigError([*self.problems, ConfigProblem(join(parts[:4]), message, remedy)])
        if not isinstance(node, (DictConfig, ListConfig)):
            return node
        names = list(node) if isinstance(node, DictConfig) else range(len(node))
        found = {name: self.target(node, name, parts) for name in names}
        kept = {name: value for name, value in found.items() if value is not _UNRESOLVED}
        return kept if isinstance(node, DictConfig) else list(kept.values())

    def target(self, node: DictConfig | ListConfig, part: Any, parts: tuple[PathPart, ...]) -> Any:
        path = (*parts, part)
        try:
            value = node[part]
        except (OmegaConfBaseException, RecursionError) as error:
            self.problems.append(ConfigProblem(join(path), _first_line(error), _reference_remedy(error)))
            return _UNRESOLVED
        return self.resolved(value, path)


def _map_below(value: Any, parts: tuple[PathPart, ...], judge: Callable[..., Any]) -> Any:
    """Apply ``judge(value, path)`` to each entry, and leave out the entries it rejects."""
    if isinstance(value, dict):
        pairs = [(key, judge(below, (*parts, key))) for key, below in value.items()]
        return {key: below for key, below in pairs if below is not _UNRESOLVED}
    entries = [judge(below, (*parts, index)) for index, below in enumerate(value)]
    return [below for below in entries if below is not _UNRESOLVED]


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


def _reference_remedy(error: Exception) -> str:
    if "Environment variable" in str(error):
        return "set the variable, or give a default: `${oc.env:NAME,default}`"
    return "refer by its full path to a key that has a value, and that does not refer back"


def _first_line(error: Exception) -> str:
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    return text.removeprefix("KeyError raised while resolving interpolation: ").strip('"')


def _escaped(value: Any) -> Any:
    """Escape texts that look like references or missing values, so that they load as themselves."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list):
        return [_escaped(below) for below in value]
    if not isinstance(value, str):
        return value
    if re.fullmatch(r"\\*\?\?\?", value):
        return "\\" + value
    if "${" in value:
        return re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + "\\${", value)
    return value


PathPart = str | int

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Any: "any value"}
_PLURALS = {int: "whole numbers", float: "numbers", str: "texts"}


def join(parts: Sequence[PathPart]) -> str:
    """Join parts into a path: ``("a", "b", 0)`` -> ``a.b[0]``."""
    text = ""
    for part in parts:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Return the type of each field of a dataclass, with references resolved."""
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in fields(cls)}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself, without ``None``."""
    members = typing.get_args(kind) if _is_union(kind) else (kind,)
    return tuple(member for member in members if member is not type(None))


def is_optional(kind: Any) -> bool:
    """Return True if ``null`` is a value of the type."""
    return _is_union(kind) and type(None) in typing.get_args(kind)


def _is_union(kind: Any) -> bool:
    return typing.get_origin(kind) in (types.UnionType, typing.Union)


def dataclass_of(kind: Any) -> type | None:
    """Return the dataclass of a type (also ``X | None``); None if there is none."""
    return next((member for member in alternatives(kind) if isinstance(member, type) and is_dataclass(member)), None)


def member(kind: Any, part: PathPart) -> Any:
    """Return the type of one key or element below ``kind``; None if the schema does not define it."""
    for option in alternatives(kind):
        if isinstance(option, type) and is_dataclass(option):
            return field_types(option).get(part) if isinstance(part, str) else None
        arguments = typing.get_args(option)
        if typing.get_origin(option) is dict and isinstance(part, str):
            return arguments[1]
        if typing.get_origin(option) is list and isinstance(part, int):
            return arguments[0]
    return None


def kind_at(root: type, parts: Sequence[PathPart]) -> Any:
    """Return the type at a path below the dataclass ``root``; None if there is none."""
    kind: Any = root
    for part in parts:
        kind = member(kind, part)
    return kind


def walk(cls: type, prefix: str = "", without: Sequence[str] = ()) -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield each field below a dataclass as (path, field, type), sections before their keys.

    The keys of a mapping are written ``<name>``, the elements of a list ``[i]``. Paths in ``without`` are skipped, with
    everything below them.
    """
    kinds = field_types(cls)
    for item in fields(cls):
        path = f"{prefix}.{item.name}" if prefix else item.name
        if path in without:
            continue
        kind = kinds[item.name]
        yield path, item, kind
        for suffix, part in (("", None), (".<name>", ""), ("[i]", 0)):
            below = dataclass_of(kind if part is None else member(kind, part))
            if below is not None:
                yield from walk(below, path + suffix, without)
                break


def describe(kind: Any) -> str:
    """Describe a type in words, for messages: ``a whole number or null``."""
    words = [_describe_one(option) for option in alternatives(kind)]
    return " or ".join(words + (["null"] if is_optional(kind) else []))


def _describe_one(kind: Any) -> str:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if is_dataclass(kind) or origin is dict:
        return "a mapping"
    if origin is list:
        entry = arguments[0]
        return f"a list of {_PLURALS.get(entry) or ('mappings' if is_dataclass(entry) else 'names')}"
    if origin is typing.Literal:
        names = ", ".join(f"`{name}`" for name in arguments)
        return names if len(arguments) == 1 else f"one of {names}"
    return _WORDS[kind]


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
    """A loader that reads plain values by the rules above."""

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
    loader = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        problems = list(_node_problems(node, source)) if _is_bounded(node) else [_too_large(source)]
        if problems:
            raise ConfigError(problems)
        return loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ConfigError([_syntax_problem(error, source)]) from error
    except RecursionError as error:
        raise ConfigError([_too_large(source)]) from error
    except ValueError as error:
        remedy = "shorten the number, or put it in quotes if it is text"
        raise ConfigError([ConfigProblem(source, f"a number cannot be read: {error}", remedy)]) from error
    finally:
        if loader is not None:
            loader.dispose()


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


def _is_bounded(root: yaml.Node) -> bool:
    """Return True if the tree stays small with its aliases expanded. Cycles count as too deep."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if depth > MAX_DEPTH:
            return MAX_NODES + 1
        if id(node) not in sizes:
            total = 1
            for child in _children(node):
                total += size(child, depth + 1)
                if total > MAX_NODES:
                    break
            sizes[id(node)] = total
        return sizes[id(node)]

    return size(root, 0) <= MAX_NODES


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair


def _node_problems(node: yaml.Node, source: str) -> Iterator[ConfigProblem]:
    if node.tag not in _PLAIN_TAGS:
        tag = node.tag.replace(_CORE, "!!")
        remedy = "a configuration holds plain values only; drop the tag"
        yield ConfigProblem(_at(source, node.start_mark), f"tag {tag} is refused", remedy)
    if isinstance(node, yaml.MappingNode):
        yield from _key_problems(node, source)
    for child in _children(node):
        yield from _node_problems(child, source)


def _key_problems(node: yaml.MappingNode, source: str) -> Iterator[ConfigProblem]:
    lines: dict[str, int] = {}
    for key, _ in node.value:
        where = _at(source, key.start_mark)
        if key.tag not in (_CORE + "str", _MERGE):
            name = key.value if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            yield ConfigProblem(where, f"the key {name} is not text", "put the key in quotes")
        elif key.tag != _MERGE and key.value in lines:
            yield ConfigProblem(
                where,
                f"the key `{key.value}` stands already at line {lines[key.value]}",
                "keep one of the two: the second would silently replace the first",
            )
        else:
            lines[key.value] = key.start_mark.line + 1


def _at(source: str, mark: yaml.Mark) -> str:
    return f"{source}:{mark.line + 1}:{mark.column + 1}"

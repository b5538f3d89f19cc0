"""YAML in and out, as data only.

Plain values follow YAML 1.2: `1e-6` is a float, and `no`, `12:30` or `2024-01-01` are text. A repeated key, a tag such
as `!!python/object` and an alias that grows without bound are reported with line and column, all at once. Nothing in a
file is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from roll.configs.errors import ConfigError, ConfigProblem

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
    ("float", r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
     "-+.0123456789"),
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

"""Readers of other systems' configurations: YAML, TOML, command lines in shell scripts, Python scripts.

Nothing is executed. Scripts are only parsed: words, assignments of plain values and whole-number arithmetic in shell
scripts, literal arguments in Python. A value that would have to be computed is kept as text and reported with its key.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path as FilePath
from typing import Any

import yaml

from roll.configs.dialects.rules import Path, leaves
from roll.configs.errors import ConfigError
from roll.configs.loader import parse_yaml, resolved_tree
from roll.configs.plugins import problem

_WORD = re.compile(
    r"""(?P<comment>(?<!\S)\#[^\n]*)|(?P<end>\n|;;?|&&|\|\|?|&)|\s+"""
    r"""|(?P<word>(?:\$\(\((?:[^()]|\([^()]*\))*\)\)|\\.|"(?:\\.|[^"\\])*"|'[^']*'|[^\s"'\\;&|])+)|.""",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_VARIABLE = re.compile(r"\$\{(?P<braced>\w+)(?::?-(?P<default>[^{}]*))?\}|\$(?P<plain>[A-Za-z_]\w*)")
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)\)")
_OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_]\w*(?:\.\w+)*)=(?P<value>.*)", re.DOTALL)
_REFERENCE = re.compile(r"\$(\{?\w+(\[[@*]\])?\}?|[@*])|")
STRAY = ("words",)
"""Key of the words of a command line that are neither ``key=value`` nor part of a flag."""
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST = 2**53
"""Limit of results of the arithmetic in a script."""

_LONGEST_WORD = 100_000
"""Maximum length of a word with its variables replaced; a few lines could double a word again and again."""


def read_keys(text: str, source: str) -> dict[Path, Any]:
    """Return the keys and values of a text; the ending of its file name, ``source``, decides the format.

    The flag ``--a-b 1`` is the key ``a-b``, ``x.y=1`` is ``x.y``; ``entry`` is the module or script that the last
    Python command starts. Raises `ConfigError`.
    """
    ending = FilePath(source).suffix
    if ending == ".toml":
        try:
            return dict(leaves(tomllib.loads(text)))
        except tomllib.TOMLDecodeError as cause:
            raise problem(source, f"not valid TOML: {cause}", "correct the line") from cause
    if ending == ".py":
        return _of_python(text, source)
    if ending in (".yaml", ".yml"):
        tree = parse_yaml(text, source)
        if not isinstance(tree, dict):
            raise problem(source, "the top level is no mapping", "give a configuration of `key: value` lines")
        plain = dict(leaves(resolved_tree(tree)))
        return {key: _referred(value, plain.get(key)) for key, value in leaves(tree)}
    return _of_shell(text)


def _referred(value: Any, plain: Any) -> Any:
    """Return the value of a reference to another key. A reference to the environment stays: it may be a secret."""
    return plain if isinstance(value, str) and "${" in value and "oc.env" not in value and plain is not None else value


def _of_shell(text: str) -> dict[Path, Any]:
    """Return the overrides ``a.b=value`` and the flags ``--flag value`` of the commands in a script."""
    variables: dict[str, str] = {}
    found: dict[Path, Any] = {}
    for words in _commands(text):
        if words[0] == "ray" and "--" in words:  # ray job submit ... -- command
            words = words[words.index("--") + 1 :]
        elif words[0] in ("ray", "pkill", "docker", "sbatch", "srun", "torchrun", "cat", "echo"):
            continue
        words = [_expanded(word, variables) for word in words]
        entry = _entry(words)
        script = next((index for index, word in enumerate(words) if word in ("trl", entry) or word.endswith(".py")), 0)
        for index, word in enumerate(words):
            if _ASSIGNMENT.match(word) and all(_ASSIGNMENT.match(each) or each == "export" for each in words[:index]):
                name, _, value = word.partition("=")
                variables[name] = value.removeprefix("(")
            elif (match := _OVERRIDE.fullmatch(word)) is not None and ("." in match["key"] or 0 < script < index):
                found[tuple(match["key"].split("."))] = plain_value(_from_environment(match["value"]))
        if entry is not None:
            found["entry",] = entry
        for command in (words[:script], words[script:]):
            flags, others = _flags([_from_environment(word) for word in command if not _REFERENCE.fullmatch(word)])
            found |= flags
        others = others[2 if entry is not None and entry.startswith("trl ") else 1 :]
        if entry is not None and others:
            found[STRAY] = [*found.get(STRAY, []), " ".join(others)]
    return found


def _entry(words: list[str]) -> str | None:
    """Return the module or script that a Python command starts, or ``trl <command>``; None without further words."""
    if words[0] == "trl" and len(words) > 2:
        return " ".join(words[:2])
    for index, word in enumerate(words[:-1]):
        if re.fullmatch(r"(.*/)?python[\d.]*", word):
            rest = [each for each in words[index + 1 :] if each not in ("-u", "-m")]
            return rest[0] if len(rest) > 1 and not rest[0].startswith("-") else None
    return None


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command; an array ``X=( ... )`` may take several lines, a comment may be anywhere."""
    words: list[str] = []
    depth = 0
    for match in _WORD.finditer(text.replace("\\\n", " ")):
        if match["end"] is not None and depth == 0:
            if words:
                yield words
            words = []
        elif match["word"] is not None:
            word = match["word"]
            if re.match(r"[A-Za-z_]\w*\+?=\(", word):
                depth, word = 1, word[word.index("(") + 1 :]
            if depth and word.endswith(")") and "(" not in word:
                depth, word = 0, word[:-1]
            if word:
                words.append(_unquoted(word))
    if words:
        yield words


def _unquoted(word: str) -> str:
    """Return a word without its quotes. Dollar signs in single quotes are masked, so they are not expanded."""
    try:
        return "".join(shlex.split(re.sub(r"'[^']*'", lambda match: match[0].replace("$", "\0"), word))) or word
    except ValueError:
        return word


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    """Return a word with its variables and whole-number arithmetic replaced.

    Variables that the script does not set are marked for `_from_environment`.
    """

    def value(match: re.Match[str]) -> str:
        name = match["braced"] or match["plain"]
        default: str | None = match["default"]
        known = variables.get(name, default)
        return f"\1{name}\2" if known is None else known

    for _ in range(8):  # values may contain variables
        new = _VARIABLE.sub(value, word)
        if new == word or len(new) > _LONGEST_WORD:
            break
        word = new
    return _ARITHMETIC.sub(lambda match: _computed(match, variables), word).replace("\0", "$")


def _from_environment(text: str) -> str:
    """Return a text with its marked variables as references `${oc.env:NAME}`."""
    return re.sub("\1(\\w+)\2", r"${oc.env:\1}", text)


def _computed(match: re.Match[str], variables: Mapping[str, str]) -> str:
    names = {name: text for name, text in variables.items() if re.fullmatch(r"-?\d+", text)}
    try:
        return str(_whole_number(ast.parse(match[1].strip(), mode="eval").body, names))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return match[0]


def _whole_number(node: ast.expr, names: Mapping[str, str]) -> int:
    """Return the value of a sum, difference, product or quotient of whole numbers. Raises ``ValueError``."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        result = node.value
    elif isinstance(node, ast.Name) and node.id in names:
        result = int(names[node.id])
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        result = _OPERATORS[type(node.op)](_whole_number(node.left, names), _whole_number(node.right, names))
    else:
        raise ValueError("no arithmetic of whole numbers")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result


def _flags(words: list[str]) -> tuple[dict[Path, Any], list[str]]:
    """Return the flags of a command, and its words that are neither part of a flag nor an override.

    A flag has its one value, a list of several, or true without any. Reading stops at a redirection.
    """
    found: dict[Path, Any] = {}
    others: list[str] = []
    values: list[Any] | None = None
    for index, word in enumerate(words):
        if re.match(r"--[A-Za-z]", word):
            name, equals, value = word[2:].partition("=")
            values = found.setdefault((*name.split("."),), [])
            values.clear()
            if equals:
                values.append(plain_value(value))
                values = None
        elif re.match(r"\d?[<>]", word):
            break
        elif _OVERRIDE.fullmatch(word):
            values = None
        elif values is not None:
            values.append(plain_value(word))
        elif index == 0 or word != "\\":
            others.append(word)
    return {key: each[0] if len(each) == 1 else each or True for key, each in found.items()}, others


def plain_value(text: str) -> Any:
    """Return a word of a command line parsed as YAML; the text itself if it is not YAML."""
    if text in ("True", "False", "None", "null"):
        return {"True": True, "False": False}.get(text)
    try:
        return parse_yaml(text, "command line")
    except (ConfigError, yaml.YAMLError):
        return text


class _Computed(str):
    """The source text of an argument that is not a literal."""


def _of_python(text: str, source: str) -> dict[Path, Any]:
    """Return the arguments of the calls of ``...Config`` and ``...Trainer`` in a script.

    Later assignments to their attributes count as arguments, too; the arguments of ``load_dataset`` become
    ``dataset_name`` and so on. A trainer's first argument is ``model``. A name has a known value if the script assigns
    it exactly once, a literal.
    """
    try:
        module = ast.parse(text)
        nodes = list(ast.walk(module))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as cause:
        raise problem(source, f"not valid Python: {cause}", "give the script as it is") from cause
    always = [statement for body in _bodies(module) for statement in body]
    names = _names(nodes, always)
    found: dict[Path, Any] = {}
    for node in nodes:
        if isinstance(node, ast.Call):
            found |= _arguments(node, names, found)
    for assignment in [node for node in nodes if isinstance(node, ast.Assign)]:
        target, value = assignment.targets[0], assignment.value
        if not isinstance(target, ast.Attribute) or not isinstance(target.value, ast.Name):
            continue
        owner = ast.unparse(names.get(target.value.id, target.value)).partition("(")[0]
        if owner.endswith(("Config", "Trainer", "args", "config")):
            known = _literal(value, names) if assignment in always else _Computed(ast.unparse(value))
            found |= _named(target.attr, known, "LoraConfig" in owner)
    return found


def _arguments(call: ast.Call, names: Mapping[str, ast.expr], found: Mapping[Path, Any]) -> dict[Path, Any]:
    name = ast.unparse(call.func).rpartition(".")[2]
    if name == "load_dataset":
        given = [_literal(argument, names) for argument in call.args]
        data = {(key,): value for key, value in zip(("dataset_name", "dataset_config"), given, strict=False)}
        data |= {(f"dataset_{word.arg}",): _literal(word.value, names) for word in call.keywords if word.arg == "split"}
        return {key: value for key, value in data.items() if key not in found}
    if not name.endswith(("Config", "Trainer")):
        return {}
    arguments: dict[Path, Any] = {("entry",): f"{found.get(('entry',), '')} {name}".strip()}
    if name.endswith("Trainer") and call.args:
        arguments["model",] = _literal(call.args[0], names)
    for word in call.keywords:
        value = _literal(word.value, names)
        if word.arg is not None:
            arguments |= {} if word.arg in ("args", "peft_config") else _named(word.arg, value, name == "LoraConfig")
        elif isinstance(value, dict):
            for key, each in value.items():
                arguments |= _named(str(key), each, name == "LoraConfig")
        else:
            arguments[f"**{value}",] = value
    return arguments


def _named(name: str, value: Any, of_adapter: bool) -> dict[Path, Any]:
    key = (*(("peft_config",) if of_adapter else ()), name)
    return dict(leaves(value, key)) if isinstance(value, dict) and value else {key: value}


def _bodies(module: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield the statement lists of the module, of each function and of each ``if __name__ == ...``."""
    yield module.body
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) or (isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)):
            yield node.body


def _names(nodes: Sequence[ast.AST], always: Sequence[ast.stmt]) -> dict[str, ast.expr]:
    """Return the names that a script assigns exactly once, with the assigned expressions."""
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    stored += [node.arg for node in nodes if isinstance(node, ast.arg)]
    return {
        node.targets[0].id: node.value
        for node in always
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and len(node.targets) == 1
        if stored.count(node.targets[0].id) == 1
    }


def _literal(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """Return the value of a literal, or of a name that stands for one; the source of anything else, as `_Computed`."""
    try:
        return _value(node, names)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return _Computed(ast.unparse(node))


def _value(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], names)
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict" and not node.args:
        return {word.arg or f"**{ast.unparse(word.value)}": _literal(word.value, names) for word in node.keywords}
    if isinstance(node, ast.BinOp) and not any(isinstance(each, ast.Div) for each in ast.walk(node)):
        return _whole_number(node, {})
    return ast.literal_eval(node)


def is_computed(value: Any) -> bool:
    """Return True for the source text of a value that the script computes."""
    return isinstance(value, _Computed) or (
        isinstance(value, str) and bool(re.search(r"\$(?!\{oc\.env:)[\w({]|`", value))
    )

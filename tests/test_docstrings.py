"""Every public name of the package says what it is for: modules, classes, functions, methods and properties.

Left out are names with a leading underscore and what stands inside them, and methods that override a documented one of
a base class: there the promise is written once. Types are mypy's business (`make check`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "roll"

GYMNASIUM = {"reset", "step", "render", "close"}
"""Methods that gymnasium documents for all environments; ours are described by `roll/agentic/base.py`."""
FOREIGN_BASES = {"gymnasium.Env": GYMNASIUM, "gymnasium.Wrapper": GYMNASIUM}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def undocumented(sources: Mapping[str, str]) -> list[str]:
    """Public names without a docstring in modules (path -> source), as ``path:line name``."""
    trees = {path: ast.parse(source) for path, source in sources.items()}
    classes: dict[str, list[ast.ClassDef]] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(node)
    return [f"{path}:{line} {name}" for path, tree in sorted(trees.items()) for line, name in _without(tree, classes)]


def _without(tree: ast.Module, classes: Mapping[str, list[ast.ClassDef]]) -> Iterator[tuple[int, str]]:
    if tree.body and not _says_something(tree):
        yield 1, "(the module)"
    yield from _without_below(tree, "", classes)


def _without_below(
    parent: ast.Module | ast.ClassDef, prefix: str, classes: Mapping[str, list[ast.ClassDef]]
) -> Iterator[tuple[int, str]]:
    for node in _definitions(parent):
        if node.name.startswith("_"):
            continue
        overrides = isinstance(parent, ast.ClassDef) and node.name in _promised(parent, classes)
        if not overrides and not _says_something(node):
            yield node.lineno, prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from _without_below(node, f"{prefix}{node.name}.", classes)


def _definitions(parent: ast.Module | ast.ClassDef) -> Iterator[Function | ast.ClassDef]:
    """What is defined there, also under a condition; setters and overloads are the same name again."""
    for node in parent.body:
        inside = [*node.body, *node.orelse] if isinstance(node, ast.If) else [node]
        for each in inside:
            if isinstance(each, Function | ast.ClassDef) and not _is_said_elsewhere(each):
                yield each


def _is_said_elsewhere(node: Function | ast.ClassDef) -> bool:
    names = [ast.unparse(decorator).split(".")[-1] for decorator in node.decorator_list]
    return "setter" in names or "overload" in names


def _promised(owner: ast.ClassDef, classes: Mapping[str, list[ast.ClassDef]]) -> set[str]:
    """Methods that a base class of the owner documents."""
    promised: set[str] = set()
    for base in owner.bases:
        name = ast.unparse(base.value if isinstance(base, ast.Subscript) else base)
        promised |= FOREIGN_BASES.get(name, set())
        for found in classes.get(name.split(".")[-1], ()):
            promised |= {each.name for each in _definitions(found) if _says_something(each)}
            if found is not owner:
                promised |= _promised(found, classes)
    return promised


def _says_something(node: ast.Module | Function | ast.ClassDef) -> bool:
    return bool((ast.get_docstring(node) or "").strip())


def test_every_public_name_has_a_docstring():
    sources = {
        str(path.relative_to(PACKAGE.parent)): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")
    }
    assert "roll/configs/run.py" in sources
    assert undocumented(sources) == []


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("x = 1", "(the module)"),
        ("'''A module.'''\ndef work(): pass", "work"),
        ("'''A module.'''\nasync def work(): pass", "work"),
        ("'''A module.'''\ndef work():\n    '''  '''", "work"),
        ("'''A module.'''\nif True:\n    def work(): pass", "work"),
        ("'''A module.'''\nclass Thing:\n    x = 1", "Thing"),
        ("'''A module.'''\nclass Thing:\n    '''One.'''\n    def work(self): pass", "Thing.work"),
        ("'''A module.'''\nclass Thing:\n    '''One.'''\n    @property\n    def size(self): return 1", "Thing.size"),
        (
            "'''A module.'''\nclass Base:\n    '''One.'''\nclass Thing(Base):\n    '''A.'''\n    def work(self): pass",
            "Thing.work",
        ),
        ("'''A module.'''\nclass Thing(gymnasium.Env):\n    '''One.'''\n    def other(self): pass", "Thing.other"),
    ],
)
def test_a_name_without_one_is_found(source, name):
    (found,) = undocumented({"module.py": source})
    assert found.endswith(f" {name}")


@pytest.mark.parametrize(
    "source",
    [
        "",
        "'''A module.'''\ndef _work(): pass",
        "'''A module.'''\nclass _Thing:\n    def work(self): pass",
        "'''A module.'''\ndef work():\n    '''Does it.'''\n    def inner(): pass",
        "'''A module.'''\nclass Thing:\n    '''One.'''\n    def __len__(self): return 1",
        "'''A module.'''\nclass Thing(gymnasium.Env[str, str]):\n    '''One.'''\n    def reset(self): pass",
    ],
)
def test_what_needs_none_is_let_through(source):
    assert undocumented({"module.py": source}) == []


def test_an_override_is_documented_by_its_base_in_another_module():
    sources = {
        "base.py": "'''Bases.'''\nclass Base:\n    '''One.'''\n    def work(self):\n        '''Does it.'''",
        "middle.py": "'''More.'''\nclass Middle(base.Base):\n    '''Another.'''",
        "thing.py": "'''Things.'''\nclass Thing(Middle):\n    '''A third.'''\n    def work(self): pass",
    }
    assert undocumented(sources) == []

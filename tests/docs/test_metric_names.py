"""Every metric that the documentation names is one that the product can report, as far as its sources tell.

Metric names are texts in the sources, some with places to be filled in (`weights/{name}_seconds`). A documented name
must fit one of them, and what fills a place must itself be a text there, or be marked as the reader's own (`<domain>`).
"""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.docs.pages import ROOT, Page, pages

FAMILIES = (
    "actor", "advantage", "correction", "critic", "engine", "env_tokens", "env_workers", "idle", "kl_penalty", "lag",
    "ledger", "memory", "metrics", "mfu", "mismatch", "reward", "rewards", "response", "time", "tokens_per_second",
    "tokens_per_second_per_device", "val", "weights",
)  # fmt: skip
"""First parts of metrics' names. Those of environments (`env`) follow from what environments report."""
_NAME = re.compile(rf"({'|'.join(FAMILIES)})(/[a-z_0-9]+|/<[a-z_]+>|/[a-z]+_<n>)+")
DOMAINS = ("math", "addition")
"""What pages call the domains of their readers."""


def documented(page: Page) -> set[str]:
    """Names of metrics in the page's code within sentences."""
    return {code for _, code in page.inline if _NAME.fullmatch(code)}


def unknown(names: set[str]) -> list[str]:
    """Those that the sources cannot report."""
    return sorted(name for name in names if not any(_fits(name, shape) for shape in _shapes()))


def _fits(name: str, shape: tuple[str | None, ...]) -> bool:
    """Whether a name is a text of the sources, in which None is a place to be filled in."""
    pattern = "".join("(.+)" if part is None else re.escape(part) for part in shape)
    found = re.fullmatch(pattern, name)
    return found is not None and all(_known(filled) for filled in found.groups())


def _known(filled: str) -> bool:
    """Whether each part of what fills a place is a text of the sources, or the reader's own."""
    parts = filled.split("/")
    own = re.compile(rf"<\w+>|\d+|{'|'.join(DOMAINS)}")
    return all(own.fullmatch(part) or part.removesuffix("<n>") in _words() for part in parts)


@cache
def _shapes() -> frozenset[tuple[str | None, ...]]:
    return frozenset(shape for shape in _texts() if any(part and "/" in part for part in shape))


@cache
def _words() -> frozenset[str]:
    """Single texts, names of fields and of keywords: what metrics are called before they get their family."""
    plain = {shape[0] for shape in _texts() if len(shape) == 1}
    pieces = {piece for shape in _texts() for part in shape if part for piece in part.split("/")}
    fields = {
        node.target.id
        for tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    return frozenset(plain | pieces | fields)


@cache
def _texts() -> frozenset[tuple[str | None, ...]]:
    """Each text of the sources, in parts; None for a place. Docstrings, which are prose, do not count."""
    found = set()
    for tree in _trees():
        prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.add(tuple(part.value if isinstance(part, ast.Constant) else None for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
                found.add((node.value,))
    return frozenset(found)


@cache
def _trees() -> tuple[ast.Module, ...]:
    files = sorted(path for path in (ROOT / "roll").rglob("*.py") if ROOT / "roll" / "report" not in path.parents)
    return tuple(ast.parse(path.read_text(encoding="utf-8")) for path in files)


@pytest.mark.parametrize("page", [page for page in pages() if documented(page)], ids=lambda page: page.name)
def test_metrics_that_are_named_exist(page):
    assert unknown(documented(page)) == []


@pytest.mark.parametrize(
    "name",
    ["actor/gradient_norm", "ledger/misplaced", "weights/unload_seconds", "response/length_median", "val/<tag>/medium"],
)
def test_a_metric_that_does_not_exist_is_found(name):
    page = Page("docs/a.md", f"Look at `{name}` and at `lag/max`.\n")
    assert unknown(documented(page)) == [name]

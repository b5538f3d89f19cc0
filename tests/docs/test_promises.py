"""The page of promises names tests that exist."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.pages import ROOT, page

NAMED = re.compile(r"\| `((?:\w+/)*test_\w+\.py)(?:::(\w+))?` \|")
ROWS = [line for line in page("docs/promises.md").text.splitlines() if line.startswith("| ") and "| test |" not in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_every_promise_names_a_test_that_is_there(row):
    found = NAMED.search(row)
    assert found, "the row names no test"
    path, name = ROOT / "tests" / found[1], found[2]
    assert path.is_file()
    defined = {each.name for each in ast.parse(path.read_text()).body if isinstance(each, ast.FunctionDef)}
    assert name is None or name in defined

"""Every Python block of the documentation runs."""

from __future__ import annotations

import pytest

from tests.docs.pages import Page, pages
from tests.docs.programs import problems_of_programs

WITH_PYTHON = [page for page in pages() if any(block.language == "python" for block in page.blocks)]


def _starts_runs(page: Page) -> bool:
    return any("roll.train(" in block.text for block in page.blocks)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=[pytest.mark.tier("all")] * _starts_runs(page)) for page in WITH_PYTHON],
)
def test_the_python_of_a_page_runs(page, sit_down, request):
    if _starts_runs(page):
        request.getfixturevalue("warm_commands")
    assert problems_of_programs(page, sit_down(page)) == []


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("from roll.configs.plugins import import_objekt", "ImportError"),
        ("print(neither_here_nor_there)", "NameError"),
        ("def broken(:\n    pass", "SyntaxError"),
        ("from roll.algorithms.kl import k1\n\nk1(most=1)", "most"),
    ],
)
def test_a_block_that_does_not_run_is_found(text, reason, sit_down):
    page = Page("docs/a.md", f"Words.\n\n```python\nfirst = 1\n```\n\nMore.\n\n```python\n{text}\n```\n")
    [found] = problems_of_programs(page, sit_down(page))
    assert found.startswith("docs/a.md:10: ") and reason in found


def test_a_file_that_the_page_saves_can_be_imported_and_a_wrong_one_is_named(sit_down):
    page = Page("docs/a.md", "Save this as `my_own.py`:\n\n```python\nSIZE = 3 / 0\n```\n")
    [found] = problems_of_programs(page, sit_down(page))
    assert found.startswith("docs/a.md:4: ") and "ZeroDivisionError" in found


def test_blocks_share_a_namespace_and_what_is_for_scripts_is_left_out(sit_down):
    second = "assert size == 3\nif __name__ == '__main__':\n    raise ValueError"
    page = Page("docs/a.md", f"```python\nsize = 3\n```\n\n```python\n{second}\n```\n")
    assert problems_of_programs(page, sit_down(page)) == []

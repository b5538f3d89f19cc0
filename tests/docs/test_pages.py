"""Every block of code of a page is found, however it is written."""

from __future__ import annotations

import pytest

from tests.docs.pages import Page, pages

BLOCK = "max_stps: 3"


@pytest.mark.parametrize(
    ("text", "language"),
    [
        (f"```yaml\n{BLOCK}\n```\n", "yaml"),
        (f"``` yaml\n{BLOCK}\n```\n", "yaml"),
        (f"~~~yaml\n{BLOCK}\n~~~\n", "yaml"),
        (f"```yaml\n{BLOCK}\n`````\n", "yaml"),
        (f"````yaml\n{BLOCK}\n````\n", "yaml"),
        (f"- A list.\n\n    ```yaml\n    {BLOCK}\n    ```\n", "yaml"),
        (f"- A list.\n\n\t```yaml\n\t{BLOCK}\n\t```\n", "yaml"),
        (f"> ```yaml\n> {BLOCK}\n> ```\n", "yaml"),
        (f"```yaml\n{BLOCK}\n", "yaml"),
        (f"    {BLOCK}\n", ""),
        (f"\t{BLOCK}\n", ""),
    ],
)
def test_a_block_is_found_however_it_is_written(text, language):
    page = Page("docs/a.md", f"Words.\n\n{text}")
    [block] = page.blocks
    assert (block.language, block.text.strip(), page.inline) == (language, BLOCK, [])
    assert page.text.splitlines()[block.line - 1].endswith(BLOCK)


@pytest.mark.parametrize("text", [f"<pre>{BLOCK}</pre>\n", f"Words <code>{BLOCK}</code>.\n"])
def test_code_as_html_is_seen(text):
    assert any("<pre" in each or "<code" in each for each in Page("docs/a.md", text).html)


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_no_page_has_code_as_html(page):
    assert [each for each in page.html if "<pre" in each or "<code" in each] == []

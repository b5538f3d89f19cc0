"""The pages of the documentation, cut into what a reader would copy: blocks of code and commands within a sentence."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PATTERNS = ("README.md", "docs/**/*.md", "examples/README.md", "examples/*/README.md", "benchmarks/README.md")

_INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_SAVED = re.compile(r"[Ss]ave this as `([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A block of code, fenced or indented."""

    page: str
    line: int
    """Of its first line, counted from 1."""
    info: str
    """What is written after the fence."""
    text: str
    lines: range
    """Those that it takes, fences included, counted from 0."""
    saved_as: str | None
    """The file name that the paragraph before it tells the reader to use."""

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info.split() else ""

    @property
    def title(self) -> str | None:
        found = re.search(r'title="([^"]*)"', self.info)
        return found[1] if found else None

    @property
    def where(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    """A Markdown file; ``name`` is its path in the repository."""

    name: str
    text: str

    @property
    def blocks(self) -> list[Block]:
        return _blocks(self.name, self.text)

    @property
    def html(self) -> list[str]:
        """What is written as HTML, which no test looks into."""
        tokens = _tokens(self.text)
        return [each.content for token in tokens for each in (token, *(token.children or ())) if "html" in each.type]

    @property
    def inline(self) -> list[tuple[int, str]]:
        """Code within sentences, with the line where it begins."""
        within = {number for block in self.blocks for number in block.lines}
        lines = self.text.split("\n")
        text = "\n".join("" if number in within else line for number, line in enumerate(lines))
        return [(text[: found.start()].count("\n") + 1, " ".join(found[1].split())) for found in _INLINE.finditer(text)]

    def saved_files(self) -> dict[str, str]:
        """What the reader has written to files by the end of the page."""
        return {block.saved_as: block.text for block in self.blocks if block.saved_as}


@cache
def _tokens(text: str) -> list[Token]:
    return MarkdownIt("commonmark").enable("table").parse(text)


@cache
def _blocks(name: str, text: str) -> list[Block]:
    lines = text.split("\n")
    found = []
    for token in _tokens(text):
        if token.type in ("fence", "code_block"):
            taken = range(*token.map)
            paragraph = "\n".join(lines[: taken.start]).rstrip().rpartition("\n\n")[2]
            saved = _SAVED.findall(" ".join(paragraph.split()))
            line = taken.start + (2 if token.type == "fence" else 1)
            block = Block(name, line, token.info.strip(), token.content, taken, saved[-1] if saved else None)
            found.append(block)
    return found


def pages() -> list[Page]:
    """All pages, in the order of their names."""
    found = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    return [Page(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in found]


def page(name: str) -> Page:
    """One of them."""
    return next(each for each in pages() if each.name == name)

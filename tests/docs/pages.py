"""The pages of the documentation, cut into what a reader would copy: blocks of code and commands within a sentence."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERNS = ("README.md", "docs/**/*.md", "examples/README.md", "examples/*/README.md", "benchmarks/README.md")

_FENCE = re.compile(
    r"^(?P<indent> *)(?P<fence>```+|~~~+)(?P<info>[^\n`]*)\n(?P<text>.*?)^ *(?P=fence)[ ]*$", re.MULTILINE | re.DOTALL
)
_INLINE = re.compile(r"(?<!`)`([^`\n]+(?:\n[^`\n]+)?)`(?!`)")
_SAVED = re.compile(r"[Ss]ave this as `([^`]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    page: str
    line: int
    """Of its first line, counted from 1."""
    info: str
    text: str
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
        return list(self._blocks())

    def _blocks(self) -> Iterator[Block]:
        for fence in _FENCE.finditer(self.text):
            before = self.text[: fence.start()]
            paragraph = before.rstrip().rpartition("\n\n")[2]
            saved = _SAVED.findall(" ".join(paragraph.split()))
            cut = len(fence["indent"])
            text = "".join(line[cut:] if line[:cut].isspace() else line for line in fence["text"].splitlines(True))
            line = before.count("\n") + 2
            yield Block(self.name, line, fence["info"].strip(), text, saved[-1] if saved else None)

    @property
    def inline(self) -> list[tuple[int, str]]:
        """Code within sentences, with the line where it begins."""
        text = _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), self.text)
        return [(text[: found.start()].count("\n") + 1, " ".join(found[1].split())) for found in _INLINE.finditer(text)]

    def saved_files(self) -> dict[str, str]:
        """What the reader has written to files by the end of the page."""
        return {block.saved_as: block.text for block in self.blocks if block.saved_as}


def pages() -> list[Page]:
    """All pages, in the order of their names."""
    found = sorted({path for pattern in PATTERNS for path in ROOT.glob(pattern)})
    return [Page(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in found]


def page(name: str) -> Page:
    """One of them."""
    return next(each for each in pages() if each.name == name)

"""Pages of the site that are written elsewhere in the repository: the READMEs of examples and benchmarks.

Nothing is copied by hand: the files are taken in while the site is built, at the paths that they have in the
repository. So a link between a page and a file outside of docs/ means the same on the site and in the repository. A
file that is linked and is no page (a configuration, a script) is taken in as it is.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

PAGES = ("examples/README.md", "examples/*/README.md", "benchmarks/README.md")
"""Pages outside of docs/, from the repository's root."""
FRONT_PAGE = {"README.md": "index.md"}
"""The repository's own front page has another one on the site."""

_FENCED = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?P<text>\]\()(?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?(?=\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Take in pages from outside of docs/, and the files that any page links to."""
    root = Path(config.docs_dir).parent
    for pattern in PAGES:
        for path in sorted(root.glob(pattern)):
            _take_in(files, config, path.relative_to(root).as_posix(), root)
    for page in list(files.documentation_pages()):
        text = Path(page.abs_src_path).read_text(encoding="utf-8")
        for target in _outside(text, _place(page)):
            if (root / target).is_file() and target not in FRONT_PAGE:
                _take_in(files, config, target, root)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that lead out of docs/, or into it from outside, lead to where things are on the site."""
    place = _place(page.file)
    here = posixpath.dirname(page.file.src_uri)

    def on_site(link: re.Match[str]) -> str:
        target = _in_repository(link["target"], place)
        target = FRONT_PAGE.get(target, target.removeprefix("docs/"))
        return f"{link['text']}{posixpath.relpath(target, here or '.')}{link['anchor'] or ''}"

    return _outside_of_fences(markdown, lambda text: _LINK.sub(on_site, text))


def _take_in(files: Files, config: MkDocsConfig, path: str, root: Path) -> None:
    if files.get_file_from_path(path) is None:
        # Examples are found through their list, and need no place each in the navigation.
        found = File.generated(config, path, abs_src_path=str(root / path), inclusion=InclusionLevel.NOT_IN_NAV)
        files.append(found)


def _place(file: File) -> str:
    """Path of a page in the repository."""
    return file.src_uri if file.generated_by else f"docs/{file.src_uri}"


def _in_repository(target: str, place: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(place), target))


def _outside(text: str, place: str) -> Iterator[str]:
    """Paths in the repository, but not below docs/, that a page links to."""
    for link in _LINK.finditer(_FENCED.sub("", text)):
        target = _in_repository(link["target"], place)
        if not target.startswith("docs/"):
            yield target


def _outside_of_fences(markdown: str, change: Callable[[str], str]) -> str:
    pieces, copied = [], 0
    for fence in _FENCED.finditer(markdown):
        pieces += [change(markdown[copied : fence.start()]), fence[0]]
        copied = fence.end()
    return "".join([*pieces, change(markdown[copied:])])

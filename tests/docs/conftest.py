"""Where the blocks of a page are tried: a folder of the reader's own, with the files that the page has them write."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Page, pages

SECRETS = {"JUDGE_KEY": "a key of the reader's own"}
"""Variables that pages name and a reader has."""


@pytest.fixture
def sit_down(tmp_path, monkeypatch) -> Callable[[Page], Path]:
    """Puts the reader of a page into a checkout of their own: examples, benchmarks and tests are there to be read, and
    so is what the front page and this one tell them to save. What they import is forgotten afterwards."""

    def prepare(page: Page) -> Path:
        for name in ("examples", "benchmarks", "tests", "requirements", "roll", "Makefile", "docs"):
            (tmp_path / name).symlink_to(ROOT / name)
        front = next(each for each in pages() if each.name == "README.md")
        for name, text in (front.saved_files() | page.saved_files()).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    yield prepare
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]

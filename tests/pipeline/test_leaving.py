"""How a process of `roll` leaves."""

from __future__ import annotations

import gc
import subprocess
import sys
from textwrap import dedent

import pytest

from roll.runtime.process import freeze_at_exit


def test_what_was_imported_is_not_searched_for_garbage_at_the_end():
    """That search takes two seconds where torch, transformers and Ray are loaded."""
    code = """
        import atexit, gc
        atexit.register(lambda: print(gc.get_freeze_count() > 10_000))  # after what is registered later
        from roll.cli.main import main
        main(["--version"])
        print(gc.get_freeze_count())
    """
    ended = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert ended.stdout.split()[-2:] == ["0", "True"]


@pytest.mark.parametrize(("loaded", "frozen"), [({}, 1), ({"triton": None}, 0)])
def test_the_search_takes_place_where_triton_would_report_what_it_did_not_find(monkeypatch, loaded, frozen):
    calls = []
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    for name, module in loaded.items():
        monkeypatch.setitem(sys.modules, name, module)
    freeze_at_exit()
    assert len(calls) == frozen

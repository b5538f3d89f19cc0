"""How a process of `roll` leaves."""

from __future__ import annotations

import subprocess
import sys
from textwrap import dedent


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

"""Runs the Python of a page as its reader would: files that it says to save are there to be imported, the other blocks
run one after the other in one namespace, in a process of their own.

`python tests/docs/programs.py FILE` in the reader's folder, FILE being JSON: a list of `[where, code]`. A block that
fails is named, with its traceback.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.docs.pages import Block, Page

NAMESPACE = "page"
"""Not `__main__`: what a block does only when it is run as a script is left out."""
LONGEST_SECONDS = 240


def problems_of_programs(page: Page, folder: Path) -> list[str]:
    """What goes wrong when the Python of a page runs in ``folder``, where its reader is."""
    blocks = [block for block in page.blocks if block.language == "python"]
    steps = [[block.where, _code(block)] for block in blocks]
    (folder / "blocks.json").write_text(json.dumps(steps), encoding="utf-8")
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, str(Path(__file__)), "blocks.json"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(root)])},
        capture_output=True,
        text=True,
        timeout=LONGEST_SECONDS,
    )
    return [] if ended.returncode == 0 else [ended.stderr.strip()[-2000:]]


def _code(block: Block) -> str:
    """A block that is saved as a file is imported, so that later ones, and configurations, find the same objects."""
    if block.saved_as is None:
        return block.text
    return f"import {block.saved_as.removesuffix('.py')}\nfrom {block.saved_as.removesuffix('.py')} import *\n"


def main(path: str) -> int:
    namespace = types.ModuleType(NAMESPACE)
    sys.modules[NAMESPACE] = namespace  # where dataclasses look for the types they name
    for where, code in json.loads(Path(path).read_text(encoding="utf-8")):
        try:
            exec(compile(code, where, "exec"), vars(namespace))  # the project's own documentation
        except Exception:
            print(f"{where}: {traceback.format_exc(limit=-3)}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

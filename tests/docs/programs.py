"""Runs the Python of a page as its reader would: files that it says to save are there to be imported, the other blocks
run one after the other in one namespace, in a process of their own (a fork of one that has imported what is large).

A block that fails is named, with its traceback.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
import types
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.docs.pages import Block, Page

NAMESPACE = "page"
"""Not `__main__`: what a block does only when it is run as a script is left out."""
LONGEST_SECONDS = 240
PRELOADED = ["roll.trainers.fsdp2", "roll.pipeline.main", "torch", "transformers"]


def problems_of_programs(page: Page, folder: Path) -> list[str]:
    """What goes wrong when the Python of a page runs in ``folder``, where its reader is."""
    steps = [(block.where, _code(block)) for block in page.blocks if block.language == "python"]
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(PRELOADED)
    told, telling = processes.Pipe(duplex=False)
    reader = processes.Process(target=_read, args=(steps, folder, dict(os.environ), telling))
    reader.start()
    telling.close()
    try:
        if not told.poll(LONGEST_SECONDS):
            return [f"{page.name}: not done after {LONGEST_SECONDS} s"]
        problem = told.recv()
    except EOFError:
        return [f"{page.name}: its process died"]
    finally:
        reader.kill()
        reader.join()
    return [] if problem is None else [problem]


def _code(block: Block) -> str:
    """A block that is saved as a file is imported, so that later ones, and configurations, find the same objects."""
    if block.saved_as is None:
        return block.text
    return f"import {block.saved_as.removesuffix('.py')}\nfrom {block.saved_as.removesuffix('.py')} import *\n"


def _read(steps: list[tuple[str, str]], folder: Path, environment: dict[str, str], telling: Connection) -> None:
    """Be the process of a page: tell what went wrong, or None."""
    with open(os.devnull, "w") as nowhere:
        for output in (1, 2):
            os.dup2(nowhere.fileno(), output)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[:0] = [str(folder)]
    sys.argv[:] = [NAMESPACE]
    telling.send(_problem(steps))


def _problem(steps: list[tuple[str, str]]) -> str | None:
    namespace = types.ModuleType(NAMESPACE)
    sys.modules[NAMESPACE] = namespace  # where dataclasses look for the types they name
    for where, code in steps:
        try:
            exec(compile(code, where, "exec"), vars(namespace))  # the project's own documentation
        except Exception:
            return f"{where}: {traceback.format_exc(limit=-3)}"[-2000:]
    return None

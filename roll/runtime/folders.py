"""Working folder and import path of a driver, which the processes of its run take over.

All processes of a run find the same modules, and relative paths mean the same to them, even if their Ray was started
elsewhere.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from roll.configs.plugins import working_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class DriverFolders:
    """Working folder and import path of a driver, which its workers take over."""

    work: str | None = None
    """None if the folder does not exist any more, or if a worker stays in its own."""
    imports: tuple[str, ...] = ()

    def enter(self) -> None:
        """Make them this process's own. Folders that only this process searches come last."""
        sys.path[:] = [*self.imports, *(entry for entry in sys.path if entry not in self.imports)]
        if self.work is not None:
            with suppress(OSError):  # the folder does not exist on another host
                os.chdir(self.work)


def driver_folders() -> DriverFolders:
    """Return the folders of this process."""
    work = working_folder()
    if work is None:
        logger.warning("the working folder has been deleted: relative paths have no meaning, here and in workers")
    return DriverFolders(work, tuple(dict.fromkeys(_import_folders(work))))


def _import_folders(work: str | None) -> Iterator[str]:
    """Yield the import path; the working folder comes last unless it stands earlier."""
    for entry in filter(None, sys.path) if work is None else (*sys.path, work):
        is_relative = work is not None and os.path.exists(os.path.join(work, entry))
        yield os.path.abspath(entry) if is_relative else entry  # otherwise it may be a key of a path hook

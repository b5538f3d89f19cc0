"""A disk that forgets what nobody waited for, as at a power cut.

While a `PowerCut` watches, it notes each `os.fsync`: of a file its content then, of a folder its names then.
`survivors` makes the folder that is found after the cut. Of a file its last synced content is left, under a name that
its folder was synced with; for a rename that means a sync of the folder after it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest


class PowerCut:
    """Notes what reaches the disk, by the numbers of files, which renames do not change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, int]] = {}
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self._note)

    def survivors(self, folder: Path, into: Path) -> Path:
        """Make a folder of whatever is left of ``folder`` now."""
        into.mkdir(parents=True)
        for name, number in self._names.get(folder.stat().st_ino, {}).items():
            self._restore(number, into / name)
        return into

    def forget_names_of(self, folder: Path) -> None:
        """Take the names of a folder for synced, where only the content of its files matters."""
        self._names[folder.stat().st_ino] = _names_in(folder)

    def _restore(self, number: int, into: Path) -> None:
        if number in self._contents:
            into.write_bytes(self._contents[number])
        elif number in self._names:
            into.mkdir()
            for name, inside in self._names[number].items():
                self._restore(inside, into / name)

    def _note(self, descriptor: int) -> None:
        self._fsync(descriptor)
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        number = os.fstat(descriptor).st_ino
        if path.is_dir():
            self._names[number] = _names_in(path)
        else:
            self._contents[number] = path.read_bytes()


def _names_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_ino for path in folder.iterdir()}

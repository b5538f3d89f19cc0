"""Size and removal of the folder of a program that has no file system of its own.

Programs may create trees deeper than the maximum path length, and folders that cannot be entered.
"""

from __future__ import annotations

import os

_MOST_FILES = 10_000


def folder_bytes(folder: str) -> float:
    """Return the bytes of the files below a folder; infinity if there are too many files, or they cannot be read."""
    total, files, open_folders = 0, 0, [folder]
    while open_folders:
        try:
            with os.scandir(open_folders.pop()) as entries:
                for entry in entries:
                    files += 1
                    if files > _MOST_FILES:
                        return float("inf")
                    if entry.is_dir(follow_symlinks=False):
                        open_folders.append(entry.path)
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
        except FileNotFoundError:
            continue
        except OSError:
            return float("inf")
    return total


def remove_folder(folder: str) -> None:
    """Remove a folder and its contents; no process may write to it meanwhile. Does nothing if it does not exist.

    Every folder below is first moved to the top, so that no path gets long and no recursion is needed.
    """
    if not os.path.lexists(folder):
        return
    unique, moved, open_folders = os.urandom(8).hex(), 0, [folder]
    while open_folders:
        current = open_folders.pop()
        os.chmod(current, 0o700)
        with os.scandir(current) as entries:
            found = list(entries)
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                moved += 1
                target = os.path.join(folder, f"{unique}-{moved}")
                os.chmod(entry.path, 0o700)
                os.rename(entry.path, target)
                open_folders.append(target)
            else:
                os.unlink(entry.path)
        if current != folder:
            os.rmdir(current)
    os.rmdir(folder)

"""The files of a program: a private file system, or else a folder whose size is checked and which is removed later.

The private file system has the interpreter (read-only) and one writable folder of limited size. It is in memory and
belongs to a mount namespace that ends with the program, so nothing remains. It has no /proc, so the program cannot read
the environment of other processes. The functions for a plain folder expect trees deeper than the maximum path length
and folders without permissions, because programs may create them.
"""

from __future__ import annotations

import os

from roll.sandbox import kernel

WORK_FOLDER = "/tmp"
PROGRAM_FILE = "program.py"
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_BYTES_PER_INODE = 4096
_MOST_FILES = 10_000
_KEPT = {
    "nodev": kernel.MS_NODEV,
    "noexec": kernel.MS_NOEXEC,
    "nosuid": kernel.MS_NOSUID,
    "noatime": kernel.MS_NOATIME,
    "nodiratime": kernel.MS_NODIRATIME,
    "relatime": kernel.MS_RELATIME,
}


def enter(mount_point: str, visible: tuple[str, ...], program: bytes, disk_bytes: int, owner: tuple[int, int]) -> None:
    """Mount a new root file system that has the paths in ``visible``, and change to `WORK_FOLDER` in it.

    ``mount_point`` is an empty folder outside ``visible``. ``owner`` is the (user, group) of the work folder. Call this
    only in a new mount namespace.
    """
    os.umask(0o022)
    kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", mount_point, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=4m,mode=0755")
    for path in (*visible, *_DEVICES):
        _show(path, mount_point + path)
    _write(f"{mount_point}/{PROGRAM_FILE}", program)
    os.makedirs(mount_point + WORK_FOLDER, exist_ok=True)
    _make_read_only(mount_point)
    options = f"size={disk_bytes},nr_inodes={max(16, disk_bytes // _BYTES_PER_INODE)},mode=0700"
    kernel.mount("tmpfs", mount_point + WORK_FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, options)
    os.chown(mount_point + WORK_FOLDER, *owner)
    kernel.pivot_root(mount_point)
    os.chdir(WORK_FOLDER)


def _show(path: str, target: str) -> None:
    if os.path.islink(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(os.readlink(path), target)
    elif os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
        kernel.mount(path, target, None, kernel.MS_BIND | kernel.MS_REC)
    elif os.path.exists(path):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        _write(target, b"")
        kernel.mount(path, target, None, kernel.MS_BIND)


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _make_read_only(root: str) -> None:
    """Make each mount at and below ``root`` read-only, one by one, because older kernels have no recursive call."""
    for point, flags in _mounts_at(root):
        what = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | flags
        kernel.mount(None, point, None, what)


def _mounts_at(root: str) -> list[tuple[str, int]]:
    """Return the mount points at and below ``root``, each with its flags that a user namespace may not remove."""
    with open("/proc/self/mountinfo", "rb") as file:
        lines = file.read().splitlines()
    found = []
    for line in lines:
        fields = line.split()
        point = os.fsdecode(fields[4].decode("unicode_escape").encode("latin-1"))
        if point == root or point.startswith(root + "/"):
            found.append((point, sum(_KEPT.get(option, 0) for option in fields[5].decode().split(","))))
    return found


def folder_bytes(folder: str) -> float:
    """Return the total size of the files below a folder in bytes; infinity if they are too many or unreadable."""
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
    """Remove a folder and its contents, if it exists. No process may write to it meanwhile.

    Each subfolder is first moved to the top, so that no path is too long and no recursion is needed.
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

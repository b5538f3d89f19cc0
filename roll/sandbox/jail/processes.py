"""The running processes of a program, and their end if no process namespace ends them."""

from __future__ import annotations

import os

from roll.sandbox.jail.kernel import SIGKILL

FIRST_PRIVATE_UID = 2_000_000_000
"""A program started by root gets a user of its own: this number plus the process id of its supervisor."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


def descendants(root: int) -> list[int]:
    """Return the process ids of all living descendants of ``root``.

    Zombies are left out. Orphans are included: ``root`` adopts them.
    """
    try:
        found = _by_children(root)
    except (FileNotFoundError, ProcessLookupError):  # this kernel has no such file, or `root` has just ended
        found = _by_parents(root)
    return [pid for pid in found if not _is_ended(pid)]


def _by_children(root: int) -> list[int]:
    with open(f"/proc/{root}/task/{root}/children", "rb") as file:
        found = [int(each) for each in file.read().split()]
    for pid in found:  # the list grows in the loop
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                    found += [int(each) for each in file.read().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
    return list(dict.fromkeys(found))


def _by_parents(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        fields = _stat(int(name)) if name.isdigit() else None
        if fields:
            children.setdefault(int(fields[1]), []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _stat(pid: int) -> list[bytes] | None:
    """Return the fields of /proc/PID/stat from the state on (0: state, 1: parent); None without such a process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def _is_ended(pid: int) -> bool:
    fields = _stat(pid)
    return fields is None or fields[0] in (b"Z", b"X")


def count_and_memory(pids: list[int]) -> tuple[int, int]:
    """Return the number of living processes, and the bytes of their private memory."""
    count = pages = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/statm", "rb") as file:
                _, resident, shared = file.read().split()[:3]
        except (FileNotFoundError, ProcessLookupError):
            continue
        count += 1
        pages += int(resident) - int(shared)
    return count, pages * _PAGE


def tasks_of_user(uid: int) -> int:
    """Return the number of processes and threads of a user, for limits that count all of them."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def end_all_of_user(uid: int) -> None:
    """Kill every process of a user that only the program has, at once, so that no new fork can escape."""
    if uid < FIRST_PRIVATE_UID:
        raise ValueError(f"user {uid} is not the program's alone")
    pid = os.fork()
    if pid == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        if os.getresuid() == (uid, uid, uid):
            os.kill(-1, SIGKILL)
        raise SystemExit(0)
    os.waitpid(pid, 0)

"""System calls without a function in Python 3.11: namespaces, mounts and prctl.

Linux only. Each function raises `OSError` with the name of the call that was refused.
"""

from __future__ import annotations

import ctypes
import os

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_NOATIME = 1024
MS_NODIRATIME = 2048
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MS_RELATIME = 1 << 21
MNT_DETACH = 2

SIGKILL = 9
SIGXCPU = 24
"""Declared here because the `signal` module takes longer to load than the program takes to start."""

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces in ``flags`` for new ones (the new process namespace applies to the children)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "new namespaces")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2)."""
    texts = [None if each is None else os.fsencode(each) for each in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mounting {target}")


def pivot_root(root: str) -> None:
    """Make ``root``, a mount point, the root of this mount namespace and forget the old one."""
    machine = os.uname().machine
    if machine not in _PIVOT_ROOT:
        raise OSError(f"no number of pivot_root is known for {machine}")
    os.chdir(root)
    _check(_libc.syscall(ctypes.c_long(_PIVOT_ROOT[machine]), b".", b"."), "changing the root")
    _check(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "leaving the old root")
    os.chdir("/")


def prctl(option: int, value: int, pointer: ctypes.c_void_p | None = None) -> None:
    """Call prctl(2) with one value, and a pointer if the option takes one."""
    zero = ctypes.c_ulong(0)
    result = _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), pointer or zero, zero, zero)
    _check(result, f"prctl {option}")

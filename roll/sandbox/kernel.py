"""Linux system calls for the sandbox: namespaces, mounts, prctl, and a system call filter (seccomp).

Python 3.11 has no functions for them. Each function here raises `OSError` with the name of the call that failed.

The filter blocks ways around the other isolation: sockets (for levels without a network namespace), memory that no
limit counts (memfd, System V shared memory), the memory of other processes, new user namespaces, and parts of the
kernel with a history of vulnerabilities. All other calls are allowed. The filter exists for x86-64 and AArch64 only.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

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
"""Signal numbers, declared here because the `signal` module is slow to import."""

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Move this process into new namespaces, as in ``flags``. A new process namespace applies to its children only."""
    _check(_libc.unshare(ctypes.c_int(flags)), "new namespaces")


def mount(source: str | None, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """Call mount(2)."""
    texts = [None if each is None else os.fsencode(each) for each in (source, target, kind, options)]
    result = _libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _check(result, f"mounting {target}")


def pivot_root(root: str) -> None:
    """Make the mount point ``root`` the root of this mount namespace, and unmount the old root."""
    number = _NUMBERS["pivot_root"][_machine()]
    os.chdir(root)
    _check(_libc.syscall(ctypes.c_long(number), b".", b"."), "changing the root")
    _check(_libc.umount2(b".", ctypes.c_int(MNT_DETACH)), "leaving the old root")
    os.chdir("/")


def prctl(option: int, value: int, pointer: ctypes.c_void_p | None = None) -> None:
    """Call prctl(2) with one value, and a pointer if the option takes one."""
    zero = ctypes.c_ulong(0)
    result = _libc.prctl(ctypes.c_int(option), ctypes.c_ulong(value), pointer or zero, zero, zero)
    _check(result, f"prctl {option}")


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_CALL, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
_NEW_NAMESPACES = 0x7E020000
_X32 = 0x40000000

_MACHINES = ("x86_64", "aarch64")
_NUMBERS = {  # denied call -> its number on each of the `_MACHINES`
    "shmget": (29, 194), "socket": (41, 198), "semget": (64, 190), "msgget": (68, 186), "ptrace": (101, 117),
    "pivot_root": (155, 41), "chroot": (161, 51), "mount": (165, 40), "umount2": (166, 39),
    "init_module": (175, 105), "mq_open": (240, 180), "kexec_load": (246, 104), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219), "unshare": (272, 97), "perf_event_open": (298, 241),
    "fanotify_init": (300, 262), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "setns": (308, 268), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "finit_module": (313, 273), "memfd_create": (319, 279), "bpf": (321, 280), "userfaultfd": (323, 282),
}  # fmt: skip
_SINCE_2019 = {  # newer calls have the same number on all machines
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsmount": 432, "pidfd_getfd": 438, "mount_setattr": 442, "memfd_secret": 447,
}  # fmt: skip
_CLONE3 = 435
_ARCHITECTURES = (0xC000003E, 0xC00000B7)
_CLONE = (56, 220)
_TO_SELF = ((62, 200, 234, 302), (129, 130, 131, 261))
"""Calls that a process may use only on itself if signals are filtered: kill, tkill, tgkill, prlimit64."""
_NEVER = ((129, 297, 424), (138, 240, 424))
"""Calls that are denied if signals are filtered: rt_sigqueueinfo, rt_tgsigqueueinfo, pidfd_send_signal."""


def _machine() -> int:
    """Return the index of this machine in `_MACHINES` and the tables of call numbers. Raises `OSError`."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(f"no system calls are known for {machine}")
    return _MACHINES.index(machine)


def filter_system_calls(*, signal_only_self: bool) -> None:
    """Filter the system calls of this process and its descendants. Set ``PR_SET_NO_NEW_PRIVS`` first.

    ``signal_only_self``: each process can send signals only to itself, not even to its children. This is for the level
    without a process namespace or a user of its own. Raises `OSError` if the system does not support filters.
    """
    code = b"".join(_filter(_machine(), os.getpid() if signal_only_self else None))
    instructions = ctypes.create_string_buffer(code, len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions)))
    prctl(PR_SET_SECCOMP, 2, ctypes.cast(program, ctypes.c_void_p))


def _filter(machine: int, own_pid: int | None) -> list[bytes]:
    denied = [*_SINCE_2019.values(), *(numbers[machine] for numbers in _NUMBERS.values())]
    if own_pid is not None:
        denied += _NEVER[machine]
    code = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _CALL),
    ]
    if _MACHINES[machine] == "x86_64":
        code += [_step(_AT_LEAST, _X32, 0, 1), _step(_RETURN, _ERRNO | errno.ENOSYS)]
    for number in denied:
        code += _answer_if(number, _ERRNO | errno.EPERM)
    code += _answer_if(_CLONE3, _ERRNO | errno.ENOSYS)  # the filter cannot read its flags; libraries fall back to clone
    code += [
        _step(_EQUAL, _CLONE[machine], 0, 4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_ANY_BIT, _NEW_NAMESPACES, 0, 1),
        _step(_RETURN, _ERRNO | errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    for number in _TO_SELF[machine] if own_pid is not None else ():
        code += [
            _step(_EQUAL, number, 0, 5),
            _step(_LOAD, _FIRST_ARGUMENT),
            _step(_EQUAL, 0, 2, 0),
            _step(_EQUAL, own_pid or 0, 1, 0),
            _step(_RETURN, _ERRNO | errno.EPERM),
            _step(_RETURN, _ALLOW),
        ]
    return [*code, _step(_RETURN, _ALLOW)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _answer_if(value: int, answer: int) -> list[bytes]:
    return [_step(_EQUAL, value, 0, 1), _step(_RETURN, answer)]

"""The steps from the supervisor to the program: the processes in between, and the privileges each gives up.

With namespaces: supervisor -> builder (makes the namespaces and the file system) -> first process of the process
namespace (its end is the end of all others in it) -> program. Without: supervisor -> program. Failures on the way, the
process id of the first process and the end of the program are lines of text on the status pipe.
"""

from __future__ import annotations

import os
import resource

from roll.sandbox import filesystem, kernel

TYPE_CHECKING = False  # not from `typing`, which takes longer to load than all of this
if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PRIVATE_UID = 2_000_000_000
"""A program started by root gets a user of its own: this number plus the process id of its supervisor."""
INSIDE_ID = 1000
"""User and group of a program in a user namespace, as the program sees them."""
NOBODY = 65534
_NPROC_PER_NAMESPACE = (5, 14)
"""Linux version since which processes are counted per user namespace."""


class Setup:
    """The supervisor's task. Not a dataclass: the module `dataclasses` takes longer to load than all of this."""

    code: bytes
    stdin: bytes
    interpreter: str
    folder: str
    """Mount point of the new root; without namespaces the folder that the program runs in."""
    level: str
    """`namespaces`, `own_user` or `same_user`."""
    visible: tuple[str, ...]
    wall_seconds: float
    cpu_seconds: int
    memory_bytes: int
    disk_bytes: int
    file_bytes: int
    processes: int
    open_files: int
    output_bytes: int

    def __init__(self, values: dict[str, object]) -> None:
        vars(self).update(values)


class Identity:
    """The user and group of the program."""

    def __init__(self, uid: int, gid: int, *, private: bool = False, user_namespace: bool = False) -> None:
        """Set the user; ``private`` means that no other process on the machine has it."""
        self.uid = uid
        self.gid = gid
        self.private = private
        self.user_namespace = user_namespace

    @property
    def counted_apart(self) -> bool:
        """True if the process limit counts only this program's processes."""
        return self.private or (self.user_namespace and _kernel_version() >= _NPROC_PER_NAMESPACE)


def identity_for(level: str, supervisor_pid: int) -> Identity:
    """Return the identity of a program at this level."""
    if os.geteuid() == 0:
        uid = FIRST_PRIVATE_UID + supervisor_pid
        private = _exists(uid)
        uid = uid if private else NOBODY
        return Identity(uid, uid, private=private)
    if level == "namespaces":
        return Identity(INSIDE_ID, INSIDE_ID, user_namespace=True)
    return Identity(os.geteuid(), os.getegid())


def _exists(uid: int) -> bool:
    """Return True if this user namespace has the user (a container's may have few)."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    return any(first <= uid < first + length for first, _, length in ranges)


class Launch:
    """The way of one program from the supervisor to its first line."""

    def __init__(self, setup: Setup, standard_files: tuple[int, int, int], status: int) -> None:
        """Choose the program's user. The numbers are its ends of the standard pipes, and of the status pipe."""
        self._setup = setup
        self._standard_files = standard_files
        self._status = status
        self._namespaces = setup.level == "namespaces"
        self.identity = identity_for(setup.level, os.getpid())

    def start(self) -> int:
        """Fork and return the process id of the supervisor's child: the builder, or the program itself."""
        supervisor = os.getpid()
        if not self._namespaces:
            with open(os.path.join(self._setup.folder, filesystem.PROGRAM_FILE), "wb") as file:
                file.write(self._setup.code)
            os.chown(self._setup.folder, self.identity.uid, self.identity.gid)
        pid = os.fork()
        if pid == 0:
            self._guarded(lambda: self._build(supervisor) if self._namespaces else self._become_program())
        return pid

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run a forked process's action, report a failure, and exit. No caller may act on the way out."""
        try:
            action()
        except Exception as error:
            self._note(f"failed {type(error).__name__}: {error}")
        raise SystemExit(1)

    def _note(self, line: str) -> None:
        os.write(self._status, f"{line[:2000]}\n".encode())

    def _build(self, supervisor: int) -> None:
        _die_with_parent(supervisor)
        _first_victim()
        setup, identity = self._setup, self.identity
        flags = (
            kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS
        )
        if identity.user_namespace:
            uid, gid = os.geteuid(), os.getegid()
            kernel.unshare(flags | kernel.CLONE_NEWUSER)
            maps = {"uid_map": f"{INSIDE_ID} {uid} 1", "gid_map": f"{INSIDE_ID} {gid} 1"}
            _write_about_itself({"setgroups": "deny"} | maps)
        else:
            kernel.unshare(flags)
        owner = identity.uid, identity.gid
        filesystem.enter(setup.folder, setup.visible, setup.code, setup.disk_bytes, owner)
        first = os.fork()
        if first == 0:
            self._guarded(self._be_first_process)
        self._note(f"first {first}")
        _close_all_but()
        os.waitpid(first, 0)

    def _be_first_process(self) -> None:
        """Wait for the program, reap all other children, then end.

        Nothing inside the namespace can kill this process.
        """
        self._become_user()
        kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
        _die_with_parent(None)
        program = os.fork()
        if program == 0:
            self._guarded(self._become_program)
        _close_all_but(self._status)
        while True:
            pid, status, usage = os.wait4(-1, 0)
            if pid == program:
                self._note(f"ended {status} {usage.ru_utime + usage.ru_stime:.3f}")
                return

    def _become_program(self) -> None:
        setup = self._setup
        os.setsid()
        if not self._namespaces:
            os.chdir(setup.folder)
            _first_victim()
        for number, end in enumerate(self._standard_files):
            os.dup2(end, number)
        self._become_user()
        self._limit()
        kernel.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1)
        if not os.access(setup.interpreter, os.X_OK):
            raise PermissionError(f"{setup.interpreter} cannot be run by the user of the program")
        try:
            kernel.filter_system_calls(signal_only_self=setup.level == "same_user")
        except OSError as error:
            self._note(f"unfiltered {error}")
        file = os.path.join("/" if self._namespaces else setup.folder, filesystem.PROGRAM_FILE)
        os.execve(setup.interpreter, [setup.interpreter, "-I", "-S", "-B", "-u", "-X", "utf8", file], {})

    def _become_user(self) -> None:
        """Switch from root (of the machine or of a new user namespace) to the program's user. May be called twice."""
        if os.geteuid() == 0:
            become(self.identity.uid, self.identity.gid)

    def _limit(self) -> None:
        setup = self._setup
        limits = {
            resource.RLIMIT_CPU: (setup.cpu_seconds, setup.cpu_seconds + 1),
            resource.RLIMIT_AS: setup.memory_bytes,
            resource.RLIMIT_FSIZE: setup.file_bytes,
            resource.RLIMIT_NOFILE: setup.open_files,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_MEMLOCK: 0,
            resource.RLIMIT_MSGQUEUE: 0,
        }
        if self.identity.counted_apart:
            limits[resource.RLIMIT_NPROC] = setup.processes + self._namespaces  # and the first process
        elif not self._namespaces:
            limits[resource.RLIMIT_NPROC] = setup.processes + _tasks_of_user(self.identity.uid)
        for which, value in limits.items():
            soft, hard = value if isinstance(value, tuple) else (value, value)
            allowed = resource.getrlimit(which)[1]
            if allowed != resource.RLIM_INFINITY:
                soft, hard = min(soft, allowed), min(hard, allowed)
            resource.setrlimit(which, (soft, hard))


def become(uid: int, gid: int) -> None:
    """Give up root for good."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _tasks_of_user(uid: int) -> int:
    """Return the number of processes and threads of a user, for limits that count all of them."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


def _first_victim() -> None:
    """Make the kernel kill the program before any other process when memory runs out."""
    _write_about_itself({"oom_score_adj": "1000"})


def _write_about_itself(texts: dict[str, str]) -> None:
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)  # otherwise the files belong to root
    for name, text in texts.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)


def _die_with_parent(parent: int | None) -> None:
    kernel.prctl(kernel.PR_SET_PDEATHSIG, kernel.SIGKILL)
    if parent is not None and os.getppid() != parent:
        raise SystemExit(1)


def _close_all_but(*kept: int) -> None:
    low = 0
    for each in sorted(kept):
        os.closerange(low, each)
        low = each + 1
    os.closerange(low, os.sysconf("SC_OPEN_MAX"))


def _kernel_version() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(each for each in minor if each.isdigit()))

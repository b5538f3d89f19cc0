"""The process between the caller and untrusted code: it starts the program in isolation, watches it, and ends it.

It reads its task from its standard input; end-of-file there means that the answer is no longer needed. It writes one
answer to its standard output, after all processes of the program have ended. It is started anew for each program, so
the modules in this package (except `sandbox`) import only parts of the standard library that load in a few
milliseconds.

Each process in the chain gives up privileges. With namespaces: supervisor -> builder (creates the namespaces and the
file system) -> first process of the process namespace (if it ends, the kernel ends all others in it) -> program.
Without: supervisor -> program. The status pipe gets lines of text: failures in the chain, the process id of the first
process, and the exit status of the program.
"""

from __future__ import annotations

import marshal
import os
import resource
import select
import sys
import time

from roll.sandbox import filesystem, kernel

TYPE_CHECKING = False  # not from `typing`, which is slow to import
if TYPE_CHECKING:
    from collections.abc import Callable

WATCH_SECONDS = 0.02
_CHUNK = 65536
_PAGE = os.sysconf("SC_PAGE_SIZE")
FIRST_PRIVATE_UID = 2_000_000_000
"""First user id of programs started by root. A program gets this number plus the process id of its supervisor."""
INSIDE_ID = 1000
"""User and group of a program in a user namespace, as the program sees them."""
NOBODY = 65534
_NPROC_PER_NAMESPACE = (5, 14)
"""Linux version since which processes are counted per user namespace."""


def main() -> None:
    """Carry out one task. Do not catch `SystemExit` here: forked processes exit by raising it."""
    task = sys.stdin.buffer
    setup = Setup(marshal.loads(task.read(int.from_bytes(task.read(8), "little"))))
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    program = Watched(setup)
    program.watch()
    program.end()
    if program.wanted:
        sys.stdout.buffer.write(repr(program.answer()).encode())
        sys.stdout.buffer.flush()
    else:
        filesystem.remove_folder(setup.folder)  # the caller may be dead


class Setup:
    """The supervisor's task. It is no dataclass, because the module `dataclasses` is slow to import."""

    code: bytes
    stdin: bytes
    interpreter: str
    folder: str
    """Mount point of the new root; without namespaces, the folder in which the program runs."""
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
        self.namespaces = self.level == "namespaces"


class Identity:
    """The user and group of the program."""

    def __init__(self, level: str, supervisor_pid: int) -> None:
        """Choose the user and group of a program at this level."""
        is_root = os.geteuid() == 0
        own = FIRST_PRIVATE_UID + supervisor_pid
        self.private = is_root and _exists(own)
        """True if no other process on the machine runs as this user."""
        self.user_namespace = level == "namespaces" and not is_root
        self.uid, self.gid = os.geteuid(), os.getegid()
        if is_root:
            self.uid = self.gid = own if self.private else NOBODY
        elif self.user_namespace:
            self.uid = self.gid = INSIDE_ID

    @property
    def counted_apart(self) -> bool:
        """True if the kernel's process limit counts only this program's processes."""
        major, minor = os.uname().release.split(".")[:2]
        version = int(major), int("".join(filter(str.isdigit, minor)))
        return self.private or (self.user_namespace and version >= _NPROC_PER_NAMESPACE)


def _exists(uid: int) -> bool:
    """Return True if the user id exists in this user namespace; that of a container may have few."""
    with open("/proc/self/uid_map") as file:
        ranges = [[int(number) for number in line.split()] for line in file]
    return any(first <= uid < first + length for first, _, length in ranges)


class Launch:
    """The start of one program: the chain of processes from the supervisor to the program."""

    def __init__(self, setup: Setup, standard_files: tuple[int, int, int], status: int) -> None:
        """Choose the program's user.

        ``standard_files``: the program's ends of the pipes for stdin, stdout and stderr. ``status``: its end of the
        status pipe.
        """
        self._setup = setup
        self._standard_files = standard_files
        self._status = status
        self.identity = Identity(setup.level, os.getpid())

    def start(self) -> int:
        """Fork and return the process id of the supervisor's child: the builder, or the program itself."""
        supervisor = os.getpid()
        if not self._setup.namespaces:
            with open(os.path.join(self._setup.folder, filesystem.PROGRAM_FILE), "wb") as file:
                file.write(self._setup.code)
            os.chown(self._setup.folder, self.identity.uid, self.identity.gid)
        pid = os.fork()
        if pid == 0:
            self._guarded(lambda: self._build(supervisor) if self._setup.namespaces else self._become_program())
        return pid

    def _guarded(self, action: Callable[[], object]) -> None:
        """Run the action of a forked process, report a failure, and exit by `SystemExit`, which no caller may catch."""
        try:
            action()
        except Exception as error:
            self._note(f"failed {type(error).__name__}: {error}")
        raise SystemExit(1)

    def _note(self, line: str) -> None:
        os.write(self._status, f"{line[:2000]}\n".encode())

    def _build(self, supervisor: int) -> None:
        _die_with_parent(supervisor)
        _write_about_itself(_FIRST_VICTIM)
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
        """Start the program, reap all children until the program has ended, then end.

        No process inside the namespace can kill this one.
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
        if not self._setup.namespaces:
            os.chdir(setup.folder)
            _write_about_itself(_FIRST_VICTIM)
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
        file = os.path.join("/" if setup.namespaces else setup.folder, filesystem.PROGRAM_FILE)
        os.execve(setup.interpreter, [setup.interpreter, "-I", "-S", "-B", "-u", "-X", "utf8", file], {})

    def _become_user(self) -> None:
        """Switch from root (of the machine or of a new user namespace) to the program's user, if not done already."""
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
            limits[resource.RLIMIT_NPROC] = setup.processes + self._setup.namespaces  # and the first process
        elif not self._setup.namespaces:
            limits[resource.RLIMIT_NPROC] = setup.processes + _tasks_of_user(self.identity.uid)
        for which, value in limits.items():
            soft, hard = value if isinstance(value, tuple) else (value, value)
            allowed = resource.getrlimit(which)[1]
            if allowed != resource.RLIM_INFINITY:
                soft, hard = min(soft, allowed), min(hard, allowed)
            resource.setrlimit(which, (soft, hard))


def become(uid: int, gid: int) -> None:
    """Switch from root to a user, permanently."""
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)


def _tasks_of_user(uid: int) -> int:
    """Return the number of processes and threads of a user, because the kernel's process limit counts all of them."""
    total = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == uid:
                total += len(os.listdir(f"/proc/{name}/task"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return total


_FIRST_VICTIM = {"oom_score_adj": "1000"}
"""Setting that makes the kernel kill the program before any other process when memory runs out."""


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


class Watched:
    """A program that the supervisor watches, from its start to the answer."""

    def __init__(self, setup: Setup) -> None:
        """Start the program."""
        self._setup = setup
        stdin, self._feed = os.pipe()
        self._out, stdout = os.pipe()
        self._err, stderr = os.pipe()
        self._notes, status = os.pipe()
        self._read = {end: bytearray() for end in (self._out, self._err, self._notes)}
        self._began = time.monotonic()
        launch = Launch(setup, (stdin, stdout, stderr), status)
        self._identity = launch.identity
        self._child = launch.start()
        for end in (stdin, stdout, stderr, status):
            os.close(end)
        for end in (*self._read, self._feed):
            os.set_blocking(end, False)
        self._child_status: int | None = None
        """Exit status of the supervisor's child; None while it runs. With namespaces, all processes of the program have
        ended when it has."""
        self._child_cpu_seconds = 0.0
        self._killed_because: str | None = None
        self.wanted = True

    def watch(self) -> None:
        """Return when the program has ended or must be killed."""
        poll = select.poll()
        ended = os.pidfd_open(self._child)
        for end in (*self._read, ended, 0):
            poll.register(end, select.POLLIN)
        poll.register(self._feed, select.POLLOUT)
        unsent = memoryview(self._setup.stdin)
        next_look = time.monotonic() + WATCH_SECONDS
        while self._child_status is None and self._killed_because is None and self.wanted:
            for end, _ in poll.poll(max(0.0, next_look - time.monotonic()) * 1000):
                if end == 0:
                    self.wanted = False
                elif end == ended:
                    self._reap()
                elif end == self._feed:
                    unsent = self._fed(unsent)
                    if not unsent:
                        poll.unregister(end)
                        os.close(end)
                elif not self._read_from(end):
                    poll.unregister(end)
            if time.monotonic() >= next_look:
                self._reap()
                self._look()
                next_look = time.monotonic() + WATCH_SECONDS

    def end(self) -> None:
        """Kill all processes of the program, and wait until they have ended."""
        first = self._note("first")
        if self._child_status is None and self._setup.namespaces:
            os.kill(int(first[0]) if first else self._child, kernel.SIGKILL)
        while self._reap():
            if not self._setup.namespaces:
                for pid in descendants(os.getpid()):
                    try:
                        os.kill(pid, kernel.SIGKILL)
                    except ProcessLookupError:
                        continue
                if self._identity.private:
                    end_all_of_user(self._identity.uid)
            time.sleep(0.001)

    def answer(self) -> dict[str, object]:
        """Read each pipe to its end (all writers are gone), and return the answer for the caller."""
        seconds = time.monotonic() - self._began
        for end in self._read:
            before = self._killed_because
            while self._read_from(end) and self._killed_because == before:
                pass
        status, cpu_seconds = self._child_status or 0, self._child_cpu_seconds
        if self._setup.namespaces:
            ended = self._note("ended")
            status, cpu_seconds = (int(ended[0]), float(ended[1])) if ended else (kernel.SIGKILL, 0.0)
        returncode = os.waitstatus_to_exitcode(status)
        # The kernel enforces the limit in clock ticks but reports exact times, which may be smaller on a busy machine.
        # A program may also send itself this signal, but hardly after half of its time.
        limit = self._setup.cpu_seconds
        least = {-kernel.SIGXCPU: limit / 2, -kernel.SIGKILL: limit - 0.1}
        if self._killed_because is None and cpu_seconds >= least.get(returncode, float("inf")):
            self._killed_because = "cpu_time"
        failed, unfiltered = self._note("failed"), self._note("unfiltered")
        return {
            "failed": " ".join(failed) if failed else None,
            "stdout": bytes(self._read[self._out]),
            "stderr": bytes(self._read[self._err]),
            "returncode": returncode,
            "killed_because": self._killed_because,
            "seconds": seconds,
            "filtered": unfiltered is None,
            "counted_apart": self._identity.counted_apart,
            "private_user": self._identity.private,
        }

    def _fed(self, unsent: memoryview) -> memoryview:
        """Write to the program's input and return the unsent rest; empty if the program has closed its input."""
        try:
            return unsent[os.write(self._feed, unsent[:_CHUNK]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            return unsent[:0]

    def _read_from(self, end: int) -> bool:
        """Read from a pipe. Return False at its end."""
        try:
            chunk = os.read(end, _CHUNK)
        except BlockingIOError:
            return True
        kept = self._read[end]
        kept += chunk
        if end != self._notes and len(kept) > self._setup.output_bytes:
            del kept[self._setup.output_bytes :]
            self._killed_because = self._killed_because or "output"
        return bool(chunk)

    def _reap(self) -> bool:
        """Reap children that have ended, adopted ones included, and return True if any are still running."""
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            if pid == self._child:
                self._child_status = status
                self._child_cpu_seconds = usage.ru_utime + usage.ru_stime

    def _look(self) -> None:
        """Check all limits, and set `_killed_because` to the first one that is exceeded."""
        setup = self._setup
        if time.monotonic() >= self._began + setup.wall_seconds:
            self._killed_because = "time"
            return
        first = self._note("first")
        processes, memory = count_and_memory(descendants(int(first[0]) if first else os.getpid()), setup.memory_bytes)
        if processes > setup.processes:
            self._killed_because = "processes"
        elif memory > setup.memory_bytes:
            self._killed_because = "memory"
        elif not self._setup.namespaces and filesystem.folder_bytes(setup.folder) > setup.disk_bytes:
            self._killed_because = "disk"

    def _note(self, kind: str) -> list[str] | None:
        """Return the words after ``kind`` in the first status line that begins with it; None if there is none."""
        for line in self._read[self._notes].decode(errors="replace").splitlines():
            words = line.split()
            if words and words[0] == kind:
                return words[1:]
        return None


def descendants(root: int) -> list[int]:
    """Return the process ids of all living descendants of ``root``.

    Zombies are left out. Orphans are included, because ``root`` adopts them.
    """
    try:
        found = _by_children(root)
    except (FileNotFoundError, ProcessLookupError):  # this kernel has no such file, or `root` has just ended
        found = _by_parents(root)
    return [pid for pid in found if (fields := _stat(pid)) and fields[0] not in (b"Z", b"X")]


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
    """Return the fields of /proc/PID/stat from the state on (0: state, 1: parent); None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None


def count_and_memory(pids: list[int], allowed: int) -> tuple[int, int]:
    """Return the number of living processes, and the bytes of their memory together.

    Pages that processes share count once. This is measured only if all their pages are more than ``allowed`` bytes,
    because it takes milliseconds; up to that, shared pages and pages of files count for each process.
    """
    found = {pid: pages for pid in pids if (pages := _pages(pid))}
    total = sum(resident for resident, _ in found.values()) * _PAGE
    for _ in range(_MEASUREMENTS):
        if total <= allowed:
            break
        total = sum(_memory_share(pid, *pages) for pid, pages in found.items())
        living = {pid: pages for pid in found if (pages := _pages(pid)) and pages[0]}
        if len(living) == len(found):
            break
        found = living  # what an ended process had shared was also counted for the others
    return len(found), total


_MEASUREMENTS = 3
"""Number of times that memory is measured while processes end meanwhile; then the last measurement counts."""


def _pages(pid: int) -> tuple[int, int] | None:
    """Return the pages of a process in memory, and those of them that are private; None if it has ended."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            _, resident, shared = map(int, file.read().split()[:3])
    except (FileNotFoundError, ProcessLookupError):
        return None
    return resident, resident - shared


def _memory_share(pid: int, resident: int, private: int) -> int:
    """Return the bytes of a process's memory without files, of a page shared by n processes the n-th part.

    If the kernel does not tell, these are its ``private`` pages. If it may not be asked, shared pages count whole.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            lines = [line.split() for line in file]
    except ProcessLookupError:
        return 0  # it has ended
    except FileNotFoundError:
        return private * _PAGE
    except PermissionError:
        return _whole_memory(pid, resident)
    shares = [int(line[1]) * 1024 for line in lines if line[0] in (b"Pss_Anon:", b"Pss_Shmem:")]
    return sum(shares) if shares else private * _PAGE


def _whole_memory(pid: int, resident: int) -> int:
    """Return the bytes of a process's memory without files, or those of its ``resident`` pages if it is not told."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = [line.split() for line in file]
    except (ProcessLookupError, FileNotFoundError):
        return 0  # it has ended
    sizes = [int(line[1]) * 1024 for line in lines if line and line[0] in (b"RssAnon:", b"RssShmem:")]
    return sum(sizes) if sizes else resident * _PAGE


def end_all_of_user(uid: int) -> None:
    """Kill all processes of a program's private user id with one call, so that no process escapes by forking."""
    if uid < FIRST_PRIVATE_UID:
        raise ValueError(f"user {uid} is not the program's alone")
    pid = os.fork()
    if pid == 0:
        become(uid, uid)
        if os.getresuid() == (uid, uid, uid):
            os.kill(-1, kernel.SIGKILL)
        raise SystemExit(0)
    os.waitpid(pid, 0)

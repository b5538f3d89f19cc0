"""The process between the caller and untrusted code: it starts the program in isolation, watches it, and ends it.

It reads its task from its standard input; end-of-file there means that the answer is no longer needed. It writes one
answer to its standard output; after that no process of the program is left. It runs in a bare interpreter for each
program, so the modules here (all but `sandbox`) import only parts of the standard library that load in a few
milliseconds.
"""

from __future__ import annotations

import marshal
import os
import select
import sys
import time

from roll.sandbox import kernel
from roll.sandbox.filesystem import folder_bytes, remove_folder
from roll.sandbox.program import FIRST_PRIVATE_UID, Launch, Setup, become

WATCH_SECONDS = 0.02
_CHUNK = 65536
_PAGE = os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Serve one task. Forks: nothing here may catch `SystemExit`."""
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
        remove_folder(setup.folder)  # the caller may be dead


class Watched:
    """A program, from its start to the answer."""

    def __init__(self, setup: Setup) -> None:
        """Start the program."""
        self._setup = setup
        self._namespaces = setup.level == "namespaces"
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
        """Exit status of the supervisor's child, None until it has ended; with namespaces no process of the program is
        left then."""
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
        """Kill all processes of the program; none runs when this returns."""
        first = self._note("first")
        if self._child_status is None and self._namespaces:
            os.kill(int(first[0]) if first else self._child, kernel.SIGKILL)
        while self._reap():
            if not self._namespaces:
                for pid in descendants(os.getpid()):
                    _kill(pid)
                if self._identity.private:
                    end_all_of_user(self._identity.uid)
            time.sleep(0.001)

    def answer(self) -> dict[str, object]:
        """Read each pipe to its end, which exists because all writers are gone, and return what is known."""
        seconds = time.monotonic() - self._began
        for end in self._read:
            before = self._killed_because
            while self._read_from(end) and self._killed_because == before:
                pass
        status, cpu_seconds = self._child_status or 0, self._child_cpu_seconds
        if self._namespaces:
            ended = self._note("ended")
            status, cpu_seconds = (int(ended[0]), float(ended[1])) if ended else (kernel.SIGKILL, 0.0)
        returncode = os.waitstatus_to_exitcode(status)
        # The kernel's limit counts ticks, its answer is exact: on a busy machine the answer is smaller. A program may
        # also send itself that signal, but hardly after half of its time.
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
        """Write to the program's input and return what is still unsent; nothing if the program does not read."""
        try:
            return unsent[os.write(self._feed, unsent[:_CHUNK]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            return unsent[:0]

    def _read_from(self, end: int) -> bool:
        """Read from a pipe and return True if more may come."""
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
        """Reap ended children, adopted ones included, and return True if children are left."""
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
        """Note the first limit that is exceeded."""
        setup = self._setup
        if time.monotonic() >= self._began + setup.wall_seconds:
            self._killed_because = "time"
            return
        first = self._note("first")
        processes, memory = count_and_memory(descendants(int(first[0]) if first else os.getpid()))
        if processes > setup.processes:
            self._killed_because = "processes"
        elif memory > setup.memory_bytes:
            self._killed_because = "memory"
        elif not self._namespaces and folder_bytes(setup.folder) > setup.disk_bytes:
            self._killed_because = "disk"

    def _note(self, kind: str) -> list[str] | None:
        """Return the words after ``kind`` in the first such line of the status pipe; None without one."""
        for line in self._read[self._notes].decode(errors="replace").splitlines():
            words = line.split()
            if words and words[0] == kind:
                return words[1:]
        return None


def _kill(pid: int) -> None:
    try:
        os.kill(pid, kernel.SIGKILL)
    except ProcessLookupError:
        return


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


def end_all_of_user(uid: int) -> None:
    """Kill all processes of a user ID that belongs to one program, with one call, so that no new fork escapes."""
    if uid < FIRST_PRIVATE_UID:
        raise ValueError(f"user {uid} is not the program's alone")
    pid = os.fork()
    if pid == 0:
        become(uid, uid)
        if os.getresuid() == (uid, uid, uid):
            os.kill(-1, kernel.SIGKILL)
        raise SystemExit(0)
    os.waitpid(pid, 0)

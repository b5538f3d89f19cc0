"""The process between the caller and untrusted code: it starts the program in isolation, watches it, and ends it.

It reads its task from its standard input; end-of-file there means that the answer is no longer needed. It writes one
answer to its standard output; after that no process of the program is left.
"""

from __future__ import annotations

import marshal
import os
import select
import sys
import time

from roll.sandbox.jail import kernel
from roll.sandbox.jail.folders import folder_bytes, remove_folder
from roll.sandbox.jail.processes import count_and_memory, descendants, end_all_of_user
from roll.sandbox.jail.program import Identity, Setup, Streams, identity_for, start

WATCH_SECONDS = 0.02
_CHUNK = 65536


class Watched:
    """The state of the program while it runs."""

    def __init__(self, child: int, deadline: float, out: int, err: int) -> None:
        self.child = child
        self.deadline = deadline
        self.outputs = {out: bytearray(), err: bytearray()}
        self.status = bytearray()
        self.child_status: int | None = None
        """Exit status of the supervisor's child, None until it has ended; with namespaces no process of the program is
        left then."""
        self.child_cpu_seconds = 0.0
        self.killed_because: str | None = None
        self.wanted = True


def main() -> None:
    """Serve one task."""
    task = sys.stdin.buffer
    setup = Setup(marshal.loads(task.read(int.from_bytes(task.read(8), "little"))))
    kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    answer = _supervise(setup)
    if answer is None:
        remove_folder(setup.folder)  # the caller may be dead
    else:
        sys.stdout.buffer.write(repr(answer).encode())
        sys.stdout.buffer.flush()


def _supervise(setup: Setup) -> dict[str, object] | None:
    """Return the answer, or None if it is no longer needed. Forks: nothing here may catch `SystemExit`."""
    stdin, feed = os.pipe()
    out, stdout = os.pipe()
    err, stderr = os.pipe()
    told, status = os.pipe()
    identity = identity_for(setup.level, os.getpid())
    began = time.monotonic()
    child = start(setup, identity, Streams(stdin, stdout, stderr, status))
    for end in (stdin, stdout, stderr, status):
        os.close(end)
    watched = Watched(child, began + setup.wall_seconds, out, err)
    _watch(setup, watched, feed, told)
    _end(setup, watched, identity)
    _drain(setup, watched, told)
    return _answer(setup, watched, identity, time.monotonic() - began, out, err) if watched.wanted else None


def _watch(setup: Setup, watched: Watched, feed: int, told: int) -> None:
    """Watch the program until it has ended or must be killed."""
    for end in (*watched.outputs, feed, told):
        os.set_blocking(end, False)
    poll = select.poll()
    ended = os.pidfd_open(watched.child)
    for end in (*watched.outputs, told, ended, 0):
        poll.register(end, select.POLLIN)
    poll.register(feed, select.POLLOUT)
    unsent = memoryview(setup.stdin)
    next_look = time.monotonic() + WATCH_SECONDS
    while watched.child_status is None and watched.killed_because is None and watched.wanted:
        for end, _ in poll.poll(max(0.0, next_look - time.monotonic()) * 1000):
            if end == 0:
                watched.wanted = False
            elif end == ended:
                _reap(watched)
            elif end == feed:
                unsent = _fed(feed, unsent)
                if not unsent:
                    poll.unregister(feed)
                    os.close(feed)
            elif not _read(setup, watched, end, told):
                poll.unregister(end)
        if time.monotonic() >= next_look:
            _reap(watched)
            _look(setup, watched)
            next_look = time.monotonic() + WATCH_SECONDS


def _fed(feed: int, unsent: memoryview) -> memoryview:
    """Write to the program's input and return what is still unsent; nothing if the program does not read."""
    try:
        return unsent[os.write(feed, unsent[:_CHUNK]) :]
    except BlockingIOError:
        return unsent
    except BrokenPipeError:
        return unsent[:0]


def _read(setup: Setup, watched: Watched, end: int, told: int) -> bool:
    """Read from a pipe and return True if more may come."""
    try:
        chunk = os.read(end, _CHUNK)
    except BlockingIOError:
        return True
    if end == told:
        watched.status += chunk
        return bool(chunk)
    kept = watched.outputs[end]
    kept += chunk
    if len(kept) > setup.output_bytes:
        del kept[setup.output_bytes :]
        watched.killed_because = watched.killed_because or "output"
    return bool(chunk)


def _reap(watched: Watched) -> bool:
    """Reap ended children, adopted ones included, and return True if children are left."""
    while True:
        try:
            pid, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True
        if pid == watched.child:
            watched.child_status = status
            watched.child_cpu_seconds = usage.ru_utime + usage.ru_stime


def _look(setup: Setup, watched: Watched) -> None:
    if time.monotonic() >= watched.deadline:
        watched.killed_because = "time"
        return
    first = _told(watched, "first")
    processes, memory = count_and_memory(descendants(int(first[0]) if first else os.getpid()))
    if processes > setup.processes:
        watched.killed_because = "processes"
    elif memory > setup.memory_bytes:
        watched.killed_because = "memory"
    elif setup.level != "namespaces" and folder_bytes(setup.folder) > setup.disk_bytes:
        watched.killed_because = "disk"


def _told(watched: Watched, kind: str) -> list[str] | None:
    """Return the words after ``kind`` in the first such line of the status pipe; None without one."""
    for line in watched.status.decode(errors="replace").splitlines():
        words = line.split()
        if words and words[0] == kind:
            return words[1:]
    return None


def _end(setup: Setup, watched: Watched, identity: Identity) -> None:
    """Kill all processes of the program; none runs when this returns."""
    first = _told(watched, "first")
    if watched.child_status is None and setup.level == "namespaces":
        os.kill(int(first[0]) if first else watched.child, kernel.SIGKILL)
    while _reap(watched):
        if setup.level != "namespaces":
            for pid in descendants(os.getpid()):
                _kill(pid)
            if identity.private:
                end_all_of_user(identity.uid)
        time.sleep(0.001)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, kernel.SIGKILL)
    except ProcessLookupError:
        return


def _drain(setup: Setup, watched: Watched, told: int) -> None:
    """Read each pipe to its end, which exists because all writers are gone."""
    for end in (*watched.outputs, told):
        while True:
            before = watched.killed_because
            more = _read(setup, watched, end, told)
            if not more or watched.killed_because != before:
                break


def _answer(
    setup: Setup, watched: Watched, identity: Identity, seconds: float, out: int, err: int
) -> dict[str, object]:
    ended = _told(watched, "ended")
    status = watched.child_status or 0
    cpu_seconds = watched.child_cpu_seconds
    if setup.level == "namespaces":
        status, cpu_seconds = (int(ended[0]), float(ended[1])) if ended else (kernel.SIGKILL, 0.0)
    failed = _told(watched, "failed")
    unfiltered = _told(watched, "unfiltered")
    returncode = os.waitstatus_to_exitcode(status)
    # The kernel's limit counts ticks, its answer is exact: on a busy machine the answer is smaller. A program may also
    # send itself that signal, but hardly after half of its time.
    least = {-kernel.SIGXCPU: setup.cpu_seconds / 2, -kernel.SIGKILL: setup.cpu_seconds - 0.1}
    if watched.killed_because is None and cpu_seconds >= least.get(returncode, float("inf")):
        watched.killed_because = "cpu_time"
    return {
        "failed": " ".join(failed) if failed else None,
        "stdout": bytes(watched.outputs[out]),
        "stderr": bytes(watched.outputs[err]),
        "returncode": returncode,
        "killed_because": watched.killed_because,
        "seconds": seconds,
        "unfiltered": " ".join(unfiltered) if unfiltered else None,
        "counted_apart": identity.counted_apart,
        "private_user": identity.private,
    }

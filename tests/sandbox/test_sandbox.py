"""Programs that try to get out, to stay, or to take everything. Each is ended, and nothing of it is left.

They run at every level of the sandbox that the machine allows. What a level does not promise is not asked of it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from roll.sandbox.sandbox import Limits, Sandbox, SandboxUnavailable, default_sandbox
from tests.sandbox.sandboxes import Kind, kinds, needs_sandbox

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the sandbox is made for Linux")


@pytest.fixture(params=kinds())
def kind(request) -> Kind:
    return request.param


@pytest.fixture
def marker() -> str:
    """A name for processes, short enough for the kernel (15 characters)."""
    return f"m{uuid.uuid4().hex[:12]}"


@pytest.fixture(autouse=True)
def programs(marker: str, monkeypatch) -> Iterator[Path]:
    """Where the folders of programs are made, in which nothing may be left: the test's own, as other tests run programs
    at the same time, and one that every user may write into."""
    folder = Path(tempfile.mkdtemp(prefix="roll-tests-"))
    folder.chmod(0o1777)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert processes_named(marker) == []
    assert list(folder.iterdir()) == []
    folder.rmdir()


def processes_named(name: str) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and (folder / "comm").read_text().strip() == name:
                found.append(int(folder.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def named(marker: str, code: str) -> str:
    """The program, its process and all that come from it bearing a name."""
    return f"import ctypes\nctypes.CDLL(None).prctl(15, b'{marker}', 0, 0, 0)\n{code}"


def test_a_program_reads_and_writes(kind):
    result = kind.run("import sys\nprint(input() * 2)\nprint('ü', file=sys.stderr)\nsys.exit(3)", "ä\n")
    assert (result.stdout, result.stderr, result.returncode) == ("ää\n", "ü\n", 3)
    assert result.killed_because is None and not result.timed_out


def test_an_exception_is_shown_with_its_line(kind):
    result = kind.run("x = 1\nx / 0\n")
    assert "line 2" in result.stderr and "ZeroDivisionError" in result.stderr
    assert result.returncode == 1


def test_the_environment_is_empty(kind, monkeypatch):
    monkeypatch.setenv("CANARY", "bird")
    result = kind.run("import os; print({k: v for k, v in os.environ.items() if k != 'LC_CTYPE'})")
    assert result.stdout == "{}\n"  # the interpreter sets that one itself


READ_EVERYTHING = """
import glob, os
paths = [f'/proc/{os.getppid()}/environ', '/proc/1/environ', *glob.glob('/proc/[0-9]*/environ')]
for path in paths:
    try:
        if b'CANARY' in open(path, 'rb').read(1 << 20):
            print('found in', path)
    except OSError as error:
        pass
print('looked')
"""


def test_no_environment_of_another_process_can_be_read(kind, monkeypatch):
    if kind.level == "same_user":
        pytest.skip("not promised, which is why this level must be asked for")
    monkeypatch.setenv("CANARY", "bird")
    holder = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env={"CANARY": "bird"})
    try:
        result = kind.run(READ_EVERYTHING)
    finally:
        holder.communicate(b"\n")
    assert (result.stdout, result.protections.processes) == ("looked\n", True)


def test_the_weakest_level_must_be_asked_for():
    levels = ["same_user"]
    with pytest.raises(SandboxUnavailable, match="code would run as root|accept_weak"):
        Sandbox(levels=levels).run("print(1)")


def test_descriptors_of_the_parent_are_not_there(kind):
    with tempfile.TemporaryFile() as file:
        os.set_inheritable(file.fileno(), True)
        code = "import os\nfor fd in range(3, 64):\n try: print(fd, os.fstat(fd))\n except OSError: pass"
        result = kind.run(code)
    assert (result.stdout, result.stderr) == ("", "")


def test_no_socket_leads_anywhere(kind):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=3)\nprint('through')"
        result = kind.run(code)
    assert result.stdout == "" and result.protections.network
    assert "PermissionError" in result.stderr


def test_event_loops_still_work(kind):
    result = kind.run("import asyncio\nasync def f(): await asyncio.sleep(0.01); print('slept')\nasyncio.run(f())")
    assert result.stdout == "slept\n", result.stderr


@pytest.mark.tier("all")
def test_an_endless_loop_is_ended(kind, marker):
    result = kind.run(named(marker, "print('begun')\nwhile True: pass"), wall_seconds=4)
    assert (result.stdout, result.killed_because, result.timed_out) == ("begun\n", "time", True)


@pytest.mark.tier("all")
def test_processor_time_has_a_limit_of_its_own(kind, marker):
    result = kind.run(named(marker, "while True: pass"), cpu_seconds=1, wall_seconds=60)
    assert result.killed_because == "cpu_time" and result.timed_out


@pytest.mark.tier("all")
def test_a_program_that_ignores_the_first_warning_is_ended(kind, marker):
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert kind.run(named(marker, code), cpu_seconds=1, wall_seconds=60).killed_because == "cpu_time"


def test_sleeping_for_ever_is_ended(kind, marker):
    result = kind.run(named(marker, "import time; time.sleep(10 ** 6)"), wall_seconds=0.5)
    assert result.killed_because == "time"


@pytest.mark.tier("all")
def test_closing_the_outputs_is_not_the_end(kind, marker):
    code = "import os, time\nos.close(0); os.close(1); os.close(2)\ntime.sleep(10 ** 6)"
    assert kind.run(named(marker, code), "x" * 300_000, wall_seconds=0.7).killed_because == "time"


def test_endless_output_is_ended_and_its_beginning_kept(kind, marker):
    result = kind.run(named(marker, "while True: print('y' * 100)"), output_bytes=1000, wall_seconds=30)
    assert result.killed_because == "output"
    assert len(result.stdout) == 1000 and result.stdout.startswith("yyyy")


def test_output_that_is_no_text_is_replaced(kind):
    result = kind.run("import sys; sys.stdout.buffer.write(bytes([255, 65]))")
    assert result.stdout == "\ufffdA"


FORK_BOMB = """
import os
import re
while True:
    try:
        os.fork()
    except OSError:
        pass
"""


@pytest.mark.tier("all")
def test_a_fork_bomb_is_stopped(kind, marker):
    result = kind.run(named(marker, FORK_BOMB), wall_seconds=1.5, processes=8)
    assert result.killed_because in ("time", "processes")


@pytest.mark.tier("all")
def test_a_fork_bomb_in_new_sessions_is_stopped(kind, marker):
    code = FORK_BOMB.replace("os.fork()", "os.fork() or os.setsid()")
    assert kind.run(named(marker, code), wall_seconds=1, processes=8).killed_because in ("time", "processes")


@pytest.mark.tier("all")
def test_processes_have_a_limit(kind, marker):
    code = "import os, time\nfor i in range(50):\n if os.fork() == 0: time.sleep(1000)\nprint('all')\ntime.sleep(1000)"
    result = kind.run(named(marker, code), processes=10, wall_seconds=60)
    assert result.stdout == ""
    if result.protections.process_limit:
        assert "BlockingIOError" in result.stderr  # by the kernel; elsewhere it may be noticed later
    else:
        assert result.killed_because == "processes" or "BlockingIOError" in result.stderr


DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3): os.close(fd)
        time.sleep(10 ** 6)
    os._exit(0)
os.wait()
print('left it behind')
"""


@pytest.mark.tier("all")
def test_a_daemon_does_not_stay(kind, marker):
    result = kind.run(named(marker, DAEMON))
    assert (result.stdout, result.returncode) == ("left it behind\n", 0)


def test_filling_the_memory_is_stopped(kind, marker):
    code = "block = []\nwhile True: block.append(bytearray(10_000_000))"
    result = kind.run(named(marker, code), memory_bytes=200_000_000)
    assert "MemoryError" in result.stderr and result.returncode == 1


@pytest.mark.tier("all")
def test_filling_the_memory_with_many_processes_is_stopped(kind, marker):
    code = "import os, time\nfor i in range(3): os.fork()\nblock = bytearray(70_000_000)\ntime.sleep(1000)"
    result = kind.run(named(marker, code), memory_bytes=150_000_000, wall_seconds=30)
    assert result.killed_because == "memory"


FORKED = """
import mmap, os, time
block = bytearray(SIZE)
for _ in range(6):
    if not os.fork():
        more = mmap.mmap(-1, MORE)
        for place in range(0, MORE, 4096):
            more[place] = 1
        time.sleep(0.5)
        os._exit(0)
print([os.wait()[1] for _ in range(6)])
"""


@pytest.mark.parametrize(("own", "more", "because"), [(1, 40_000_000, "memory"), (40_000_000, 4096, None)])
def test_memory_counts_once_however_processes_share_it(kind, marker, own, more, because):
    rights = int(re.search(r"CapEff:\s*(\w+)", Path("/proc/self/status").read_text())[1], 16)
    if kind.level == "own_user" and not rights & (1 << 19 | 1 << 38):  # CAP_SYS_PTRACE, CAP_PERFMON
        pytest.skip("the kernel does not tell which pages processes of another user share")
    code = FORKED.replace("SIZE", str(own)).replace("MORE", str(more))
    result = kind.run(named(marker, code), memory_bytes=120_000_000, wall_seconds=30)
    assert (result.killed_because, result.stdout) == (because, "" if because else "[0, 0, 0, 0, 0, 0]\n")


@pytest.mark.tier("all")
@pytest.mark.parametrize(
    "code",
    [
        "import os; os.memfd_create('m')",
        "import multiprocessing.shared_memory as s; s.SharedMemory(create=True, size=9)",
    ],
)
def test_memory_that_no_limit_counts_cannot_be_had(kind, code):
    if "shared_memory" in code and kind.level != "namespaces":
        pytest.skip("without a file system of its own, /dev/shm is there")
    assert "Error" in kind.run(code).stderr


def test_one_large_file_is_stopped(kind, marker):
    result = kind.run(
        named(marker, "f = open('big', 'wb')\nwhile True: f.write(bytes(100_000)); f.flush()"), file_bytes=1_000_000
    )
    assert "File too large" in result.stderr


@pytest.mark.tier("all")
def test_many_files_are_stopped(kind, marker):
    code = "import itertools\nfor i in itertools.count(): open(f'f{i}', 'wb').write(bytes(500_000)); print(i)"
    result = kind.run(named(marker, code), disk_bytes=4_000_000, file_bytes=1_000_000)
    if kind.level == "namespaces":
        assert "No space left on device" in result.stderr and len(result.stdout.splitlines()) < 8
    else:
        assert result.killed_because == "disk"


@pytest.mark.tier("all")
def test_many_empty_files_and_deep_folders_are_stopped(kind, marker):
    code = "import os\nwhile True:\n open('f', 'wb').close()\n os.mkdir('d'); os.chdir('d')"
    result = kind.run(named(marker, code), disk_bytes=1_000_000, wall_seconds=20)
    assert result.killed_because == "disk" or "No space left on device" in result.stderr


def test_files_in_the_own_folder_work(kind):
    assert kind.run("open('a', 'w').write('b')\nprint(open('a').read())").stdout == "b\n"


def test_writing_elsewhere_is_refused(kind, marker):
    code = (
        "import os, sys\n"
        "places = ['/', '/usr', '/usr/bin', '/etc', '/dev', '/var/tmp', '/dev/shm', '/root', sys.base_prefix]\n"
        "for folder in places:\n"
        f"  try:\n    open(folder + '/{marker}', 'w'); print('wrote', folder)\n  except OSError: pass\n"
    )
    result = kind.run(code)
    if result.protections.files:
        assert result.stdout == ""
    leaks = [Path(line.split()[1]) / marker for line in result.stdout.splitlines()]
    for leak in leaks:  # world-writable folders, where there is no file system of its own
        leak.unlink(missing_ok=True)
    assert {leak.parent for leak in leaks} <= {Path("/var/tmp"), Path("/dev/shm")}


def test_all_but_the_own_folder_is_read_only_whoever_owns_it(kind):
    code = (
        "import os, sys\nfor folder in ('/', '/usr', '/usr/lib', sys.base_prefix, '/dev/null', '/tmp'):\n"
        " print(bool(os.statvfs(folder).f_flag & os.ST_RDONLY))"
    )
    result = kind.run(code)
    if result.protections.files:
        assert result.stdout.split() == ["True"] * 5 + ["False"]


def test_files_of_others_are_not_there(kind):
    secret = Path(tempfile.gettempdir()) / f"roll-secret-{uuid.uuid4().hex}"
    secret.write_text("secret")
    secret.chmod(0o644)
    try:
        result = kind.run(f"print(open({str(secret)!r}).read())")
    finally:
        secret.unlink()
    if result.protections.files:
        assert "FileNotFoundError" in result.stderr and result.stdout == ""
    else:
        assert kind.level != "namespaces"


def test_folders_made_inaccessible_are_removed(kind):
    code = "import os\nos.makedirs('a/b/c'); open('a/b/f', 'w').close()\nos.chmod('a/b', 0); os.chmod('a', 0)"
    assert kind.run(code).returncode in (0, -9)  # one that is watched may be ended for it


@pytest.mark.tier("all")
def test_killing_the_parent_only_harms_the_program(kind, marker):
    code = "import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass\nprint('alive')"
    result = kind.run(named(marker, code))
    assert result.stdout.endswith("alive\n") and result.returncode == 0


@pytest.mark.tier("all")
def test_killing_everybody_only_harms_the_program(kind, marker):
    proof = kind.run("import os; print(os.getuid(), os.getpid())")
    uid, pid = map(int, proof.stdout.split())
    apart = (proof.protections.level == "namespaces" and pid == 2) or uid >= 2_000_000_000
    if not apart:
        pytest.skip("the program is not proven to be kept apart from others")
    bystander = subprocess.Popen([sys.executable, "-c", "input(); print('here')"], stdin=-1, stdout=-1, text=True)
    result = kind.run(named(marker, "import os\ntry: os.kill(-1, 9)\nexcept OSError: pass\nprint('alone')"))
    assert bystander.communicate("\n")[0] == "here\n"
    assert result.stdout == "alone\n" and result.returncode == 0


@pytest.mark.tier("all")
@pytest.mark.parametrize("number", [1, 2, 15, 19])
def test_the_first_process_cannot_be_signalled_away(kind, marker, number):
    if kind.level != "namespaces":
        pytest.skip("there is none")
    code = f"import os\nfor i in range(20):\n try: os.kill(1, {number})\n except OSError: pass\nprint('still here')"
    result = kind.run(named(marker, code), wall_seconds=60)
    assert result.killed_because is None


@pytest.mark.tier("all")
@pytest.mark.parametrize("call", ["unshare(0x10000000)", "ptrace(16, 1, 0, 0)", "mount(b'a', b'/tmp', b'tmpfs', 0, 0)"])
def test_the_kernel_refuses_what_a_program_needs_not(kind, call):
    result = kind.run(f"import ctypes\nc = ctypes.CDLL(None, use_errno=True)\nprint(c.{call}, ctypes.get_errno())")
    assert result.stdout == "-1 1\n" and result.protections.system_calls


def test_standard_input_that_is_not_read_does_not_block(kind):
    assert kind.run("print('done')", "x" * 1_000_000).stdout == "done\n"


def test_long_input_arrives_whole(kind):
    assert kind.run("import sys; print(len(sys.stdin.read()))", "x" * 1_000_000).stdout == "1000000\n"


@needs_sandbox
@pytest.mark.parametrize("code", ["", "\x00", "\ud800", "def", "print('" + "ä" * 200_000 + "'[:1])"])
def test_odd_code_is_just_code(code):
    result = default_sandbox().run(code)
    assert result.killed_because is None


@needs_sandbox
def test_a_signal_of_its_own_is_reported():
    assert default_sandbox().run("import os; os.kill(os.getpid(), 11)").returncode == -11


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="`wall_seconds` of the sandbox is 0"):
        Limits(wall_seconds=0)


@needs_sandbox
def test_an_event_loop_is_not_blocked_and_calls_run_side_by_side():
    async def both():
        code = "import sys; print(sys.stdin.readline())"
        return await asyncio.gather(*(default_sandbox().run_async(code, stdin=f"{number}\n") for number in range(4)))

    assert [int(result.stdout) for result in asyncio.run(both())] == [0, 1, 2, 3]


@needs_sandbox
def test_it_may_be_called_by_what_runs_on_an_event_loop_but_is_not_asynchronous():
    async def called():
        return Sandbox().run("print(1)")

    assert asyncio.run(called()).stdout == "1\n"


@needs_sandbox
def test_cancelling_ends_the_program(marker):
    async def cancelled():
        running = asyncio.create_task(default_sandbox().run_async(named(marker, "import time; time.sleep(10 ** 6)")))
        while not processes_named(marker):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert processes_named(marker) == []

    asyncio.run(cancelled())


@needs_sandbox
def test_interrupting_the_caller_ends_the_program(marker):
    code = named(marker, "import time; time.sleep(10 ** 6)")
    # Where the tests run as a job in the background of a shell, SIGINT is ignored, and programs inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heard}\nfrom roll.sandbox.sandbox import Sandbox; Sandbox().run({code!r})"
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2], stderr=subprocess.PIPE)
    wait_until(lambda: processes_named(marker) != [])
    asking.send_signal(signal.SIGINT)
    assert b"KeyboardInterrupt" in asking.communicate(timeout=60)[1]
    wait_until(lambda: processes_named(marker) == [])


@needs_sandbox
def test_a_program_ends_with_the_process_that_asked_for_it(marker, programs):
    code = named(marker, "import time; time.sleep(10 ** 6)")
    script = f"from roll.sandbox.sandbox import Sandbox; Sandbox().run({code!r})"
    environment = os.environ | {"TMPDIR": str(programs)}
    asking = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2], env=environment)
    try:
        wait_until(lambda: processes_named(marker) != [])
        assert list(programs.iterdir()) != []
    finally:
        asking.kill()
        asking.wait()
    wait_until(lambda: processes_named(marker) == [])
    wait_until(lambda: list(programs.iterdir()) == [])


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""Worker processes of Ray that begin with what is large imported: forks of one process instead of new interpreters.

Each is a process of its own, which dies alone, as those of a user's run are; only the seconds of importing torch and
transformers are spent once. A command with a Ray of its own has them too, if its `PYTHONPATH` is `search_path`'s.

As a script this file is what Ray starts in place of its own `setup_worker.py`: a small process that asks for the fork
and lives as long as it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NoReturn

ADDRESS = "ROLL_TEST_WARM_WORKERS"
"""Name of the variable that holds the path of the socket."""
COLD = {"runtime_env": {"env_vars": {"ROLL_TEST_COLD_WORKER": "1"}}}
"""Options of an actor whose process is to begin as a user's does, with nothing imported."""
PRELOADED = (
    "aiohttp",
    "grpc",
    "google.protobuf.json_format",
    "gymnasium",
    "jsonschema",
    "roll.agentic.worker",
    "roll.rewards.registry",
    "roll.engines.hf.strategy",
    "roll.rewards.classifier",
    "roll.trainers.fsdp2",
    "torch.distributed.fsdp",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
)
"""Not Ray itself: its library reads the environment, with the job of the worker, when it is loaded."""
COMMANDS = Path(__file__).with_name("warm_commands")
Request = tuple[list[str], dict[str, str], str]
"""Arguments, environment and working directory."""


def search_path(*folders: Path) -> str:
    """`PYTHONPATH` of a command: these folders. Its workers are warm within `warm_workers`."""
    return os.pathsep.join(map(str, [COMMANDS, *folders] if ADDRESS in os.environ else folders))


@contextmanager
def warm_workers(*folders: Path) -> Iterator[int | None]:
    """Within the block this process's environment, and so that of a Ray which it starts, names a server that forks
    workers; they end with the block. They find modules in these folders, too. Yields the server's process id; None
    where there is no Linux: workers begin cold there."""
    import subprocess
    from tempfile import TemporaryDirectory

    if sys.platform != "linux":
        yield None
        return
    # Not where temporary files usually are: the path of a socket has 107 characters at most.
    with TemporaryDirectory(prefix="roll-", dir="/tmp") as folder:
        path = f"{folder}/warm-workers"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(64)  # who asks while the imports run waits
            command = [sys.executable, "-P", "-m", "tests.warm_workers", str(listener.fileno())]
            # Libraries of numbers would start threads of their own, and then it could not fork.
            paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
            alone = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
            server = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()], env=alone)
        before = os.environ.get(ADDRESS)
        os.environ[ADDRESS] = path
        try:
            yield server.pid
        finally:
            del os.environ[ADDRESS]
            if before is not None:
                os.environ[ADDRESS] = before
            try:
                server.communicate(timeout=60)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def serve(listener: socket.socket) -> Request:
    """Fork for each request until stdin is closed. Returns in the forks only, with the request."""
    import selectors
    import signal

    children: dict[int, socket.socket] = {}
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        ended, end = socket.socketpair()
        end.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(end.fileno())
        for source in (listener, sys.stdin, ended):
            selector.register(source, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is sys.stdin:
                    os._exit(0)  # libraries that look for leaks at the end would tell of them
                elif key.fileobj is listener:
                    asker, _ = listener.accept()
                    try:
                        request, files = receive(asker)
                    except ValueError:  # killed while it asked
                        asker.close()
                        continue
                    assert len(os.listdir("/proc/self/task")) == 1, "a fork of several threads may hang"
                    child = os.fork()
                    if child == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for each in (listener, ended, end, asker, *children.values()):
                            each.close()
                        take_over(files)
                        return request
                    for file in files:
                        os.close(file)
                    children[child] = asker
                    selector.register(asker, selectors.EVENT_READ, child)
                elif key.fileobj is ended:
                    ended.recv(4096)
                    for child in list(children):
                        if os.waitpid(child, os.WNOHANG)[0]:
                            with suppress(KeyError):
                                selector.unregister(children[child])
                            children.pop(child).close()
                elif key.data in children:  # who asked was killed
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)


def receive(asker: socket.socket) -> tuple[Request, list[int]]:
    """What is asked for, and the files that are to be its input, output and errors."""
    head, files, _, _ = socket.recv_fds(asker, 4, 3)
    with asker.makefile("rb") as stream:
        arguments, environment, folder = json.loads(stream.read(int.from_bytes(head)))
    return (arguments, environment, folder), files


def take_over(files: list[int]) -> None:
    """Make a fork's standard files those of who asked, and let it die with its parent. It has a group of its own, as
    each worker of Ray: when a node dies, its workers' groups are killed."""
    import ctypes
    import signal

    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    os.setpgid(0, 0)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)


def become_worker(request: Request) -> NoReturn:
    """What Ray's `setup_worker.py` does, without a new interpreter, and without taking one down: that would touch,
    and so copy, every page that it shares with its siblings, for many seconds where cores are few."""
    import atexit
    import runpy

    arguments, environment, folder = request
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)

    from ray._private.runtime_env.context import RuntimeEnvContext
    from ray._private.workers import setup_worker

    options, command = setup_worker.parser.parse_known_args(arguments)
    os.environ.update(RuntimeEnvContext.deserialize(options.serialized_runtime_env_context or "{}").env_vars)
    sys.argv = command
    status = 1
    try:
        runpy.run_path(command[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def ask() -> None:
    """Have a worker forked with this process's arguments, environment and files, and end when it has ended."""
    if ADDRESS not in os.environ or any("ROLL_TEST_COLD_WORKER" in argument for argument in sys.argv):
        become_cold_worker()
    body = json.dumps((sys.argv[1:], dict(os.environ), os.getcwd())).encode()
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(os.environ[ADDRESS])
            socket.send_fds(server, [len(body).to_bytes(4)], [0, 1, 2])
            server.sendall(body)
            server.recv(1)
        except OSError:  # it died, for what it imports is broken, say
            become_cold_worker()


def become_cold_worker() -> NoReturn:
    """What Ray would have started without this file."""
    from importlib.util import find_spec

    script = Path(find_spec("ray").origin).parent / "_private" / "workers" / "setup_worker.py"
    os.execv(sys.executable, [sys.executable, str(script), *sys.argv[1:]])


def main() -> None:
    """The server, or who asks it."""
    if __package__ != "tests":
        ask()
        return
    import gc
    import importlib

    for name in PRELOADED:
        with suppress(ModuleNotFoundError):  # not all of them need be installed
            importlib.import_module(name)
    assert "ray" not in sys.modules
    gc.freeze()  # pages that no collection touches stay shared
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        request = serve(listener)
    become_worker(request)


if __name__ == "__main__":
    main()

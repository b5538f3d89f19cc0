"""New processes that have imported already what they need.

Importing torch, transformers and an engine takes a process longer than a tiny model's steps. One process for each
engine, the nursery, imports them once; ranks are forks of it, which start in a hundredth of a second and in which
nothing that ran before has left a mark (DeepSpeed and megatron-core keep state for each process, and replace functions
of torch). The nursery computes nothing, so it has no threads that a fork would lose.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn

import torch

from roll.runtime.placement import free_port
from roll.trainers.deepspeed import import_deepspeed
from tests.trainers import megatron_cpu_shim

MODULES = {
    "torch": (
        "pytest",
        "hypothesis",
        "safetensors.torch",
        "transformers.models.qwen2.modeling_qwen2",
        "roll.trainers.fsdp2",
        "tests.trainers.histories",
        "tests.trainers.ranks",
    ),
    "deepspeed": (
        "roll.trainers.deepspeed",
        "deepspeed.runtime.engine",
        "deepspeed.runtime.zero.muon.muon_optimizer",  # has torch's compiler imported, which each engine asks for
    ),
    "megatron": (
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3.modeling_qwen3",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        "roll.trainers.megatron.strategy",
        "tests.trainers.megatron_models",
    ),
}
"""What ranks of an engine need; those of DeepSpeed and Megatron need what torch's need, too."""


class RankFailed(Exception):
    """A rank raised, died or did not end in time; the text has its traceback."""


def on_ranks(
    function: Callable[..., Any], *arguments: Any, ranks: int, engine: str = "torch", seconds: float = 200.0
) -> list[Any]:
    """Results by rank of ``function(rank, port, *arguments)``, of a module, on ``ranks`` new processes.

    ``port`` is free, and the same for all. `RankFailed` as soon as one of them fails; the others are killed.
    """
    if engine not in _nurseries:
        _nurseries[engine] = Nursery(engine)
    work = pickle.dumps((function, arguments))
    try:
        answers, failure = _nurseries[engine].ask(work, ranks, seconds)
    except BaseException:
        _nurseries.pop(engine).close()
        raise
    if failure is not None:
        raise RankFailed(failure)
    return [pickle.loads(answer) for answer in answers]


class Nursery:
    """The process that ranks of an engine are forks of. It ends with the one that started it."""

    def __init__(self, engine: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._line, other = context.Pipe()
        self._process = context.Process(target=_nurse, args=(engine, other), daemon=True)
        self._process.start()
        other.close()
        self._answer(180)

    def ask(self, work: bytes, ranks: int, seconds: float) -> tuple[list[bytes], str | None]:
        """Answers by rank and None, or what went wrong."""
        self._line.send((work, ranks, seconds))
        return self._answer(seconds + 60)

    def close(self) -> None:
        """It ends, and its ranks with it, when nobody is on the line."""
        self._line.close()

    def _answer(self, seconds: float) -> Any:
        if not self._line.poll(seconds):
            raise TimeoutError("the process that ranks are forks of does not answer")
        return self._line.recv()


_nurseries: dict[str, Nursery] = {}


@dataclass(frozen=True)
class _Child:
    rank: int
    pid: int


def _nurse(engine: str, line: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if engine == "megatron":
        megatron_cpu_shim.install()
    if engine == "deepspeed":
        # An operation of inference on CPUs, which the first rank would compile for a minute and the others wait for.
        import_deepspeed(torch.device("cpu")).ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for module in (*MODULES["torch"], *(MODULES[engine] if engine != "torch" else ())):
        importlib.import_module(module)
    line.send("ready")
    while True:
        try:
            work, ranks, seconds = line.recv()
            line.send(_raise_ranks(work, ranks, seconds, line))
        except EOFError:
            return  # Nobody is on the line any more.


def _raise_ranks(work: bytes, ranks: int, seconds: float, line: Connection) -> tuple[list[bytes], str | None]:
    """Answers by rank and None, or what went wrong first."""
    port = free_port()
    children: dict[Any, _Child] = {}
    answers: dict[int, bytes] = {}
    try:
        for rank in range(ranks):
            reading, writing = Pipe(duplex=False)
            pid = os.fork()
            if pid == 0:
                line.close()
                _be_rank(rank, port, work, writing, seconds)
            writing.close()
            children[reading] = _Child(rank, pid)
        end = time.monotonic() + seconds
        while len(answers) < ranks:
            open_pipes = [pipe for pipe, child in children.items() if child.rank not in answers]
            ready = wait([line, *open_pipes], max(0.0, end - time.monotonic()))
            if line in ready:
                raise EOFError
            if not ready:
                missing = sorted({*range(ranks)} - answers.keys())
                return [], f"ranks {missing} did not end within {seconds:.0f} s; where they were is on stderr"
            for pipe in ready:
                rank = children[pipe].rank
                try:
                    succeeded, answer = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    return [], f"rank {rank} died: {_end_of(children.pop(pipe).pid)}"
                if not succeeded:
                    return [], f"rank {rank} failed\n{answer}"
                answers[rank] = answer
        return [answers[rank] for rank in range(ranks)], None
    finally:
        for pipe, child in children.items():
            pipe.close()
            os.kill(child.pid, signal.SIGKILL)
            os.waitpid(child.pid, 0)


def _end_of(pid: int) -> str:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _be_rank(rank: int, port: int, work: bytes, answers: Connection, seconds: float) -> NoReturn:
    """Everything that a rank does, in its own process, which does not outlive the one it was forked from."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    try:
        faulthandler.dump_traceback_later(max(1.0, 0.95 * seconds), file=sys.__stderr__)
        torch.set_num_threads(1)
        function, arguments = pickle.loads(work)
        answer = pickle.dumps((True, pickle.dumps(function(rank, port, *arguments))))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    try:
        answers.send_bytes(answer)
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(0)

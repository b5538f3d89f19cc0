"""The verifier `code`: it runs the program in a response in the sandbox, against the prompt's tests.

A fault of the program (an exception, too much time, memory or output, no program at all) only lowers the score. A fault
of the tests or of the sandbox raises an error, so that no response is punished for it. Expected outputs and return
values never enter the program's process: its output is compared here. Assertions are the exception, because they are
code that must run in the same process. See docs/rewards.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import textwrap
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from roll.rewards.base import PreparedVerifier, VerifierUnavailable
from roll.sandbox.sandbox import GRACE_SECONDS, Limits, Sandbox, SandboxResult, SandboxUnavailable, default_sandbox

_MEBIBYTE = 2**20
_OUTPUT_BYTES = 64 * 1024
_BLOCK = re.compile(  # `*+` never backtracks, so any text takes linear time
    r"^[^\S\n]*+(?P<fence>```++)[^\S\n]*+(?P<mark>[^\s`]*+)[^`\n]*+\n"
    r"(?P<code>.*?)(?P<end>^[^\S\n]*+(?P=fence)`*+[^\S\n]*+$|\Z)",
    re.DOTALL | re.MULTILINE,
)
"""A fenced code block in Markdown. A block without a closing fence extends to the end of the text."""


class CodeVerifier(PreparedVerifier):
    """The verifier `code`."""

    numbers = ("score", "tests_passed", "timed_out", "no_program")

    def __init__(
        self,
        timeout_seconds: float,
        *,
        score: Literal["all", "share"] = "all",
        wall_seconds: PositiveFloat = 10.0,
        memory_mib: PositiveInt = 512,
        max_tests: PositiveInt | None = None,
        max_concurrency: PositiveInt | None = None,
        accept_weak_sandbox: bool = False,
    ) -> None:
        """Prepare the sandbox. docs/rewards.md explains the arguments.

        Raises `ValueError` if one run and its cleanup do not fit into ``timeout_seconds``, the time limit of a
        response.
        """
        if wall_seconds + GRACE_SECONDS > timeout_seconds:
            raise ValueError(
                f"`wall_seconds` {wall_seconds:g} and {GRACE_SECONDS:g} s for cleaning up do not fit into the "
                f"`timeout_seconds` of the reward, {timeout_seconds:g}"
            )
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        self.max_concurrency = max_concurrency or cores or 1
        self._all = score == "all"
        self._seconds = timeout_seconds - GRACE_SECONDS
        self._wall_seconds = wall_seconds
        self._memory_bytes = memory_mib * _MEBIBYTE
        self._max_tests = max_tests
        self._sandbox = Sandbox(accept_weak=True) if accept_weak_sandbox else default_sandbox()

    async def __call__(self, response: str, ground_truth: Any) -> dict[str, float]:
        """Return the score, `tests_passed`, `timed_out` and `no_program`.

        `tests_passed` is the share of tests that passed. With `score: all`, no run is started after a failure; the
        remaining tests count as not passed. Raises `ValueError` for unreadable tests, `SandboxUnavailable` and
        `SandboxFailed`.
        """
        runs = read_tests(ground_truth, self._max_tests)
        program = last_program(response)
        if program is None:
            return {"score": 0.0, "tests_passed": 0.0, "timed_out": 0.0, "no_program": 1.0}
        passed, timed_out = await self._passed(program, runs)
        share = passed / sum(run.tests for run in runs)
        score = float(share == 1) if self._all else share
        return {"score": score, "tests_passed": share, "timed_out": float(timed_out), "no_program": 0.0}

    async def _passed(self, program: str, runs: list[Run]) -> tuple[int, bool]:
        """Return the number of passed tests, and True if time ran out in a test or before all tests had run."""
        deadline = time.monotonic() + self._seconds
        passed, timed_out = 0, False
        for run in runs:
            left = deadline - time.monotonic()
            if left <= 0:
                return passed, True
            limits = Limits(
                wall_seconds=min(self._wall_seconds, left),
                cpu_seconds=math.ceil(self._wall_seconds),
                memory_bytes=self._memory_bytes,
                output_bytes=_OUTPUT_BYTES + 2 * run.expected_bytes,
            )
            result = await self._sandbox.run_async(run.code(program), stdin=run.stdin, limits=limits)
            newly = run.passed(result)
            passed += newly
            timed_out = timed_out or result.timed_out
            if self._all and newly < run.tests:
                break
        return passed, timed_out

    def check_ground_truth(self, ground_truth: Any) -> None:
        read_tests(ground_truth, self._max_tests)

    def check_machine(self) -> None:
        try:
            self._sandbox.check()
        except SandboxUnavailable as error:
            raise VerifierUnavailable(f"the verifier `code`: {error}") from error


def last_program(text: str) -> str | None:
    """Return the last closed code block marked as Python, else the last closed unmarked block, else None."""
    found: dict[bool, str] = {}
    for block in _BLOCK.finditer(text):
        mark = block["mark"].lower()
        if block["end"] and mark in ("", "python", "python3", "py"):
            found[bool(mark)] = textwrap.dedent(block["code"].removesuffix("\n"))
    return found.get(True, found.get(False))


# The code that runs a program inside the sandbox. The tests stay unread in a pipe until their turn, so the program
# cannot find them in a file or a stack frame. This does not make the process trustworthy: a program that reads the
# pipe, or whose objects are equal to everything, can make an assertion pass. docs/rewards.md says what is protected.
_HEAD = """
import builtins, os, sys, types
builtins.exit = builtins.quit = sys.exit  # the bare interpreter has neither
PROGRAM = {program}
"""

_PLAIN = """
def main(program):
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(program, "program.py", "exec", dont_inherit=True), vars(module))

main(PROGRAM)
"""

# The harness binds everything that the program could replace (builtins, functions of modules, its own names) before it
# runs the program.
_ASKED = """
import json

def main(program, run=exec, compiled=compile, read=os.read, write=os.write, load=json.loads, dump=json.dumps,
         base=BaseException, number=int, length=len, mutable=bytearray):
    questions, answers, nothing = os.dup(0), os.dup(1), os.open("/dev/null", os.O_RDONLY)
    os.dup2(nothing, 0)

    def taken(size):
        data = mutable()
        while length(data) < size:
            chunk = read(questions, size - length(data))
            if not chunk:
                break
            data += chunk
        return data.decode()

    def section():
        size = taken(16)
        return taken(number(size, 16)) if size else None

    def tell(text):
        data = text.encode()
        while data:
            data = data[write(answers, data):]

    module = sys.modules["program"] = types.ModuleType("program")
    names = vars(module)
    run(compiled(program, "program.py", "exec", dont_inherit=True), names)
"""

# If the program does not define the function, its class `Solution` is searched for it.
_CALLING = (
    _ASKED
    + """
    name, arguments = load(section())
    owner = names["Solution"]() if name not in names and "Solution" in names else None
    function = names[name] if owner is None else getattr(owner, name)
    returned = dump(function(*arguments))
    tell("\\n" + section() + returned + "\\n")

main(PROGRAM)
"""
)

_ASSERTING = (
    _ASKED
    + """
    while (question := section()) is not None:
        try:
            run(compiled(question, "asserts.py", "exec", dont_inherit=True), names)
        except base as error:
            os.write(2, (type(error).__name__ + "\\n").encode())
            section()
        else:
            tell("\\n" + section() + "\\n")

main(PROGRAM)
"""
)

FLOAT_TOLERANCE = 1e-6
"""Relative and absolute tolerance if the expected return value is a float."""

_FORMS = 'write {"inputs": [...], "outputs": [...]}, the same with "fn_name", {"asserts": ...}, or a list of assertions'


@dataclass(frozen=True)
class Run:
    """One execution of a program, for one or several tests."""

    harness: str
    """Code that runs the program."""
    stdin: str
    """Standard input of the process."""
    passed: Callable[[SandboxResult], int]
    """Function that returns the number of passed tests, given the output of the process."""
    tests: int = 1
    expected_bytes: int = 0
    """Approximate length of a correct output."""

    def code(self, program: str) -> str:
        """Return the code for the process.

        The program is embedded as a string literal, so its line numbers are unchanged, and an unclosed quote or bracket
        in it cannot affect the code after it.
        """
        return _HEAD.format(program=ascii(program)) + self.harness


def _input_run(stdin: str, expected: str) -> Run:
    """Return a run that passes ``stdin`` to the program and expects ``expected`` as standard output."""

    def passed(result: SandboxResult) -> int:
        ended_well = result.killed_because is None and result.returncode == 0
        return int(ended_well and _lines(result.stdout) == _lines(expected))

    return Run(_PLAIN, stdin, passed, expected_bytes=len(expected.encode("utf-8", "replace")))


def _call_run(function: str, arguments: list[Any], expected: Any) -> Run:
    """Return a run of one function call. The process prints a random marker and then the result, as a line of JSON."""
    marker = secrets.token_hex(16)

    def passed(result: SandboxResult) -> int:
        _, found, after = result.stdout.rpartition(marker)
        if not found:
            return 0
        try:
            returned = json.loads(after.split("\n", 1)[0])
        except (ValueError, RecursionError):  # incomplete, or a number or nesting too large to parse
            return 0
        return int(_equal(returned, expected))

    stdin = _sections(json.dumps([function, arguments]), marker)
    return Run(_CALLING, stdin, passed, expected_bytes=len(json.dumps(expected)))


def _sections(*texts: str) -> str:
    """Join texts so that a process can read them from a pipe one by one: each is preceded by its length in bytes."""
    return "".join(f"{len(text.encode('utf-8', 'replace')):016x}{text}" for text in texts)


def read_tests(ground_truth: Any, max_tests: int | None = None) -> list[Run]:
    """Convert a ground truth to runs of the program, limited to its first ``max_tests`` tests.

    Raises `ValueError` if there is no test, or if the ground truth has none of the forms in docs/rewards.md (a mapping,
    a list, or either as JSON text).
    """
    if isinstance(ground_truth, str):
        try:
            ground_truth = json.loads(ground_truth)
        except (ValueError, RecursionError) as cause:
            raise ValueError(f"the tests are text, but not JSON ({cause}); {_FORMS}") from cause
    if isinstance(ground_truth, list):
        ground_truth = {"asserts": ground_truth}
    if not isinstance(ground_truth, Mapping):
        raise ValueError(f"the tests are a {type(ground_truth).__name__}; {_FORMS}")
    if "asserts" in ground_truth:
        return [_assert_run(ground_truth, max_tests)]
    return _runs(ground_truth)[:max_tests]


def _assert_run(tests: Mapping[str, Any], max_tests: int | None) -> Run:
    """Return a run of assertions, one after the other in the program's process.

    Each one has its own proof: a random text that the process reads only after the assertion has passed, and prints.
    """
    _only(tests, "asserts")
    asserts = [tests["asserts"]] if isinstance(tests["asserts"], str) else tests["asserts"]
    if not isinstance(asserts, list) or not asserts or any(not isinstance(each, str) for each in asserts):
        raise ValueError("`asserts` must be Python code, or a list of such texts with at least one")
    kept = asserts[:max_tests]
    for text in kept:
        try:
            compile(text, "asserts", "exec", dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as cause:  # every program would fail it
            raise ValueError(f"the assertion {text[:80]!r} is no Python ({cause})") from cause
    proofs = [secrets.token_hex(16) for _ in kept]

    def passed(result: SandboxResult) -> int:
        return sum(proof in result.stdout for proof in proofs)

    stdin = _sections(*(each for pair in zip(kept, proofs, strict=True) for each in pair))
    return Run(_ASSERTING, stdin, passed, tests=len(kept))


def _runs(tests: Mapping[str, Any]) -> list[Run]:
    _only(tests, "inputs", "outputs", "fn_name", "entry_point")
    inputs, outputs = tests.get("inputs"), tests.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise ValueError(f"the tests have no lists `inputs` and `outputs`; {_FORMS}")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"{len(inputs)} `inputs` and {len(outputs)} `outputs` are no pairs")
    pairs = list(zip(inputs, outputs, strict=True))
    names = [tests[key] for key in ("fn_name", "entry_point") if tests.get(key) is not None]
    if not names:
        return [_input_run(_text(given), _text(expected)) for given, expected in pairs]
    name = names[0]
    if not isinstance(name, str) or not name.isidentifier() or len(set(names)) > 1:
        raise ValueError(f"{', '.join(map(repr, names))} is no name of a function")
    for given, _ in pairs:
        if not isinstance(given, list):
            raise ValueError(f"the input {str(given)[:80]!r} of `{name}` is no list of arguments")
    return [_call_run(name, given, expected) for given, expected in pairs]


def _only(tests: Mapping[str, Any], *known: str) -> None:
    strange = [key for key in tests if key not in known]
    if strange:
        raise ValueError(f"the tests have `{strange[0]}`, which is not read beside {', '.join(known)}; {_FORMS}")


def _text(value: Any) -> str:
    """Return a text unchanged, or the lines of a list joined."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{str(value)[:80]!r} is no text for standard input or output (set `fn_name` to call)")
    return value


def _lines(text: str) -> list[str]:
    """Split into lines, without trailing white space and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _equal(returned: Any, expected: Any) -> bool:
    """Compare as Python does, but allow rounding where a float is expected."""
    if isinstance(expected, float) and isinstance(returned, int | float):
        try:
            return math.isclose(returned, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
        except OverflowError:  # an integer too large for a float
            return False
    if isinstance(expected, Mapping) and isinstance(returned, Mapping):
        return returned.keys() == expected.keys() and all(_equal(returned[key], expected[key]) for key in expected)
    if isinstance(expected, list | tuple) and isinstance(returned, list):
        return len(returned) == len(expected) and all(map(_equal, returned, expected))
    return bool(returned == expected)

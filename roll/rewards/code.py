"""The verifier `code`: it runs the program of a response in the sandbox against the prompt's tests.

A fault of the program (an exception, too much time, memory or output, no program at all) only lowers the score. A fault
of the tests or of the sandbox raises an error, so that no response is punished for it. See docs/rewards.md.
"""

from __future__ import annotations

import math
import os
import textwrap
import time
from typing import Any, Literal

from pydantic import PositiveFloat, PositiveInt

from roll.rewards.code_tests import Run, read_tests
from roll.rewards.records import PreparedVerifier, VerifierUnavailable
from roll.sandbox.sandbox import GRACE_SECONDS, Limits, Sandbox, SandboxUnavailable, default_sandbox

_MEBIBYTE = 2**20
_OUTPUT_BYTES = 64 * 1024
_PYTHON = ("python", "python3", "py")


class CodeVerifier(PreparedVerifier):
    """The verifier `code`."""

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
        """Check the limits and prepare the sandbox.

        ``timeout_seconds``: for one response; its last part is left to the sandbox for cleaning up. ``score``: `all`
        gives 1 if every test passes and else 0, and starts no further run after a failure; `share` gives the share of
        passed tests. ``wall_seconds``, ``memory_mib``: limits of one run of the program. ``max_tests``: use only this
        many of a prompt's tests, the first ones. ``max_concurrency``: programs at a time over all processes; default:
        the number of cores of this machine. ``accept_weak_sandbox``: see `Sandbox`. Raises `ValueError` if one run does
        not fit into the time for a response.
        """
        if wall_seconds + GRACE_SECONDS > timeout_seconds:
            raise ValueError(
                f"`wall_seconds` {wall_seconds:g} and {GRACE_SECONDS:g} s for cleaning up do not fit into the "
                f"`timeout_seconds` of the reward, {timeout_seconds:g}"
            )
        self.max_concurrency = max_concurrency or _cores()
        self._all = score == "all"
        self._seconds = timeout_seconds - GRACE_SECONDS
        self._wall_seconds = wall_seconds
        self._memory_bytes = memory_mib * _MEBIBYTE
        self._max_tests = max_tests
        self._sandbox = Sandbox(accept_weak=True) if accept_weak_sandbox else default_sandbox()

    async def __call__(self, response: str, ground_truth: Any) -> dict[str, float]:
        """Return the score, `tests_passed`, `timed_out` and `no_program`.

        `tests_passed` is the passed share. With `all`, no run is started after a failure, and its tests count as not
        passed. Raises `ValueError` for unreadable tests, `SandboxUnavailable` and `SandboxFailed`.
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
        """Return the number of passed tests, and True if time ran out in a test or before all of them ran."""
        deadline = time.monotonic() + self._seconds
        passed, timed_out = 0, False
        for run in runs:
            left = deadline - time.monotonic()
            if left <= 0:
                return passed, True
            result = await self._sandbox.run_async(run.code(program), stdin=run.stdin, limits=self._limits(run, left))
            newly = run.passed(result)
            passed += newly
            timed_out = timed_out or result.timed_out
            if self._all and newly < run.tests:
                break
        return passed, timed_out

    def _limits(self, run: Run, seconds_left: float) -> Limits:
        return Limits(
            wall_seconds=min(self._wall_seconds, seconds_left),
            cpu_seconds=math.ceil(self._wall_seconds),
            memory_bytes=self._memory_bytes,
            output_bytes=_OUTPUT_BYTES + 2 * run.expected_bytes,
        )

    def check_ground_truth(self, ground_truth: Any) -> None:
        """See `PreparedVerifier`."""
        read_tests(ground_truth, self._max_tests)

    def check_machine(self) -> None:
        """See `PreparedVerifier`."""
        try:
            self._sandbox.check()
        except SandboxUnavailable as error:
            raise VerifierUnavailable(f"the verifier `code`: {error}") from error


def last_program(text: str) -> str | None:
    """Return the last closed fenced block marked as Python; without one, the last unmarked block; else None."""
    found: dict[bool, str] = {}
    fence, mark = "", ""
    lines: list[str] = []
    for line in text.split("\n"):
        bare = line.strip()
        if fence:
            if bare.startswith(fence) and not bare.strip("`"):
                if mark in ("", *_PYTHON):
                    found[bool(mark)] = textwrap.dedent("\n".join(lines))
                fence = ""
            else:
                lines.append(line)
        elif bare.startswith("```"):
            after = bare.lstrip("`")
            if "`" not in after:
                fence, lines = bare[: len(bare) - len(after)], []
                mark = after.split()[0].lower() if after.strip() else ""
    return found.get(True, found.get(False))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

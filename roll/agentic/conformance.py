"""Checks that an environment conforms to the interface: resets, seeds, odd actions, threads, leaks, deadlines.

The checks run in separate processes. Whatever the environment does (hang, end its process, leave child processes) is
reported and cleaned up afterwards. Each call of the environment is announced through a pipe first, so that the parent
knows which call hangs or ends the process. A check raises `_Defect` or `_Doubt`, or returns what it observed.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import random
import signal
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal, NamedTuple

from roll.agentic.base import BadAnswer, observation_from
from roll.agentic.episode import Observation
from roll.agentic.registry import make_env
from roll.agentic.worker import described, holdings
from roll.configs.errors import ConfigError

Level = Literal["passed", "warning", "failed"]

START_SECONDS = 120.0
"""Time limit for starting Python and importing, and for the checks' own work between two calls of the environment."""
MAX_LOST_PROCESSES = 3
EXIT_SECONDS = 10.0
MARKS: Mapping[Level, str] = {"passed": "ok", "warning": "warning", "failed": "FAILED"}

STEPS = 30
STEPS_TO_AN_END = 250
LEAK_CYCLES = 16
LEAKED_BYTES_TRACED = 64 * 1024
LEAKED_BYTES_RESIDENT = 512 * 1024
"""Allowed growth in bytes per environment made and closed: of Python's traced memory, and of the resident set size."""
SETTLE_SECONDS = 1.0

IDLE = ""
"""Marks that no call is running: the process is starting or doing the checks' own work."""
MAKING = "making the environment"
"""Name of the call that creates the environment. It has its own time limit, because it may import much."""
GUESSES = ("left", "1", "yes", "[1]", "<answer>left</answer>", "<answer>1</answer>")
"""Actions to try in environments without `example_actions`."""
_ODD_ANSWERS = (
    "", " ", "\n\n", "\x00", "".join(chr(code) for code in range(32)) + "\x7f", "\u202eright\u200b\ufeff",
    "e\u0301\U0001f9ca\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u0663", "-1", "1e999", "NaN", "9" * 5000, "null",
    "{}", '{"action": {"deep": [[[[[1e999]]]]]}}', "[[[[", "%s%n{0}{x}$(x)`x`", "../../etc/passwd",
    '<tool_call>{"name": 3, "arguments": "}</tool_call>', "left right up down", "LEFT", "pickup", "hit", "\\boxed{7}",
    "[up]", "a" * 100_000,
)  # fmt: skip
ODD_ACTIONS = (
    *_ODD_ANSWERS,
    *(f"<answer>{answer}</answer>" for answer in _ODD_ANSWERS),
    *(f"[{answer}]" for answer in _ODD_ANSWERS),
    *("<answer>", "</answer><answer>", "<answer>" * 20_000, "</answer>" * 20_000),
)


@dataclass(frozen=True)
class Finding:
    """Result of one check."""

    name: str
    level: Level
    message: str
    """What the check observed. For a warning or a failure, also what is wrong and how to fix it."""

    @property
    def passed(self) -> bool:
        """True if the environment is usable despite this finding."""
        return self.level != "failed"


@dataclass(frozen=True)
class ConformanceReport:
    """All findings about one environment."""

    env_type: str
    findings: tuple[Finding, ...]

    @property
    def passed(self) -> bool:
        """True if no check failed. There may be warnings."""
        return all(finding.passed for finding in self.findings)


def check_env(
    env_type: str,
    env_config: Mapping[str, Any],
    *,
    episodes: int = 20,
    seed: int = 0,
    deadline_seconds: float = 10.0,
    make_deadline_seconds: float = 120.0,
) -> ConformanceReport:
    """Test an environment as training uses it, and more harshly. Takes some seconds.

    Most checks run ``episodes`` episodes, with consecutive seeds from ``seed``. A call of the environment that takes
    longer than ``deadline_seconds`` counts as hanging; creating the environment may take ``make_deadline_seconds``,
    because that may import much. Faults of the environment are reported, never raised.
    """
    try:
        pickle.dumps((env_type, dict(env_config)))
    except (pickle.PicklingError, TypeError, AttributeError) as cause:
        message = f"name and options cannot be sent to a worker process ({cause}); use plain values as in YAML"
        return ConformanceReport(env_type, (Finding("pickling", "failed", message),))
    findings = [Finding("pickling", "passed", "name and options can be sent to a worker process")]
    limits = {IDLE: START_SECONDS, MAKING: make_deadline_seconds}
    waiting, lost = list(CHECKS), 0
    while waiting and lost < MAX_LOST_PROCESSES:
        arguments = (env_type, dict(env_config), max(1, episodes), seed)
        found, is_lost = _in_a_process(arguments, waiting, lambda call: limits.get(call, deadline_seconds))
        findings += found
        lost += is_lost
        waiting = waiting[len(found) :]
        if _prevents_all_others(findings[-1]):
            break
    findings += [Finding(name, "warning", "was not run, because of what failed before") for name in waiting]
    if lost:
        findings.append(Finding("process", "failed", f"{lost} of the processes that held the environment were lost"))
    else:
        message = f"each call returned within {deadline_seconds:g} s, and no process was lost"
        findings.append(Finding("process", "passed", message))
    return ConformanceReport(env_type, tuple(findings))


def render_report(report: ConformanceReport) -> str:
    """Format the report for a terminal: one line per finding, then a verdict."""
    width = max(len(finding.name) for finding in report.findings)
    lines = [f"{finding.name:<{width}}  {MARKS[finding.level]:<7}  {finding.message}" for finding in report.findings]
    failed = sum(not finding.passed for finding in report.findings)
    doubts = sum(finding.level == "warning" for finding in report.findings)
    verdict = "keeps the interface" if report.passed else f"breaks the interface in {failed} of {len(lines)} checks"
    warnings = f", with {doubts} warning{'' if doubts == 1 else 's'}" if doubts else ""
    return "\n".join([*lines, f"{report.env_type} {verdict}{warnings}"])


def _in_a_process(
    arguments: tuple[str, Mapping[str, Any], int, int], names: Sequence[str], limit: Callable[[str], float]
) -> tuple[list[Finding], bool]:
    """Run checks in a new process. Return the findings, and True if the last check hung or ended the process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_checks, args=(theirs, *arguments, names))
    process.start()
    theirs.close()
    findings: list[Finding] = []
    call = IDLE
    try:
        while ours.poll(limit(call)):
            match ours.recv():
                case Finding() as finding:
                    findings.append(finding)
                    if len(findings) == len(names) or _prevents_all_others(finding):
                        return findings, False
                case begun:
                    call = begun
        what = f"{call} did not return within {limit(call):g} s; give what it waits for a time limit of its own"
        if call == IDLE:
            what = f"nothing was heard for {limit(call):g} s; is something slow imported, or a thread kept busy?"
    except (EOFError, ConnectionResetError):
        process.join(EXIT_SECONDS)
        code = process.exitcode
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        where = call or "its start"
        what = f"the process ended ({how}) during {where}; an environment may raise, but not end its process"
    finally:
        _end(process)
        ours.close()
    return [*findings, Finding(names[len(findings)], "failed", what)], True


def _prevents_all_others(finding: Finding) -> bool:
    return finding.name == "make" and not finding.passed


def _end(process: SpawnProcess) -> None:
    """Kill the process and all its descendants."""
    assert process.pid is not None
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:  # already gone, or not yet the leader of a group
        process.kill()
    process.join(EXIT_SECONDS)
    process.close()


class _Defect(Exception):
    """The environment violates the interface. The message says what is wrong and how to fix it."""


class _Doubt(Exception):
    """Something is probably unintended, or could not be checked."""


class _Turn(NamedTuple):
    """The parts of an observation that are compared between episodes."""

    text: str
    reward: float
    terminated: bool
    truncated: bool
    state: str | None


class _CheckedEnv:
    """Wraps an environment: announces each call, and raises `_Defect` if it fails or returns an invalid value."""

    def __init__(self, subject: _Subject) -> None:
        self._subject = subject
        self.env = subject.call(MAKING, lambda: make_env(subject.env_type, subject.env_config))

    def reset(self, seed: int) -> Observation:
        return self._observed(f"reset(seed={seed})", lambda: self.env.reset(seed=seed), "text", "info")

    def step(self, action: str) -> Observation:
        parts = ("text", "reward", "terminated", "truncated", "info")
        return self._observed(f"step({_short(action)})", lambda: self.env.step(action), *parts)

    def render(self) -> Any:
        """Return a frame, or None if the environment does not render."""
        return None if self.env.render_mode is None else self._subject.call("render()", self.env.render)

    def close(self) -> None:
        self._subject.call("close()", self.env.close)

    def play(
        self, seed: int, actions: Sequence[str] | None = None, steps: int = STEPS
    ) -> tuple[list[_Turn], list[str]]:
        """Run an episode with the given actions, or with random ones. Returns its turns and actions."""
        turns = [_turn(self.reset(seed))]
        taken: list[str] = []
        draw = random.Random(seed)
        for action in (draw.choice(self.examples()) for _ in range(steps)) if actions is None else actions:
            turns.append(_turn(self.step(action)))
            taken.append(action)
            if turns[-1].terminated or turns[-1].truncated:
                break
        return turns, taken

    def examples(self) -> tuple[str, ...]:
        """Return actions that the environment may accept."""
        if not self.env.has_wrapper_attr("example_actions"):
            return GUESSES
        return tuple(str(each) for each in self.env.get_wrapper_attr("example_actions")) or GUESSES

    def _observed(self, what: str, act: Callable[[], Any], *parts: str) -> Observation:
        """Call the environment. Raises `_Defect` unless it returns a tuple of these parts."""
        answer = self._subject.call(what, act)
        if not isinstance(answer, tuple) or len(answer) != len(parts):
            raise _Defect(f"{what} answered {_short(answer)}; it has to be ({', '.join(parts)})")
        try:
            return observation_from(**dict(zip(parts, answer, strict=True)))
        except BadAnswer as bad:
            raise _Defect(f"{what}: {bad}") from bad


@dataclass
class _Subject:
    """The environment under test, and the settings of the checks."""

    connection: Connection
    env_type: str
    env_config: Mapping[str, Any]
    episodes: int
    seed: int

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Call the environment. Raises `_Defect` if it raises."""
        self.connection.send(what)
        try:
            return function()
        except Exception as cause:
            raise _Defect(f"{what} raised {_described(cause)}") from cause
        finally:
            self.connection.send(IDLE)

    @contextmanager
    def environment(self) -> Iterator[_CheckedEnv]:
        """Make an environment, and close it if the check finds no defect.

        An error in `close` is ignored here: `_closes_in_any_state` reports it once.
        """
        env = _CheckedEnv(self)
        yield env
        try:
            env.close()
        except _Defect:
            return

    def seeds(self) -> range:
        """Return the seeds of a check, one per episode."""
        return range(self.seed, self.seed + self.episodes)


def _makes_an_environment(subject: _Subject) -> str:
    try:
        _CheckedEnv(subject)
    except _Defect as defect:
        if isinstance(defect.__cause__, ConfigError):
            raise _Defect(f"the environment cannot be made: {defect.__cause__}") from defect
        raise
    return "made in a fresh process from its name and options"


def _resets_at_any_time(subject: _Subject) -> str:
    with subject.environment() as env:
        first = env.reset(subject.seed)
        env.reset(subject.seed)
        env.step(env.examples()[0])
        again = env.reset(subject.seed)
    if again.done:
        raise _Defect("reset answered with the end of an episode")
    if difference := _difference(_turn(first), _turn(again)):
        raise _Defect(f"reset(seed={subject.seed}) answered differently after a step: {difference}")
    return "reset works before a step, twice, and in the middle of an episode"


def _answers_are_well_formed(subject: _Subject) -> str:
    """Check the types of all returned values in several episodes."""
    with subject.environment() as env:
        count = sum(len(env.play(seed)[0]) for seed in subject.seeds())
    return f"{count} answers had the right types"


def _equal_seeds_give_equal_episodes(subject: _Subject) -> str:
    with subject.environment() as env, subject.environment() as other:
        played = {seed: env.play(seed) for seed in subject.seeds()}
        for seed in reversed(subject.seeds()):
            turns, actions = played[seed]
            _require_equal(f"episodes of seed {seed} with equal actions", turns, other.play(seed, actions)[0])
    return f"{len(played)} episodes were repeated exactly"


def _different_seeds_give_different_episodes(subject: _Subject) -> str:
    with subject.environment() as env:
        env.reset(subject.seed)
        actions = env.examples()
        seen = {tuple(env.play(seed, actions)[0]) for seed in subject.seeds()}
    if len(seen) == 1 and subject.episodes > 1:
        message = "every group of a run would be the same; draw from `self.np_random` after `super().reset(seed=seed)`"
        raise _Doubt(f"{subject.episodes} seeds gave one and the same episode: {message}")
    return f"{subject.episodes} seeds gave {len(seen)} different episodes"


def _odd_actions_are_answered(subject: _Subject) -> str:
    refused = 0
    with subject.environment() as env:
        env.reset(subject.seed)
        for index, action in enumerate(ODD_ACTIONS):
            answer = env.step(action)
            refused += not answer.action_is_valid
            if answer.done:
                env.reset(subject.seed + index)
    if not refused:
        message = "say info['action_is_valid'] = False where a text holds no action, or no format penalty is ever given"
        raise _Doubt(f"{len(ODD_ACTIONS)} odd texts were all valid actions: {message}")
    return f"{len(ODD_ACTIONS)} odd texts were answered, {refused} of them as invalid actions"


def _ended_episodes_stay_ended(subject: _Subject) -> str:
    """Check that a step after the end raises or reports the end again, and that a reset works afterwards."""
    with subject.environment() as env:
        for seed in subject.seeds():
            turns, _ = env.play(seed, steps=STEPS_TO_AN_END)
            if turns[-1].terminated or turns[-1].truncated:
                try:
                    if not env.step(env.examples()[0]).done:
                        remedy = "raise `gymnasium.error.ResetNeeded` there"
                        raise _Defect(f"a step after the end went on with the episode; {remedy}")
                except _Defect as defect:
                    if defect.__cause__ is None or isinstance(defect.__cause__, BadAnswer):
                        raise
                env.reset(seed)
                return "a step after the end is refused, or answered with the end"
    message = f"no episode of {subject.episodes} ended within {STEPS_TO_AN_END} random actions, so its end was not seen"
    raise _Doubt(f"{message}; `example_actions` with actions that lead to an end would help")


def _success_is_reported(subject: _Subject) -> str:
    """Check that success is reported, because success rates need it."""
    with subject.environment() as env:
        env.reset(subject.seed)
        answer = env.step(env.examples()[0])
    if answer.success is None:
        raise _Doubt("info['success'] is never given; without it no success rate can be reported")
    return "info['success'] is given"


def _frames_are_text(subject: _Subject) -> str:
    with subject.environment() as env:
        env.reset(subject.seed)
        frame = env.render()
    if frame is None:
        raise _Doubt("there are no frames to look at; set `render_mode = 'ansi'` and return a text from `render()`")
    if not isinstance(frame, str):
        raise _Defect(f"render() answered {_short(frame)} ({type(frame).__name__}); it has to be a str")
    return "frames are text"


def _environments_share_no_state(subject: _Subject) -> str:
    """Check that two interleaved environments behave as each does alone."""
    with subject.environment() as env, subject.environment() as other:
        for seed in subject.seeds()[:5]:
            plays = [(env, seed, *env.play(seed)), (other, seed + 1, *other.play(seed + 1))]
            beside = [[_turn(each.reset(number))] for each, number, _, _ in plays]
            for step in range(STEPS):
                for (each, _, _, actions), turns in zip(plays, beside, strict=True):
                    if step < len(actions):
                        turns.append(_turn(each.step(actions[step])))
            for (_, _, alone, _), turns in zip(plays, beside, strict=True):
                _require_equal("an episode alone and one beside another environment's", alone, turns)
    return "two environments in one process do not notice each other"


def _works_in_another_thread(subject: _Subject) -> str:
    """Check that the environment works in a thread that did not create it, as environment workers use it."""
    with subject.environment() as env, ThreadPoolExecutor(1) as thread:
        turns, actions = env.play(subject.seed)
        try:
            again, _ = thread.submit(env.play, subject.seed, actions).result()
        except _Defect as defect:
            raise _Defect(
                f"in a thread that did not make the environment, {defect}; workers use several threads"
            ) from None
    _require_equal("episodes in two threads", turns, again)
    return "an environment works in a thread that did not make it"


def _closes_in_any_state(subject: _Subject) -> str:
    _CheckedEnv(subject).close()
    env = _CheckedEnv(subject)
    env.reset(subject.seed)
    env.close()
    env.close()
    return "close works before a reset, in the middle of an episode, and twice"


def _closed_environments_leave_nothing(subject: _Subject) -> str:
    if not Path("/proc/self/task").is_dir():
        raise _Doubt("files, threads, processes and memory cannot be counted on this system")
    tracemalloc.start()
    try:
        _cycles(subject, LEAK_CYCLES // 3)
        before = _usage()
        _cycles(subject, LEAK_CYCLES)
        deadline = time.monotonic() + SETTLE_SECONDS  # ending threads and processes get time to end
        while (leaks := _leaks(_usage() - before)) and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        tracemalloc.stop()
    if leaks:
        what = f"{LEAK_CYCLES} environments made, used and closed left {', '.join(leaks)}"
        raise _Defect(f"{what}; free them in `close()`")
    return f"{LEAK_CYCLES} environments made, used and closed left nothing"


def _cycles(subject: _Subject, count: int) -> None:
    for index in range(count):
        with subject.environment() as env:
            env.play(subject.seed + index, steps=3)


def _usage() -> Counter[str]:
    gc.collect()
    traced = tracemalloc.get_traced_memory()[0]
    return holdings() + Counter({"child processes": _children(), "traced bytes": traced})


def _leaks(grown: Counter[str]) -> list[str]:
    """Return resources that at least every second environment leaked. A resource held once for all does not count."""
    counted = ("open files", "threads", "child processes")
    leaks = [f"{grown[name]} {name}" for name in counted if 2 * grown[name] >= LEAK_CYCLES]
    traced, resident = grown["traced bytes"], grown["resident bytes"]
    if traced >= LEAKED_BYTES_TRACED * LEAK_CYCLES or resident >= LEAKED_BYTES_RESIDENT * LEAK_CYCLES:
        leaks.append(f"{max(traced, resident) / 2**20:.1f} MiB of memory")
    return leaks


def _children() -> int:
    """Return the number of child processes of this process."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended in the meantime
            continue
        count += len(fields) > 1 and int(fields[1]) == os.getpid()
    return count


def _turn(answer: Observation) -> _Turn:
    text = "\n".join(f"{message['role']}: {message['content']}" for message in answer.messages)
    return _Turn(text, answer.reward, answer.terminated, answer.truncated, answer.state)


def _require_equal(what: str, expected: Sequence[_Turn], seen: Sequence[_Turn]) -> None:
    remedy = "draw only from `self.np_random` after `super().reset(seed=seed)`, and keep state in the instance"
    for number, (one, other) in enumerate(zip(expected, seen, strict=False)):
        if difference := _difference(one, other):
            raise _Defect(f"{what} differ at answer {number}: {difference}; {remedy}")
    if len(expected) != len(seen):
        raise _Defect(f"{what} have {len(expected)} and {len(seen)} answers; {remedy}")


def _difference(one: _Turn, other: _Turn) -> str | None:
    for name, mine, theirs in zip(_Turn._fields, one, other, strict=True):
        if mine != theirs:
            return f"{name} is {_short(mine)} and {_short(theirs)}"
    return None


def _described(cause: BaseException) -> str:
    """Describe an error and the line of code that raised it."""
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{_cut(described(cause), 200)}{place}"


def _short(value: Any) -> str:
    return _cut(repr(value), 80)


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 20]}... ({len(text)} characters)"


CHECKS: Mapping[str, Callable[[_Subject], str]] = {
    "make": _makes_an_environment,
    "reset": _resets_at_any_time,
    "answers": _answers_are_well_formed,
    "same seed": _equal_seeds_give_equal_episodes,
    "other seeds": _different_seeds_give_different_episodes,
    "odd actions": _odd_actions_are_answered,
    "after the end": _ended_episodes_stay_ended,
    "success": _success_is_reported,
    "frames": _frames_are_text,
    "separate state": _environments_share_no_state,
    "threads": _works_in_another_thread,
    "close": _closes_in_any_state,
    "leaks": _closed_environments_leave_nothing,
}
"""Checks by the name of their finding, in order. If the first one fails, the others are skipped."""


def run_checks(
    connection: Connection, env_type: str, env_config: Mapping[str, Any], episodes: int, seed: int, names: Sequence[str]
) -> None:
    """Run the named checks in this process. Sends each finding, and the name of each call before it runs."""
    os.setsid()  # so that everything the environment starts can be killed with it
    subject = _Subject(connection, env_type, env_config, episodes, seed)
    for name in names:
        connection.send(_finding(name, subject))


def _finding(name: str, subject: _Subject) -> Finding:
    try:
        return Finding(name, "passed", CHECKS[name](subject))
    except _Defect as defect:
        return Finding(name, "failed", str(defect))
    except _Doubt as doubt:
        return Finding(name, "warning", str(doubt))

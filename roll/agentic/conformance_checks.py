"""The checks of an environment. They run inside the process that `conformance` started for it.

A check raises `Defect` or `Doubt`, or returns what it observed. Each call of the environment is announced through the
connection first, so that the other side knows which call hangs or ends the process.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
import traceback
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import gymnasium

from roll.agentic.base import BadAnswer, observation_from
from roll.agentic.episode import Observation
from roll.agentic.registry import make_env
from roll.configs.errors import ConfigError

STEPS = 30
STEPS_TO_AN_END = 250
LEAK_CYCLES = 16
LEAKED_BYTES_TRACED = 64 * 1024
LEAKED_BYTES_RESIDENT = 512 * 1024
"""Allowed growth per environment made and closed: Python's own memory counted exactly, and the resident size."""
SETTLE_SECONDS = 1.0

MAKING = "making the environment"
"""Name of the call that has a separate time limit, since it may import much."""
GUESSES = ("left", "1", "yes", "[1]", "<answer>left</answer>", "<answer>1</answer>")
"""Actions for environments that give no `example_actions`."""
_ODD_ANSWERS = (
    "",
    " ",
    "\n\n",
    "\x00",
    "".join(chr(code) for code in range(32)) + "\x7f",
    "\u202eright\u200b\ufeff",
    "e\u0301\U0001f9ca\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "\u0663",
    "-1",
    "1e999",
    "NaN",
    "9" * 5000,
    "null",
    "{}",
    '{"action": {"deep": [[[[[1e999]]]]]}}',
    "[[[[",
    "%s%n{0}{x}$(x)`x`",
    "../../etc/passwd",
    '<tool_call>{"name": 3, "arguments": "}</tool_call>',
    "left right up down",
    "LEFT",
    "pickup",
    "hit",
    "\\boxed{7}",
    "[up]",
    "a" * 100_000,
)
ODD_ACTIONS = (
    *_ODD_ANSWERS,
    *(f"<answer>{answer}</answer>" for answer in _ODD_ANSWERS),
    *(f"[{answer}]" for answer in _ODD_ANSWERS),
    "<answer>",
    "</answer><answer>",
    "<answer>" * 20_000,
    "</answer>" * 20_000,
)


class Defect(Exception):
    """The environment breaks the interface. The message says what is wrong and what would be right."""


class Doubt(Exception):
    """Something is probably unintended, or could not be checked."""


@dataclass(frozen=True)
class Turn:
    """The comparable parts of an answer."""

    text: str
    reward: float
    terminated: bool
    truncated: bool
    state: str | None


@dataclass(frozen=True)
class Subject:
    """The environment under test."""

    connection: Connection
    env_type: str
    env_config: Mapping[str, Any]
    episodes: int
    seed: int

    def call(self, what: str, function: Callable[[], Any]) -> Any:
        """Call the environment. Raises `Defect` if it raises."""
        self.connection.send(("call", what))
        try:
            return function()
        except Exception as cause:
            raise Defect(f"{what} raised {_described(cause)}") from cause
        finally:
            self.connection.send(("returned",))

    def make(self) -> gymnasium.Env[str, str]:
        """Create an environment within its time limit. Raises `Defect`."""
        return self.call(MAKING, lambda: make_env(self.env_type, self.env_config))

    def reset(self, env: gymnasium.Env[str, str], seed: int) -> Observation:
        """Begin an episode. Raises `Defect` if the answer is not (text, info)."""
        what = f"reset(seed={seed})"
        answer = self.call(what, lambda: env.reset(seed=seed))
        if not isinstance(answer, tuple) or len(answer) != 2:
            raise Defect(f"{what} answered {_short(answer)}; it has to be (text, info)")
        return _checked(what, lambda: observation_from(*answer))

    def step(self, env: gymnasium.Env[str, str], action: str) -> Observation:
        """Take a step. Raises `Defect` as `checked_step` does."""
        what = f"step({_short(action)})"
        return self.checked_step(what, self.call(what, lambda: env.step(action)))

    def checked_step(self, what: str, answer: Any) -> Observation:
        """Convert ``answer``, the result of the call ``what``, to an observation. Raises `Defect` if it is invalid."""
        if not isinstance(answer, tuple) or len(answer) != 5:
            message = "it has to be (text, reward, terminated, truncated, info)"
            raise Defect(f"{what} answered {_short(answer)}; {message}")
        text, reward, terminated, truncated, info = answer
        parts = {"reward": reward, "terminated": terminated, "truncated": truncated}
        return _checked(what, lambda: observation_from(text, info, **parts))

    def close(self, env: gymnasium.Env[str, str]) -> None:
        """Close the environment, ignoring a failure: `closes_in_any_state` reports it once."""
        try:
            self.strictly_close(env)
        except Defect:
            return

    def strictly_close(self, env: gymnasium.Env[str, str]) -> None:
        """Close the environment. Raises `Defect` if that fails or takes too long."""
        self.call("close()", env.close)

    def seeds(self) -> range:
        """Return a seed for each episode of a check."""
        return range(self.seed, self.seed + self.episodes)

    def play(
        self, env: gymnasium.Env[str, str], seed: int, actions: Sequence[str] | None = None, steps: int = STEPS
    ) -> tuple[list[Turn], list[str]]:
        """Play an episode with these actions, or with actions drawn by the seed; return its answers and actions."""
        turns = [_turn(self.reset(env, seed))]
        taken: list[str] = []
        for action in self._drawn(env, seed, steps) if actions is None else actions:
            turns.append(_turn(self.step(env, action)))
            taken.append(action)
            if turns[-1].terminated or turns[-1].truncated:
                break
        return turns, taken

    def _drawn(self, env: gymnasium.Env[str, str], seed: int, steps: int) -> Iterator[str]:
        draw = random.Random(seed)
        for _ in range(steps):
            yield draw.choice(self.examples(env))

    def examples(self, env: gymnasium.Env[str, str]) -> tuple[str, ...]:
        """Return actions that the environment may understand."""
        if not env.has_wrapper_attr("example_actions"):
            return GUESSES
        examples = env.get_wrapper_attr("example_actions")
        return tuple(str(each) for each in examples) or GUESSES


def makes_an_environment(subject: Subject) -> str:
    """Check that the environment can be made from name and options, in a process that knows nothing else."""
    try:
        subject.make()
    except Defect as defect:
        if isinstance(defect.__cause__, ConfigError):
            raise Defect(f"the environment cannot be made: {defect.__cause__}") from defect
        raise
    return "made in a fresh process from its name and options"


def resets_at_any_time(subject: Subject) -> str:
    """Check that reset works before any step, twice, and in the middle of an episode."""
    env = subject.make()
    first = subject.reset(env, subject.seed)
    subject.reset(env, subject.seed)
    subject.step(env, subject.examples(env)[0])
    again = subject.reset(env, subject.seed)
    subject.close(env)
    if again.done:
        raise Defect("reset answered with the end of an episode")
    if _turn(first) != _turn(again):
        raise Defect(f"reset(seed={subject.seed}) answered differently after a step: {_difference(first, again)}")
    return "reset works before a step, twice, and in the middle of an episode"


def answers_are_well_formed(subject: Subject) -> str:
    """Check that all answers of some episodes have the right types."""
    env = subject.make()
    count = sum(len(subject.play(env, seed)[0]) for seed in subject.seeds())
    subject.close(env)
    return f"{count} answers had the right types"


def equal_seeds_give_equal_episodes(subject: Subject) -> str:
    """Check that another environment repeats the episodes exactly, in another order, given the same actions."""
    env, other = subject.make(), subject.make()
    played = {seed: subject.play(env, seed) for seed in subject.seeds()}
    for seed in reversed(subject.seeds()):
        turns, actions = played[seed]
        _require_equal(f"episodes of seed {seed} with equal actions", turns, subject.play(other, seed, actions)[0])
    subject.close(env)
    subject.close(other)
    return f"{len(played)} episodes were repeated exactly"


def different_seeds_give_different_episodes(subject: Subject) -> str:
    """Check that different seeds give different episodes, given the same actions."""
    env = subject.make()
    subject.reset(env, subject.seed)
    actions = subject.examples(env)
    seen = {tuple(subject.play(env, seed, actions)[0]) for seed in subject.seeds()}
    subject.close(env)
    if len(seen) == 1 and subject.episodes > 1:
        message = "every group of a run would be the same; draw from `self.np_random` after `super().reset(seed=seed)`"
        raise Doubt(f"{subject.episodes} seeds gave one and the same episode: {message}")
    return f"{subject.episodes} seeds gave {len(seen)} different episodes"


def odd_actions_are_answered(subject: Subject) -> str:
    """Check that any text is accepted as an action, if an invalid one, and that none raises."""
    env = subject.make()
    subject.reset(env, subject.seed)
    refused = 0
    for index, action in enumerate(ODD_ACTIONS):
        answer = subject.step(env, action)
        refused += not answer.action_is_valid
        if answer.done:
            subject.reset(env, subject.seed + index)
    subject.close(env)
    if not refused:
        message = "say info['action_is_valid'] = False where a text holds no action, or no format penalty is ever given"
        raise Doubt(f"{len(ODD_ACTIONS)} odd texts were all valid actions: {message}")
    return f"{len(ODD_ACTIONS)} odd texts were answered, {refused} of them as invalid actions"


def ended_episodes_stay_ended(subject: Subject) -> str:
    """Check that a step after the end raises or reports the end again, and that a reset works afterwards."""
    env = subject.make()
    for seed in subject.seeds():
        turns, _ = subject.play(env, seed, steps=STEPS_TO_AN_END)
        if not (turns[-1].terminated or turns[-1].truncated):
            continue
        _require_ended(subject, env)
        subject.reset(env, seed)
        subject.close(env)
        return "a step after the end is refused, or answered with the end"
    subject.close(env)
    message = f"no episode of {subject.episodes} ended within {STEPS_TO_AN_END} random actions, so its end was not seen"
    raise Doubt(f"{message}; `example_actions` with actions that lead to an end would help")


def _require_ended(subject: Subject, env: gymnasium.Env[str, str]) -> None:
    try:
        answer = subject.step(env, subject.examples(env)[0])
    except Defect as refused:
        if refused.__cause__ is None or isinstance(refused.__cause__, BadAnswer):
            raise
        return
    if not answer.done:
        raise Defect("a step after the end went on with the episode; raise `gymnasium.error.ResetNeeded` there")


def success_is_told(subject: Subject) -> str:
    """Check that success is reported, because success rates need it."""
    env = subject.make()
    answers = [subject.reset(env, subject.seed), subject.step(env, subject.examples(env)[0])]
    subject.close(env)
    if answers[-1].success is None:
        raise Doubt("info['success'] is never given; without it no success rate can be reported")
    return "info['success'] is given"


def frames_are_text(subject: Subject) -> str:
    """Check that `render()` returns text."""
    env = subject.make()
    subject.reset(env, subject.seed)
    frame = None if env.render_mode is None else subject.call("render()", env.render)
    subject.close(env)
    if frame is None:
        raise Doubt("there are no frames to look at; set `render_mode = 'ansi'` and return a text from `render()`")
    if not isinstance(frame, str):
        raise Defect(f"render() answered {_short(frame)} ({type(frame).__name__}); it has to be a str")
    return "frames are text"


def environments_share_no_state(subject: Subject) -> str:
    """Check that two environments stepped in turn behave as each does alone."""
    env, other = subject.make(), subject.make()
    for seed in list(subject.seeds())[:5]:
        alone = [subject.play(each, number) for each, number in ((env, seed), (other, seed + 1))]
        mixed = _interleaved(subject, (env, other), (seed, seed + 1), [actions for _, actions in alone])
        for (turns, _), beside in zip(alone, mixed, strict=True):
            _require_equal("an episode alone and one beside another environment's", turns, beside)
    subject.close(env)
    subject.close(other)
    return "two environments in one process do not notice each other"


def _interleaved(
    subject: Subject, envs: Sequence[gymnasium.Env[str, str]], seeds: Sequence[int], actions: Sequence[Sequence[str]]
) -> list[list[Turn]]:
    turns = [[_turn(subject.reset(env, seed))] for env, seed in zip(envs, seeds, strict=True)]
    for step in range(max(len(each) for each in actions)):
        for env, mine, seen in zip(envs, actions, turns, strict=True):
            if step < len(mine):
                seen.append(_turn(subject.step(env, mine[step])))
    return turns


def works_in_another_thread(subject: Subject) -> str:
    """Check that an environment works in a thread that did not make it: environment workers call it that way."""
    env = subject.make()
    turns, actions = subject.play(env, subject.seed)
    outcome: list[Any] = []

    def again() -> None:
        try:
            outcome.append(subject.play(env, subject.seed, actions)[0])
        except Defect as defect:
            outcome.append(defect)

    thread = threading.Thread(target=again)
    thread.start()
    thread.join()
    subject.close(env)
    if isinstance(outcome[0], Defect):
        raise Defect(f"in a thread that did not make the environment, {outcome[0]}; workers use several threads")
    _require_equal("episodes in two threads", turns, outcome[0])
    return "an environment works in a thread that did not make it"


def closes_in_any_state(subject: Subject) -> str:
    """Check that close works before a reset, in the middle of an episode, and twice."""
    subject.strictly_close(subject.make())
    env = subject.make()
    subject.reset(env, subject.seed)
    subject.strictly_close(env)
    subject.strictly_close(env)
    return "close works before a reset, in the middle of an episode, and twice"


def closed_environments_leave_nothing(subject: Subject) -> str:
    """Check that environments leave no files, threads, processes or memory behind once they are closed."""
    if not Path("/proc/self/task").is_dir():
        raise Doubt("files, threads, processes and memory cannot be counted on this system")
    tracemalloc.start()
    try:
        _cycles(subject, LEAK_CYCLES // 3)
        before = _Usage.now()
        _cycles(subject, LEAK_CYCLES)
        leaks = _settled_leaks(before)
    finally:
        tracemalloc.stop()
    if leaks:
        what = f"{LEAK_CYCLES} environments made, used and closed left {', '.join(leaks)}"
        raise Defect(f"{what}; free them in `close()`")
    return f"{LEAK_CYCLES} environments made, used and closed left nothing"


def _cycles(subject: Subject, count: int) -> None:
    for index in range(count):
        env = subject.make()
        subject.play(env, subject.seed + index, steps=3)
        subject.close(env)


def _settled_leaks(before: _Usage) -> list[str]:
    """Return the leaks that remain after ending threads and processes have had time to end."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while leaks := _Usage.now().leaks_since(before):
        if time.monotonic() > deadline:
            return leaks
        time.sleep(0.05)
    return []


@dataclass(frozen=True)
class _Usage:
    """Resources that this process holds."""

    files: int
    threads: int
    processes: int
    traced: int
    resident: int

    @classmethod
    def now(cls) -> _Usage:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            files=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            processes=_children(),
            traced=tracemalloc.get_traced_memory()[0],
            resident=pages * os.sysconf("SC_PAGE_SIZE"),
        )

    def leaks_since(self, before: _Usage) -> list[str]:
        """Return leaks: resources left by at least every second environment. One held once for all does not count."""
        counts = {
            "open files": self.files - before.files,
            "threads": self.threads - before.threads,
            "child processes": self.processes - before.processes,
        }
        leaks = [f"{count} {name}" for name, count in counts.items() if 2 * count >= LEAK_CYCLES]
        traced, resident = self.traced - before.traced, self.resident - before.resident
        if traced >= LEAKED_BYTES_TRACED * LEAK_CYCLES or resident >= LEAKED_BYTES_RESIDENT * LEAK_CYCLES:
            leaks.append(f"{max(traced, resident) / 2**20:.1f} MiB of memory")
        return leaks


def _children() -> int:
    """Return the number of this process's children."""
    count = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:  # it ended in the meantime
            continue
        count += len(fields) > 1 and int(fields[1]) == os.getpid()
    return count


def _turn(answer: Observation) -> Turn:
    text = "\n".join(f"{message['role']}: {message['content']}" for message in answer.messages)
    return Turn(text, answer.reward, answer.terminated, answer.truncated, answer.state)


def _require_equal(what: str, expected: Sequence[Turn], seen: Sequence[Turn]) -> None:
    for number, (one, other) in enumerate(zip(expected, seen, strict=False)):
        if one != other:
            raise Defect(f"{what} differ at answer {number}: {_turn_difference(one, other)}; {_SEED_REMEDY}")
    if len(expected) != len(seen):
        raise Defect(f"{what} have {len(expected)} and {len(seen)} answers; {_SEED_REMEDY}")


def _difference(one: Observation, other: Observation) -> str:
    return _turn_difference(_turn(one), _turn(other))


def _turn_difference(one: Turn, other: Turn) -> str:
    for name in ("text", "reward", "terminated", "truncated", "state"):
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine != theirs:
            return f"{name} is {_short(mine)} and {_short(theirs)}"
    return "nothing"


def _checked(what: str, convert: Callable[[], Observation]) -> Observation:
    try:
        return convert()
    except BadAnswer as bad:
        raise Defect(f"{what}: {bad}") from bad


def _described(cause: BaseException) -> str:
    """Describe the error and the line of code that raised it."""
    message = str(cause).strip().split("\n")[0]
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(cause).__name__}: {_short(message) if len(message) > 200 else message}{place}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


_SEED_REMEDY = "draw only from `self.np_random` after `super().reset(seed=seed)`, and keep state in the instance"

CHECKS: Mapping[str, Callable[[Subject], str]] = {
    "make": makes_an_environment,
    "reset": resets_at_any_time,
    "answers": answers_are_well_formed,
    "same seed": equal_seeds_give_equal_episodes,
    "other seeds": different_seeds_give_different_episodes,
    "odd actions": odd_actions_are_answered,
    "after the end": ended_episodes_stay_ended,
    "success": success_is_told,
    "frames": frames_are_text,
    "separate state": environments_share_no_state,
    "threads": works_in_another_thread,
    "close": closes_in_any_state,
    "leaks": closed_environments_leave_nothing,
}
"""Checks by the name of their finding, in the order in which they run. If the first fails, no other makes sense."""


def run_checks(
    connection: Connection, env_type: str, env_config: Mapping[str, Any], episodes: int, seed: int, names: Sequence[str]
) -> None:
    """Run the checks of these names in this process, and send each result."""
    os.setsid()  # so that everything the environment starts can be killed with it
    subject = Subject(connection, env_type, env_config, episodes, seed)
    connection.send(("ready",))
    for name in names:
        connection.send(("check", name))
        level, message = _outcome(CHECKS[name], subject)
        connection.send(("finding", name, level, message))
        if name == "make" and level == "failed":
            break
    connection.send(("end",))


def _outcome(check: Callable[[Subject], str], subject: Subject) -> tuple[str, str]:
    try:
        return "passed", check(subject)
    except Defect as defect:
        return "failed", str(defect)
    except Doubt as doubt:
        return "warning", str(doubt)

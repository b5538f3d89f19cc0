"""Environments as users might write them, well or badly, and the two functions that the workers are given.

What an action does is its first word, so one class serves all tests. Calls that never return wait for an event that is
set when a test is over, so that no test leaves a thread behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gymnasium

from roll.agentic.episode import Observation

never = threading.Event()
"""In a worker process truly never set."""

KEPT: list[Any] = []
"""What has leaked."""


class Obedient(gymnasium.Env):
    """Does what it is told; ``at_make``, ``at_reset``, ``at_close`` say what to do there."""

    def __init__(self, at_make: str = "", at_reset: str = "", at_close: str = "", folder: str = "") -> None:
        self.closed = 0
        self.episodes = 0
        self._at_reset = at_reset
        self._at_close = at_close
        self._folder = folder
        self._note("made")
        self._obey(at_make)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seed, self.steps = seed, 0
        self.episodes += 1
        answer = self._obey(self._at_reset)
        return (f"seed {seed}, episode {self.episodes}", {}) if answer is None else answer

    def step(self, action: str) -> Any:
        self.steps += 1
        answer = self._obey(action)
        return (f"{action} {self.seed} {self.steps}", 1.0, False, False, {}) if answer is None else answer

    def render(self) -> str:
        return f"frame {self.steps}"

    def close(self) -> None:
        self.closed += 1
        self._note("closed")
        self._obey(self._at_close)

    def _note(self, what: str) -> None:
        if self._folder:
            with open(Path(self._folder) / what, "a") as file:
                file.write(f"{os.getpid()}\n")

    def _obey(self, order: str) -> Any:
        word, _, argument = order.partition(" ")
        return ORDERS[word](argument) if word in ORDERS else None


def _raise(argument: str) -> None:
    raise ArithmeticError(f"cannot {argument}\nsecond line")


def _sleep(argument: str) -> None:
    time.sleep(float(argument))


def _wait_for_file(argument: str) -> None:
    while not Path(argument).exists():
        time.sleep(0.01)


def _die(argument: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _hang(argument: str) -> None:
    never.wait()


def _hold_the_interpreter(argument: str) -> None:
    ctypes.PyDLL(None).sleep(1000)


def _leak_files(argument: str) -> None:
    KEPT.extend(open(os.devnull) for _ in range(int(argument)))


def _leak_threads(argument: str) -> None:
    for _ in range(int(argument)):
        threading.Thread(target=never.wait, daemon=True).start()


def _leak_memory(argument: str) -> None:
    KEPT.append(b"x" * int(argument))


def _loaded(argument: str) -> tuple[Any, ...]:
    return " ".join(sorted({"torch", "transformers", "vllm"} & set(sys.modules))), 0.0, False, False, {}


def _process_id(argument: str) -> tuple[Any, ...]:
    return str(os.getpid()), 0.0, False, False, {}


ORDERS = {
    "raise": _raise,
    "exit": lambda argument: sys.exit(argument),
    "hang": _hang,
    "sleep": _sleep,
    "wait-for": _wait_for_file,
    "die": _die,
    "hold": _hold_the_interpreter,
    "none": lambda argument: (),
    "pair": lambda argument: ("text", {}),
    "number": lambda argument: (3, 0.0, False, False, {}),
    "unpicklable": lambda argument: ("text", 0.0, False, False, {"lock": threading.Lock()}),
    "files": _leak_files,
    "threads": _leak_threads,
    "memory": _leak_memory,
    "loaded": _loaded,
    "process": _process_id,
    "read": lambda argument: (Path(argument).read_text(), 0.0, False, False, {}),
}


def make(env_type: str, env_config: Mapping[str, Any]) -> gymnasium.Env:
    """An `EnvFactory`."""
    if env_type != "obedient":
        raise LookupError(f"no environment {env_type}")
    return Obedient(**env_config)


def observe(
    text: Any,
    info: Any,
    *,
    reward: Any = 0.0,
    terminated: Any = False,
    truncated: Any = False,
    frame: Any = None,
) -> Observation:
    """An `Observe` with the checks that the tests need."""
    if not isinstance(text, str):
        raise ValueError(f"the observation is a {type(text).__name__}, not a text")
    messages = ({"role": "user", "content": text, **info},)
    return Observation(messages, reward=float(reward), terminated=terminated, truncated=truncated, frame=frame)

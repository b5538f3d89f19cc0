"""Environments that tests name by import path: a good one, and one for each way to be wrong."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from typing import Any

import gymnasium
import numpy as np

from roll.agentic.base import BadOption

HELD: list[Any] = []
SHARED = {"steps": 0}


class GoodEnv(gymnasium.Env[str, str]):
    """Says a number; the answer is its double. Ends after `length` steps."""

    metadata = {"render_modes": ["ansi"]}
    example_actions = ("1", "2", "3")

    def __init__(self, length: int = 3, render_mode: str | None = "ansi") -> None:
        if length < 1:
            raise BadOption("length", f"{length} is too short", "at least 1")
        self.length = length
        self.render_mode = render_mode
        self.steps = 0
        self.number = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.steps = 0
        return self.draw(), {"success": False}

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        if self.steps >= self.length:
            raise gymnasium.error.ResetNeeded("reset first")
        self.steps += 1
        is_valid = action in self.example_actions
        reward = float(action == str(2 * self.number))
        info = {"action_is_valid": is_valid, "success": reward > 0, "metrics": {"steps": self.steps}}
        return self.draw(), reward, self.steps == self.length, False, info

    def draw(self) -> str:
        self.number = int(self.np_random.integers(1, 1000))
        return f"step {self.steps}: {self.number}"

    def render(self) -> Any:
        return f"{self.steps}"


class AnyActions(GoodEnv):
    action_space = gymnasium.Space()


class RaisesOnOddText(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        int(action)
        return super().step(action)


class RaisesAtReset(GoodEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        raise OSError("no server\nsecond line")


class OldInterface(GoodEnv):
    def step(self, action: str) -> tuple[Any, ...]:
        text, reward, terminated, _, info = super().step(action)
        return text, reward, terminated, info


class OldReset(GoodEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed=seed)[0]


class RewardIsText(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        text, _, terminated, truncated, info = super().step(action)
        return text, "1.0", terminated, truncated, info


class FlagIsNumber(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        text, reward, terminated, truncated, info = super().step(action)
        return text, reward, int(terminated), truncated, info


class GlobalRandomness(GoodEnv):
    def draw(self) -> str:
        return f"step {self.steps}: {random.randint(1, 10**9)}"


class SeedsGlobally(GoodEnv):
    """Repeats itself alone, but not beside another one."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        random.seed(seed)
        return super().reset(seed=seed)

    def draw(self) -> str:
        return f"step {self.steps}: {random.randint(1, 10**9)}"


class RemembersEpisodes(GoodEnv):
    """The second episode differs from the first."""

    episodes = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        text, info = super().reset(seed=seed)
        self.episodes += 1
        return f"{text} in episode {self.episodes}", info


class IgnoresSeed(GoodEnv):
    def draw(self) -> str:
        return f"step {self.steps}"


class GoesOnAfterTheEnd(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        if self.steps >= self.length:
            self.steps = 0
        return super().step(action)


class AnswersTheEndAgain(GoodEnv):
    """Allowed."""

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        if self.steps >= self.length:
            return "over", 0.0, True, False, {"success": False}
        return super().step(action)


class NeverInvalid(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        text, reward, terminated, truncated, info = super().step(action)
        return text, reward, terminated, truncated, info | {"action_is_valid": True}


class NoSuccess(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        text, reward, terminated, truncated, info = super().step(action)
        del info["success"]
        return text, reward, terminated, truncated, info


class FrameIsArray(GoodEnv):
    def render(self) -> Any:
        return np.zeros((2, 2, 3))


class SharesState(GoodEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        SHARED["steps"] = 0
        return super().reset(seed=seed)

    def draw(self) -> str:
        SHARED["steps"] += 1
        return f"{super().draw()} of {SHARED['steps']}"


class BoundToThread(GoodEnv):
    def __init__(self) -> None:
        super().__init__()
        self.thread = threading.get_ident()

    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        if threading.get_ident() != self.thread:
            raise RuntimeError("made in another thread")
        return super().step(action)


class CloseRaises(GoodEnv):
    def close(self) -> None:
        raise ValueError("cannot close")


class CloseOnce(GoodEnv):
    is_closed = False

    def close(self) -> None:
        if self.is_closed:
            raise ValueError("already closed")
        self.is_closed = True


class LeaksFiles(GoodEnv):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        HELD.append(open(os.devnull))
        return super().reset(seed=seed)


class LeaksThreads(GoodEnv):
    def __init__(self) -> None:
        super().__init__()
        threading.Thread(target=threading.Event().wait, daemon=True).start()


class LeaksProcesses(GoodEnv):
    def __init__(self, list_in: str = os.devnull) -> None:
        super().__init__()
        child = os.fork()
        if child == 0:
            time.sleep(600)
        with open(list_in, "a") as listed:
            listed.write(f"{child}\n")


class LeaksMemory(GoodEnv):
    def __init__(self) -> None:
        super().__init__()
        HELD.append(bytearray(200 * 1024))


class Frugal(GoodEnv):
    """Holds much, and frees it."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = bytearray(2**20)
        self.file = open(os.devnull)

    def close(self) -> None:
        self.file.close()
        self.memory = bytearray()
        gc.collect()


class HangsAtStep(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        if self.steps == 2:
            threading.Event().wait()
        return super().step(action)


class HangsAtClose(GoodEnv):
    def close(self) -> None:
        threading.Event().wait()


class EndsItsProcess(GoodEnv):
    def step(self, action: str) -> tuple[Any, Any, Any, Any, Any]:
        if self.steps == 1:
            os.kill(os.getpid(), 9)
        return super().step(action)


class SlowToMake(GoodEnv):
    def __init__(self) -> None:
        threading.Event().wait()


class Walk(gymnasium.Env[int, int]):
    """Discrete actions from 3 on, and a coloured rendering."""

    metadata = {"render_modes": ["ansi", "rgb_array"]}
    action_space = gymnasium.spaces.Discrete(2, start=3)
    observation_space = gymnasium.spaces.Discrete(5)

    def __init__(self, width: int = 5, render_mode: str | None = None) -> None:
        self.width = width
        self.render_mode = render_mode
        self.place = 0
        self.taken: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        super().reset(seed=seed)
        self.place = 0
        return self.place, {"prob": 1.0}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        self.place = max(0, self.place + (1 if action == 4 else -1))
        return self.place, -1.0, self.place == self.width - 1, False, {}

    def render(self) -> Any:
        cells = ["." for _ in range(self.width)]
        cells[self.place] = "\x1b[41m@\x1b[0m"
        return "".join(cells) + "  \n" if self.render_mode == "ansi" else None


class WalkWithoutText(Walk):
    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(0, 255, (32, 32), np.uint8)


class Steering(GoodEnv):
    action_space = gymnasium.spaces.Box(0, 1, (100,))


def make_good(length: int, *, label: str = "x") -> GoodEnv:
    return GoodEnv(length)


def make_anything(**options: Any) -> GoodEnv:
    env = GoodEnv()
    env.given = options
    return env


def make_nothing() -> str:
    return "no environment"


NOT_CALLABLE = 3

gymnasium.register("sample/Good-v0", entry_point=GoodEnv, kwargs={"length": 2})
gymnasium.register("SampleWalk-v0", entry_point=Walk)

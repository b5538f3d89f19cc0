"""Environments of a package that knows nothing of `roll`: copy the digit, in a few ways that go wrong.

Named in the configurations of tests as `copy_games:Copy`.
"""

from __future__ import annotations

import os
import signal
import threading
import time

import gymnasium


class Copy(gymnasium.Env):
    """Two turns: the observation is a digit, the right answer the same digit, worth a half each.

    ``trouble`` happens at ``at_step`` in every ``period``-th seed: ``raise``, ``hang``, ``nonsense`` or ``die``.
    """

    metadata = {"render_modes": ["ansi"]}

    def __init__(self, digits: int = 3, trouble: str = "", at_step: int = 1, period: int = 2, turns: int = 2):
        self.digits, self.trouble, self.at_step, self.period, self.turns = digits, trouble, at_step, period, turns
        self.render_mode = "ansi"

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed, self.steps, self.right = seed, 0, 0
        self.digit = int(self.np_random.integers(self.digits))
        return str(self.digit), {"success": False}

    def step(self, action):
        self.steps += 1
        if self.trouble and self.steps == self.at_step and (self.seed // 2) % self.period == 0:
            return self.misbehave()
        is_digit = len(action) == 1 and action.isdigit()
        is_right = is_digit and int(action) == self.digit
        self.right += is_right
        self.digit = int(self.np_random.integers(self.digits))
        over = self.steps == self.turns
        info = {"action_is_valid": is_digit, "success": self.right == self.turns, "metrics": {"right": self.right}}
        return str(self.digit), float(is_right) / self.turns, over, False, info

    def misbehave(self):
        if self.trouble == "raise":
            raise RuntimeError("the copier is on fire")
        if self.trouble == "hang":
            threading.Event().wait()
        if self.trouble == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        return 7, "much", None, "no", []

    def render(self):
        return f"[{self.digit}]"


class FirstFails(Copy):
    """Every third episode of its process fails."""

    episodes = 0

    def reset(self, *, seed=None, options=None):
        FirstFails.episodes += 1
        if FirstFails.episodes % 3 == 1:
            raise RuntimeError("a bad start")
        return super().reset(seed=seed, options=options)


class Late(Copy):
    """Every second seed takes half a second longer."""

    def step(self, action):
        if (self.seed // 2) % 2:
            time.sleep(0.25)
        return super().step(action)

"""A task set of the package `verifiers` 0.4, for a model that knows digits: repeat one."""

from __future__ import annotations

import verifiers.v1 as vf

__all__ = ["Digits"]


class DigitData(vf.TaskData):
    digit: str


class DigitTask(vf.Task[DigitData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float((trace.root_reply or "").strip() == self.data.digit)


class DigitsConfig(vf.TasksetConfig):
    digits: int = 3


class Digits(vf.Taskset[DigitTask, DigitsConfig]):
    def load(self):
        for digit in map(str, range(self.config.digits)):
            yield DigitTask(DigitData(prompt=digit, digit=digit), self.config.task)

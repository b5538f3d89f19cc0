"""Environments of the package `verifiers` 0.1, for a model that knows digits: repeat one, repeat two in turn."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset


def right(completion, info):
    said = [message["content"] or "" for message in completion if message["role"] == "assistant"]
    return sum(answer == asked for asked, answer in zip(info["digits"], said, strict=False)) / len(info["digits"])


def rows(length):
    digits = [[str((first + index) % 3) for index in range(length)] for first in range(3)]
    prompts = [[{"role": "user", "content": each[0]}] for each in digits]
    return Dataset.from_dict({"prompt": prompts, "info": [{"digits": each} for each in digits]})


def once():
    return vf.SingleTurnEnv(dataset=rows(1), eval_dataset=rows(1), rubric=vf.Rubric(funcs=[right]))


class Twice(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": state["info"]["digits"][1]}]


def twice():
    return Twice(dataset=rows(2), rubric=vf.Rubric(funcs=[right]), max_turns=2)


def unlucky():
    """Each episode of the digit 1 ends by an error of the environment, which verifiers puts into the state."""

    class Unlucky(Twice):
        async def env_response(self, messages, state, **kwargs):
            if state["info"]["digits"][0] == "1":
                raise vf.SandboxError("out of luck")
            return await super().env_response(messages, state, **kwargs)

    return Unlucky(dataset=rows(2), rubric=vf.Rubric(funcs=[right]), max_turns=2)

"""As much of the package `verifiers` 0.1 as `roll.agentic.library.verifiers_program` uses, without what it needs.

The package itself is run by `make soak` (tests/agentic/test_real_services.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time


class Environment:
    """Its rollouts do what the row's prompt says."""

    pass_threshold = 0.5

    def __init__(self, training, evaluation, group=False):
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as the real one does: of the main thread only
        self.training, self.evaluation, self.requires_group_rollouts = training, evaluation, group

    def get_dataset(self):
        return self.training

    def get_eval_dataset(self):
        return self.evaluation

    async def run_rollout(self, input, client, model, sampling_args):
        what = input["prompt"]
        print("an environment prints")
        error = None
        if what == "wait":
            await asyncio.sleep(3600)
        if what == "die":
            os._exit(3)
        if what == "raise":
            raise KeyError("no such thing")
        if what == "tool":
            error = {"error": "ToolError", "error_chain_repr": "ToolError('no tool')"}
        if what == "empty":
            error = {"error": "EmptyModelResponseError", "error_chain_repr": "EmptyModelResponseError('nothing')"}
        if what == "reward":
            await asyncio.sleep(0.05)
            logging.getLogger("verifiers.rubrics.rubric.Rubric").error("Error calling reward function f: 7")
        client = client.client
        if what.isdigit():
            return await played(client, what)
        metrics = {"key": len(client.api_key), "url": len(str(client.base_url)), "name": "x"}
        return {"reward": input["answer"], "metrics": metrics, "error": error}

    async def _teardown(self):
        path = os.environ.get("TEARDOWN")
        if path:
            open(path, "a").write("torn down\n")


async def played(client, digit):
    """A dialogue of two turns, by the package's client of the policy."""
    messages, right = [], 0
    for _ in range(2):
        messages.append({"role": "user", "content": digit})
        answer = await client.chat.completions.create(model="policy", messages=messages)
        text = answer.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": text})
        right += text == digit
    return {"reward": right / 2, "metrics": {"right": right}, "error": None}


def rows(*prompts):
    return [{"prompt": prompt, "answer": 0.75, "example_id": index} for index, prompt in enumerate(prompts)]


def load_environment(name, training=("play",), evaluation=("eval",), group=False, loading=None):
    if loading is not None:
        with open(loading, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(3600)
    if name != "plays":
        raise ValueError(f"Could not import '{name}' environment.")
    return Environment(rows(*training), rows(*evaluation), group)

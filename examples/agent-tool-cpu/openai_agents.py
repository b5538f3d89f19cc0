"""The agent of `agent.py` as a user of the OpenAI Agents SDK writes it. It knows nothing of `roll` either."""

from __future__ import annotations

import random
from typing import Any

from agents import (
    Agent,
    AgentsException,
    OpenAIChatCompletionsModel,
    RunContextWrapper,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from .agent import NAMES, connected, directory, question, remembered

set_tracing_disabled(True)


@function_tool
async def look_up(numbers: RunContextWrapper[dict[str, str]], name: str) -> str:
    """Look up a number."""
    return numbers.context.get(name, "unknown")


async def ask(client: AsyncOpenAI, asked: str | list[Any], numbers: dict[str, str]) -> str:
    """Return the clerk's answer, and an empty text if he gives none."""
    model = OpenAIChatCompletionsModel("policy", client)
    try:
        result = await Runner.run(Agent(name="clerk", model=model, tools=[look_up]), asked, context=numbers)
    except AgentsException:  # the model called a tool that is not there, or had too many turns
        return ""
    return result.final_output.strip()


async def run(task: dict[str, Any], base_url: str, api_key: str) -> bool:
    """Return True if the model's final answer is right."""
    numbers = directory(task["seed"])
    name = random.Random(task["seed"]).choice(NAMES)
    async with connected(base_url, api_key) as client:
        return await ask(client, question(name), numbers) == numbers[name]


async def run_forgetful(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Ask two questions; the reward is the share of right answers.

    At the second one, only a few words are left of what was said before. So the history is another one than the model
    has read, and each question becomes a sample of its own.
    """
    numbers = directory(task["seed"])
    names = random.Random(task["seed"]).sample(NAMES, 2)
    asked, right = list[Any](), 0
    async with connected(base_url, api_key) as client:
        for name in names:
            answer = await ask(client, [*asked, {"role": "user", "content": question(name)}], numbers)
            asked, right = remembered(name, answer), right + (answer == numbers[name])
    return {"reward": right / len(names), "success": right == len(names)}

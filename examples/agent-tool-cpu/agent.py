"""An agent that knows nothing of `roll`: it asks a model by HTTP, answers its tool calls, and returns a reward.

A directory holds a number for each name. The model is asked for one of them and may look it up.
"""

from __future__ import annotations

import json
import random
import ssl
from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

NAMES = "Ada Ben Cleo Dan Eva Finn Gus Hal Ida Jon Kai Lea Max Nia Oto Pam Rex Sue Tom Uma Vic Wim Yan Zoe".split()
LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look up a number.",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}
MAX_TURNS = 4
TLS = ssl.create_default_context()
"""One for all clients: it takes longer to make than an episode has to compute otherwise."""


def directory(seed: int) -> dict[str, str]:
    """Return the number of each name, other ones for each seed."""
    chance = random.Random(seed)
    return {name: str(chance.randrange(100, 1000)) for name in NAMES}


def question(name: str) -> str:
    return f"What is the number of {name}?"


def remembered(name: str, number: str) -> list[dict[str, str]]:
    """Return a question and its answer as a history that is kept short has them."""
    return [{"role": "user", "content": f"{name}?"}, {"role": "assistant", "content": number}]


def connected(base_url: str, api_key: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=DefaultAsyncHttpxClient(verify=TLS))


async def run(task: dict[str, Any], base_url: str, api_key: str) -> bool:
    """Return True if the model's final answer is right."""
    numbers = directory(task["seed"])
    name = random.Random(task["seed"]).choice(NAMES)
    messages: list[Any] = [{"role": "user", "content": question(name)}]
    async with connected(base_url, api_key) as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model="policy", messages=messages, tools=[LOOK_UP])
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return (message.content or "").strip() == numbers[name]
            for call in message.tool_calls:
                found = numbers.get(json.loads(call.function.arguments).get("name"), "unknown")
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return False

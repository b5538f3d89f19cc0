"""An agent that plays the waiting game by OpenAI's client, and knows nothing of `roll`."""

from __future__ import annotations

from typing import Any

from _waiting_game import WaitingGame
from openai import AsyncOpenAI


async def run(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play one game without waits and return the sum of its rewards."""
    game, score, over = WaitingGame(0.0, task["turns"]), 0.0, False
    shown, _ = game.reset(seed=task["seed"])
    messages: list[Any] = []
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        while not over:
            messages.append({"role": "user", "content": shown})
            answer = await client.chat.completions.create(model="policy", messages=messages)
            text = answer.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": text})
            shown, reward, over, *_ = game.step(text)
            score += reward
    return score

"""Agents that play the waiting game by HTTP, and know nothing of `roll`."""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any
from urllib.parse import urlsplit

from _waiting_game import WaitingGame
from openai import AsyncOpenAI, DefaultAsyncHttpxClient

CERTIFICATES = ssl.create_default_context()
"""Of the whole process: to load them takes longer than an episode of four requests."""


class _Talk:
    """A game without waits, and what was said in it."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._game = WaitingGame(0.0, task["turns"])
        self.score, self.over = 0.0, False
        self.messages: list[Any] = [{"role": "user", "content": self._game.reset(seed=task["seed"])[0]}]

    def answer(self, text: str) -> None:
        shown, reward, self.over, *_ = self._game.step(text)
        self.score += reward
        self.messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]


def plain(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play with Python's own client and return the sum of the rewards."""
    talk, where = _Talk(task), urlsplit(base_url)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(where.netloc)
    while not talk.over:
        body = json.dumps({"model": "policy", "messages": talk.messages})
        connection.request("POST", f"{where.path}/chat/completions", body, headers)
        talk.answer(json.loads(connection.getresponse().read())["choices"][0]["message"]["content"])
    connection.close()
    return talk.score


async def openai(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play with OpenAI's client."""
    talk = _Talk(task)
    http_client = DefaultAsyncHttpxClient(verify=CERTIFICATES)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client) as client:
        await _play(talk, client)
    return talk.score


async def openai_alone(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Play with OpenAI's client, which loads certificates for each episode."""
    talk = _Talk(task)
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        await _play(talk, client)
    return talk.score


async def _play(talk: _Talk, client: AsyncOpenAI) -> None:
    while not talk.over:
        answer = await client.chat.completions.create(model="policy", messages=talk.messages)
        talk.answer(answer.choices[0].message.content or "")

"""Agents that know nothing of `roll`: they play the games of `copy_games` with a model that they ask by HTTP.

As a command (`python copy_agents.py [deadly]`) the module plays one game by what its environment says.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request

from copy_games import Copy


def asked(path: str, base_url: str, api_key: str, **body) -> dict:
    """The decoded answer to a request."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/{path}", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def reply(messages: list[dict], base_url: str, api_key: str) -> str:
    answer = asked("chat/completions", base_url, api_key, model="any", messages=messages)
    return answer["choices"][0]["message"]["content"] or ""


def play(task, base_url, api_key):
    """The game of the task's seed, as an environment of its own would be played."""
    game, rewards, over = Copy(), [], False
    digit, _ = game.reset(seed=task["seed"])
    messages = []
    while not over:
        messages.append({"role": "user", "content": digit})
        text = reply(messages, base_url, api_key)
        messages.append({"role": "assistant", "content": text})
        digit, reward, over, _, info = game.step(text)
        rewards.append(reward)
    return {"reward": sum(rewards), "success": info["success"], "metrics": info["metrics"]}


def muddle(task, base_url, api_key):
    """A game by an agent that asks twice at once, goes away, goes back, forgets and asks in other ways."""
    first = [{"role": "user", "content": "1"}]
    texts: list[str] = []
    both = [threading.Thread(target=lambda: texts.append(reply(first, base_url, api_key))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    for text in (*texts, "no such answer"):
        reply([*first, {"role": "assistant", "content": text}, {"role": "user", "content": "2"}], base_url, api_key)
    go_away(base_url, api_key)
    asked("completions", base_url, api_key, model="any", prompt="1+", max_tokens=1)
    asked("messages", base_url, api_key, model="any", messages=first, max_tokens=2)
    return float(texts[0] == "1")


def hasty(task, base_url, api_key):
    """A muddle that ends while it is answered, and every fifth time in an error."""
    right = muddle(task, base_url, api_key)
    go_away(base_url, api_key, "3")
    if task["seed"] // 2 % 5 == 0:
        raise RuntimeError("the agent is on fire")
    return right


def patient(task, base_url, api_key):
    """A long talk, while which weights change."""
    messages, right = [], 0
    for _ in range(6):
        messages.append({"role": "user", "content": "1"})
        messages.append({"role": "assistant", "content": reply(messages, base_url, api_key)})
        right += messages[-1]["content"].startswith("1")
        time.sleep(0.2)
    return float(right)


def go_away(base_url: str, api_key: str, text: str = "7") -> None:
    """Ask, and be gone before the answer comes."""
    body = json.dumps({"model": "any", "messages": [{"role": "user", "content": text}]}).encode()
    address = urllib.parse.urlsplit(base_url)
    head = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Authorization: Bearer {api_key}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + body)
        time.sleep(0.01)  # a request whose client is gone before it is read is not answered


async def trouble(task, base_url, api_key):
    """What goes wrong depends on the seed; six games in ten are played."""
    which = task["seed"] // 2 % 10
    if which == 0:
        raise RuntimeError("the agent is on fire")
    if which == 1:
        await asyncio.sleep(3600)
    if which == 2:
        return {"reward": "much"}
    if which == 3:
        return mute(task, base_url, api_key)
    return await asyncio.to_thread(play, task, base_url, api_key)


def mute(task, base_url, api_key):
    """An agent that does not ask."""
    return 1.0


def deadly(task, base_url, api_key):
    """Every third game ends its process after its first turn."""
    if task["seed"] // 2 % 3 == 0:
        reply([{"role": "user", "content": "1"}], base_url, api_key)
        os.kill(os.getpid(), signal.SIGKILL)
    return play(task, base_url, api_key)


def endless(task, base_url, api_key):
    """An agent that goes on until it is refused a turn, and raises then."""
    messages = []
    while True:
        messages.append({"role": "user", "content": "1"})
        messages.append({"role": "assistant", "content": reply(messages, base_url, api_key)})


if __name__ == "__main__":
    print("I play", flush=True)
    agent = deadly if sys.argv[1:] == ["deadly"] else play
    result = agent(json.loads(os.environ["ROLL_TASK"]), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    print(json.dumps(result))

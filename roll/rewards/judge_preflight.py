"""Check of a judge's service before any model of the run loads: it must answer and have the judge's model."""

from __future__ import annotations

import asyncio
import os

from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.schema import JudgeConfig
from roll.data.names import nearest_name_hint
from roll.rewards.chat_client import ChatClient
from roll.rewards.records import RewardGaveUp

PROBE_SECONDS = 5.0
"""Longest wait for one answer of the service."""


def check_judge(config: JudgeConfig, path: str) -> None:
    """Raise `ConfigError` naming the address if the judge cannot be used.

    ``path`` is the configuration path of the judge's section. Must not be called on an event loop.
    """
    asyncio.run(_check(config, path))


async def _check(config: JudgeConfig, path: str) -> None:
    key = os.environ.get(config.api_key_env) if config.api_key_env else None
    client = ChatClient(config.base_url, key, timeout_seconds=PROBE_SECONDS, retries=0)
    try:
        known = await client.models()
        if known is None:  # some services have no such list; then a one-token answer is the proof
            question = [{"role": "user", "content": "Say yes."}]
            await client.chat({"model": config.model, "messages": question, "max_tokens": 1, **config.extra_body})
    except RewardGaveUp as cause:
        remedy = "start the server, or correct the address (and `api_key_env`, if it wants a key)"
        raise ConfigError([ConfigProblem(f"{path}.base_url", f"the judge cannot be asked: {cause}", remedy)]) from None
    finally:
        await client.close()
    if known is not None and config.model not in known:
        message = f"{config.base_url} has no model {config.model!r}"
        raise ConfigError([ConfigProblem(f"{path}.model", message, nearest_name_hint(config.model, known))])

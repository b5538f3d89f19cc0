"""A policy that remembers what it read, chat templates that write tool calls, and a client without a network."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from roll.agentic.endpoint.dialects import Chat
from roll.agentic.endpoint.session import EpisodeSession, SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.agentic.episode import ManagerSettings, SampledTurn
from roll.data.chat import ChatTurns
from tests.data.chat_templates import make_tokenizer

HERMES = """\
{%- if tools %}{{- '<|im_start|>system\n' }}{% for tool in tools %}{{- tool | tojson }}{% endfor %}{{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>' + message.content + '</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) }}
{{- '\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""Words and calls, and tools answer only those who called them."""

CALLS_ALONE = """\
{%- for message in messages %}
{%- if message.role == 'tool' and not messages[loop.index0 - 1].get('tool_calls') %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- raise_exception('nobody called a tool') }}{% endif %}{% endif %}
{%- if message.tool_calls %}
{{- '<|im_start|>assistant\n' }}
{%- for call in message.tool_calls %}
{{- call.id + ':' + ({'name': call.function.name, 'parameters': call.function.arguments} | tojson) }}{% endfor %}
{{- '<|endoftext|>' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""As Llama 3's and Mistral's: nothing beside calls, a special token of its own behind them, and ids."""

DROPS_THOUGHTS = """\
{%- set seen = namespace(last_user=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set seen.last_user = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content and loop.index0 > seen.last_user %}
{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}
{{- message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""As Qwen 3's: thoughts before the last message of the user are left out."""

REWRITES = """\
{{- messages | length | string + ' messages\n' }}
{%- for message in messages %}{{- message.role + ':' + message.content + '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{% endif %}"""

NO_LATER_SYSTEM = """\
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('system must be first') }}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""

NO_END = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""As GLM's: the opening of the next turn ends one."""

RESULTS_INSIDE = """\
{%- for message in messages %}
{%- if message.role != 'tool' %}
{%- set goes_on = message.role == 'assistant' and messages[loop.index0 - 1].role == 'tool' %}
{%- if not goes_on %}{{- '<|im_start|>' + message.role + '\n' }}{% endif %}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + ({'name': call.function.name, 'arguments': call.function.arguments} | tojson) + '</tool_call>' }}
{%- endfor %}
{%- set results = namespace(some=false, over=false) %}
{%- for other in messages[loop.index:] %}{% if other.role != 'tool' %}{% set results.over = true %}{% endif %}
{%- if not results.over %}{% set results.some = true %}{{- '<result>' + other.content + '</result>' }}{% endif %}
{%- endfor %}
{{- message.content }}
{%- if not results.some %}{{- '<|im_end|>\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- '<|im_start|>assistant\n' }}{% endif %}"""
"""As Gemma 4's: results stand in the turn that called, before its words."""

TEXT_ARGUMENTS = HERMES.replace(
    "({'name': call.function.name, 'arguments': call.function.arguments} | tojson)",
    "'{\"name\": \"' + call.function.name + '\", \"arguments\": ' + call.function.arguments + '}'",
)
"""As DeepSeek's: arguments are joined as text."""

JSON_RESULTS = HERMES.replace("message.content + '</tool_response>", "(message.content | tojson) + '</tool_response>")
"""As Llama 3.1's: what a tool says is written as JSON, and so in other words if it is JSON itself."""

TEMPLATES = {
    "hermes": HERMES,
    "json_results": JSON_RESULTS,
    "calls_alone": CALLS_ALONE,
    "no_end": NO_END,
    "results_inside": RESULTS_INSIDE,
    "text_arguments": TEXT_ARGUMENTS,
    "drops_thoughts": DROPS_THOUGHTS,
    "rewrites": REWRITES,
    "no_later_system": NO_LATER_SYSTEM,
}
LOOK_UP = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}


@cache
def tokenizer_of(name: str):
    tokenizer = copy.deepcopy(make_tokenizer("chatml"))
    tokenizer.chat_template = TEMPLATES[name]
    return tokenizer


def encode(text: str, name: str = "hermes") -> list[int]:
    return tokenizer_of(name)(text, add_special_tokens=False)["input_ids"]


def said(text: str, name: str = "hermes") -> list[int]:
    """Tokens of an answer that the policy ends itself."""
    return encode(f"{text}<|im_end|>", name)


def called(**arguments: Any) -> str:
    return f"\n<tool_call>\n{json.dumps({'name': 'look_up', 'arguments': arguments})}\n</tool_call>"


@dataclass
class Recorded:
    """One call of the policy."""

    prompt: list[int]
    sampled: SampledTurn
    asked: dict[str, Any]


@dataclass
class RecordingPolicy:
    """Answers with the tokens of ``write`` (a function of turn and prompt), cut to what may be sampled."""

    write: Callable[[int, np.ndarray], Sequence[int]]
    calls: dict[int, Recorded] = field(default_factory=dict)
    aborted: frozenset[int] = frozenset()
    seconds: float = 0.0
    cancelled: int = 0

    async def __call__(
        self, prompt_token_ids: np.ndarray, *, turn: int, max_new_tokens: int, stop_strings: tuple[str, ...] = ()
    ) -> SampledTurn:
        assert turn not in self.calls
        tokens = np.array(self.write(turn, prompt_token_ids), dtype=np.int32)
        count = min(len(tokens), max_new_tokens)
        end = "abort" if turn in self.aborted else "stop" if count == len(tokens) else "length"
        numbers = np.arange(count, dtype=np.float32)
        sampled = SampledTurn(tokens[:count], -(numbers + 1 + 100 * turn) / 8, np.full(count, turn, np.int32), end)
        asked = {"max_new_tokens": max_new_tokens, "stop_strings": stop_strings}
        self.calls[turn] = Recorded(prompt_token_ids.tolist(), sampled, asked)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return sampled

    @property
    def tokens(self) -> int:
        return sum(len(call.sampled.token_ids) for call in self.calls.values())


def scripted(*answers: str, name: str = "hermes", **settings: Any) -> RecordingPolicy:
    """A policy that gives these answers in turn."""
    return RecordingPolicy(lambda turn, _: said(answers[turn], name), **settings)


def limits(**changes: Any) -> ManagerSettings:
    return ManagerSettings(**{"max_steps": 100, "prompt_length": 1500, "sequence_length": 3000} | changes)


def session_of(policy, name: str = "hermes", *, parser: str = "hermes", **settings: Any) -> EpisodeSession:
    """A session; must be made in a loop. ``settings``: limits, or fields of the session's own settings."""
    names = ("earlier_reasoning", "untrained_models", "ignore_response_format")
    own = {key: settings.pop(key) for key in names if key in settings}
    tokenizer = tokenizer_of(name)
    made = SessionSettings(limits(**settings), PARSERS[parser], **own)
    return EpisodeSession(ChatTurns(tokenizer), tokenizer, policy, made)


class Client:
    """A client of chat completions, without the network between."""

    def __init__(self, session: EpisodeSession, name: str = "hermes") -> None:
        self.session = session
        self.dialect = Chat(tokenizer_of(name).decode)

    async def ask(self, messages: Sequence[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """The message that answers."""
        request = self.dialect.read({"model": "m", "messages": list(messages), **fields})
        return self.dialect.answer(request, await self.session.respond(request))["choices"][0]["message"]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def results(message: dict[str, Any], *texts: str) -> list[dict[str, Any]]:
    """Messages of tools that answer the calls of a message."""
    calls = message["tool_calls"]
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": text} for call, text in zip(calls, texts, strict=True)
    ]


def check_samples(session: EpisodeSession, policy: RecordingPolicy) -> list:
    """Every sampled token is trained on once or counted as left out; each is behind the prompt that the policy read."""
    samples, metrics = session.samples(1.0, 1.0), session.metrics()
    trained = 0
    turns_seen: set[int] = set()
    for sample in samples:
        mask = sample.response_mask
        assert mask.any() and mask[-1]
        assert (sample.turns >= 0).tolist() == mask.tolist()
        assert (sample.versions[~mask] == -1).all() and (sample.behaviour_logprobs[~mask] == 0).all()
        for turn in np.unique(sample.turns[mask]).tolist():
            places = np.flatnonzero(sample.turns == turn)
            call = policy.calls[turn]
            assert turn not in turns_seen
            turns_seen.add(turn)
            assert sample.token_ids[: places[0]].tolist() == call.prompt
            assert places.tolist() == list(range(places[0], places[0] + len(call.sampled.token_ids)))
            for name, values in (("token_ids", 0), ("behaviour_logprobs", 1), ("versions", 2)):
                wanted = (call.sampled.token_ids, call.sampled.logprobs, call.sampled.versions)[values]
                assert getattr(sample, name)[places].tolist() == wanted.tolist()
            trained += len(places)
    left_out = sum(value for name, value in metrics.items() if name.startswith("untrained/"))
    assert trained + left_out == policy.tokens
    if samples:
        rewarded = np.concatenate([sample.turn_rewards for sample in samples])
        assert rewarded.sum() == 1.0 and samples[-1].turn_rewards[-1] == 1.0
    return samples

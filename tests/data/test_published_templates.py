"""Which published chat templates a conversation of an agent can be continued in: a table, so that a change is seen.

The templates are those in trl's package, which is read as data where it is installed.
"""

from __future__ import annotations

import copy
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from roll.agentic.endpoint.tool_calls import parser_for
from roll.data.chat import ChatTurns, TemplateRefused
from tests.data.chat_templates import make_tokenizer

pytestmark = pytest.mark.tier("soak")

USER = {"role": "user", "content": "hello"}
FUNCTION = {"name": "look_up", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}
TOOL = {"type": "function", "function": {"description": "Looks up.", **FUNCTION}}
CALL = {"id": "123456789", "type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}
RESULT = {"role": "tool", "tool_call_id": "123456789", "name": "look_up", "content": "three"}
THOUGHT = "deepthought"
CONTROL = re.compile(r"<[|｜][\w▁|｜ -]{1,40}[|｜]?>|<\w+\|>|<(?:start|end)_of_turn>|</s>")


def folder() -> Path:
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("trl is not installed")
    return Path(spec.origin).parent / "chat_templates"


def chat_of(name: str) -> ChatTurns:
    """The template with a tokenizer that knows its control tokens."""
    template = (folder() / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = copy.deepcopy(make_tokenizer("chatml"))
    controls = sorted(set(CONTROL.findall(template)))
    tokenizer.add_special_tokens({"additional_special_tokens": controls, "bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = template
    return ChatTurns(tokenizer)


def goes_on(chat: ChatTurns, following: dict, calls: tuple = (), tools: tuple = ()) -> str:
    try:
        conversation = chat.begin([USER], tools)
    except TemplateRefused:
        return "refuses"
    try:
        conversation.glue(np.array([5], np.int32), [following], calls)
    except TemplateRefused:
        return "no"
    return "yes"


def thoughts_stay(chat: ChatTurns) -> str:
    """Whether a thought is still there behind a new message of the user."""
    answer = {"role": "assistant", "content": "hi", "reasoning_content": THOUGHT}
    try:
        return "yes" if THOUGHT in chat.render([USER, answer, USER], ()) else "no"
    except TemplateRefused:
        return "refuses"


def found(name: str) -> tuple[str | None, str, str, str]:
    """The form of tool calls, and if the conversation goes on after words, after calls, and with thoughts."""
    chat = chat_of(name)
    return (
        parser_for(chat.tokenizer.get_chat_template()),
        goes_on(chat, USER),
        goes_on(chat, RESULT, (CALL,), (TOOL,)),
        thoughts_stay(chat),
    )


TABLE: dict[str, tuple[str | None, str, str, str]] = {
    "cohere": ("none", "yes", "no", "no"),
    "cohere2": ("none", "yes", "no", "no"),
    "deepseek_r1_distill": (None, "yes", "yes", "no"),
    "deepseekv3": (None, "yes", "yes", "no"),
    "diffusion_gemma": (None, "yes", "yes", "no"),
    "gemma": ("none", "yes", "no", "no"),
    "gemma3": ("none", "yes", "no", "no"),
    "gemma4": (None, "yes", "yes", "no"),
    "gemma4_v2": (None, "yes", "yes", "no"),
    "gemma4_v3": (None, "yes", "yes", "no"),
    "gemma4_v4": (None, "yes", "yes", "no"),
    "gemma4_v5": (None, "yes", "yes", "no"),
    "glm4moe": (None, "yes", "yes", "no"),
    "gptoss": (None, "yes", "yes", "no"),
    "lfm2": (None, "yes", "yes", "no"),
    "lfm2_2_5": (None, "yes", "yes", "no"),
    "lfm2_2_5_v2": (None, "yes", "yes", "no"),
    "lfm2_2_5_vl": (None, "yes", "yes", "no"),
    "lfm2_v2": (None, "yes", "yes", "no"),
    "llama3": ("none", "yes", "yes", "no"),
    "llama3_1": ("llama3_json", "yes", "yes", "no"),
    "llama3_2": ("llama3_json", "yes", "yes", "no"),
    "muse_glimmer": (None, "yes", "yes", "yes"),
    "nemotron_3_5_lightning": ("qwen3_coder", "yes", "yes", "no"),
    "nemotron_3_nano": ("qwen3_coder", "yes", "yes", "no"),
    "nemotron_3_super": ("qwen3_coder", "yes", "yes", "no"),
    "nemotron_3_ultra": ("qwen3_coder", "yes", "yes", "no"),
    "phi3": ("none", "yes", "no", "no"),
    "phi3_5": ("none", "yes", "no", "no"),
    "qwen2_5": ("hermes", "yes", "yes", "no"),
    "qwen2_5_vl": ("none", "yes", "yes", "no"),
    "qwen3": ("hermes", "yes", "yes", "no"),
    "qwen3_5_nothink": ("qwen3_coder", "yes", "yes", "no"),
    "qwen3_5_think": ("qwen3_coder", "yes", "yes", "no"),
    "qwen3_6": ("qwen3_coder", "yes", "yes", "no"),
    "qwen3_8": ("qwen3_coder", "yes", "yes", "yes"),
    "qwen3_instruct_2507": ("hermes", "yes", "yes", "no"),
    "qwen3_vl": ("hermes", "yes", "yes", "no"),
}
"""See `found`. Templates whose contents are pictures are left out."""


def test_the_table_has_every_template_of_text():
    names = {path.stem for path in folder().glob("*.jinja") if not path.stem.endswith("_training")}
    assert names - {"idefics3", "llava_next", "smolvlm"} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_published_template_goes_on_as_it_did(name):
    assert found(name) == TABLE[name]

"""Tool calls and thoughts in texts: the cases that matter by hand, and vLLM's parsers as the oracle for all others."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.agentic.endpoint.tool_calls import PARSERS, call_id, parser_for, split_thoughts
from tests import tiers

PROPERTIES = {
    "key": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "deep": {"type": "boolean"},
    "place": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    "names": {"type": "array", "items": {"type": "integer"}},
    "more": {"type": "object", "properties": {"count": {"type": "integer"}}},
    "odd": {"type": "whatever"},
    "one_of": {"enum": [1, "two", None]},
}
TOOLS = (
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks up.",
            "parameters": {"type": "object", "properties": PROPERTIES},
        },
    },
    {"type": "function", "function": {"name": "stop", "description": None, "parameters": None}},
)


def parsed(name: str, text: str) -> tuple[str, list[tuple[str, Any]]]:
    rest, calls = PARSERS[name](text, TOOLS)
    return rest, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(
    ("name", "text", "rest", "calls"),
    [
        (
            "hermes",
            'Let me see.\n<tool_call>\n{"name": "look_up", "arguments": {"key": "a<b>"}}\n</tool_call>',
            "Let me see.\n",
            [("look_up", {"key": "a<b>"})],
        ),
        (
            "hermes",
            '<tool_call>{"name": "stop", "arguments": {}}</tool_call><tool_call>{"name": "f", "arguments": {"é": 1}}',
            "",
            [("stop", {}), ("f", {"é": 1})],
        ),
        ("llama3_json", '{"name": "stop", "parameters": {}}', "", [("stop", {})]),
        (
            "llama3_json",
            '<|python_tag|>{"name": "stop", "parameters": {}}; {"name": "f", "arguments": {"x": {"y": 1}}}',
            "",
            [("stop", {}), ("f", {"x": {"y": 1}})],
        ),
        ("mistral", 'Well.[TOOL_CALLS]look_up[ARGS]{"key": "a"}', "Well.", [("look_up", {"key": "a"})]),
        ("mistral", '[TOOL_CALLS]stop{}[TOOL_CALLS]f{"x": [1]}', "", [("stop", {}), ("f", {"x": [1]})]),
        (
            "mistral",
            '[TOOL_CALLS] [{"name": "f", "arguments": {"x": 1}}, {"name": "stop"}]',
            "",
            [("f", {"x": 1}), ("stop", {})],
        ),
        (
            "qwen3_coder",
            "Well.\n\n<tool_call>\n<function=look_up>\n<parameter=key>\n7\n</parameter>\n<parameter=count>\n7\n"
            '</parameter>\n<parameter=more>\n{"count": "x"}\n</parameter>\n</function>\n</tool_call>',
            "Well.",
            [("look_up", {"key": "7", "count": 7, "more": {"count": "x"}})],
        ),
        (
            "qwen3_coder",
            "<tool_call><function=f><parameter=x>\nif a > b:\n    <b>\n\n</parameter></function></tool_call>"
            "<tool_call><function=stop></function></tool_call>",
            "",
            [("f", {"x": "if a > b:\n    <b>\n"}), ("stop", {})],
        ),
    ],
)
def test_calls_are_found_and_the_text_before_them_stays(name, text, rest, calls):
    assert parsed(name, text) == (rest, calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "stop", "arguments": {}}</tool_call> and <tool_call>{"name": </tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": "now"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": {"x": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": {"x": "\\ud800"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "stop", "arguments": ' + '{"x":' * 200 + "1" + "}" * 202 + "</tool_call>"),
        ("hermes", '<tool_call>{"name": "stop", "arguments": ' + "[" * 100_000 + "</tool_call>"),
        ("hermes", "<tool_call>"),
        ("hermes", "</tool_call>"),
        ("llama3_json", 'see {"x": 1}'),
        ("llama3_json", '{"name": "stop", "parameters": [1]}'),
        ("llama3_json", '{"name": "stop", "parameters": {"x": 1'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral", '[TOOL_CALLS]{"x": 1}'),
        ("mistral", '[TOOL_CALLS]stop{"x": '),
        ("mistral", "[TOOL_CALLS][1, 2]"),
        ("mistral", "[TOOL_CALLS][[{]"),
        ("qwen3_coder", "<tool_call>stop</tool_call>"),
        ("qwen3_coder", "<tool_call><function=></function></tool_call>"),
        ("none", '<tool_call>{"name": "stop", "arguments": {}}</tool_call>'),
    ],
)
def test_a_malformed_call_leaves_the_whole_answer_text(name, text):
    assert PARSERS[name](text, TOOLS) == (text, ())


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("name", "begin", "bit"),
    [
        ("hermes", "", "<tool_call>"),
        ("llama3_json", "", "{"),
        ("mistral", "[TOOL_CALLS]", "[{}"),
        ("mistral", "[TOOL_CALLS]", "f{"),
        ("qwen3_coder", "<function=f><parameter=", " "),
        ("qwen3_coder", "<function=f>", "<parameter="),
        ("qwen3_coder", "<function=f>", "<"),
        ("qwen3_coder", "<function=f>", ">"),
    ],
)
def test_what_has_no_end_is_read_in_linear_time(name, begin, bit):
    text = begin + bit * (200_000 // len(bit)) + "</function>"
    assert PARSERS[name](text, TOOLS)[1] in ((), (("f", "{}"),))


@pytest.mark.parametrize("name", PARSERS)
def test_without_tools_nothing_is_a_call(name):
    text = '[TOOL_CALLS]stop{}<tool_call>{"name": "stop", "arguments": {}}</tool_call><function=stop></function>'
    assert PARSERS[name](text, ()) == (text, ())


@pytest.mark.parametrize(
    ("text", "begun", "thought", "rest"),
    [
        ("<think>a</think>b", False, "a", "b"),
        ("\n<think>\na\n</think>\n\nb", False, "\na\n", "\n\nb"),
        ("a</think>b", False, "a", "b"),
        ("a</think>b", True, "a", "b"),
        ("a <think> b", True, "a <think> b", ""),
        ("<think>a</think>b", True, "a", "b"),
        ("a</think>b<think>c</think>", False, "a", "b<think>c</think>"),
        ("<think>a", False, "a", ""),
        ("<think></think>b", False, None, "b"),
        ("a", False, None, "a"),
        ("a", True, "a", ""),
        ("say <think>a</think>", False, None, "say <think>a</think>"),
        ("", False, None, ""),
    ],
)
def test_thoughts_are_split_off_as_they_were_written(text, begun, thought, rest):
    assert split_thoughts(text, begun=begun) == (thought, rest)


def test_ids_of_calls_repeat_with_the_answer_and_suit_templates_of_mistral():
    ids = [call_id(answer, index) for answer in ("a", "b") for index in range(500)]
    assert ids == [call_id(answer, index) for answer in ("a", "b") for index in range(500)]
    assert len(set(ids)) == 1000
    assert all(len(each) == 9 and each.isascii() and each.isalnum() for each in ids)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": ' }}{% if tools %}", "hermes"),
        ("<tool_call>\n<function=example>\n{% for tool in tools %}", "qwen3_coder"),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", "mistral"),
        ('<|start_header_id|>{% if tools %}{"name": "f", "parameters": {}}', "llama3_json"),
        ("<tool_call>{{ name }}\n<arg_key>{% for tool in tools %}", None),
        ("{% for tool in tools %}", None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", "none"),
    ],
)
def test_the_parser_is_found_from_the_template(template, name):
    assert parser_for(template) == name


# vLLM as the oracle

WHOLE_JSON = (
    '{"name": "look_up", "arguments": {"key": "a"}}',
    '{"name": "stop", "parameters": {"n": [1, {"x": 2.50}]}}',
)
JSON_BITS = (
    *WHOLE_JSON,
    '{"name": "stop"}',
    '{"arguments": {"count": "7"}}',
    '{"name": "look_up", "arguments": "{\\"key\\": 1}"}',
    '{"name": 3, "arguments": {}}',
    '{"name": "", "arguments": {}}',
    '{"name": "é", "arguments": {"ü": "\\u00e9 \\n <"}}',
    '{"count": "7", "names": ["1", "x"], "more": {"count": "3"}, "key": 5, "deep": "TRUE", "share": 1e2}',
    '{"place": "null", "odd": "[1]", "one_of": 2, "share": "1e400", "count": 3.0}',
    *("{", "}", "[", "]", ",", ";", ":", '"', "null", "NaN", "\\", "3", "; ", "{}", '"name"', "[]"),
)
TEXTS = ("", " ", "\n", "\n\n", "I see. ", "é", "<", ">", "</", "<tool", "call>", "'", "\u2028", "|", "{ not json }")


def texts(*bits: str) -> st.SearchStrategy[str]:
    """Texts put together from these pieces and some of no meaning."""
    return st.lists(st.sampled_from([*bits, *TEXTS]), max_size=12).map("".join)


@cache
def vllm_parser(name: str, *tokens: str) -> Callable[[str], tuple[Any, Any]]:
    """What vLLM's parser of that name makes of a complete answer, with a vocabulary that has the ``tokens``."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    logging.getLogger("vllm").setLevel(logging.CRITICAL)  # it logs each malformed call with its trace
    vocabulary = {token: i for i, token in enumerate((*tokens, "x"))}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="x")))
    request = ChatCompletionRequest(messages=[{"role": "user", "content": "?"}], tools=list(TOOLS), model="m")
    if name == "deepseek_r1":
        return lambda text: ReasoningParserManager.get_reasoning_parser(name)(tokenizer).extract_reasoning(
            text, request
        )
    make = ToolParserManager.get_tool_parser(name)

    def parse(text: str) -> tuple[str, list[tuple[str, str]]]:
        found = make(tokenizer, request.tools).extract_tool_calls(text, request)
        return found.content or "", [(call.function.name, call.function.arguments) for call in found.tool_calls]

    return parse


def is_whole(call: tuple[str, str]) -> bool:
    """Whether a call has a name, and arguments that are an object without NaN."""
    try:
        arguments = json.loads(call[1], parse_constant=lambda _: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return bool(call[0]) and isinstance(arguments, dict)


def same_as_vllm(text: str, name: str, *tokens: str) -> None:
    rest, calls = vllm_parser(name, *tokens)(text)
    expected = (rest, calls) if calls and all(map(is_whole, calls)) else (text, [])
    rest, found = PARSERS[name](text, TOOLS)
    assert (rest, list(found)) == expected


@pytest.mark.tier("all")
@pytest.mark.needs("vllm")
@pytest.mark.timeout(600)
class TestAgainstVllm:
    @settings(max_examples=tiers.examples(1000))
    @given(text=texts("<tool_call>", "</tool_call>", "<tool_call>\n", "\n</tool_call>", *JSON_BITS))
    def test_hermes(self, text):
        same_as_vllm(text, "hermes", "<tool_call>", "</tool_call>")

    @settings(max_examples=tiers.examples(1000))
    @given(text=texts("<|python_tag|>", *JSON_BITS))
    def test_llama3_json(self, text):
        same_as_vllm(text, "llama3_json", "<|python_tag|>")

    @settings(max_examples=tiers.examples(1000))
    @given(
        before=texts(),
        name=st.sampled_from(("look_up", "stop", "f", " ")),
        after=texts("[TOOL_CALLS]", "[ARGS]", "stop", *JSON_BITS),
    )
    def test_mistral_with_names(self, before, name, after):
        if not (name + after).replace("[TOOL_CALLS]", "").lstrip().startswith(("[", "{")):  # else it is the other form
            same_as_vllm(f"{before}[TOOL_CALLS]{name}{after}", "mistral", "[TOOL_CALLS]", "[ARGS]")

    @settings(max_examples=tiers.examples(1000))
    @given(
        before=texts(),
        begin=st.sampled_from(("[", "{", "[[", f"[{WHOLE_JSON[0]}", f"[{WHOLE_JSON[0]}, ")),
        after=texts("[TOOL_CALLS]", *JSON_BITS),
    )
    def test_mistral_with_an_array(self, before, begin, after):
        same_as_vllm(f"{before}[TOOL_CALLS]{begin}{after}", "mistral", "[TOOL_CALLS]")

    @settings(max_examples=tiers.examples(1000))
    @given(
        text=texts(
            *(
                "<tool_call>",
                "</tool_call>",
                "<function=look_up>",
                "<function=",
                "</function>",
                "stop>",
                "</parameter>",
            ),
            *(f"<parameter={name}>" for name in PROPERTIES),
            *(
                "<parameter=count>\n7\n</parameter>",
                "<parameter=place>null</parameter>",
                "<parameter=deep>1</parameter>",
            ),
            *('<parameter=names>[1, "2"]</parameter>', "<parameter=odd>[NaN]</parameter>", "< parameter = share >1e3"),
            *("</ parameter >", "<function=look_up>\n<parameter=key>\n", "\n</parameter>\n</function>\n</tool_call>"),
        )
    )
    def test_qwen3_coder(self, text):
        same_as_vllm(text, "qwen3_coder", "<tool_call>", "</tool_call>")

    @settings(max_examples=tiers.examples(1000))
    @given(begin=st.sampled_from(("", "<think>", "\n<think>\n")), text=texts("a", "</think>", "<tool_call>"))
    def test_thoughts(self, begin, text):
        thought, rest = vllm_parser("deepseek_r1", "<think>", "</think>")(begin + text)
        assert split_thoughts(begin + text, begun=True) == (thought or None, rest or "")

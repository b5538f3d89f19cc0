"""Calls in a policy's text: those that are meant are found, and no text makes the parser raise."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.tools.base import CALL_BEGIN, CALL_END, ToolCall, parse_calls

NAMES = st.text(min_size=1, max_size=10)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
ARGUMENTS = st.dictionaries(st.text(max_size=10), VALUES, max_size=4)
PROSE = st.text(max_size=30).filter(lambda text: "<" not in text)
PIECES = st.sampled_from(
    [CALL_BEGIN, CALL_END, '{"name": "a", "arguments": {}}', *'{}"\\\n\ud800', "```python\n", "```\n", "[" * 3000]
)


def tagged(name: str, arguments) -> str:
    return f"{CALL_BEGIN}\n{json.dumps({'name': name, 'arguments': arguments})}\n{CALL_END}"


@given(st.text() | st.lists(PIECES | st.text(max_size=5)).map("".join), st.sampled_from([None, "python"]))
def test_no_text_makes_it_raise(text, code_tool):
    for call in parse_calls(text, code_tool=code_tool):
        assert isinstance(call, ToolCall)


@given(st.lists(st.tuples(NAMES, ARGUMENTS, PROSE), max_size=4), PROSE)
def test_calls_come_back_in_order_whatever_is_around_them(calls, before):
    # JSON escapes everything but ASCII, so that only `<` in contents could look like a tag.
    calls = [each for each in calls if tagged(*each[:2]).count(CALL_END) == 1]
    text = before + "".join(tagged(name, arguments) + after for name, arguments, after in calls)
    assert parse_calls(text) == [ToolCall(name, arguments) for name, arguments, _ in calls]


@given(NAMES, ARGUMENTS)
def test_arguments_may_be_json_in_a_text(name, arguments):
    assert parse_calls(tagged(name, json.dumps(arguments))) == [ToolCall(name, arguments)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("{", "no JSON"),
        ("", "no JSON"),
        ("[1]", "JSON object such as"),
        ('{"arguments": {}}', 'needs a "name"'),
        ('{"name": 3}', 'needs a "name"'),
        ('{"name": "a", "arguments": [1]}', "must be a JSON object"),
        ('{"name": "a", "arguments": "not json"}', "a text that is no JSON object"),
        ('{"name": "a", "arguments": {"x": NaN}}', "NaN is no JSON"),
        ("[" * 50_000, "nested too deeply"),
        ('{"name": "a", "arguments": {"x": ' + "1" * 5000 + "}}", "no JSON"),
        ('"' + "x" * 200_000 + '"', "longer than"),
        (f'{CALL_BEGIN}{{"name": "a"}}', "begins inside of another"),
    ],
)
def test_what_is_wrong_with_a_call_is_said(body, words):
    (call,) = parse_calls(f"thinking {CALL_BEGIN}{body}{CALL_END} done")
    assert words in call.problem


def test_a_malformed_call_does_not_hide_the_next():
    calls = parse_calls(f"{CALL_BEGIN}oops{CALL_END}{tagged('a', {})}")
    assert calls[0].problem is not None and calls[1] == ToolCall("a", {})


def test_the_end_tag_may_be_missing_at_the_end_if_the_call_is_whole():
    assert parse_calls(f'{CALL_BEGIN}{{"name": "a", "arguments": {{"x": 1}}}}') == [ToolCall("a", {"x": 1})]
    assert parse_calls(f'{CALL_BEGIN}{{"name": "a", "arg')[0].problem is not None


def test_arguments_may_be_left_out_and_line_breaks_may_stand_in_texts():
    assert parse_calls(f'{CALL_BEGIN}{{"name": "a"}}{CALL_END}') == [ToolCall("a", {})]
    body = '{"name": "a", "arguments": {"code": "x\ny"}}'
    assert parse_calls(f"{CALL_BEGIN}{body}{CALL_END}") == [ToolCall("a", {"code": "x\ny"})]


def test_a_tag_in_a_text_of_the_arguments_is_no_call():
    text = tagged("a", {"x": CALL_BEGIN})
    assert parse_calls(text) == [ToolCall("a", {"x": CALL_BEGIN})]


def test_blocks_of_python_are_calls_only_where_asked_for():
    text = f"First\n```python\nprint(1)\n```\nthen {tagged('a', {})}\n```py\nprint(2)\n```\n```js\nno\n```"
    assert parse_calls(text) == [ToolCall("a", {})]
    assert parse_calls(text, code_tool="python") == [
        ToolCall("python", {"code": "print(1)\n"}),
        ToolCall("a", {}),
        ToolCall("python", {"code": "print(2)\n"}),
    ]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("text", ["```python\n" * 60_000, "``` \n" * 60_000])
def test_blocks_without_an_end_are_read_in_linear_time(text):
    assert parse_calls(text, code_tool="python") == []


def test_a_block_goes_from_its_first_line_to_the_next_bare_fence():
    text = " ```PY\n```python\n```js\na\n``` \nb\n```\nc ```python\nd\n```python e\n```\n```python\n\n```\n```py\nlost"
    codes = ["```python\n```js\na\n", "\n"]
    assert [call.arguments["code"] for call in parse_calls(text, code_tool="python")] == codes


def test_a_block_inside_of_a_call_is_not_a_second_one():
    text = f"{CALL_BEGIN}\n```python\nprint(1)\n```\n{CALL_END}"
    (call,) = parse_calls(text, code_tool="python")
    assert call.problem is not None

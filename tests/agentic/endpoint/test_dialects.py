"""The languages of the endpoint, spoken to by the clients of OpenAI and Anthropic themselves: what they send is read,
and what is answered is taken by their types and put together by their own code."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import anthropic
import httpx2  # what both clients are built on
import numpy as np
import openai
import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from roll.agentic.endpoint.dialects import Chat, Completions, Dialect, model_list
from roll.agentic.endpoint.messages import Messages
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest, RequestRefused, ToolCall
from roll.agentic.endpoint.responses import Responses
from tests import tiers

WORDS = ("a", " b", "é", "😀", "</code>", "\n", "Observation:")


def decode(ids: Any) -> str:
    return "".join(WORDS[each % len(WORDS)] for each in ids)


DIALECTS: dict[str, Dialect] = {kind.path: kind(decode) for kind in (Chat, Completions, Responses, Messages)}
USER = {"role": "user", "content": "hi"}
LEAST: dict[str, dict[str, Any]] = {
    "chat/completions": {"model": "m", "messages": [USER]},
    "completions": {"model": "m", "prompt": "hi"},
    "responses": {"model": "m", "input": "hi"},
    "messages": {"model": "m", "messages": [USER], "max_tokens": 9},
}
SCHEMA = {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]}
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Looks up.", "parameters": SCHEMA}}


def read(path: str, **fields: Any) -> ModelRequest:
    return DIALECTS[path].read({**LEAST[path], **fields})


def an_answer(text: str = "hello", finish: Any = "stop", calls: int = 0, **fields: Any) -> ModelAnswer:
    tool_calls = tuple(ToolCall("look_up", json.dumps({"key": f"é{i}"}), f"call{i}") for i in range(calls))
    return ModelAnswer(
        id="7f",
        created=1_700_000_000,
        text=text,
        finish_reason=finish,
        prompt_token_ids=np.array([4, 5, 6], np.int32),
        token_ids=np.array([0, 1, 2, 3], np.int32),
        logprobs=np.array([-0.5, -1.25, 0.0, -np.inf], np.float32),
        tool_calls=tool_calls,
        **fields,
    )


@st.composite
def answers(draw: Any) -> ModelAnswer:
    calls = draw(
        st.lists(st.tuples(st.text(min_size=1), st.dictionaries(st.text(), st.integers() | st.text())), max_size=3)
    )
    size = draw(st.integers(1, 5))
    return ModelAnswer(
        id=draw(st.text("abc123", min_size=1, max_size=8)),
        created=draw(st.integers(0, 2**32)),
        text=draw(st.text()),
        finish_reason=draw(st.sampled_from(("tool_calls", "length") if calls else ("stop", "length"))),
        prompt_token_ids=np.arange(draw(st.integers(1, 5)), dtype=np.int32),
        token_ids=np.array(draw(st.lists(st.integers(0, 99), min_size=size, max_size=size)), np.int32),
        logprobs=np.full(size, -0.5, np.float32),
        reasoning=draw(st.none() | st.text(min_size=1)),
        tool_calls=tuple(ToolCall(name, json.dumps(arguments), f"id{i}") for i, (name, arguments) in enumerate(calls)),
    )


CUTS = st.lists(st.floats(0, 1), max_size=4).map(sorted)
"""Shares of an answer at which a stream tells it in pieces."""


def told(dialect: Dialect, request: ModelRequest, answer: ModelAnswer, cuts: Sequence[float] = ()) -> Iterator[str]:
    """The events of an answer that is told in pieces, as those of a served model are."""
    thoughts = answer.reasoning or ""
    before = None
    for cut in cuts:
        size = round(cut * len(thoughts + answer.text))
        text = answer.text[: max(0, size - len(thoughts))]
        part = replace(answer, reasoning=thoughts[:size] or None, text=text, finish_reason="stop", tool_calls=())
        yield from dialect.events(request, part, before, ended=False)
        before = part
    yield from dialect.events(request, answer, before)


class Service:
    """The transport of real clients, in place of the network: reads each request and gives the same answer."""

    def __init__(self, answer: ModelAnswer) -> None:
        self.answer = answer
        self.cuts: Sequence[float] = ()
        self.requests: list[ModelRequest] = []
        self.openai = openai_client(self.respond)
        self.anthropic = anthropic_client(self.respond)

    def respond(self, path: str, body: Any) -> tuple[int, str, str]:
        dialect = DIALECTS[path]
        try:
            self.requests.append(dialect.read(body))
        except RequestRefused as refused:
            return refused.status, "application/json", json.dumps(dialect.error(refused))
        if self.requests[-1].stream:
            events = "".join(told(dialect, self.requests[-1], self.answer, self.cuts))
            return 200, "text/event-stream", ": wait\n\n" + events
        return 200, "application/json", json.dumps(dialect.answer(self.requests[-1], self.answer))


Respond = Callable[[str, Any], tuple[int, str, str]]
"""From path and body to status, type of content and content."""


def http_client(respond: Respond) -> httpx2.Client:
    def handle(request: httpx2.Request) -> httpx2.Response:
        path = request.url.path.removeprefix("/v1/")
        status, kind, content = respond(path, json.loads(request.content) if request.content else None)
        return httpx2.Response(status, content=content.encode(), headers={"content-type": kind})

    return httpx2.Client(transport=httpx2.MockTransport(handle))


def openai_client(respond: Respond) -> openai.OpenAI:
    client = http_client(respond)
    return openai.OpenAI(base_url="http://h/v1", api_key="k", http_client=client, max_retries=0)


def anthropic_client(respond: Respond) -> anthropic.Anthropic:
    client = http_client(respond)
    return anthropic.Anthropic(base_url="http://h", api_key="k", http_client=client, max_retries=0)


SERVICE = Service(an_answer())
"""For tests of many examples, which set its answer."""


def payloads(events: Iterator[str]) -> list[Any]:
    """The data of a stream of events, without its end mark."""
    lines = [line for event in events for line in event.split("\n") if line.startswith("data: ")]
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def same(left: Any, right: Any) -> bool:
    return left.model_dump(exclude_none=True) == right.model_dump(exclude_none=True)


# Answers

RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

FLAGS = st.fixed_dictionaries(
    {
        "logprobs": st.booleans(),
        "return_token_ids": st.booleans(),
        "include_usage": st.booleans(),
        "thoughts": st.just(True),
    }
)


@given(answer=answers(), flags=FLAGS, cuts=CUTS)
def test_a_stream_of_chat_completions_adds_up_to_the_whole(answer, flags, cuts):
    request = ModelRequest(messages=(USER,), model="m", **flags)
    whole = ChatCompletion.model_validate(DIALECTS["chat/completions"].answer(request, answer))
    state = ChatCompletionStreamState()
    for data in payloads(told(DIALECTS["chat/completions"], request, answer, cuts)):
        state.handle_chunk(ChatCompletionChunk.model_validate(data))
    built = ChatCompletion.model_validate(state.current_completion_snapshot.model_dump(warnings=False))
    if not flags["include_usage"]:
        whole.usage = None
    left, right = built.model_dump(exclude_none=True), whole.model_dump(exclude_none=True)
    for made in (left, right):
        for call in made["choices"][0]["message"].get("tool_calls", ()):
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        made["choices"][0]["message"].pop("parsed", None)
        made["choices"][0]["message"].setdefault("content", "")  # a stream that has begun cannot say that there is none
        made.pop("prompt_token_ids", None)
        made["choices"][0].pop("token_ids", None)
    assert left == right | {"object": left["object"]}


@given(answer=answers(), flags=FLAGS, cuts=CUTS)
def test_a_stream_of_completions_adds_up_to_the_whole(answer, flags, cuts):
    if answer.finish_reason == "tool_calls":
        return
    request = ModelRequest(messages=(), prompt="hi", model="m", **flags)
    dialect = DIALECTS["completions"]
    whole = Completion.model_validate(dialect.answer(request, answer))
    chunks = [Completion.model_validate(data) for data in payloads(dialect.events(request, answer))]
    assert chunks[0].choices == whole.choices
    assert len(chunks) == 1 + flags["include_usage"]
    if flags["include_usage"]:
        assert chunks[1].usage == whole.usage and not chunks[1].choices
    choices = [data["choices"][0] for data in payloads(told(dialect, request, answer, cuts)) if data["choices"]]
    assert "".join(choice["text"] for choice in choices) == answer.text
    assert [choice["finish_reason"] for choice in choices] == [*([None] * len(cuts)), answer.finish_reason]


@given(answer=answers())
def test_a_stream_of_responses_adds_up_to_the_whole(answer):
    SERVICE.answer = answer
    whole = Response.model_validate(DIALECTS["responses"].answer(ModelRequest(messages=(USER,), model="m"), answer))
    with SERVICE.openai.responses.stream(model="m", input="hi") as stream:
        seen = [event.type for event in stream]
    raw = payloads(DIALECTS["responses"].events(SERVICE.requests.pop(), answer))
    events = [RESPONSE_EVENT.validate_python(data) for data in raw]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert same(events[-1].response, whole)
    assert (
        events[-1].type
        == seen[-1]
        == ("response.incomplete" if answer.finish_reason == "length" else "response.completed")
    )
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == whole.output
    if answer.finish_reason != "length":
        assert stream.get_final_response().output_text == (answer.text if whole.output_text else "")


@given(answer=answers(), thoughts=st.booleans(), cuts=CUTS)
def test_a_stream_of_messages_adds_up_to_the_whole(answer, thoughts, cuts):
    SERVICE.answer, SERVICE.cuts = answer, cuts
    request = ModelRequest(messages=(USER,), model="m", thoughts=thoughts)
    dialect = DIALECTS["messages"]
    whole = AnthropicMessage.model_validate(dialect.answer(request, answer))
    for data in payloads(told(dialect, request, answer, cuts)):
        MESSAGE_EVENT.validate_python(data)
    thinking: Any = {"type": "enabled", "budget_tokens": 1024} if thoughts else {"type": "disabled"}
    asked = {"model": "m", "max_tokens": 9, "messages": [USER], "thinking": thinking}
    with SERVICE.anthropic.messages.stream(**asked) as stream:
        assert same(AnthropicMessage.model_validate(stream.get_final_message().model_dump()), whole)
    assert any(block.type == "thinking" for block in whole.content) == (thoughts and answer.reasoning is not None)


def test_log_probabilities_carry_the_text_and_the_bytes_of_each_token():
    answer = an_answer()
    chat = read("chat/completions", logprobs=True, return_token_ids=True)
    whole = DIALECTS["chat/completions"].answer(chat, answer)
    entries = whole["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in entries] == ["a", " b", "é", "😀"]
    assert [bytes(each["bytes"]).decode() for each in entries] == ["a", " b", "é", "😀"]
    assert [each["logprob"] for each in entries] == [-0.5, -1.25, 0.0, -9999.0]
    assert whole["prompt_token_ids"] == [4, 5, 6] and whole["choices"][0]["token_ids"] == [0, 1, 2, 3]
    stream = payloads(DIALECTS["chat/completions"].events(chat, answer))
    assert stream[0]["prompt_token_ids"] == [4, 5, 6]
    assert [token for each in stream for token in each["choices"][0].get("token_ids", ())] == [0, 1, 2, 3]
    (choice,) = DIALECTS["completions"].answer(read("completions", logprobs=0, return_token_ids=True), answer)[
        "choices"
    ]
    assert choice["logprobs"]["text_offset"] == [0, 1, 3, 4]
    assert choice["prompt_token_ids"] == [4, 5, 6] and choice["token_ids"] == [0, 1, 2, 3]
    bare = DIALECTS["chat/completions"].answer(read("chat/completions"), answer)
    assert "prompt_token_ids" not in bare and bare["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("finish", "stops", "reason", "sequence"),
    [
        ("stop", [], "end_turn", None),
        ("stop", ["😀", "zz"], "stop_sequence", "😀"),
        ("stop", ["😀", "zz", "é"], "stop_sequence", "é"),
        ("stop", ["zz"], "end_turn", None),
        ("length", ["😀"], "max_tokens", None),
        ("tool_calls", ["😀"], "tool_use", None),
    ],
)
def test_messages_say_why_they_ended(finish, stops, reason, sequence):
    calls = int(finish == "tool_calls")
    answer = DIALECTS["messages"].answer(read("messages", stop_sequences=stops), an_answer("a", finish, calls))
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, sequence)


@pytest.mark.parametrize(
    ("path", "usage"),
    [
        ("chat/completions", {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}),
        ("completions", {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}),
        ("responses", {"input_tokens": 3, "output_tokens": 4, "total_tokens": 7}),
        ("messages", {"input_tokens": 3, "output_tokens": 4}),
    ],
)
def test_tokens_are_counted(path, usage):
    counted = DIALECTS[path].answer(read(path), an_answer())["usage"]
    assert {name: count for name, count in counted.items() if isinstance(count, int)} == usage


def test_an_answer_that_was_cut_says_so_in_responses():
    whole = DIALECTS["responses"].answer(read("responses", tool_choice="none"), an_answer("a", "length"))
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert whole["output"][0]["status"] == "incomplete" and whole["tool_choice"] == "none"
    assert DIALECTS["responses"].answer(read("responses"), an_answer())["output"][0]["status"] == "completed"


@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_streams_have_an_end_mark(path):
    *_, last = DIALECTS[path].events(read(path, stream=True), an_answer())
    assert last == "data: [DONE]\n\n"


def test_an_answer_is_empty_text_rather_than_nothing():
    nothing = an_answer("")
    assert DIALECTS["messages"].answer(read("messages"), nothing)["content"] == [{"type": "text", "text": ""}]
    assert (
        DIALECTS["chat/completions"].answer(read("chat/completions"), nothing)["choices"][0]["message"]["content"] == ""
    )
    called = DIALECTS["chat/completions"].answer(read("chat/completions"), an_answer("", "tool_calls", 1))
    assert called["choices"][0]["message"]["content"] is None


def test_the_list_of_models_is_read_by_both_clients():
    listed = model_list("policy", created=1_700_000_000, max_model_len=4096)
    told = (200, "application/json", json.dumps(listed))
    (model,) = openai_client(lambda *_: told).models.list()
    assert (model.id, model.max_model_len) == ("policy", 4096)
    (other,) = anthropic_client(lambda *_: told).models.list(limit=10).data
    assert (other.id, other.created_at.year) == ("policy", 2023)


# Errors


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, "BadRequestError"),
        (401, "AuthenticationError"),
        (404, "NotFoundError"),
        (409, "ConflictError"),
        (503, "APIStatusError"),
    ],
)
def test_clients_raise_their_own_errors(status, error):
    refused = RequestRefused("`n` is not served", status=status, field="n", code="unsupported")

    def respond(path: str, _: Any) -> tuple[int, str, str]:
        return status, "application/json", json.dumps(DIALECTS[path].error(refused))

    with pytest.raises(getattr(openai, error)) as caught:
        openai_client(respond).responses.create(model="m", input="hi")
    assert (caught.value.param, caught.value.code) == ("n", "unsupported") and "not served" in caught.value.message
    with pytest.raises(getattr(anthropic, error), match="not served"):
        anthropic_client(respond).messages.create(model="m", max_tokens=9, messages=[USER])


@pytest.mark.parametrize("path", LEAST)
def test_an_error_within_a_stream_reaches_the_client(path):
    event = DIALECTS[path].error_event(RequestRefused("the run ended", status=503))
    told = (200, "text/event-stream", event)
    if path == "messages":
        asked: Any = anthropic_client(lambda *_: told).messages
    else:
        client = openai_client(lambda *_: told)
        asked = {
            "chat/completions": client.chat.completions,
            "completions": client.completions,
            "responses": client.responses,
        }[path]
    stream = asked.create(**LEAST[path], stream=True)
    if path == "responses":  # an event of its own there
        (only,) = stream
        assert (only.type, only.message) == ("error", "the run ended")
        return
    with pytest.raises((openai.APIError, anthropic.APIError), match="the run ended"):
        list(stream)


def test_agents_that_shorten_their_conversation_know_a_prompt_that_is_too_long():
    refused = RequestRefused("9 tokens, 8 fit", code="context_length_exceeded")
    assert DIALECTS["messages"].error(refused)["error"]["message"] == "prompt is too long: 9 tokens, 8 fit"
    for path in ("chat/completions", "completions", "responses"):
        error = DIALECTS[path].error(refused)["error"]
        assert error["code"] == "context_length_exceeded"
        assert error["message"] == "This model's maximum context length is exceeded: 9 tokens, 8 fit"


@pytest.mark.parametrize(
    ("status", "openais", "anthropics"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (413, "invalid_request_error", "request_too_large"),
        (500, "server_error", "api_error"),
        (503, "server_error", "overloaded_error"),
    ],
)
def test_errors_have_the_type_of_their_status(status, openais, anthropics):
    refused = RequestRefused("no", status=status)
    assert DIALECTS["responses"].error(refused)["error"]["type"] == openais
    assert DIALECTS["messages"].error(refused)["error"]["type"] == anthropics


# Requests that are taken


def test_the_least_that_can_be_asked():
    assert read("chat/completions") == ModelRequest(messages=(USER,), model="m")
    assert read("completions") == ModelRequest(messages=(), prompt="hi", model="m", max_tokens=16)
    assert read("responses") == ModelRequest(messages=(USER,), model="m")
    assert read("messages") == ModelRequest(messages=(USER,), model="m", max_tokens=9, thoughts=False)


def test_messages_of_a_chat_become_what_templates_take():
    call = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"key":  1}'}}
    request = read(
        "chat/completions",
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "short."}]},
            USER,
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{**call, "index": 0}]},
            {"role": "tool", "tool_call_id": "c1", "name": "look_up", "content": [{"type": "text", "text": "7"}]},
            {"role": "assistant", "content": "7", "tool_calls": None, "reasoning_content": None, "refusal": None},
            {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": '}}]},
        ],
    )
    known = {**call, "function": {"name": "look_up", "arguments": {"key": 1}}}
    assert request.messages == (
        {"role": "system", "content": "Be\nshort."},
        USER,
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [known]},
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "look_up"},
        {"role": "assistant", "content": "7"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**call, "function": {"name": "f", "arguments": '{"x": '}}],
        },
    )
    assert request.without_effect == ("messages.tool_calls.index",)


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("", {}),
        (None, {}),
        ({"a": 1}, {"a": 1}),
        ("[1]", "[1]"),
        ("{", "{"),
        ('{"a": NaN}',) * 2,
        ('{"a": "\\ud800"}',) * 2,
        ("[" * 9999,) * 2,
    ],
)
def test_arguments_are_objects_or_stay_text(given, read_as):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": given}}
    request = read("chat/completions", messages=[{"role": "assistant", "tool_calls": [call]}])
    assert request.messages[0]["tool_calls"][0]["function"]["arguments"] == read_as


def test_blocks_of_messages_become_what_templates_take():
    request = read(
        "messages",
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=1; cch=ab;"},
            {"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "text", "text": "Both."},
                    {"type": "tool_use", "id": "t1", "name": "look_up", "input": {"key": "a"}},
                    {"type": "tool_use", "id": "t2", "name": "look_up", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "2"}]},
                    {"type": "tool_result", "tool_use_id": "t1", "content": "1", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t0"},
                    {"type": "text", "text": "and"},
                    {"type": "text", "text": "now?"},
                ],
            },
            {"role": "system", "content": "A reminder."},
        ],
        tools=[
            {
                "name": "look_up",
                "description": "Looks up.",
                "input_schema": SCHEMA,
                "cache_control": {"type": "ephemeral"},
            }
        ],
        thinking={"type": "adaptive"},
        metadata={"user_id": "u"},
        context_management={"edits": []},
        output_config={"effort": "high"},
    )

    def call(identifier: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {"id": identifier, "type": "function", "function": {"name": "look_up", "arguments": arguments}}

    assert request.messages == (
        {"role": "system", "content": "Be short."},
        USER,
        {
            "role": "assistant",
            "content": "Both.",
            "reasoning_content": "hm",
            "tool_calls": [call("t1", {"key": "a"}), call("t2", {})],
        },
        {"role": "tool", "content": "2", "tool_call_id": "t2"},
        {"role": "tool", "content": "1", "tool_call_id": "t1"},
        {"role": "tool", "content": "", "tool_call_id": "t0"},
        {"role": "user", "content": "and\nnow?"},
        {"role": "system", "content": "A reminder."},
    )
    assert request.tools == (TOOL,) and request.thoughts
    assert set(request.without_effect) == {
        *(
            "system.cache_control",
            "messages.content.cache_control",
            "messages.content.is_error",
            "messages.content.data",
        ),
        *("tools.cache_control", "metadata", "context_management", "output_config.effort"),
    }


@pytest.mark.parametrize(
    ("system", "left"),
    [
        ("x-anthropic-billing-header: a\nBe short.", "Be short."),
        ("Be short. x-anthropic-billing-header: a", "Be short. x-anthropic-billing-header: a"),
        ([{"type": "text", "text": "Be "}, {"type": "text", "text": "short."}], "Be short."),
    ],
)
def test_the_line_about_billing_is_taken_out_of_the_beginning(system, left):
    assert read("messages", system=system).messages == ({"role": "system", "content": left}, USER)


def test_messages_in_the_middle_and_tools_of_clients_are_read_alike():
    reminder = {"role": "system", "content": "x-anthropic-billing-header: a\nNow."}
    tool = {"type": "custom", "name": "look_up", "description": "Looks up.", "input_schema": SCHEMA}
    request = read("messages", messages=[USER, reminder], tools=[tool], thinking={"type": "disabled"})
    assert request.messages == (USER, {"role": "system", "content": "Now."})
    assert request.tools == (TOOL,) and not request.thoughts


def test_nothing_is_left_of_a_system_prompt_that_is_only_about_billing():
    assert read("messages", system="x-anthropic-billing-header: a").messages == (USER,)


def test_items_of_responses_become_what_templates_take():
    def item(number: int) -> dict[str, Any]:
        return {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"c{number}",
            "name": "look_up",
            "arguments": '{"key": "a"}',
            "status": "completed",
        }

    request = read(
        "responses",
        instructions="Be short.",
        input=[
            {"role": "developer", "content": "Now."},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "m",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Both.", "annotations": []}],
            },
            item(1),
            item(2),
            {"type": "function_call_output", "call_id": "c1", "output": "1"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "2"}]},
            item(3),
            {"type": "function_call_output", "call_id": "c3", "output": "3"},
            {"role": "assistant", "content": "first"},
            {"role": "assistant", "content": "second"},
        ],
        tools=[
            {"type": "function", "name": "look_up", "description": "Looks up.", "parameters": SCHEMA, "strict": True}
        ],
        include=[],
        store=False,
        max_output_tokens=5,
    )

    def call(number: int) -> dict[str, Any]:
        return {"id": f"c{number}", "type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}

    assert request.messages == (
        {"role": "system", "content": "Be short."},
        {"role": "system", "content": "Now."},
        USER,
        {"role": "assistant", "content": "Both.", "reasoning_content": "hm", "tool_calls": [call(1), call(2)]},
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
        {"role": "tool", "content": "2", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [call(3)]},
        {"role": "tool", "content": "3", "tool_call_id": "c3"},
        {"role": "assistant", "content": "first"},
        {"role": "assistant", "content": "second"},
    )
    assert request.tools == (TOOL,) and request.max_tokens == 5
    assert set(request.without_effect) == {
        "include",
        "store",
        "tools.strict",
        "input.summary",
        "input.content.annotations",
    }


@given(answer=answers())
def test_an_answer_that_is_sent_back_reads_as_what_was_said(answer):
    calls = [(call.id, call.name, json.loads(call.arguments)) for call in answer.tool_calls]
    chat = DIALECTS["chat/completions"].answer(read("chat/completions"), answer)
    spoken = ChatCompletion.model_validate(chat).choices[0].message.model_dump()
    whole = Response.model_validate(DIALECTS["responses"].answer(read("responses"), answer))
    blocks = AnthropicMessage.model_validate(
        DIALECTS["messages"].answer(read("messages", thinking={"type": "enabled"}), answer)
    )
    after: Any = [{"role": "user", "content": "go on"}]
    again = [
        read("chat/completions", messages=[USER, spoken, *after]),
        read("responses", input=[USER, *(each.model_dump() for each in whole.output), *after]),
        read(
            "messages",
            messages=[USER, {"role": "assistant", "content": [each.model_dump() for each in blocks.content]}, *after],
        ),
    ]
    for request in again:
        _, said, _ = request.messages
        assert (said["content"], said.get("reasoning_content")) == (answer.text, answer.reasoning)
        found = [
            (each["id"], each["function"]["name"], each["function"]["arguments"]) for each in said.get("tool_calls", ())
        ]
        assert found == calls


@pytest.mark.parametrize(
    ("path", "fields", "read_as"),
    [
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ("chat/completions", {"max_tokens": 5, "max_completion_tokens": None}, {"max_tokens": 5}),
        ("chat/completions", {"stop": "x"}, {"stop": ("x",)}),
        ("chat/completions", {"stop": ["Observation:", "y"]}, {"stop": ("Observation:", "y")}),
        (
            "chat/completions",
            {"stream": True, "stream_options": {"include_usage": True}},
            {"stream": True, "include_usage": True},
        ),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "none"}, {"tools": (TOOL,), "may_call": False}),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "auto"}, {"tools": (TOOL,)}),
        (
            "chat/completions",
            {
                "tools": [
                    {
                        "function": {"parameters": SCHEMA, "description": "Looks up.", "name": "look_up"},
                        "type": "function",
                    }
                ]
            },
            {"tools": (TOOL,)},
        ),
        (
            "chat/completions",
            {"n": 1, "logit_bias": {}, "presence_penalty": 0.0, "response_format": {"type": "text"}},
            {},
        ),
        ("completions", {"prompt": [3, 4]}, {"prompt": (3, 4)}),
        (
            "completions",
            {"prompt": [[3, 4]], "echo": False, "best_of": 1, "max_tokens": 3},
            {"prompt": (3, 4), "max_tokens": 3},
        ),
        ("completions", {"prompt": ["hi"], "logprobs": 0}, {"prompt": "hi", "logprobs": True}),
        ("responses", {"text": {"format": {"type": "text"}}, "background": False, "previous_response_id": None}, {}),
        ("messages", {"stop_sequences": ["x"], "tool_choice": {"type": "none"}}, {"stop": ("x",), "may_call": False}),
    ],
)
def test_what_is_taken(path, fields, read_as):
    request = read(path, **fields)
    assert {name: getattr(request, name) for name in read_as} == read_as
    assert request.without_effect == ()


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("chat/completions", {"temperature": 0.3, "top_p": 0.9, "top_k": 4}, {"temperature", "top_p", "top_k"}),
        ("chat/completions", {"tools": [TOOL], "tool_choice": "required"}, {"tool_choice"}),
        ("chat/completions", {"tool_choice": {"type": "function", "function": {"name": "f"}}}, {"tool_choice"}),
        ("chat/completions", {"parallel_tool_calls": False}, {"parallel_tool_calls"}),
        (
            "chat/completions",
            {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
            {"tools.function.strict"},
        ),
        (
            "chat/completions",
            {"user": "u", "metadata": {}, "store": True, "seed": 3, "service_tier": "auto", "reasoning_effort": "low"},
            {"user", "metadata", "store", "seed", "service_tier", "reasoning_effort"},
        ),
        (
            "chat/completions",
            {"messages": [{**USER, "name": "me", "provider_specific_fields": {"x": 1}}]},
            {"messages.name", "messages.provider_specific_fields"},
        ),
        ("chat/completions", {"something_new": {"x": 1}}, {"something_new"}),
        ("chat/completions", {"a\nb": 1, "x" * 200: 1}, {"ab", "x" * 100}),
        (
            "messages",
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "temperature": 1.0},
            {"tool_choice", "temperature"},
        ),
        (
            "responses",
            {"tool_choice": {"type": "function", "name": "f"}, "truncation": "auto", "parallel_tool_calls": False},
            {"tool_choice", "truncation", "parallel_tool_calls"},
        ),
        (
            "messages",
            {"tool_choice": {"type": "any"}, "betas": ["x"], "thinking": {"type": "enabled", "budget_tokens": 9}},
            {"tool_choice", "betas", "thinking.budget_tokens"},
        ),
    ],
)
def test_what_is_taken_and_has_no_effect(path, fields, names):
    assert set(read(path, **fields).without_effect) == names


def test_a_request_of_many_fields_has_few_names_without_effect():
    assert len(read("chat/completions", **{f"x{i}": i for i in range(1000)}).without_effect) == 64


def test_thoughts_have_two_names_in_chats():
    (said,) = read("chat/completions", messages=[{"role": "assistant", "content": "a", "reasoning": "hm"}]).messages
    assert said == {"role": "assistant", "content": "a", "reasoning_content": "hm"}


def test_a_thought_after_a_text_begins_another_message_of_responses():
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    request = read("responses", input=[{"role": "assistant", "content": "a"}, thought, {"role": "user", "content": ""}])
    assert [each.get("reasoning_content") for each in request.messages] == [None, "hm", None]


# Requests that are refused

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}


@pytest.mark.parametrize(
    ("path", "fields", "field", "words"),
    [
        ("chat/completions", {"n": 2}, "n", "ask once for each"),
        ("chat/completions", {"n": True}, "n", "ask once for each"),
        ("chat/completions", {"logit_bias": {"3": 1}}, "logit_bias", "trainer"),
        ("chat/completions", {"presence_penalty": 0.1}, "presence_penalty", "trainer"),
        ("chat/completions", {"top_logprobs": 2}, "top_logprobs", "sampled"),
        ("chat/completions", {"functions": [{"name": "f"}]}, "functions", "tools"),
        ("chat/completions", {"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "functions"),
        ("chat/completions", {"tools": [TOOL, {"type": "function"}]}, "tools[1].function", "missing"),
        (
            "chat/completions",
            {"tools": [{"type": "function", "function": {"name": ""}}]},
            "tools[0].function.name",
            "missing",
        ),
        (
            "chat/completions",
            {"messages": [USER, {"role": "user", "content": [IMAGE]}]},
            "messages[1].content[0].type",
            "only text",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "function", "content": "x"}]},
            "messages[0].role",
            "must be one of",
        ),
        ("chat/completions", {"messages": []}, "messages", "missing"),
        ("chat/completions", {"messages": "hi"}, "messages", "must be a list"),
        ("chat/completions", {"messages": ["hi"]}, "messages[0]", "must be an object"),
        ("chat/completions", {"max_tokens": 0}, "max_tokens", "at least 1"),
        ("chat/completions", {"max_tokens": True}, "max_tokens", "whole number"),
        ("chat/completions", {"stream": "yes"}, "stream", "true or false"),
        ("chat/completions", {"stop": [""]}, "stop", "not empty"),
        ("chat/completions", {"tool_choice": "always"}, "tool_choice", "must be one of"),
        *(
            ("chat/completions", {name: value}, name, "is not served")
            for name, value in {
                "frequency_penalty": 0.1,
                "repetition_penalty": 1.1,
                "structured_outputs": {"regex": "a"},
                "function_call": "auto",
                "modalities": ["text", "audio"],
                "audio": {"voice": "x"},
                "web_search_options": {},
                "continue_final_message": True,
            }.items()
        ),
        (
            "chat/completions",
            {"messages": [USER, {"role": "assistant", "function_call": {"name": "f"}}]},
            "messages[1].function_call",
            "tool_calls",
        ),
        ("completions", {"prompt": [2**31]}, "prompt", "token ids"),
        ("responses", {"prompt": {"id": "p"}}, "prompt", "whole conversation"),
        ("responses", {"top_logprobs": 1}, "top_logprobs", "chat completions"),
        ("completions", {"prompt": ["a", "b"]}, "prompt", "several"),
        ("completions", {"prompt": [[1], [2]]}, "prompt", "several"),
        ("completions", {"prompt": [1, -2]}, "prompt", "token ids"),
        ("completions", {"prompt": ""}, "prompt", "missing"),
        ("completions", {"echo": True}, "echo", "not served"),
        ("completions", {"best_of": 2}, "best_of", "not served"),
        ("completions", {"suffix": "x"}, "suffix", "not served"),
        ("completions", {"logprobs": 1}, "logprobs", "0 asks"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id", "whole conversation"),
        ("responses", {"conversation": {"id": "c"}}, "conversation", "whole conversation"),
        ("responses", {"background": True}, "background", "wait"),
        ("responses", {"tools": [{"type": "web_search"}]}, "tools[0].type", "only functions"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type", "whole conversation"),
        ("responses", {"input": [{"type": "computer_call"}]}, "input[0].type", "computer_call"),
        (
            "messages",
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0].type",
            "only text",
        ),
        ("messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0].type", "client runs itself"),
        ("messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "not served"),
        (
            "messages",
            {"messages": [USER, {"role": "assistant", "content": "I "}]},
            "messages",
            "ends with the assistant",
        ),
        ("messages", {"messages": []}, "messages", "missing"),
    ],
)
def test_what_is_refused_names_the_field_and_a_remedy(path, fields, field, words):
    with pytest.raises(RequestRefused, match="(?s)`" + field.replace("[", "\\[").replace(".", "\\.")) as caught:
        read(path, **fields)
    assert (caught.value.field, caught.value.status) == (field, 400) and words in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "fields", "name"),
    [
        (Chat, {"response_format": {"type": "json_object"}}, "response_format"),
        (Responses, {"text": {"format": {"type": "json_schema"}}}, "text.format"),
        (Completions, {"response_format": {"type": "json_object"}}, "response_format"),
        (Messages, {"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        (Messages, {"output_format": {"type": "json_schema"}}, "output_format"),
    ],
)
def test_a_form_of_the_answer_is_told_with_its_field(kind, fields, name):
    """Whether it is refused is for the session to say (`test_session.py`, `test_served.py`)."""
    request = kind(decode).read({**LEAST[kind.path], **fields})
    assert request.form == name and request.without_effect == (name,)
    assert kind(decode).read(LEAST[kind.path]).form is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (float("nan"), "double precision"),
        (10**5000, "double precision"),
        ("\ud800", "surrogate"),
        ({"\udfff": 1}, "surrogate"),
        ({1: 2}, "no JSON"),
        (b"x", "no JSON"),
    ],
    ids=lambda each: type(each).__name__,
)
def test_what_cannot_be_passed_on_is_refused_wherever_it_is(value, words):
    for path, body in LEAST.items():
        with pytest.raises(RequestRefused, match=words):
            DIALECTS[path].read({**body, "metadata": {"deep": [value]}})


def test_endless_nesting_is_refused():
    value: Any = []
    for _ in range(100_000):
        value = [value]
    for path, body in LEAST.items():
        with pytest.raises(RequestRefused, match="levels"):
            DIALECTS[path].read({**body, "metadata": value})
    while value:  # or freeing it recurses
        value = value.pop()


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(exclude_categories=()))
    | st.sampled_from(["text", "user", "assistant", "tool", "function"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "function", "name"]) | st.text(), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(value=JSON)
def test_nothing_but_a_refusal_comes_of_any_json(value):
    for dialect in DIALECTS.values():
        with pytest.raises(RequestRefused):
            dialect.read(value)


RICH: dict[str, dict[str, Any]] = {
    "chat/completions": {
        **LEAST["chat/completions"],
        **{"tools": [TOOL], "tool_choice": "auto", "stop": ["x"], "stream_options": {"include_usage": True}, "n": 1},
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            USER,
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "1"},
        ],
    },
    "completions": {**LEAST["completions"], "prompt": [1, 2], "stop": "x", "logprobs": 0},
    "responses": {
        **LEAST["responses"],
        **{
            "instructions": "s",
            "text": {"format": {"type": "text"}},
            "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        },
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "content": None},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "1"},
        ],
    },
    "messages": {
        **LEAST["messages"],
        **{
            "system": [{"type": "text", "text": "s"}],
            "thinking": {"type": "enabled"},
            "output_config": {"effort": "low"},
        },
        **{"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "auto"}},
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "1"}]}],
            },
        ],
    },
}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to everything inside of a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield (*at, key)
        yield from places(each, (*at, key))


@pytest.mark.parametrize("path", RICH)
def test_a_rich_request_is_taken(path):
    assert DIALECTS[path].read(RICH[path]).model == "m"


@pytest.mark.parametrize("path", RICH)
@settings(max_examples=tiers.examples(1000))
@given(data=st.data())
def test_a_request_with_anything_in_one_place_is_read_or_refused(path, data):
    body = copy.deepcopy(RICH[path])
    *way, last = data.draw(st.sampled_from(list(places(body))))
    holder = body
    for key in way:
        holder = holder[key]
    holder[last] = data.draw(JSON)
    try:
        request = DIALECTS[path].read(body)
    except RequestRefused as refused:
        json.dumps(DIALECTS[path].error(refused), allow_nan=False).encode()
        return
    json.dumps(
        [*request.messages, *request.tools, *request.without_effect], allow_nan=False, ensure_ascii=False
    ).encode()
    for message in request.messages:
        assert isinstance(message["content"], str)
        assert message["role"] in ("system", "user", "assistant", "tool")


# Requests of the real clients


@pytest.mark.parametrize(
    "ask",
    [
        lambda client: client.chat.completions.create(model="m", messages=[USER], tools=[TOOL]),
        lambda client: client.responses.create(
            model="m",
            input="hi",
            tools=[
                {
                    "type": "function",
                    "strict": True,
                    "name": "look_up",
                    "description": "Looks up.",
                    "parameters": SCHEMA,
                }
            ],
        ),
    ],
)
def test_the_openai_client_asks_and_is_answered(ask: Callable[[openai.OpenAI], Any]):
    service = Service(an_answer("Well.", "tool_calls", 2))
    answer = ask(service.openai)
    assert service.requests[0].tools == (TOOL,) and service.requests[0].messages == (USER,)
    if isinstance(answer, ChatCompletion):
        calls = [call.function.arguments for call in answer.choices[0].message.tool_calls or ()]
        assert answer.choices[0].message.content == "Well."
    else:
        calls = [item.arguments for item in answer.output if item.type == "function_call"]
        assert answer.output_text == "Well."
    assert [json.loads(each) for each in calls] == [{"key": "é0"}, {"key": "é1"}]


def test_the_helpers_of_the_openai_client_stream():
    service = Service(an_answer("Well.", "tool_calls", 1))
    with service.openai.chat.completions.stream(model="m", messages=[USER], tools=[TOOL]) as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.content == "Well." and message.tool_calls[0].function.arguments == '{"key": "\\u00e90"}'
    (chunk,) = service.openai.completions.create(model="m", prompt="hi", stream=True)
    assert chunk.choices[0].text == "Well."

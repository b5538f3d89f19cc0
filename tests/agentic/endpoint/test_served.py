"""A finished model behind the endpoint: told as it is sampled, as the client says, and ended with its client."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import aiohttp.web
import anthropic
import httpx2
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.agentic.agents import DIALECTS
from roll.agentic.endpoint.records import ModelAnswer, ModelRequest
from roll.agentic.endpoint.served import TELL_SHARE, ServedModel, ServedSampling
from roll.agentic.endpoint.server import Endpoint
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.agentic.endpoint.turns import TurnReader
from roll.agentic.episode import SampledTurn
from roll.data.chat import ChatTurns
from roll.engines.base import TokenChunk
from roll.engines.local import _Policy
from tests.agentic.endpoint.conversations import LOOK_UP, called, encode, said, tokenizer_of, user
from tests.tiers import examples

DEADLINE_SECONDS = 60
NAME = "hermes"
END = tokenizer_of(NAME).convert_tokens_to_ids("<|im_end|>")


def reader(parser: str = NAME) -> TurnReader:
    return TurnReader(ChatTurns(tokenizer_of(NAME)), tokenizer_of(NAME), PARSERS[parser])


@dataclass
class Sampler:
    """Writes a text token by token; at a token number of ``waits`` it waits until `goes_on` is set."""

    text: str
    waits: int | None = None
    goes_on: threading.Event = field(default_factory=threading.Event)
    asked: list[dict[str, Any]] = field(default_factory=list)
    running: int = 0
    cancelled: threading.Event = field(default_factory=threading.Event)

    async def __call__(
        self,
        prompt_token_ids: np.ndarray,
        *,
        max_new_tokens: int,
        stop_strings: tuple[str, ...],
        sampling: ServedSampling,
        on_tokens: Callable[[np.ndarray], None],
    ) -> SampledTurn:
        self.asked.append({"prompt": prompt_token_ids.tolist(), "most": max_new_tokens, "sampling": sampling})
        ids = np.array(said(self.text), dtype=np.int32)[:max_new_tokens]
        self.running += 1
        try:
            for place in range(len(ids)):
                if place == self.waits:
                    while not self.goes_on.is_set():
                        await asyncio.sleep(0.01)
                on_tokens(ids[place : place + 1])
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1
        return SampledTurn(
            ids, np.zeros(len(ids), np.float32), ids * 0, "stop" if len(ids) < max_new_tokens else "length"
        )


@contextmanager
def served(sampler: Sampler, key: str = "", room: int = 400, **sampling: Any) -> Iterator[str]:
    """The address of a model, whose policy is called in a loop of its own."""
    ready, over = threading.Event(), threading.Event()
    place: list[str] = []

    async def serve() -> None:
        decode = tokenizer_of(NAME).decode
        endpoint = Endpoint([dialect(decode, client_samples=True) for dialect in DIALECTS], model="mine")
        endpoint.start()
        try:
            place.append(endpoint.serve(ServedModel(reader(), sampler, ServedSampling(**sampling), room), key))
            ready.set()
            await asyncio.to_thread(over.wait)
        finally:
            endpoint.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(DEADLINE_SECONDS)
    try:
        yield place[0]
    finally:
        over.set()
        sampler.goes_on.set()
        thread.join(DEADLINE_SECONDS)
        assert not thread.is_alive() and not sampler.running


@contextmanager
def openai_at(address: str, key: str = "any") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=address, api_key=key, max_retries=0) as client:
        yield client


def test_each_language_is_answered_whole_and_as_a_stream():
    text = "<think>hm</think>You go left."
    with served(Sampler(text)) as address, openai_at(address) as client:
        chat = client.chat.completions.create(model="m", messages=[user("go")])
        with client.chat.completions.stream(model="m", messages=[user("go")]) as stream:
            streamed = stream.get_final_completion()
        for answer in (chat, streamed):
            message = answer.choices[0].message
            assert (message.content, message.reasoning_content) == ("You go left.", "hm")
            assert answer.choices[0].finish_reason == "stop"
        plain = client.completions.create(model="m", prompt="go", max_tokens=100)
        assert plain.choices[0].text == text
        pieces = [
            each.choices[0].text
            for each in client.completions.create(model="m", prompt="go", max_tokens=100, stream=True)
        ]
        assert "".join(pieces) == text
        assert client.responses.create(model="m", input="go").output_text == "You go left."
        with client.responses.stream(model="m", input="go") as stream:
            assert stream.get_final_response().output_text == "You go left."
        assert client.models.list().data[0].id == "mine"
        with anthropic.Anthropic(base_url=address.removesuffix("/v1"), api_key="any", max_retries=0) as other:
            asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [user("go")]}
            assert other.messages.create(**asked).content[0].text == "You go left."
            with other.messages.stream(**asked) as stream:
                assert stream.get_final_message().content[0].text == "You go left."
            assert other.messages.count_tokens(model="m", messages=[user("go")]).input_tokens > 0


@pytest.mark.parametrize("language", ["chat", "completions", "messages"])
def test_a_stream_is_told_while_it_is_sampled(language):
    """The last token is sampled only after the client has read the first ones."""
    text = "You go left, and right, and left again."
    sampler = Sampler(text, waits=len(said(text)) - 1)
    read = ""
    with served(sampler) as address:

        def take(piece: str | None) -> None:
            nonlocal read
            read += piece or ""
            if read:
                sampler.goes_on.set()

        if language == "messages":
            with anthropic.Anthropic(base_url=address.removesuffix("/v1"), api_key="any") as client:
                with client.messages.stream(model="m", max_tokens=100, messages=[user("go")]) as stream:
                    for piece in stream.text_stream:
                        take(piece)
        else:
            with openai_at(address) as client:
                if language == "chat":
                    for chunk in client.chat.completions.create(model="m", messages=[user("go")], stream=True):
                        take(chunk.choices[0].delta.content)
                else:
                    for chunk in client.completions.create(model="m", prompt="go", max_tokens=100, stream=True):
                        take(chunk.choices[0].text)
    assert read == text


def test_a_call_of_a_tool_is_no_text_of_a_stream():
    with served(Sampler(f"Look.{called(key='a')}")) as address, openai_at(address) as client:
        asked: dict[str, Any] = {"model": "m", "messages": [user("go")], "tools": [LOOK_UP]}
        chunks = list(client.chat.completions.create(stream=True, **asked))
        assert "tool_call>" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        with client.chat.completions.stream(**asked) as stream:
            message = stream.get_final_completion().choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("look_up", {"key": "a"})
        again = [
            user("go"),
            message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": "r"},
        ]
        assert client.chat.completions.create(model="m", messages=again, tools=[LOOK_UP]).choices[0].message.tool_calls


def test_the_client_says_how_to_sample_within_the_limits_of_the_server():
    sampler = Sampler("You go left.")
    with served(sampler, temperature=0.5, max_tokens=3) as address, openai_at(address) as client:
        chat = client.chat.completions
        cut = chat.create(model="m", messages=[user("go")], temperature=0, top_p=0.5, seed=-7, extra_body={"top_k": -1})
        assert cut.choices[0].finish_reason == "length" and cut.usage.completion_tokens == 3
        assert chat.create(model="m", messages=[user("go")], max_tokens=2).usage.completion_tokens == 2
        first, second = (each["sampling"] for each in sampler.asked)
        assert (first.temperature, first.top_p, first.top_k) == (0.0, 0.5, 0)
        assert (second.temperature, second.top_p, second.top_k) == (0.5, 1.0, 0)
        assert (first.seed, second.seed) == (-7, None)
        for name, value in (("temperature", -1), ("top_p", 0), ("seed", "x"), ("n", 2), ("logit_bias", {"3": 1})):
            with pytest.raises(openai.BadRequestError, match=name):
                chat.create(model="m", messages=[user("go")], **{name: value})
        with pytest.raises(openai.BadRequestError, match="in the prompt"):
            chat.create(model="m", messages=[user("go")], response_format={"type": "json_object"})
        with pytest.raises(openai.BadRequestError, match="context length"):
            chat.create(model="m", messages=[user("go " * 400)])
        assert len(sampler.asked) == 2


def test_a_seed_reaches_the_engine_in_a_range_that_engines_take():
    seeds = []

    class Engine:
        async def stream(self, request):
            seeds.append(request.sampling.seed)
            yield TokenChunk(np.array([1]), np.zeros(1), np.zeros(1, int), "stop")

    def ask(seed: int | None) -> None:
        call = _Policy(Engine(), Future())(
            np.array([1]),
            max_new_tokens=1,
            stop_strings=(),
            sampling=ServedSampling(seed=seed),
            on_tokens=lambda token_ids: None,
        )
        asyncio.run(call)

    for seed in (5, -1, 2**80 + 3, None, None):
        ask(seed)
    assert seeds[:3] == [5, 2**63 - 1, 3] and seeds[3] != seeds[4]
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_field_without_effect_is_logged_as_such(caplog):
    with served(Sampler("left")) as address, openai_at(address) as client, caplog.at_level("INFO"):
        client.chat.completions.create(model="m", messages=[user("go")], extra_body={"mood": "good"})
    assert "clients send `mood`, which has no effect" in caplog.text and "the run" not in caplog.text


def test_a_conversation_is_what_the_template_writes():
    sampler = Sampler("left")
    with served(sampler) as address, openai_at(address) as client:
        messages: list[Any] = [user("go"), {"role": "assistant", "content": "left"}, user("on")]
        client.chat.completions.create(model="m", messages=messages)
    text = tokenizer_of(NAME).apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert sampler.asked[0]["prompt"] == encode(text)


def test_a_key_is_needed_where_there_is_one():
    with served(Sampler("left"), key="sk-mine") as address:
        with openai_at(address, "sk-other") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with openai_at(address, "sk-mine") as client:
            assert client.chat.completions.create(model="m", messages=[user("go")]).choices[0].message.content == "left"


@pytest.mark.parametrize("streams", [False, True])
def test_an_answer_ends_when_its_client_goes_away(streams):
    sampler = Sampler("You go left, and right.", waits=3)

    async def leave(address: str) -> None:
        async with aiohttp.ClientSession() as http:
            body = {"model": "m", "messages": [user("go")], "stream": streams}
            asking = asyncio.ensure_future(http.post(f"{address}/chat/completions", json=body))
            while not sampler.running:
                await asyncio.sleep(0.01)
            asking.cancel()

    with served(sampler) as address:
        asyncio.run(leave(address))
        assert sampler.cancelled.wait(DEADLINE_SECONDS)


@pytest.fixture
def endpoints(monkeypatch):
    """The endpoints that serve a model."""
    made, serve = list[Endpoint](), Endpoint.serve
    monkeypatch.setattr(Endpoint, "serve", lambda self, *given: made.append(self) or serve(self, *given))
    return made


@pytest.mark.parametrize("language", ["chat", "messages"])
def test_what_was_told_as_text_stays_text_if_it_turns_out_to_be_a_thought(language):
    text = "You go left</think>right"
    sampler = Sampler(text, waits=len(encode("You go")))
    read = ""
    with served(sampler) as address, anthropic.Anthropic(base_url=address.removesuffix("/v1"), api_key="a") as other:
        if language == "messages":
            thinking: Any = {"type": "enabled", "budget_tokens": 1024}
            asked: dict[str, Any] = {"model": "m", "max_tokens": 100, "messages": [user("go")], "thinking": thinking}
            with other.messages.stream(**asked) as stream:
                for piece in stream.text_stream:
                    read += piece
                    sampler.goes_on.set()
                (block,) = stream.get_final_message().content
            assert block.text == text
        else:
            with openai_at(address) as client:
                for chunk in client.chat.completions.create(model="m", messages=[user("go")], stream=True):
                    read += chunk.choices[0].delta.content or ""
                    if read:
                        sampler.goes_on.set()
    assert read == text


def test_each_of_two_equal_requests_is_sampled_and_nothing_of_them_is_kept(endpoints):
    """Also if one of the clients asks for the second time: the answer that it would get is another client's."""
    sampler = Sampler("left")
    with served(sampler) as address, openai_at(address) as client:
        for headers in ({}, {"x-stainless-retry-count": "1"}, {"idempotency-key": "k"}, {"idempotency-key": "k"}):
            client.chat.completions.create(model="m", messages=[user("go")], extra_headers=headers)
        assert len(sampler.asked) == 4
        deadline = time.monotonic() + DEADLINE_SECONDS
        while endpoints[0]._episodes[""].calls and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not endpoints[0]._episodes[""].calls


def test_a_client_that_goes_away_is_no_error_in_the_log(monkeypatch, caplog):
    """It may go away just when a part is written."""

    async def gone(self: Any, data: bytes) -> None:
        raise aiohttp.ClientConnectionResetError("Cannot write to closing transport")

    monkeypatch.setattr(aiohttp.web.StreamResponse, "write", gone)
    with served(Sampler("left")) as address, openai_at(address) as client:
        with pytest.raises((openai.APIError, httpx2.TransportError)):
            list(client.chat.completions.create(model="m", messages=[user("go")], stream=True))
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_telling_leaves_the_loop_time_for_others(monkeypatch):
    """A part of a long answer takes long to make; no second one waits for its turn meanwhile."""
    parts = []

    def slow(self: TurnReader, request: ModelRequest, prompt: np.ndarray, ids: list[int], **more: Any) -> ModelAnswer:
        parts.append(len(ids))
        time.sleep(0.2)
        return begun_answer(self, request, prompt, ids, **more)

    begun_answer = TurnReader.begun_answer
    monkeypatch.setattr(TurnReader, "begun_answer", slow)

    class Slowly(Sampler):
        async def __call__(self, *given: Any, on_tokens: Callable[[np.ndarray], None], **more: Any) -> SampledTurn:
            for token in said(self.text):
                on_tokens(np.array([token], dtype=np.int32))
                await asyncio.sleep(0.03)
            return await super().__call__(*given, on_tokens=lambda token_ids: None, **more)

    text = "You go left, and right, and left again." * 2
    with served(Slowly(text)) as address, openai_at(address) as client:
        asked: dict[str, Any] = {"model": "m", "messages": [user("go")], "stream": True}
        begun = time.monotonic()
        pieces = [each.choices[0].delta.content or "" for each in client.chat.completions.create(**asked)]
        seconds = time.monotonic() - begun
    assert "".join(pieces) == text
    assert 1 <= len(parts) <= 1 + seconds / (0.2 / TELL_SHARE)


def test_many_are_answered_at_once():
    sampler = Sampler("left", waits=0)
    answers: list[str | None] = []

    def ask(address: str) -> None:
        with openai_at(address) as client:
            answers.append(client.chat.completions.create(model="m", messages=[user("go")]).choices[0].message.content)

    with served(sampler) as address:
        asking = [threading.Thread(target=ask, args=[address]) for _ in range(8)]
        for each in asking:
            each.start()
        while sampler.running < 8:
            threading.Event().wait(0.01)
        sampler.goes_on.set()
        for each in asking:
            each.join(DEADLINE_SECONDS)
    assert answers == ["left"] * 8


CALL = '<tool_call>{"name": "look_up", "arguments": {}}</tool_call>'
PIECES = st.sampled_from(
    [
        *("You ", "go", " left", "<think>", "</think>", "<", "</th", "é", "😀", "\n", " ", "STOP", "ST", "OP"),
        *("<|im_end|>", "<|im_", CALL, "<tool_call>", "<tool_", "{"),
    ]
)


@settings(max_examples=examples(300))
@given(
    pieces=st.lists(PIECES, max_size=12),
    stops=st.lists(st.sampled_from(["STOP", "OP", "left"]), max_size=2),
    parser=st.sampled_from(sorted(PARSERS)),
    tools=st.sampled_from([(), (LOOK_UP,)]),
)
def test_what_is_told_of_an_answer_stays(pieces, stops, parser, tools):
    """Thoughts that end without a beginning are the one exception: what came before is taken for text till then."""
    text = "".join(pieces)
    if "</think>" in text.partition("<think>")[0] or text.partition("<think>")[0].strip():
        text = text.replace("</think>", "")
    ids = encode(text)
    request = ModelRequest((user("go"),), tools=tools, stop=tuple(stops))
    prompt = np.array([1], np.int32)
    made = reader(parser)
    # The engine ends at the first token after which a stop string is there.
    decode = tokenizer_of(NAME).decode
    end = next((n for n in range(len(ids) + 1) if any(stop in decode(ids[:n]) for stop in stops)), len(ids))
    ids = ids[:end] if end < len(ids) or any(stop in text for stop in stops) else [*ids, END]
    nothing = np.zeros(len(ids), np.float32)
    sampled = SampledTurn(np.array(ids, np.int32), nothing, np.array(ids, np.int32), "stop")
    whole = made.answer(request, prompt, sampled, answer_id="a", created=0, calls_id="a")
    told = "", ""
    for size in range(len(ids) + 1):
        part = made.begun_answer(request, prompt, ids[:size], answer_id="a", created=0)
        words = part.reasoning or "", part.text
        assert whole.text.startswith(part.text) and (whole.reasoning or "").startswith(words[0])
        assert all(now.startswith(before) for now, before in zip(words, told, strict=True))  # nothing is told twice
        assert not part.text or part.reasoning == whole.reasoning  # thoughts come first
        told = words

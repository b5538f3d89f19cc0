"""A server of episodes with real clients: what they send again is sampled once, and nothing lands elsewhere."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections.abc import Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import aiohttp
import anthropic
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.agentic.endpoint.dialects import Chat, Completions
from roll.agentic.endpoint.messages import Messages
from roll.agentic.endpoint.responses import Responses
from roll.agentic.endpoint.server import LONG_BODY, Endpoint
from roll.agentic.endpoint.session import LONG_PROMPT, EpisodeSession, SessionSettings
from roll.agentic.endpoint.tool_calls import PARSERS
from roll.data.chat import ChatTurns
from tests.agentic.endpoint.conversations import (
    LOOK_UP,
    RecordingPolicy,
    called,
    check_samples,
    limits,
    results,
    said,
    scripted,
    session_of,
    tokenizer_of,
    user,
)
from tests.tiers import examples

DEADLINE_SECONDS = 60


def make_endpoint(**settings: Any) -> Endpoint:
    decode = tokenizer_of("hermes").decode
    return Endpoint([Chat(decode), Completions(decode), Responses(decode), Messages(decode)], **settings)


@asynccontextmanager
async def running(**settings: Any):
    before = threading.active_count()
    endpoint = make_endpoint(**settings)
    endpoint.start()
    try:
        yield endpoint
    finally:
        endpoint.stop()
        assert not any(thread.name == "agent-endpoint" for thread in threading.enumerate())
        assert threading.active_count() <= before + 4  # of the loop's own executor


def run(main: Callable[[], Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main(), DEADLINE_SECONDS))


def openai_client(address: tuple[str, str], **settings: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=address[0], api_key=address[1], **settings)


def anthropic_client(address: tuple[str, str], **settings: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address[0].removesuffix("/v1"), api_key=address[1], **settings)


def ask(address: tuple[str, str], messages, **fields: Any):
    """The message that answers a chat, by a client of its own."""
    with openai_client(address, max_retries=fields.pop("max_retries", 2)) as client:
        return client.chat.completions.create(model="m", messages=messages, **fields).choices[0].message


@asynccontextmanager
async def posting(address: tuple[str, str], body: dict, path: str = "/chat/completions", **headers: str):
    """An answer to a request of a client that is no library."""
    async with (
        aiohttp.ClientSession() as http,
        http.post(
            address[0] + path, json=body, headers={"authorization": f"Bearer {address[1]}", **headers}
        ) as response,
    ):
        yield response


async def post(address: tuple[str, str], body: dict, path: str = "/chat/completions", **headers: str):
    """Status and body."""
    async with posting(address, body, path, **headers) as response:
        return response.status, await response.text()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def ask_and_leave(address: tuple[str, str], policy: RecordingPolicy, text: str) -> None:
    """A client that goes away once its request has come to the policy, which takes half a second."""
    policy.seconds, asked = 0.5, len(policy.calls)
    asking = asyncio.ensure_future(post(address, hello(text)))
    await until(lambda: len(policy.calls) > asked)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled()


def hello(text: str = "hello", **fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [user(text)], **fields}


def played_by_openai(address: tuple[str, str], streams: bool) -> str:
    with openai_client(address) as client:
        messages: list[Any] = [user("look")]
        for _ in range(4):
            if streams:
                with client.chat.completions.stream(model="m", messages=messages, tools=[LOOK_UP]) as stream:
                    message = stream.get_final_completion().choices[0].message
            else:
                message = (
                    client.chat.completions.create(model="m", messages=messages, tools=[LOOK_UP]).choices[0].message
                )
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                return message.content
            messages += results(messages[-1], *("r" for _ in message.tool_calls))
        raise AssertionError("the policy never ended")


def played_by_anthropic(address: tuple[str, str], streams: bool) -> str:
    tool = {"name": "look_up", "input_schema": {"type": "object"}}
    with anthropic_client(address) as client:
        messages: list[Any] = [user("look")]
        for _ in range(4):
            fields: dict[str, Any] = {"model": "m", "max_tokens": 500, "messages": messages, "tools": [tool]}
            assert client.messages.count_tokens(model="m", messages=messages, tools=[tool]).input_tokens > 0
            if streams:
                with client.messages.stream(**fields) as stream:
                    message = stream.get_final_message()
            else:
                message = client.messages.create(**fields)
            messages.append({"role": "assistant", "content": [block.model_dump() for block in message.content]})
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                return message.content[0].text
            answers = [{"type": "tool_result", "tool_use_id": call.id, "content": "r"} for call in calls]
            messages.append({"role": "user", "content": answers})
        raise AssertionError("the policy never ended")


def played_by_responses(address: tuple[str, str], streams: bool) -> str:
    tool = {"type": "function", "name": "look_up", "parameters": {"type": "object"}}
    with openai_client(address) as client:
        items: list[Any] = [user("look")]
        for _ in range(4):
            if streams:
                with client.responses.stream(model="m", input=items, tools=[tool]) as stream:
                    response = stream.get_final_response()
            else:
                response = client.responses.create(model="m", input=items, tools=[tool])
            items += [item.model_dump(exclude_none=True) for item in response.output]
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            items += [{"type": "function_call_output", "call_id": call.call_id, "output": "r"} for call in calls]
        raise AssertionError("the policy never ended")


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("play", [played_by_openai, played_by_anthropic, played_by_responses])
def test_a_real_clients_episode_is_one_sample(play, streams):
    async def main():
        policy = scripted(called(a=1), "let me see" + called(b=2) + called(c=3), "done", seconds=0.05)
        async with running(keep_alive_seconds=0.02) as endpoint:
            session = session_of(policy)
            address = endpoint.open(session)
            assert await asyncio.to_thread(play, address, streams) == "done"
            await endpoint.close(session)
            (sample,) = check_samples(session, policy)
            assert sorted(set(sample.turns[sample.response_mask].tolist())) == [0, 1, 2]

    run(main)


def test_the_models_and_what_is_not_there_are_told():
    async def main():
        async with running(model="policy") as endpoint:
            session = session_of(scripted("x"))
            address = endpoint.open(session)

            def look():
                with openai_client(address) as client:
                    assert [model.id for model in client.models.list()] == ["policy"]
                    with pytest.raises(openai.NotFoundError, match="POST /v1/chat/completions"):
                        client.embeddings.create(model="m", input="x", encoding_format="float")
                with anthropic_client(address) as client:
                    assert client.models.list().data[0].id == "policy"

            await asyncio.to_thread(look)

    run(main)


@pytest.mark.parametrize("at_root", [False, True])
def test_path_and_key_name_the_episode_and_must_agree(at_root):
    async def main():
        async with running() as endpoint:
            one, other = session_of(scripted("one")), session_of(scripted("other"))
            (path, key), (other_path, other_key) = endpoint.open(one), endpoint.open(other)
            base = endpoint.address + "/v1" if at_root else path
            assert key != other_key and path != other_path
            for headers in ({"authorization": "Bearer wrong"}, {"authorization": ""}, {"x-api-key": other_key}):
                assert (await post((base, key), hello(), **headers))[0] == 401
            if not at_root:
                assert (await post((base, other_key), hello()))[0] == 401
            status, body = await post((base, ""), hello(), **{"authorization": "", "x-api-key": key})
            assert status == 200 and json.loads(body)["choices"][0]["message"]["content"] == "one"
            await endpoint.close(one)
            assert (await post((base, key), hello()))[0] == 409
            assert (await post((base, "wrong"), hello()))[0] == 401
            assert other.metrics()["turns"] == 0

    run(main)


def test_what_cannot_be_read_is_refused_in_the_clients_words():
    async def main():
        async with running() as endpoint:
            address = endpoint.open(session_of(scripted("x"), prompt_length=30))

            def look():
                with openai_client(address) as client:
                    with pytest.raises(openai.BadRequestError) as refused:
                        client.chat.completions.create(model="m", messages=[user("x" * 500)])
                    assert refused.value.code == "context_length_exceeded"
                with anthropic_client(address) as client, pytest.raises(anthropic.BadRequestError):
                    client.messages.create(model="m", max_tokens=5, messages=[user("x" * 500)], stream=True)

            await asyncio.to_thread(look)
            async with aiohttp.ClientSession() as http:
                headers = {"authorization": f"Bearer {address[1]}"}
                async with http.post(address[0] + "/messages", data=b'{"a', headers=headers) as response:
                    assert response.status == 400 and (await response.json())["type"] == "error"

    run(main)


def test_a_large_body_is_read():
    async def main():
        async with running() as endpoint:
            policy = scripted("x")
            address = endpoint.open(session_of(policy, prompt_length=10**7, sequence_length=10**7))
            status, _ = await post(address, hello("hello", metadata={"blob": "y" * (5 * 2**20)}))
            assert status == 200

    run(main)


@pytest.mark.parametrize("part", ["body", "prompt"])
def test_others_are_answered_while_a_long_request_is_read(part):
    """A long body, and a long conversation, would stop the loop of all episodes."""
    begun, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert go_on.wait(DEADLINE_SECONDS / 4), "the others were not answered"

    class SlowChat(Chat):
        def read(self, value):
            if "metadata" in value:
                wait()
            return super().read(value)

    class SlowTurns(ChatTurns):
        def begin(self, messages, tools=()):
            if len(messages[0]["content"]) > LONG_PROMPT:
                wait()
            return super().begin(messages, tools)

    async def main():
        tokenizer = tokenizer_of("hermes")
        endpoint = Endpoint([SlowChat(tokenizer.decode)])
        endpoint.start()
        try:
            made = SessionSettings(limits(prompt_length=10**7, sequence_length=10**7), PARSERS["none"])
            session = EpisodeSession(SlowTurns(tokenizer), tokenizer, scripted("long"), made)
            address, other = endpoint.open(session), endpoint.open(session_of(scripted("short")))
            blob, words = {"blob": "y" * (LONG_BODY + 1)}, "word " * (LONG_PROMPT // 4)
            body = hello(metadata=blob) if part == "body" else hello(words)
            long = asyncio.ensure_future(post(address, body))
            assert await asyncio.to_thread(begun.wait, DEADLINE_SECONDS / 4)
            assert (await post(other, hello()))[0] == 200 and not long.done()
            go_on.set()
            assert (await long)[0] == 200
        finally:
            go_on.set()
            await asyncio.to_thread(endpoint.stop)

    run(main)


def test_of_answers_that_are_sampled_at_once_one_is_written_in_a_turn_of_the_loop():
    """However many episodes ask and are answered together, the loop is free between any two of them."""
    sessions, done = 24, list[str]()

    class CountedChat(Chat):
        def read(self, value):
            done.append("read")
            return super().read(value)

        def answer(self, request, answer):
            done.append("answer")
            return super().answer(request, answer)

    async def main():
        together = asyncio.Barrier(sessions)

        class Together(RecordingPolicy):
            async def __call__(self, *arguments, **asked):
                await together.wait()
                return await super().__call__(*arguments, **asked)

        in_a_turn: list[list[str]] = []

        async def watch():
            while True:
                before = len(done)
                await asyncio.sleep(0)
                in_a_turn.append(done[before:])

        endpoint = Endpoint([CountedChat(tokenizer_of("hermes").decode)])
        endpoint.start()
        try:
            watching = asyncio.run_coroutine_threadsafe(watch(), endpoint._loop)
            policies = [Together(lambda *_: said("yes")) for _ in range(sessions)]
            addresses = [endpoint.open(session_of(policy)) for policy in policies]
            answers = await asyncio.gather(*(post(address, hello()) for address in addresses))
            watching.cancel()
        finally:
            await asyncio.to_thread(endpoint.stop)
        assert [status for status, _ in answers] == [200] * sessions
        assert sorted(sum(in_a_turn, [])) == ["answer"] * sessions + ["read"] * sessions
        assert max(map(len, in_a_turn)) == 1

    run(main)


def test_a_request_sent_again_while_it_runs_is_sampled_once():
    """A client of half a second's patience, of a policy that needs a second: its second or third try is answered."""

    async def main():
        async with running() as endpoint:
            policy = scripted("slow", seconds=1.0)
            session = session_of(policy)
            address = endpoint.open(session)
            message = await asyncio.to_thread(ask, address, [user("go")], timeout=0.4)
            assert message.content == "slow" and len(policy.calls) == 1
            await endpoint.close(session)
            assert len(check_samples(session, policy)) == 1

    run(main)


def test_equal_requests_are_two_if_nobody_lost_an_answer():
    async def main():
        async with running() as endpoint:
            policy = scripted("one", "two", "three", seconds=0.05)
            session = session_of(policy)
            address = endpoint.open(session)
            first = await post(address, hello())
            second, third = await asyncio.gather(post(address, hello()), post(address, hello()))
            contents = [json.loads(body)["choices"][0]["message"]["content"] for _, body in (first, second, third)]
            assert sorted(contents) == ["one", "three", "two"]
            again = await post(address, hello(), **{"x-stainless-retry-count": "1"})
            assert again in (second, third)
            assert (await post(address, hello(), **{"idempotency-key": "k"}))[0] == 503  # the script has ended
            await endpoint.close(session)

    run(main)


def test_a_client_that_goes_away_may_come_back_without_a_word():
    async def main():
        async with running() as endpoint:
            policy = scripted("one", "two")
            session = session_of(policy)
            address = endpoint.open(session)
            await ask_and_leave(address, policy, "hello")
            await until(lambda: session.metrics()["turns"] == 1)
            status, body = await post(address, hello())
            assert status == 200 and "one" in body and len(policy.calls) == 1 and policy.cancelled == 0
            await asyncio.gather(*(post(address, hello(), **{"idempotency-key": "k"}) for _ in range(5)))
            assert len(policy.calls) == 2
            await endpoint.close(session)
            assert len(check_samples(session, policy)) == 2

    run(main)


def test_an_answer_that_nobody_came_for_is_not_trained_on():
    async def main():
        async with running() as endpoint:
            policy = scripted("one", "two")
            session = session_of(policy)
            address = endpoint.open(session)
            assert (await post(address, hello("first")))[0] == 200
            await ask_and_leave(address, policy, "second")
            await until(lambda: session.metrics()["turns"] == 2)
            await asyncio.sleep(0.1)
            await endpoint.close(session)
            assert len(check_samples(session, policy)) == 1
            assert session.metrics()["untrained/unread"] == len(said("two"))

    run(main)


def test_a_stream_shows_signs_of_life_before_its_answer():
    async def main():
        async with running(keep_alive_seconds=0.05) as endpoint:
            address = endpoint.open(session_of(scripted("slow", seconds=0.3)))
            status, body = await post(address, hello(stream=True))
            assert status == 200 and body.startswith(": wait\n\n") and body.rstrip().endswith("[DONE]")
            assert body.count(": wait") >= 3 and body.rindex(": wait") < body.index("data:")

    run(main)


def test_the_end_of_an_episode_ends_its_calls_and_no_others():
    async def main():
        async with running() as endpoint:
            slow, other = scripted("late", seconds=30.0), scripted("other", seconds=0.3)
            ending, going = session_of(slow), session_of(other)
            address, other_address = endpoint.open(ending), endpoint.open(going)
            late = asyncio.ensure_future(post(address, hello()))
            beside = asyncio.ensure_future(post(other_address, hello()))
            await until(lambda: bool(slow.calls and other.calls))
            await endpoint.close(ending)
            await endpoint.close(ending)
            assert (await late)[0] == 409 and slow.cancelled == 1
            assert ending.metrics()["cancelled"] == 1 and ending.metrics()["tokens"] == 0
            assert (await beside)[0] == 200
            assert ending.samples(1.0, 1.0) == []

    run(main)


def test_the_end_of_the_run_answers_those_who_wait():
    async def main():
        async with running(keep_alive_seconds=0.05) as endpoint:
            policy = scripted("late", "late", seconds=30.0)
            session = session_of(policy)
            address = endpoint.open(session)
            waiting = [asyncio.ensure_future(post(address, hello(stream=stream))) for stream in (False, True)]
            await until(lambda: len(policy.calls) == 2)
            await asyncio.to_thread(endpoint.stop)
            (status, _), (_, streamed) = await asyncio.gather(*waiting)
            assert status == 503 and "the run ends" in streamed
            with pytest.raises(RuntimeError):
                endpoint.open(session)
            await endpoint.close(session)

    run(main)


def test_episodes_end_whenever_the_endpoint_does():
    """Before, while and after its loop ends; nothing waits for a loop that is gone."""

    async def main():
        for attempt in range(40):
            async with running() as endpoint:
                sessions = [session_of(scripted("x")) for _ in range(20)]
                for session in sessions:
                    endpoint.open(session)

                async def ended(turns: int, session) -> None:
                    for _ in range(turns):
                        await asyncio.sleep(0)
                    await endpoint.close(session)

                stopping = threading.Thread(target=endpoint.stop)
                stopping.start()
                turns = [3 * number * (attempt % 7 + 1) for number in range(len(sessions))]
                await asyncio.wait_for(asyncio.gather(*map(ended, turns, sessions)), 10)
                await asyncio.to_thread(stopping.join)
                assert all(session.closed for session in sessions)

    run(main)


def test_episodes_begin_while_others_end():
    async def main():
        async with running() as endpoint:
            sessions = [session_of(scripted("x")) for _ in range(3000)]
            for session in sessions:
                endpoint.open(session)
            other, done = session_of(scripted("x")), threading.Event()

            def opening() -> None:
                while not done.is_set():
                    endpoint.open(other)

            thread = threading.Thread(target=opening)
            thread.start()
            try:
                for session in sessions[:3]:
                    await endpoint.close(session)
            finally:
                done.set()
                await asyncio.to_thread(thread.join)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        run(main)
    finally:
        sys.setswitchinterval(interval)


def test_a_port_that_is_taken_is_an_error_at_the_start():
    async def main():
        async with running() as endpoint:
            port = int(endpoint.address.rpartition(":")[2])
            other = make_endpoint(port=port)
            with pytest.raises(RuntimeError, match=str(port)):
                other.start()
            other.stop()

    run(main)


def test_many_episodes_at_once_stay_apart():
    async def main():
        async with running() as endpoint:

            async def episode(number: int):
                policy = RecordingPolicy(lambda turn, _: said(f"{number} says {turn}"))
                session = session_of(policy)
                address = endpoint.open(session)
                messages: list[Any] = [user(f"you are {number}")]
                for turn in range(3):
                    status, body = await post(address, {"messages": messages})
                    message = json.loads(body)["choices"][0]["message"]
                    assert status == 200 and message["content"] == f"{number} says {turn}"
                    messages += [message, user("on")]
                await endpoint.close(session)
                (sample,) = check_samples(session, policy)
                assert f"{number} says 2" in tokenizer_of("hermes").decode(sample.token_ids.tolist())

            await asyncio.gather(*(episode(number) for number in range(200)))

    run(main)


class LossyProxy:
    """Passes requests on, and closes the connection in place of every ``nth`` answer, which was computed."""

    def __init__(self, target: str, nth: int) -> None:
        self.target, self.nth, self.count, self.dropped = target, nth, 0, 0

    async def __aenter__(self) -> LossyProxy:
        from aiohttp import web

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", 0).start()
        self.address = "http://{}:{}".format(*self.runner.addresses[0][:2])
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.runner.cleanup()

    async def _pass(self, request):
        from aiohttp import web

        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in ("host", "accept-encoding")
        }
        async with (
            aiohttp.ClientSession() as http,
            http.request(
                request.method, self.target + request.path_qs, data=await request.read(), headers=headers
            ) as got,
        ):
            body = await got.read()
        self.count += 1
        if self.count % self.nth == 0:
            self.dropped += 1
            request.transport.close()
        return web.Response(body=body, status=got.status, content_type=got.content_type)


@pytest.mark.parametrize("play", [played_by_openai, played_by_anthropic])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_storm_of_retries_gives_the_samples_of_a_calm_run(play, seed):
    """Every third answer is lost after it was computed; the samples are those without a loss, bit by bit."""
    answers = [called(a=1), called(b=random.Random(seed).randrange(99)), "done"]

    async def played(nth: int):
        async with running() as endpoint, LossyProxy(endpoint.address, nth) as proxy:
            policy = scripted(*answers)
            session = session_of(policy)
            path, key = endpoint.open(session)
            address = path.replace(endpoint.address, proxy.address), key
            assert await asyncio.to_thread(play, address, False) == "done"
            await endpoint.close(session)
            return check_samples(session, policy), proxy.dropped

    calm, _ = run(lambda: played(10**9))
    stormy, dropped = run(lambda: played(3))
    assert dropped and len(calm) == len(stormy) == 1
    for name, value in vars(calm[0]).items():
        other = getattr(stormy[0], name)
        assert np.array_equal(value, other) if isinstance(value, np.ndarray) else value == other, name


outcomes = st.sampled_from(["read", "gone", "lost"])
"""What becomes of an attempt: its answer is read; the client goes away before; the answer is lost on its way."""


@settings(max_examples=examples(20))
@given(st.lists(st.lists(outcomes, min_size=1, max_size=3), min_size=1, max_size=5))
def test_each_request_is_sampled_once_whatever_happens_to_its_attempts(requests):
    """Conversations side by side, each of two turns. A client that gives up leaves tokens that are counted."""

    async def main():
        async with running() as endpoint:
            policy = RecordingPolicy(lambda turn, _: said(f"answer {turn}"), seconds=0.02)
            session = session_of(policy)
            address = endpoint.open(session)

            async def attempts(messages, plan) -> dict[str, Any] | None:
                for count, outcome in enumerate(plan):
                    body, retry = {"messages": messages}, {"x-stainless-retry-count": str(count)}
                    if outcome == "gone":
                        with suppress(asyncio.TimeoutError):
                            await asyncio.wait_for(post(address, body, **retry), 0.01)
                    else:
                        status, text = await post(address, body, **retry)
                        assert status == 200
                    if outcome == "read":
                        return json.loads(text)["choices"][0]["message"]
                return None

            async def conversation(name: int, plan):
                messages = [user(f"you are {name}")]
                if (answer := await attempts(messages, plan)) is not None:
                    await attempts([*messages, answer, user("on")], plan)

            await asyncio.gather(*(conversation(name, plan) for name, plan in enumerate(requests)))
            await asyncio.sleep(0.1)  # a request may be heard after its client is gone
            await until(lambda: session.metrics()["turns"] == len(policy.calls))
            await endpoint.close(session)
            samples = check_samples(session, policy)
            asked = sum(1 + ("read" in plan) for plan in requests)
            assert len(policy.calls) <= asked  # a client may be gone before it is heard
            read = sum("read" in plan for plan in requests)
            assert read <= len(samples) <= len(requests)
            never = sum(set(plan) == {"gone"} for plan in requests)
            assert len(samples) >= len(requests) - never
            turns = sum(len(np.unique(sample.turns[sample.response_mask])) for sample in samples)
            assert turns >= 2 * read and policy.cancelled == 0

    run(main)

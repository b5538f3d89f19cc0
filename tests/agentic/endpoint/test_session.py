"""An episode's requests become samples: each sampled token once, behind exactly what the policy read."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.agentic.endpoint.dialects import Completions
from roll.agentic.endpoint.records import RequestRefused
from tests.agentic.endpoint.conversations import (
    LOOK_UP,
    TEMPLATES,
    Client,
    RecordingPolicy,
    called,
    check_samples,
    encode,
    results,
    said,
    scripted,
    session_of,
    system,
    tokenizer_of,
    user,
)
from tests.tiers import examples


def decode(token_ids, name: str = "hermes") -> str:
    return tokenizer_of(name).decode(list(token_ids))


BEHIND = {
    "hermes": "<|im_end|>\n<|im_start|>user\n<tool_response>VII</tool_response><|im_end|>\n<|im_start|>assistant\n",
    "calls_alone": "<|im_end|><|endoftext|><|im_start|>tool\nVII<|im_end|>\n<|im_start|>assistant\n",
    "no_end": "<|im_start|>tool\nVII<|im_start|>assistant\n",
    "results_inside": "<|im_end|><result>VII</result>",
}


BEHIND["text_arguments"] = BEHIND["hermes"]


@pytest.mark.parametrize("name", BEHIND)
def test_a_call_and_its_result_continue_the_turns_own_tokens(name):
    """What the policy wrote in its own way, with other spaces, is read again as it was written."""
    wrote = '<tool_call>{"name":"look_up",   "arguments":{"x":  7}}</tool_call>'
    end = "<|im_start|>" if name == "no_end" else "<|im_end|>"

    async def main():
        policy = RecordingPolicy(lambda turn, _: encode(wrote + end if turn < 2 else "seven" + end, name))
        session = session_of(policy, name)
        client = Client(session, name)
        messages = [user("look 7 up")]
        for _ in range(2):
            answer = await client.ask(messages, tools=[LOOK_UP])
            assert answer["content"] is None
            assert json.loads(answer["tool_calls"][0]["function"]["arguments"]) == {"x": 7}
            messages += [answer, *results(answer, "VII")]
        assert (await client.ask(messages, tools=[LOOK_UP]))["content"] == "seven"
        (sample,) = check_samples(session, policy)
        assert decode(policy.calls[2].prompt, name).split(wrote)[1:] == [BEHIND[name]] * 2
        assert session.metrics()["conversations"] == 1

    asyncio.run(main())


def test_a_result_that_the_template_writes_in_other_words_continues_the_conversation():
    async def main():
        policy = scripted(called(x=7), "seven", name="json_results")
        session = session_of(policy, "json_results")
        client = Client(session, "json_results")
        answer = await client.ask([user("look 7 up")], tools=[LOOK_UP])
        told = results(answer, '{"roman": "VII"}')
        await client.ask([user("look 7 up"), answer, *told], tools=[LOOK_UP])
        (sample,) = check_samples(session, policy)
        assert r'<tool_response>"{\"roman\": \"VII\"}"</tool_response>' in decode(sample.token_ids, "json_results")
        assert session.metrics()["conversations"] == 1

    asyncio.run(main())


STYLES = {
    "as given": lambda message: message,
    "without nulls": lambda message: {key: value for key, value in message.items() if value is not None},
    "empty for null": lambda message: {**message, "content": message["content"] or ""},
    "parts": lambda message: {**message, "content": [{"type": "text", "text": message["content"] or ""}]},
    "own keys": lambda message: {**message, "reasoning_content": "another", "provider_specific_fields": {"a": 1}},
    "arguments written again": lambda message: {
        **message,
        "tool_calls": [
            {
                "id": call["id"],
                "type": "function",
                "index": 0,
                "function": {
                    "name": call["function"]["name"],
                    "arguments": json.dumps(
                        dict(reversed(json.loads(call["function"]["arguments"]).items())), separators=(",", ":")
                    ),
                },
            }
            for call in message["tool_calls"]
        ],
    },
    "trimmed": lambda message: {**message, "content": (message["content"] or "").strip()},
}


@pytest.mark.parametrize("style", STYLES)
def test_a_history_in_other_words_is_the_same_history(style):
    async def main():
        policy = scripted("let me see" + called(b=1, a=[1, 2.5, None]), "done")
        session = session_of(policy)
        client = Client(session)
        first = [system("be brief"), user("look")]
        answer = await client.ask(first, tools=[LOOK_UP])
        await client.ask([*first, STYLES[style](answer), *results(answer, "3")], tools=[LOOK_UP])
        assert len(check_samples(session, policy)) == 1
        assert not any(count for name, count in session.metrics().items() if name.startswith("new_samples/"))

    asyncio.run(main())


@pytest.mark.parametrize("change", ["words", "arguments", "name", "earlier", "tools"])
def test_another_history_is_another_sample_with_its_cause(change):
    async def main():
        policy = scripted("I look" + called(a=1), "done")
        session = session_of(policy)
        client = Client(session)
        first, tools = [user("look")], [LOOK_UP]
        answer = await client.ask(first, tools=tools)
        function = answer["tool_calls"][0]["function"]
        after = results(answer, "3")
        if change == "words":
            answer["content"] = "I looked"
        elif change == "arguments":
            function["arguments"] = '{"a": 2}'
        elif change == "name":
            function["name"] = "look_down"
        elif change == "earlier":
            first = [user("look!")]
        else:
            tools = [LOOK_UP, {"type": "function", "function": {"name": "other"}}]
        await client.ask([*first, answer, *after], tools=tools)
        assert len(check_samples(session, policy)) == 2
        assert session.metrics()[f"new_samples/{'tools' if change == 'tools' else 'history'}"] == 1

    asyncio.run(main())


def test_a_stop_string_that_the_client_puts_back_is_known():
    async def main():
        policy = RecordingPolicy(lambda turn, _: encode("<code>x</code>") if turn == 0 else said("done"))
        session = session_of(policy)
        client = Client(session)
        first = [user("write")]
        answer = await client.ask(first, stop=["</code>"])
        assert answer["content"] == "<code>x"
        assert policy.calls[0].asked["stop_strings"] == ("</code>",)
        again = {**answer, "content": answer["content"] + "</code>"}
        await client.ask([*first, again, user("go on")])
        (sample,) = check_samples(session, policy)
        assert "<code>x</code><|im_end|>\n<|im_start|>user\ngo on" in decode(sample.token_ids)

    asyncio.run(main())


def test_branches_share_their_turns_as_context_only():
    """Two continuations of one answer, and a second answer to the first request: each turn is trained on once."""

    async def main():
        policy = scripted("one", "left", "right", "two")
        session = session_of(policy)
        client = Client(session)
        first = [user("count")]
        one = await client.ask(first)
        await client.ask([*first, one, user("left?")])
        await client.ask([*first, one, user("right?")])
        await client.ask(first)
        samples = check_samples(session, policy)
        assert [np.unique(sample.turns[sample.response_mask]).tolist() for sample in samples] == [[0, 1], [2], [3]]
        assert session.metrics()["conversations"] == 2

    asyncio.run(main())


def test_a_turn_that_the_client_replaced_stays_a_branch_of_what_came_before():
    """As mini-swe-agent does: an answer without a call is taken out, and an error stands in its place."""

    async def main():
        policy = scripted("hm" + called(a=1), "no call", "ok" + called(a=2))
        session = session_of(policy)
        client = Client(session)
        first = [user("work")]
        one = await client.ask(first, tools=[LOOK_UP])
        history = [*first, one, *results(one, "3")]
        await client.ask(history, tools=[LOOK_UP])
        await client.ask([*history, user("call a tool!")], tools=[LOOK_UP])
        samples = check_samples(session, policy)
        assert [np.unique(sample.turns[sample.response_mask]).tolist() for sample in samples] == [[0, 1], [2]]
        assert session.metrics()["new_samples/history"] == 0

    asyncio.run(main())


def test_parallel_requests_of_sub_agents_do_not_meet():
    async def main():
        policy = RecordingPolicy(lambda turn, prompt: said(f"answer {len(prompt)}"), seconds=0.01)
        session = session_of(policy)
        client = Client(session)

        async def sub_agent(name: str):
            messages = [user(f"you are {name}")]
            for _ in range(3):
                messages += [await client.ask(messages), user(f"go on, {name}")]

        await asyncio.gather(*(sub_agent(name) for name in "abcdefg"))
        samples = check_samples(session, policy)
        assert len(samples) == 7
        for name, sample in zip("abcdefg", samples, strict=True):
            text = decode(sample.token_ids)
            assert f"you are {name}" in text and text.count(f"go on, {name}") == 2 and text.count("you are") == 1

    asyncio.run(main())


@pytest.mark.parametrize("reasoning", ["keep", "template"])
def test_thoughts_of_earlier_turns_are_kept_or_left_to_the_template(reasoning):
    async def main():
        name = "drops_thoughts"
        policy = scripted("<think>deep</think>one", "two", name=name)
        session = session_of(policy, name, earlier_reasoning=reasoning)
        client = Client(session, name)
        answer = await client.ask([user("count")])
        assert answer["content"] == "one" and answer["reasoning_content"] == "deep"
        await client.ask([user("count"), {"role": "assistant", "content": "one"}, user("on")])
        samples = check_samples(session, policy)
        assert ("deep" in decode(policy.calls[1].prompt)) is (reasoning == "keep")
        assert len(samples) == (1 if reasoning == "keep" else 2)
        assert session.metrics()["new_samples/template"] == (reasoning == "template")

    asyncio.run(main())


def test_thoughts_that_the_template_keeps_do_not_cut():
    """Between calls of tools, with no message of the user between, the template has them."""

    async def main():
        name = "drops_thoughts"
        policy = scripted("<think>deep</think>one", "two", name=name)
        session = session_of(policy, name, earlier_reasoning="template")
        client = Client(session, name)
        await client.ask([user("count")])
        await client.ask([user("count"), {"role": "assistant", "content": "one"}, {"role": "tool", "content": "3"}])
        assert len(check_samples(session, policy)) == 1

    asyncio.run(main())


def test_a_template_that_rewrites_gives_a_sample_per_turn():
    async def main():
        policy = scripted("one", "two", name="rewrites")
        session = session_of(policy, "rewrites")
        client = Client(session, "rewrites")
        answer = await client.ask([user("count")])
        await client.ask([user("count"), answer, user("on")])
        samples = check_samples(session, policy)
        assert len(samples) == 2 and session.metrics()["new_samples/template"] == 1
        assert decode(policy.calls[1].prompt).startswith("3 messages\n")

    asyncio.run(main())


def test_a_system_message_in_the_middle_becomes_the_users_where_the_template_refuses_it():
    async def main():
        name = "no_later_system"
        policy = scripted("one", "two", "three", name=name)
        session = session_of(policy, name)
        client = Client(session, name)
        answer = await client.ask([system("count"), user("go")])
        await client.ask([system("count"), user("go"), answer, system("slower")])
        await client.ask([system("count"), user("go"), system("now")])
        assert len(check_samples(session, policy)) == 2
        assert "<|im_start|>user\nslower" in decode(policy.calls[1].prompt)
        assert decode(policy.calls[2].prompt).startswith("<|im_start|>system\ncount")

    asyncio.run(main())


def test_a_prompt_beyond_the_room_is_refused_and_an_answer_is_cut_to_it():
    async def main():
        policy = RecordingPolicy(lambda turn, _: [5] * 1000)
        session = session_of(policy, sequence_length=60, prompt_length=40)
        client = Client(session)
        answer = await client.ask([user("go")], max_tokens=1000)
        assert policy.calls[0].asked["max_new_tokens"] == 60 - len(policy.calls[0].prompt)
        for messages in ([user("go" * 30)], [user("go"), answer, user("on")]):
            with pytest.raises(RequestRefused) as refused:
                await client.ask(messages)
            assert refused.value.status == 400 and refused.value.code == "context_length_exceeded"
        (sample,) = check_samples(session, policy)
        assert len(sample.token_ids) == 60 and sample.finish_reason == "length"

    asyncio.run(main())


@pytest.mark.parametrize("ignored", [False, True])
def test_a_form_of_the_answer_is_refused_unless_it_may_be_ignored(ignored):
    async def main():
        session = session_of(scripted("one"), ignore_response_format=ignored)
        form = {"response_format": {"type": "json_object"}}
        if ignored:
            assert (await Client(session).ask([user("count")], **form))["content"] == "one"
            return
        with pytest.raises(RequestRefused, match="in the prompt.*`ignore_response_format`") as refused:
            await Client(session).ask([user("count")], **form)
        assert (refused.value.field, refused.value.status) == ("response_format", 400)

    asyncio.run(main())


def test_answers_that_are_not_trained_on_are_counted_by_cause():
    async def main():
        policy = scripted("one", "small", "stopped", "unread", "two", aborted=frozenset({2}))
        session = session_of(policy, untrained_models=frozenset({"haiku"}), max_steps=5)
        client = Client(session)
        first = [user("count")]
        answer = await client.ask(first)
        assert session.metrics()["untrained/other_model"] == 0  # counts in a mean over episodes
        await client.ask([user("title?")], model="haiku")
        with pytest.raises(RequestRefused) as refused:
            await client.ask([user("x")])
        assert refused.value.status == 503
        unread = await session.respond(client.dialect.read({"messages": [user("y")]}))
        session.leave_out(unread.id, "unread")
        await client.ask([*first, answer, user("on")])
        with pytest.raises(RequestRefused) as refused:
            await client.ask(first)
        assert refused.value.code == "max_steps_exceeded"
        (sample,) = check_samples(session, policy)
        assert np.unique(sample.turns[sample.response_mask]).tolist() == [0, 4]
        counts = {name: value for name, value in session.metrics().items() if name.startswith("untrained/") and value}
        assert counts == {
            f"untrained/{cause}": len(said(text))
            for cause, text in (("other_model", "small"), ("aborted", "stopped"), ("unread", "unread"))
        }

    asyncio.run(main())


def test_nothing_is_recorded_after_the_end():
    async def main():
        policy = scripted("one", "late", seconds=0.02)
        session = session_of(policy)
        client = Client(session)
        await client.ask([user("go")])
        late = asyncio.ensure_future(client.ask([user("late")]))
        await asyncio.sleep(0)
        session.close()
        with pytest.raises(RequestRefused) as refused:
            await late
        assert refused.value.status == 409
        with pytest.raises(RequestRefused):
            await client.ask([user("later")])
        assert len(check_samples(session, policy)) == 1

    asyncio.run(main())


def test_what_the_policy_raises_ends_the_episode():
    class Broken(RuntimeError):
        pass

    async def main():
        async def policy(prompt, **_):
            raise Broken("the engine is gone")

        session = session_of(policy)
        with pytest.raises(RequestRefused) as refused:
            await Client(session).ask([user("go")])
        assert refused.value.status == 503
        with pytest.raises(Broken):
            session.samples(1.0, 1.0)

    asyncio.run(main())


def test_a_text_is_continued_behind_its_answer():
    async def main():
        policy = scripted("one", "two", "three")
        session = session_of(policy)
        dialect = Completions(tokenizer_of("hermes").decode)

        async def ask(prompt):
            return await session.respond(dialect.read({"prompt": prompt, "max_tokens": 50}))

        text = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n"
        one = await ask(text)
        assert one.text == "one" and one.prompt_token_ids.tolist() == encode(text)
        two = await ask(text + one.text + "<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n")
        assert decode(two.prompt_token_ids).count("<|im_end|>\n<|im_start|>user\non") == 1
        await ask([*two.prompt_token_ids.tolist(), *two.token_ids.tolist(), *encode("\nmore")])
        assert len(check_samples(session, policy)) == 2  # a text and token ids are not compared
        for beyond in ([len(tokenizer_of("hermes"))], [*one.prompt_token_ids.tolist(), *one.token_ids.tolist(), 2**30]):
            with pytest.raises(RequestRefused, match="vocabulary"):
                await ask(beyond)
        assert len(policy.calls) == 3

    asyncio.run(main())


@pytest.mark.parametrize(
    ("stop", "sampled", "told", "rest", "read"),
    [
        ("Observation:", "2\nObservation:", "2\n", "Observation: four\nThought:", "2\nObservation: four\nThought:"),
        ("Observation:", "2\nObservation:", "2\n", "Observation:", "2\nObservation:"),
        ("\n", "2\n\n", "2", "\nQ:", "2\n\nQ:"),
        ("\n", "2\n", "2", "and on", "2\nand on"),
        ("</tool>", "call</tool>", "call", "</answer>", "call</tool></answer>"),
    ],
)
def test_a_stop_string_with_which_a_text_goes_on_is_read_once(stop, sampled, told, rest, read):
    """As an agent does that writes results behind `Observation:`, where the policy stopped."""

    async def main():
        policy = RecordingPolicy(lambda turn, _: encode(sampled) if turn == 0 else said("done"))
        session = session_of(policy)
        dialect = Completions(tokenizer_of("hermes").decode)

        async def ask(prompt):
            return await session.respond(dialect.read({"prompt": prompt, "max_tokens": 50, "stop": stop}))

        one = await ask("What is 1 + 1?\n")
        assert one.text == told
        two = await ask("What is 1 + 1?\n" + told + rest)
        assert decode(two.prompt_token_ids) == f"What is 1 + 1?\n{read}"
        assert len(check_samples(session, policy)) == 1

    asyncio.run(main())


@st.composite
def plans(draw):
    """Requests of an episode: each goes on from an earlier answer, repeats a request, rewrites a history or begins."""
    kinds = ["continue", "continue", "continue", "begin", "repeat", "rewrite", "other_model", "many"]
    count = draw(st.integers(1, 12))
    tokens = st.lists(st.integers(0, len(tokenizer_of("hermes")) - 1), max_size=6)
    words = st.sampled_from(["ok", "let me see", "<think>why</think>so", "<|im_end|> spelled", called(a=1), ""])
    answers = draw(
        st.lists(st.one_of(tokens, words.map(said), words.map(encode)), min_size=3 * count, max_size=3 * count)
    )
    steps = [
        (draw(st.sampled_from(kinds)), draw(st.integers(0, 99)), draw(st.sampled_from(list(STYLES))))
        for _ in range(count)
    ]
    return answers, steps, draw(st.sets(st.integers(0, 3 * count), max_size=2))


@settings(max_examples=examples(150))
@given(
    plans(),
    st.sampled_from(sorted(TEMPLATES)),
    st.sampled_from(["keep", "template"]),
)
def test_whatever_an_agent_asks_no_sampled_token_is_lost_or_trained_on_twice(plan, name, reasoning):
    answers, steps, aborted = plan

    async def main():
        policy = RecordingPolicy(lambda turn, _: answers[turn], aborted=frozenset(aborted))
        session = session_of(policy, name, earlier_reasoning=reasoning, untrained_models=frozenset({"other"}))
        client = Client(session, name)
        asked: list[tuple[list, dict]] = []
        requests: list[list] = []

        async def ask(messages, **fields):
            requests.append(messages)
            try:
                asked.append((messages, await client.ask(messages, tools=[LOOK_UP], **fields)))
            except RequestRefused as refused:
                assert refused.code == "aborted"

        for kind, choice, style in steps:
            if kind == "begin" or not asked:
                await ask([user(f"begin {choice}")])
                continue
            messages, answer = asked[choice % len(asked)]
            told = STYLES[style](answer) if answer.get("tool_calls") or style != "arguments written again" else answer
            after = results(answer, *["r"] * len(answer["tool_calls"])) if answer.get("tool_calls") else [user("on")]
            if kind == "repeat":
                await ask(messages)
            elif kind == "rewrite":
                await ask([*messages, {"role": "assistant", "content": f"rewritten {choice}"}, user("on")])
            elif kind == "other_model":
                await ask([*messages, told, *after], model="other")
            elif kind == "many":
                await asyncio.gather(*(ask([*messages, told, *after, user(f"branch {each}")]) for each in range(3)))
            else:
                await ask([*messages, told, *after])
        check_samples(session, policy)
        if name == "hermes" and reasoning == "keep":
            metrics = session.metrics()
            assert {name for name, value in metrics.items() if value} <= {
                "turns",
                "conversations",
                "capped_turns",
                "tokens",
                "new_samples/history",
                "untrained/aborted",
                "untrained/other_model",
            }
            rewritten = sum("rewritten" in str(messages[-2:-1]) for messages in requests)
            assert metrics["new_samples/history"] <= rewritten

    asyncio.run(main())

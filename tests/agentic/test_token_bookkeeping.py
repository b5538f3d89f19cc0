"""Whatever the policy samples, in whatever template: its tokens are trained on as they were sampled, and only those."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.agentic.episode import Observation
from roll.agentic.manager import state_id
from roll.data.chat import ChatTurns
from tests.agentic.episodes import ScriptedPolicy, ScriptedSession, encode, limits, run_episode, user
from tests.data.chat_templates import FORMATS, make_tokenizer
from tests.tiers import examples

plain_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
rewards = st.floats(-4, 4, width=16)


@st.composite
def observations(draw, first: bool = False, system: bool = False):
    head = ({"role": "system", "content": draw(plain_text)},) if first and system and draw(st.booleans()) else ()
    return Observation(
        messages=(*head, user(draw(plain_text))),
        reward=0.0 if first else draw(rewards),
        action_is_valid=draw(st.booleans()),
        state=draw(st.sampled_from([None, "a", "b"])),
    )


@st.composite
def episodes(draw):
    """A format, what the environment says, and what the policy samples: any tokens, special ones and parts of
    characters among them, or nothing, often ended by the format's own end of turn."""
    name = draw(st.sampled_from(sorted(FORMATS)))
    tokenizer, form = make_tokenizer(name), FORMATS[name]
    stop = tokenizer.convert_tokens_to_ids(form.stop)
    tokens = st.lists(st.integers(0, len(tokenizer) - 1), max_size=8)
    special = st.lists(st.sampled_from(sorted(tokenizer.all_special_ids)), max_size=3)
    response = st.tuples(st.one_of(tokens, special), st.booleans()).map(lambda drawn: drawn[0] + [stop] * drawn[1])
    turns = draw(st.integers(1, 5))
    said = [draw(observations(first=True, system=form.has_system))] + [draw(observations()) for _ in range(turns)]
    return name, said, [draw(response) for _ in range(turns)]


def glue_by_hand(name: str, said: list[Observation], turn: int, sampled: np.ndarray) -> list[int]:
    """The tokens between two turns, cut out of the whole conversation's text."""
    form, tokenizer = FORMATS[name], make_tokenizer(name)
    messages = list(said[0].messages)
    for answer in said[1:]:
        messages += [{"role": "assistant", "content": "Xcontentx"}, *answer.messages]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    piece = re.split("Xcontentx", text)[turn + 1]
    if turn + 2 < len(said):
        piece = piece.removesuffix(form.before_content)
    has_ended = len(sampled) and sampled[-1] == tokenizer.convert_tokens_to_ids(form.stop)
    return encode(piece.split(form.stop, 1)[1] if has_ended else piece, name)


@settings(max_examples=examples(150))
@given(episodes())
def test_a_trajectory_is_prompt_then_sampled_tokens_and_glue_in_turn(drawn):
    name, said, responses = drawn
    policy = ScriptedPolicy(responses)
    settings = limits(max_steps=len(responses), sequence_length=5000, prompt_length=1000)
    episode = run_episode("trajectory", ScriptedSession(said), policy, settings, ChatTurns(make_tokenizer(name)), name)
    (sample,) = episode.samples
    segments, mask = [policy.prompts[0].tolist()], [False] * len(policy.prompts[0])
    for turn, sampled in enumerate(policy.sampled):
        segments.append(sampled.token_ids.tolist())
        mask += [True] * len(sampled.token_ids)
        if turn + 1 < len(responses):
            segments.append(glue_by_hand(name, said, turn, sampled.token_ids))
            mask += [False] * len(segments[-1])
    assert sample.token_ids.tolist() == sum(segments, [])
    assert sample.response_mask.tolist() == mask


@settings(max_examples=examples(100))
@given(episodes(), st.integers(60, 160), st.one_of(st.none(), st.integers(1, 9)))
def test_what_was_sampled_stands_where_the_mask_says_and_nothing_else_does(drawn, sequence_length, max_tokens):
    name, said, responses = drawn
    policy = ScriptedPolicy(responses)
    settings = limits(
        max_steps=len(responses),
        sequence_length=sequence_length,
        max_tokens_per_step=max_tokens,
        format_penalty=-0.5,
    )
    template = ChatTurns(make_tokenizer(name))
    if len(template.prompt(said[0].messages)) >= sequence_length:
        return
    episode = run_episode("trajectory", ScriptedSession(said), policy, settings, template, name)
    (sample,) = episode.samples
    assert len(sample.token_ids) <= sequence_length
    assert episode.end == ("sequence_length" if len(policy.sampled) < len(responses) else "max_steps")
    assert_sampled(sample, policy.sampled, range(len(policy.sampled)))
    for prompt, sampled, asked in zip(policy.prompts, policy.sampled, policy.asked, strict=True):
        beginning = np.concatenate([prompt, sampled.token_ids])
        assert np.array_equal(sample.token_ids[: len(beginning)], beginning)
        assert asked == min(max_tokens or sequence_length, sequence_length - len(prompt)) >= 1
    assert_rewards(episode, said, policy)


@settings(max_examples=examples(100))
@given(episodes(), st.integers(0, 3), st.booleans())
def test_a_step_sample_is_the_prompt_that_was_read_and_what_was_sampled(drawn, history, keep_first):
    name, said, responses = drawn
    policy = ScriptedPolicy(responses)
    settings = limits(
        max_steps=len(responses),
        prompt_length=150,
        history_length=history,
        keep_first_observation=keep_first,
        format_penalty=-0.5,
    )
    episode = run_episode("step", ScriptedSession(said), policy, settings, ChatTurns(make_tokenizer(name)), name)
    written = [turn for turn, sampled in enumerate(policy.sampled) if len(sampled.token_ids)] or [0]
    assert len(episode.samples) == len(written)
    for sample, turn in zip(episode.samples, written, strict=True):
        assert len(policy.prompts[turn]) <= 150
        row = np.concatenate([policy.prompts[turn], policy.sampled[turn].token_ids])
        assert np.array_equal(sample.token_ids, row)
        assert not sample.response_mask[: len(policy.prompts[turn])].any()
        assert_sampled(sample, [policy.sampled[turn]], [turn])
    assert_rewards(episode, said, policy)


def assert_sampled(sample, sampled, numbers) -> None:
    """Each array has what the policy gave at the sampled tokens, in order, and nothing elsewhere."""
    mask = sample.response_mask
    assert np.array_equal(sample.token_ids[mask], np.concatenate([turn.token_ids for turn in sampled]))
    assert np.array_equal(sample.behaviour_logprobs[mask], np.concatenate([turn.logprobs for turn in sampled]))
    assert np.array_equal(sample.versions[mask], np.concatenate([turn.versions for turn in sampled]))
    owners = [[number] * len(turn.token_ids) for number, turn in zip(numbers, sampled, strict=True)]
    assert sample.turns[mask].tolist() == sum(owners, [])
    assert not sample.behaviour_logprobs[~mask].any() and not sample.turn_rewards[~mask].any()
    for values in (sample.versions, sample.turns, sample.turn_states):
        assert (values[~mask] == -1).all()


def assert_rewards(episode, said, policy) -> None:
    """Each turn's reward stands at its last token (or at the last one before it), its state at all of its tokens."""
    answers = said[1 : len(policy.sampled) + 1]
    assert episode.score == pytest.approx(sum(answer.reward for answer in answers))
    due: dict[int, float] = {}
    for turn, (answer, sampled) in enumerate(zip(answers, policy.sampled, strict=True)):
        if len(sampled.token_ids):
            due[turn] = 0.0
        if due:
            due[max(due)] += answer.reward - (0 if answer.action_is_valid else 0.5)
    for sample in episode.samples:
        assert sample.score == episode.score
        for turn in np.unique(sample.turns[sample.response_mask]):
            places = np.flatnonzero(sample.turns == turn)
            assert sample.turn_rewards[places[-1]] == pytest.approx(due.pop(int(turn)))
            assert not sample.turn_rewards[places[:-1]].any()
            assert (sample.turn_states[places] == state_id(said[turn].state)).all()
    assert due == {}

"""Limits, ends, penalties, errors: what both managers do around the tokens."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from roll.agentic.episode import (
    EnvironmentFailed,
    EpisodeRefused,
    ManagerSettings,
    Observation,
    PolicyAborted,
    SampledTurn,
    TurnRecord,
)
from roll.agentic.manager import state_id
from roll.configs.errors import ConfigError
from roll.data.chat import ChatTurns, TemplateRefused
from tests.agentic.episodes import (
    ScriptedPolicy,
    ScriptedSession,
    decode,
    encode,
    limits,
    make_manager,
    observe,
    plain_turns,
    play_texts,
    run_episode,
)
from tests.data.chat_templates import make_tokenizer

both = pytest.mark.parametrize("manager", ["trajectory", "step"])


def rewards_by_turn(episode) -> list[float]:
    """What the sampled tokens carry, in the order of the turns."""
    return [
        float(sample.turn_rewards[sample.turns == turn].sum())
        for sample in episode.samples
        for turn in np.unique(sample.turns[sample.response_mask])
    ]


@both
@pytest.mark.parametrize(
    ("last", "end"),
    [
        (observe("over", terminated=True), "terminated"),
        (observe("over", truncated=True), "truncated"),
        (observe("over", terminated=True, truncated=True), "terminated"),
        (observe("on"), "max_steps"),
    ],
)
def test_an_episode_ends_as_the_environment_says_or_at_max_steps(manager, last, end):
    answers = [observe("a"), observe("b"), last]
    episode, session, policy = play_texts(manager, answers, ["x", "y", "z"], limits(max_steps=2))
    assert (episode.end, len(policy.prompts), len(episode.turns), session.closed) == (end, 2, 2, 1)
    assert session.seeds == [7] and (episode.tag, episode.seed) == ("lake", 7)
    assert {sample.finish_reason for sample in episode.samples} == {"stop"}


@both
def test_what_is_told_about_an_episode(manager):
    answers = [
        observe("a", frame="@..", metrics={"energy": 3, "luck": 1}),
        observe("b", reward=0.5, action_is_valid=False, frame=".@.", metrics={"energy": 2}),
        observe("c", reward=1.0, terminated=True, success=True, frame="..@"),
    ]
    episode, _, _ = play_texts(manager, answers, ["x<|im_end|>", "yy"], limits(format_penalty=-0.25))
    assert (episode.score, episode.success, episode.last_frame) == (1.5, True, "..@")
    assert episode.turns == [
        TurnRecord("a", "x", 0.5, action_is_valid=False, frame="@.."),
        TurnRecord("b", "yy", 1.0, action_is_valid=True, frame=".@."),
    ]
    tokens = len(encode("x<|im_end|>")) + len(encode("yy"))
    assert episode.metrics == {
        "turns": 2,
        "invalid_actions": 0.5,
        "capped_turns": 0,
        "tokens": tokens,
        "energy": 2,
        "luck": 1,
    }
    assert rewards_by_turn(episode) == [0.25, 1.0]
    assert {(sample.score, sample.reward) for sample in episode.samples} == {(1.5, 1.25)}


@both
def test_the_last_word_on_success_counts_and_silence_is_none(manager):
    said = [observe("a"), observe("b", success=True), observe("c", success=False, terminated=True)]
    assert not play_texts(manager, said, ["x", "y"])[0].success
    said = [observe("a"), observe("b", success=True), observe("c", terminated=True)]
    assert play_texts(manager, said, ["x", "y"])[0].success
    assert not play_texts(manager, [observe("a"), observe("b", terminated=True)], ["x"])[0].success


@both
def test_the_environment_reads_text_without_special_tokens(manager):
    answers = [observe("a"), observe("b"), observe("c", terminated=True)]
    _, session, _ = play_texts(manager, answers, ["<|im_start|>go <|im_end|>left<|endoftext|>", "<|im_end|>"])
    assert session.texts == ["go left", ""]


def test_the_text_of_a_trajectory_shows_all_that_follows_the_first_prompt():
    answers = [observe("a"), observe("b"), observe("c", terminated=True)]
    episode, _, _ = play_texts("trajectory", answers, ["x<|im_end|>", "y"])
    assert episode.samples[0].response_text == "x<|im_end|>;b>y"


def test_the_text_of_a_step_is_what_the_environment_read():
    answers = [observe("a"), observe("b"), observe("c", terminated=True)]
    episode, _, _ = play_texts("step", answers, ["x<|im_end|>", "y"])
    assert [sample.response_text for sample in episode.samples] == ["x", "y"]


@both
def test_turns_are_credited_with_the_state_they_acted_in(manager):
    last = observe("d", state="s3", terminated=True)
    answers = [observe("a", state="s0"), observe("b"), observe("c", state="s0"), last]
    episode, _, _ = play_texts(manager, answers, ["x", "yy", "zzz"])
    states = [sample.turn_states[sample.response_mask].tolist() for sample in episode.samples]
    flat = [state for each in states for state in each]
    lengths = [len(encode(text)) for text in ("x", "yy", "zzz")]
    expected = [[state_id(state)] * length for state, length in zip(["s0", None, "s0"], lengths, strict=True)]
    assert flat == sum(expected, [])


def test_states_have_64_bit_numbers_that_are_equal_on_every_machine():
    assert state_id(None) == -1
    assert state_id("S.G") == -1185206551457775883
    numbers = {state_id(f"state {number}") for number in range(1000)}
    assert len(numbers) == 1000 and -1 not in numbers
    assert all(-(2**63) <= number < 2**63 for number in numbers)
    assert any(abs(number) > 2**60 for number in numbers)


@both
def test_a_turn_without_tokens_gives_its_reward_to_the_one_before(manager):
    answers = [observe("a"), observe("b", reward=1), observe("c", reward=2), observe("d", reward=4, terminated=True)]
    episode, _, policy = play_texts(manager, answers, ["x", "", "y"])
    assert rewards_by_turn(episode) == [3, 4]
    assert episode.score == 7
    if manager == "step":
        assert [int(sample.turns.max()) for sample in episode.samples] == [0, 2]


@both
def test_an_episode_without_a_sampled_token_is_still_one_sample(manager):
    answers = [observe("a"), observe("b", reward=1), observe("c", reward=2, terminated=True)]
    episode, _, policy = play_texts(manager, answers, ["", ""])
    (sample,) = episode.samples
    assert not sample.response_mask.any() and not sample.turn_rewards.any()
    assert (sample.score, sample.finish_reason) == (3, "stop")


@both
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_length": 9}, "`prompt_length: 9` allows 9; raise `prompt_length` to at least 11"),
        ({"sequence_length": 11}, "`sequence_length: 11` allows 10; raise `sequence_length` to at least 12"),
    ],
)
def test_a_first_prompt_that_is_too_long_is_refused(manager, changes, message):
    session = ScriptedSession([observe("0123456789")])
    with pytest.raises(EpisodeRefused, match=f"'lake', seed 7: the first prompt has 11 tokens, and {message}"):
        run_episode(manager, session, ScriptedPolicy([]), limits(**changes))
    assert session.closed == 1


def test_a_first_prompt_that_just_fits_is_played():
    answers = [observe("0123456789"), observe("b")]
    episode, _, policy = play_texts("trajectory", answers, ["xyzuvw"], limits(prompt_length=11, sequence_length=12))
    assert (episode.end, policy.asked) == ("sequence_length", [1])
    assert episode.samples[0].finish_reason == "length"


@pytest.mark.parametrize(("sequence_length", "turns"), [(7, 1), (8, 2)])
def test_a_trajectory_goes_on_while_one_token_of_room_is_left(sequence_length, turns):
    """`a>` `1` `;b>` make six tokens and a response; the glue leaves room for one more token from eight on."""
    answers = [observe("a"), observe("bb"), observe("c", reward=1)]
    settings = limits(sequence_length=sequence_length)
    episode, session, policy = play_texts("trajectory", answers, ["1", "23"], settings)
    assert (episode.end, len(policy.prompts)) == ("sequence_length", turns)
    assert episode.samples[0].finish_reason == "length"
    assert decode(episode.samples[0].token_ids) == "a>1" + ";bb>2" * (turns - 1)
    assert session.closed == 1


@both
def test_a_response_is_no_longer_than_max_tokens_per_step(manager):
    answers = [observe("a"), observe("b"), observe("c", terminated=True)]
    settings = limits(max_tokens_per_step=2)
    episode, session, policy = play_texts(manager, answers, ["123", "4"], settings)
    assert (policy.asked, session.texts, episode.end) == ([2, 2], ["12", "4"], "terminated")
    if manager == "step":
        assert episode.metrics["capped_turns"] == 0.5
        assert {sample.finish_reason for sample in episode.samples} == {"stop"}


def test_a_cut_response_does_not_make_a_cut_episode():
    answers = [observe("a"), observe("b", terminated=True)]
    episode, _, _ = play_texts("trajectory", answers, ["123"], limits(max_tokens_per_step=2))
    assert (episode.end, episode.samples[0].finish_reason) == ("terminated", "stop")
    assert episode.metrics["capped_turns"] > 0


WINDOWS = [
    (limits(history_length=0, keep_first_observation=False), ["a>", "b>", "c>", "d>"]),
    (limits(history_length=1, keep_first_observation=False), ["a>", "a>0;b>", "b>1;c>", "c>2;d>"]),
    (limits(history_length=0), ["a>", "a\n\nb>", "a\n\nc>", "a\n\nd>"]),
    (limits(history_length=1), ["a>", "a>0;b>", "a\n\nb>1;c>", "a\n\nc>2;d>"]),
    (limits(history_length=9), ["a>", "a>0;b>", "a>0;b>1;c>", "a>0;b>1;c>2;d>"]),
]


@pytest.mark.parametrize(("settings", "prompts"), WINDOWS)
def test_a_step_reads_the_first_observation_the_last_turns_and_the_present_one(settings, prompts):
    answers = [*map(observe, "abcd"), observe("e", terminated=True)]
    episode, _, policy = play_texts("step", answers, "0123", settings)
    assert [decode(prompt) for prompt in policy.prompts] == prompts
    assert [decode(sample.token_ids) for sample in episode.samples] == [
        prompt + response for prompt, response in zip(prompts, "0123", strict=True)
    ]


@pytest.mark.parametrize(
    ("prompt_length", "last"),
    [(14, "a>0;b>1;c>2;d>"), (13, "a\n\nb>1;c>2;d>"), (11, "a\n\nc>2;d>"), (6, "a\n\nd>"), (3, "d>")],
)
def test_a_window_that_is_too_long_loses_its_oldest_turns(prompt_length, last):
    answers = [*map(observe, "abcd"), observe("e", terminated=True)]
    _, _, policy = play_texts("step", answers, "0123", limits(prompt_length=prompt_length))
    assert decode(policy.prompts[-1]) == last
    assert len(policy.prompts[-1]) <= prompt_length


def test_the_system_message_stays_where_all_else_but_the_present_observation_goes():
    first = Observation(({"role": "system", "content": "s"}, {"role": "user", "content": "a"}))
    answers = [first, observe("b"), observe("c", terminated=True)]
    _, _, policy = play_texts("step", answers, "01", limits(prompt_length=5))
    assert [decode(prompt) for prompt in policy.prompts] == ["s\na>", "s\nb>"]


def test_a_present_observation_that_does_not_fit_ends_an_episode_of_steps():
    answers = [observe("a"), observe("b"), observe("0123456789", reward=1)]
    episode, _, policy = play_texts("step", answers, "01", limits(prompt_length=9))
    assert (episode.end, len(policy.prompts), episode.score) == ("sequence_length", 2, 1)
    assert [sample.finish_reason for sample in episode.samples] == ["length", "length"]


def test_a_window_keeps_the_system_message_and_the_tools():
    tool = {"type": "function", "function": {"name": "calculator"}}
    first = Observation(({"role": "system", "content": "Play."}, {"role": "user", "content": "a"}), tools=(tool,))
    session = ScriptedSession([first, observe("b"), observe("c"), observe("d", terminated=True)])
    policy = ScriptedPolicy([encode(text) for text in "012"])
    settings = limits(history_length=1, keep_first_observation=False, prompt_length=390)
    run_episode("step", session, policy, settings, ChatTurns(make_tokenizer("chatml")))
    start = policy.prompts[0].tolist().index(encode("<|im_end|>")[0])
    system = decode(policy.prompts[0][: start + 1])
    assert "Play." in system and "calculator" in system
    assert decode(policy.prompts[2]) == system + (
        "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_steps_go_on_in_a_template_that_a_trajectory_is_refused_in():
    first = Observation(({"role": "system", "content": "Play."}, {"role": "user", "content": "a"}))
    answers = [first, observe("b"), observe("c", terminated=True)]
    template = ChatTurns(make_tokenizer("mistral"))
    policy = ScriptedPolicy([encode("0", "mistral"), encode("1", "mistral")])
    with pytest.raises(TemplateRefused, match="env_manager_cls: step"):
        run_episode("trajectory", ScriptedSession(answers), policy, template=template, name="mistral")
    policy = ScriptedPolicy(policy.responses)
    run_episode("step", ScriptedSession(answers), policy, template=template, name="mistral")
    assert decode(policy.prompts[1], "mistral") == "<s>[INST] a[/INST] 0</s>[INST] Play.\n\nb[/INST]"


class Failing:
    """A policy that ends its second turn badly."""

    def __init__(self, ending) -> None:
        self.ending = ending

    async def __call__(self, prompt_token_ids, *, turn, max_new_tokens):
        if turn and isinstance(self.ending, Exception):
            raise self.ending
        one = SampledTurn(np.array([3], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
        return self.ending if turn else one


def sampled(tokens: int, logprobs: int, finish_reason: str) -> SampledTurn:
    return SampledTurn(
        np.zeros(tokens, np.int32), np.zeros(logprobs, np.float32), np.zeros(tokens, np.int32), finish_reason
    )


@both
@pytest.mark.parametrize(
    ("ending", "error", "message"),
    [
        (sampled(2, 2, "abort"), PolicyAborted, r"'lake', seed 7, turn 1: .*aborted after 2 tokens"),
        (sampled(4, 4, "stop"), ValueError, r"'lake', seed 7, turn 1: .*4 tokens .* at most 3"),
        (sampled(2, 1, "stop"), ValueError, r"turn 1: .*2 tokens with 1 log-probabilities"),
        (OSError("engine"), OSError, "engine"),
    ],
)
def test_a_policy_that_fails_ends_the_episode_with_an_error_and_the_session_is_closed(manager, ending, error, message):
    session = ScriptedSession([observe("a"), observe("b")])
    with pytest.raises(error, match=message):
        run_episode(manager, session, Failing(ending), limits(max_tokens_per_step=3))
    assert session.closed == 1


@both
@pytest.mark.parametrize(
    "answers", [[EnvironmentFailed("died")], [observe("a"), EnvironmentFailed("died")]], ids=["reset", "step"]
)
def test_an_environment_that_fails_ends_the_episode_with_its_error_and_the_session_is_closed(manager, answers):
    session = ScriptedSession(answers)
    with pytest.raises(EnvironmentFailed, match="died"):
        run_episode(manager, session, ScriptedPolicy([[3]]))
    assert session.closed == 1


@both
def test_an_environment_that_is_over_at_its_reset_has_failed(manager):
    session = ScriptedSession([observe("a", truncated=True)])
    with pytest.raises(EnvironmentFailed, match="'lake', seed 7: the reset answered that the episode is over"):
        run_episode(manager, session, ScriptedPolicy([]))
    assert session.closed == 1


@both
def test_a_cancelled_episode_closes_its_session(manager):
    async def scenario():
        asked, session = asyncio.Event(), ScriptedSession([observe("a")])

        async def policy(prompt_token_ids, *, turn, max_new_tokens):
            asked.set()
            await asyncio.Event().wait()

        made = make_manager(manager, limits(), plain_turns(), make_tokenizer("chatml"))
        task = asyncio.create_task(made.run_episode(session, policy, tag="lake", seed=7))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.closed == 1

    asyncio.run(scenario())


@both
def test_one_manager_conducts_many_episodes_at_once(manager):
    made = make_manager(manager, limits(), plain_turns(), make_tokenizer("chatml"))

    async def scenario():
        episodes, policies = [], []
        for number in range(20):
            answers = [observe(f"{number}{letter}") for letter in "abc"] + [observe("end", terminated=True)]
            policies.append(Yielding([encode(f"{number}"), encode("x"), encode("y")]))
            episodes.append(made.run_episode(ScriptedSession(answers), policies[-1], tag="lake", seed=number))
        return await asyncio.gather(*episodes), policies

    episodes, policies = asyncio.run(asyncio.wait_for(scenario(), 60))
    for number, (episode, policy) in enumerate(zip(episodes, policies, strict=True)):
        assert episode.seed == number
        assert decode(episode.samples[-1].token_ids) == f"{number}a>{number};{number}b>x;{number}c>y"
        assert len(policy.prompts) == 3


class Yielding(ScriptedPolicy):
    """Lets others go first."""

    async def __call__(self, prompt_token_ids, *, turn, max_new_tokens):
        await asyncio.sleep(0)
        return await super().__call__(prompt_token_ids, turn=turn, max_new_tokens=max_new_tokens)


@both
def test_the_policy_cannot_change_what_it_has_read(manager):
    class Scribbling(ScriptedPolicy):
        async def __call__(self, prompt_token_ids, *, turn, max_new_tokens):
            with pytest.raises(ValueError, match="read-only"):
                prompt_token_ids[0] = 9
            return await super().__call__(prompt_token_ids, turn=turn, max_new_tokens=max_new_tokens)

    answers = [observe("a"), observe("b"), observe("c", terminated=True)]
    run_episode(manager, ScriptedSession(answers), Scribbling([encode("0"), encode("1")]))


class OwnManager:
    """What a user's package may have."""

    def __init__(self, settings: ManagerSettings, template, decoder) -> None:
        self.settings = settings


def test_a_manager_of_the_users_own_is_found_by_its_import_path():
    made = make_manager("tests.agentic.test_managers:OwnManager", limits(max_steps=3), plain_turns(), None)
    assert type(made).__name__ == "OwnManager" and made.settings.max_steps == 3


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("trajectry", "did you mean `trajectory`"),
        ("roll.agentic.manager:NoManager", "has no 'NoManager'"),
        ("no.such.module:Manager", "cannot be imported"),
        ("roll.agentic.manager:ENVIRONMENT_MANAGERS", "is a Kind"),
    ],
)
def test_a_manager_that_is_not_there_is_a_configuration_error_with_its_key(name, message):
    with pytest.raises(ConfigError, match=message) as caught:
        make_manager(name, limits(), plain_turns(), None, path="custom_envs.lake.env_manager_cls")
    assert caught.value.problems[0].path == "custom_envs.lake.env_manager_cls"

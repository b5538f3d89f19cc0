from __future__ import annotations

import random

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.base import BadOption, observation_from
from roll.agentic.library.question_games import NumberGuessingEnv, ReasoningGymEnv, TextArenaEnv
from roll.agentic.registry import make_env
from roll.configs.errors import ConfigError, problems_of

# Number guessing


def guess(env: NumberGuessingEnv, number: int) -> tuple:
    return env.step(f"<answer>{number}</answer>")


@given(st.integers(0, 2**31), st.integers(-50, 50), st.integers(1, 300))
def test_halving_finds_the_number_and_the_state_is_what_is_known(seed, low, width):
    high = low + width
    env = NumberGuessingEnv(low=low, high=high, max_guesses=9)
    _, info = env.reset(seed=seed)
    known = (low, high)
    while True:
        middle = sum(known) // 2
        assert info["state"].startswith(f"{known[0]} to {known[1]}, ")
        text, reward, terminated, truncated, info = guess(env, middle)
        if terminated:
            break
        assert reward == 0.0 and not info["success"] and not truncated
        known = (middle + 1, known[1]) if "higher" in text else (known[0], middle - 1)
    assert (reward, info["success"], text) == (1.0, True, f"{middle} is right.")
    assert info["state"].startswith(f"{middle} to {middle}, ")


def test_too_many_wrong_guesses_end_the_episode():
    env = NumberGuessingEnv(low=1, high=1000, max_guesses=2, guess_reward=-0.1)
    env.reset(seed=0)
    wrong = [number for number in (1, 2, 3) if str(number) != env.render().split("\n")[0].removeprefix("number: ")]
    assert guess(env, wrong[0])[1:3] == (-0.1, False)
    text, reward, terminated, _, info = guess(env, wrong[1])
    assert (reward, terminated, info["success"]) == (-0.1, True, False) and "Guesses left: 0" in text
    with pytest.raises(gymnasium.error.ResetNeeded):
        guess(env, 3)


@pytest.mark.parametrize("answer", ["fifty", "0", "101", "5.0", "", "9" * 5000, "٥"])
def test_what_is_no_guess_costs_none(answer):
    env = NumberGuessingEnv()
    _, before = env.reset(seed=0)
    answer, reward, terminated, _, info = env.step(f"<answer>{answer}</answer>")
    assert (reward, terminated, info["action_is_valid"], info["state"]) == (0.0, False, False, before["state"])
    assert "from 1 to 100" in answer


def test_a_tiny_policy_reads_single_words():
    env = NumberGuessingEnv(low=0, high=9, instructions=False, action_format="plain")
    text, info = env.reset(seed=0)
    assert text == "0 to 9" and "system" not in info
    words = {env.step(str(number))[0] for number in (0, 9)}
    assert words == {"higher", "lower"}
    assert env.step("x")[0] == "?"


def test_all_numbers_are_drawn():
    env = NumberGuessingEnv(low=1, high=4)
    drawn = set()
    for seed in range(60):
        env.reset(seed=seed)
        drawn.add(env.render().split("\n")[0])
    assert drawn == {f"number: {number}" for number in (1, 2, 3, 4)}


@pytest.mark.parametrize(
    ("options", "option"),
    [({"low": 5, "high": 5}, "high"), ({"max_guesses": 0}, "max_guesses"), ({"action_format": "x"}, "action_format")],
)
def test_a_game_that_cannot_work_is_named(options, option):
    assert [each.path for each in problems_of(lambda: make_env("number_guessing", options))] == [f"env_config.{option}"]
    with pytest.raises(ValueError, match=option):
        NumberGuessingEnv(**options)


# reasoning-gym


def right_answer(env: ReasoningGymEnv) -> str:
    return env.render().rpartition("right answer: ")[2]


def test_the_right_answer_ends_the_task_with_its_score():
    env = ReasoningGymEnv("chain_sum", max_attempts=3)
    text, info = env.reset(seed=5)
    assert info["state"] == text and "You have 3 attempts" in info["system"]
    text, reward, terminated, _, info = env.step("I say <answer>no idea</answer>")
    assert (reward, terminated, info["success"], info["action_is_valid"]) == (0.0, False, False, True)
    assert "Attempts left: 2" in text
    text, reward, terminated, _, info = env.step(f"<answer>{right_answer(env)}</answer>")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert info["metrics"] == {"score": 1.0, "attempts": 2, "scorer_failed": False}
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("again")


def test_the_last_attempt_earns_its_score_whatever_it_is():
    env = ReasoningGymEnv("chain_sum", action_format="plain", max_attempts=2)
    env.reset(seed=5)
    partly = f"{right_answer(env)} or so, I think"
    assert env.step(partly)[1:3] == (0.0, False)
    _, reward, terminated, _, info = env.step(partly)
    assert 0 < reward < 1 and terminated and not info["success"] and info["metrics"]["score"] == reward


def test_a_text_without_an_answer_is_an_attempt_and_no_action():
    env = ReasoningGymEnv("chain_sum")
    env.reset(seed=5)
    _, reward, terminated, _, info = env.step("I do not know")
    assert (reward, terminated, info["action_is_valid"]) == (0.0, True, False)


def test_a_seed_chooses_the_task():
    env, other = ReasoningGymEnv("chain_sum"), ReasoningGymEnv("chain_sum")
    tasks = [env.reset(seed=seed)[0] for seed in range(10)]
    assert [other.reset(seed=seed)[0] for seed in reversed(range(10))][::-1] == tasks
    assert len(set(tasks)) == 10


def test_arguments_reach_the_data_set():
    env = ReasoningGymEnv("chain_sum", {"min_terms": 9, "max_terms": 9, "min_digits": 1, "max_digits": 1}, size=5)
    questions = {env.reset(seed=seed)[0] for seed in range(30)}
    assert len(questions) <= 5
    assert all(question.count("+") + question.count("-") == 8 for question in questions)


def test_a_scorer_that_fails_gives_no_score():
    env = ReasoningGymEnv("chain_sum", action_format="plain")
    env.reset(seed=1)
    env._tasks.score_answer = None  # what data sets do with odd answers is theirs: here a call that raises
    _, reward, terminated, _, info = env.step("1")
    assert (reward, terminated, info["metrics"]["scorer_failed"]) == (0.0, True, True)


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"dataset": "chain_smu"}, "dataset"),
        ({"dataset": "chain_sum", "config": {"min_trems": 2}}, "config.min_trems"),
        ({"dataset": "chain_sum", "config": {"seed": 2}}, "config.seed"),
        ({"dataset": "chain_sum", "config": {"min_terms": -2}}, "config"),
        ({"dataset": "chain_sum", "max_attempts": 0}, "max_attempts"),
        ({"dataset": "chain_sum", "action_format": "x"}, "action_format"),
    ],
)
def test_a_task_that_cannot_work_is_named(options, option):
    assert [each.path for each in problems_of(lambda: make_env("reasoning_gym", options))] == [f"env_config.{option}"]
    with pytest.raises((ConfigError, ValueError), match=option):
        ReasoningGymEnv(**options)


@pytest.mark.parametrize(("key", "remedy"), [("seed", "leave it out of `config`"), ("size", "use `size`")])
def test_what_a_task_set_may_not_set_has_its_remedy(key, remedy):
    (problem,) = problems_of(lambda: make_env("reasoning_gym", {"dataset": "chain_sum", "config": {key: 2}}))
    assert (problem.path, problem.remedy) == (f"env_config.config.{key}", remedy)


# TextArena

textarena_is_here = pytest.mark.needs("textarena")


def textarena_env(**options):
    return TextArenaEnv(**{"game": "GuessTheNumber-v0", **options})


@textarena_is_here
def test_a_game_of_textarena_is_played_to_its_end():
    env = textarena_env()
    observation = observation_from(*env.reset(seed=3))
    assert "Guess The Number" in observation.messages[0]["content"]
    low, high = 1, 20
    while True:
        middle = (low + high) // 2
        text, reward, terminated, _, info = env.step(f"I guess [{middle}]")
        assert "Guess The Number" not in text  # only what is new
        if terminated:
            break
        assert info["action_is_valid"] and not info["success"]
        low, high = (middle + 1, high) if "higher" in text else (low, middle - 1)
    assert (reward, info["success"]) == (1.0, True)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("[1]")


@textarena_is_here
def test_a_refused_action_of_textarena_is_invalid_and_a_second_one_ends_the_game():
    env = textarena_env()
    env.reset(seed=3)
    text, _, terminated, _, info = env.step("hello")
    assert not info["action_is_valid"] and not terminated and "invalid move" in text
    text, _, terminated, _, info = env.step("hello")
    assert not info["action_is_valid"] and terminated and not info["success"] and "Invalid Move" in text


@textarena_is_here
def test_textarena_leaves_the_global_generators_alone():
    env = textarena_env()
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.random()
    random.seed(1)
    np.random.seed(1)
    env.reset(seed=3)
    env.step("[4]")
    assert (random.random(), np.random.random()) == expected


@textarena_is_here
def test_games_of_textarena_that_cannot_be_played_are_named():
    for options, option in [
        ({"game": "GuessTheNumbre-v0"}, "game"),
        ({"game": "SecretMafia-v0"}, "game"),
        ({"game_args": {"max_nubmer": 3}}, "game_args"),
    ]:
        with pytest.raises(BadOption) as caught:
            textarena_env(**options)
        assert caught.value.option == option


@textarena_is_here
@pytest.mark.parametrize(("where", "error"), [("reset", TypeError), ("__init__", AssertionError)])
def test_a_fault_of_textarena_is_not_blamed_on_an_option(where, error, monkeypatch):
    from textarena.envs.GuessTheNumber.env import GuessTheNumberEnv

    def fail(self, *args, **options):
        raise error("a slip")

    monkeypatch.setattr(GuessTheNumberEnv, where, fail)
    with pytest.raises(error, match="a slip"):
        textarena_env()


@textarena_is_here
def test_a_game_whose_words_are_not_on_this_machine_says_how_to_get_them(monkeypatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *names, **options: False)  # as without a network
    with pytest.raises(BadOption) as caught:
        textarena_env(game="Wordle-v0")
    assert caught.value.option == "game" and "Wordle-v0" in caught.value.message
    assert "python -m nltk.downloader words" in caught.value.remedy


@textarena_is_here
def test_textarena_keeps_the_interface():
    from roll.agentic.conformance import check_env, render_report

    report = check_env("textarena", {"game": "GuessTheNumber-v0"}, episodes=3, deadline_seconds=60)
    assert report.passed, render_report(report)


@textarena_is_here
def test_a_game_of_textarena_that_raises_ends_its_episode():
    env = textarena_env()
    env.reset(seed=3)
    text, reward, terminated, truncated, info = env.step(f"[{'9' * 5000}]")
    assert (reward, terminated, truncated, info["action_is_valid"]) == (0.0, False, True, False)
    assert "ValueError" in text and info["metrics"] == {"game_failed": True}
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("[1]")

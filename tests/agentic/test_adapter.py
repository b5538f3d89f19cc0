from __future__ import annotations

import json

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from roll.agentic.base import BadOption
from roll.agentic.registry import KNOWN_GAMES, TextAdapter, make_env, without_colours
from tests.agentic.sample_envs import Walk, WalkWithoutText


def walk(**options) -> TextAdapter:
    return TextAdapter(Walk(render_mode="ansi"), **options)


def played(env_type: str, actions: list[str], seed: int = 0, **options) -> list[tuple]:
    env = make_env(env_type, {"action_format": "plain", **options})
    env.reset(seed=seed)
    return [env.step(action) for action in actions]


def test_unknown_games_have_numbered_actions_and_coloured_text_in_brackets():
    env = walk()
    text, info = env.reset(seed=0)
    assert text == env.render() == info["state"] == "[@]...."
    assert "Actions: 3, 4." in info["system"] and info["prob"] == 1.0
    text, reward, terminated, truncated, info = env.step("I go <answer>4</answer>")
    assert (text, reward, terminated, truncated) == (".[@]...", -1.0, False, False)
    assert info == {"action_is_valid": True, "state": ".[@]..."}


@pytest.mark.parametrize("text", ["", "4", "<answer>5</answer>", "<answer>0</answer>", "<answer>4.0</answer>"])
def test_a_text_without_an_action_does_not_reach_the_game(text):
    env = walk()
    env.reset(seed=0)
    answer, reward, terminated, truncated, info = env.step(text)
    assert env.unwrapped.taken == []
    assert answer.startswith("That was no action.") and answer.endswith("[@]....")
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert info == {"action_is_valid": False, "state": "[@]...."}


def test_a_game_that_observes_nothing_is_told_by_its_rendering():
    env = TextAdapter(WithoutObservation(render_mode="ansi"), action_format="plain")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.render()
    assert env.reset(seed=0)[0] == "[@]...."
    assert env.step("4")[0] == ".[@]..."


class WithoutObservation(Walk):
    def reset(self, **options):
        return None, super().reset(**options)[1]

    def step(self, action):
        return None, *super().step(action)[1:]


def test_an_unknown_action_format_is_refused_with_the_known_ones():
    with pytest.raises(BadOption, match="no format `xml`; use one of `answer_tag`, `plain`") as caught:
        walk(action_format="xml")
    assert caught.value.option == "action_format"


def test_without_instructions_only_the_game_speaks():
    env = walk(instructions=False)
    assert "system" not in env.reset(seed=0)[1]
    assert env.step("what?")[0] == "[@]...."


def test_an_ended_episode_stays_ended():
    env = walk(action_format="plain")
    env.reset(seed=0)
    assert [env.step("4")[2] for _ in range(4)] == [False, False, False, True]
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("4")


def test_what_cannot_be_written_as_text_is_refused():
    with pytest.raises(TypeError, match=r"not `ansi`, and of its observations, .* has 1024 numbers, and 1 to 64"):
        TextAdapter(WalkWithoutText(render_mode="rgb_array"))
    with pytest.raises(TypeError, match=r"takes actions that cannot .* Sequence.* no space of numbers"):
        TextAdapter(Drawn(spaces.Sequence(spaces.Discrete(2))))
    with pytest.raises(TypeError, match="has keys that are no texts"):
        TextAdapter(Drawn(spaces.Dict({1: spaces.Discrete(2)})))


class Drawn(gymnasium.Env):
    """Takes actions of a space, and observes the last one."""

    def __init__(self, space: gymnasium.Space):
        self.action_space = self.observation_space = space

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.action_space.seed(seed)
        return self.action_space.sample(), {}

    def step(self, action):
        assert self.action_space.contains(action), action
        self.taken = action
        return action, 0.0, False, False, {}


def json_adapter(space: gymnasium.Space) -> TextAdapter:
    env = TextAdapter(Drawn(space), action_format="plain")
    env.reset(seed=0)
    return env


STEERING = spaces.Dict(
    {
        "move": spaces.Box(-1, 1, (2,)),
        "gear": spaces.Discrete(4, start=1),
        "say": spaces.Text(5),
        "lamps": spaces.MultiBinary(3),
        "where": spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.Box(0, np.inf, (), np.float64)]),
    }
)
STEERED = '{"move": [0.5, -1], "gear": 4, "say": "ab", "lamps": [1, 0, 1], "where": [[1, 2], 1e3]}'


@pytest.mark.parametrize(
    ("space", "words", "text"),
    [
        (spaces.Box(-1, 1, (3,)), "a list of 3 numbers from -1 to 1, as JSON", "[0.5, -1, 0]"),
        (spaces.Box(-1, 1, (1,)), "a list of 1 numbers from -1 to 1", "0.25"),
        (spaces.Box(-1, 1, (2,)), "a list of 2 numbers", "0.5, 1"),
        (spaces.Box(-np.inf, np.inf, (2, 3)), "a list of 2 lists of 3 numbers, as", "[[1, 2, 3], [4, 5, 6.5]]"),
        (spaces.Box(np.array([0, -5]), np.array([1, np.inf])), "(from 0 to 1; from -5 up)", "[0.5, 1e9]"),
        (spaces.Box(0, 255, (2,), np.uint8), "2 whole numbers from 0 to 255", "[255, 0]"),
        (spaces.Box(0, 1 / 3, (1,)), "from 0 to 0.333333", "0.333333"),
        (spaces.Box(-8.1234567, 1, (1,)), "from -8.12346 to 1", "-8.12346"),
        (spaces.MultiDiscrete([3, 2], start=[1, 0]), "2 whole numbers (from 1 to 3; from 0 to 1)", "[3, 1]"),
        (spaces.MultiDiscrete([[2, 2]]), "a list of 1 lists of 2 whole numbers from 0 to 1", "[[1, 0]]"),
        (spaces.MultiBinary(4), "a list of 4 whole numbers from 0 to 1", "[1, 0, 1, 1]"),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), "a list of 2: a whole number from 0 to 1; a", '[1, "a"]'),
        (spaces.Text(6), "An action is a text of 1 to 6 letters and digits, without spaces. Answer", "abc"),
        (spaces.Text(3, charset="ba "), 'a text of 1 to 3 characters out of " ab". Answer', "a b"),
        (STEERING, "an object with `gear` (a whole number from 1 to 4), `lamps` (a list of 3 ", STEERED),
    ],
)
def test_spaces_are_told_in_words_and_actions_read(space, words, text):
    env = json_adapter(space)
    system = env.reset(seed=0)[1]["system"]
    assert words in system and ("You read" in system) != isinstance(space, spaces.Text)
    _, _, _, _, info = env.step(text)
    assert info["action_is_valid"] is True, "the game takes it, as its assertion says"
    for example in env.example_actions:
        assert env.step(example)[4]["action_is_valid"] is True


def test_what_is_read_is_the_action():
    env = json_adapter(STEERING)
    env.step(STEERED)
    taken = env.unwrapped.taken
    assert (taken["gear"], taken["say"]) == (4, "ab") and taken["move"].dtype == np.float32
    assert taken["lamps"].tolist() == [1, 0, 1] and taken["where"][0].tolist() == [1, 2]
    text = env.step(STEERED)[0]
    assert json.loads(text) == {**json.loads(STEERED), "where": [[1, 2], 1000.0]}


@pytest.mark.parametrize(
    ("space", "text", "why"),
    [
        (spaces.Box(-1, 1, (2,)), "go", '"go" is no JSON'),
        (spaces.Box(-1, 1, (2,)), "[1, 2]", "the action has 2, which is not from -1 to 1"),
        (spaces.Box(-1, 1, (2,)), "[1]", "the action is [1], and no list of 2"),
        (spaces.Box(-1, 1, (2,)), "1", "the action is 1, and no list of 2"),
        (spaces.Box(-1, 1, (2,)), "[true, 0]", "has true, which is no number"),
        (spaces.Box(-1, 1, (2,)), "[NaN, 0]", "is no JSON"),
        (spaces.Box(-1, 1, (2,)), "[" * 5000, "is no JSON"),
        (spaces.Box(0, 255, (1,), np.uint8), "0.5", "has 0.5, which is no whole number"),
        (spaces.MultiDiscrete([2]), "9" * 400, "is no JSON"),
        (spaces.MultiDiscrete([2]), "9" * 100, "which is not from 0 to 1"),
        (spaces.Box(-1, 1, (1,)), str(2**1024 - 1), "a number is too large"),
        (spaces.Box(-np.inf, np.inf, (2,)), f"[{2**1024 - 1}, 0]", "a number is too large"),
        (
            spaces.Text(9),
            "go left",
            'the action is "go left", and no text of 1 to 9 letters and digits, without spaces',
        ),
        (spaces.Tuple([spaces.Discrete(2), spaces.Text(3)]), '[1, "long"]', 'part 2 of the action is "long", and no'),
        (STEERING, "[]", "the action is [], and no object"),
        (STEERING, STEERED.replace('"gear": 4', '"gear": 0'), "`gear` has 0, which is not from 1 to 4"),
        (STEERING, STEERED.replace('"gear": 4, ', ""), "has no `gear`"),
        (STEERING, STEERED.replace('"gear"', '"speed": 1, "gear"'), "has an unknown `speed`"),
        (STEERING, STEERED.replace("[1, 2]", "[1, 3]"), "part 1 of `where` has 3, which is not from 0 to 2"),
    ],
)
def test_what_is_no_action_is_named_and_does_not_reach_the_game(space, text, why):
    env = json_adapter(space)
    answer, reward, _, _, info = env.step(text)
    assert why in answer and "An action is" in answer
    assert reward == 0.0 and info["action_is_valid"] is False and not hasattr(env.unwrapped, "taken")


def test_numbers_of_any_size_stay_finite():
    env = json_adapter(spaces.Box(-np.inf, np.inf, (1,)))
    env.step("1e300")
    assert np.isfinite(env.unwrapped.taken).all()


@pytest.mark.parametrize(
    ("env_type", "words", "action"),
    [
        ("Pendulum-v1", "You read a list of 3 numbers (from -1 to 1; from -1 to 1; from -8 to 8), as JSON.", "[1.5]"),
        ("MountainCarContinuous-v0", "An action is a list of 1 numbers from -1 to 1, as JSON.", "-0.5"),
        ("CartPole-v1", "You read a list of 4 numbers (from -4.8 to 4.8; any; ", "1"),
        ("Acrobot-v1", "You read a list of 6 numbers", "2"),
    ],
)
def test_gymnasiums_own_simulators_are_played(env_type, words, action):
    env = make_env(env_type, {"action_format": "plain"})
    text, info = env.reset(seed=3)
    assert words in info["system"] and info["state"] == text
    after, _, _, _, info = env.step(action)
    assert info["action_is_valid"] is True and after != text and len(json.loads(after)) == len(json.loads(text))


def test_terminal_escapes_go_and_colours_become_brackets():
    assert without_colours("\n a\x1b[41mB\x1b[0m  \n\x1b[2Jc\n\n") == " a[B]\nc"


def test_frozen_lake_is_won_and_lost_by_names():
    way = ["down", "down", "right", "right", "DOWN", "right"]
    steps = played("FrozenLake-v1", way, is_slippery=False)
    assert [step[1] for step in steps] == [0, 0, 0, 0, 0, 1]
    assert steps[0][0] == "SFFF\nPHFH\nFFFH\nHFFG"
    assert steps[-1][2] and steps[-1][4]["success"] is True
    lost = played("FrozenLake-v1", ["down", "right"], is_slippery=False)[-1]
    assert lost[0] == "SFFF\nFXFH\nFFFH\nHFFG" and lost[2] and lost[4]["success"] is False


def test_cliff_walking_goes_round_the_cliff():
    steps = played("CliffWalking-v1", ["up", *["right"] * 11, "down"])
    assert steps[0][0].split("\n")[2:] == ["xooooooooooo", "oCCCCCCCCCCT"]
    assert sum(step[1] for step in steps) == -13
    assert steps[-1][2] and steps[-1][4]["success"] is True
    fallen = played("CliffWalking-v1", ["right"])[0]
    assert fallen[0].split("\n")[3] == "xCCCCCCCCCCT" and fallen[1] == -100 and not fallen[2]


def test_the_cliff_is_where_gymnasium_draws_it():
    env = make_env("CliffWalking-v1", {})
    text, _ = env.reset(seed=0)
    assert text == "\n".join(line.replace(" ", "") for line in env.unwrapped.render().strip("\n").split("\n"))


def test_taxi_tells_places_and_carries_the_passenger():
    env = make_env("Taxi-v4", {"action_format": "plain"})
    text, _ = env.reset(seed=1)
    assert text.endswith("Taxi: (2, 2). Passenger: at B (4, 3). Destination: R (0, 0).")
    steps = [env.step(action) for action in ["east", "south", "south", "pickup"]]
    assert "Passenger: in the taxi" in steps[-1][0]
    env.step("north")
    assert env.step("dropoff")[1] == -10
    steps = [env.step(action) for action in ["north", "west", "west", "west", "north", "north", "dropoff"]]
    assert (steps[-1][1], steps[-1][2], steps[-1][4]["success"]) == (20.0, True, True)


def test_blackjack_is_described_from_its_observation():
    env = make_env("Blackjack-v1", {"action_format": "plain"})
    assert env.reset(seed=1)[0] == "Your cards sum to 20, without a usable ace. The dealer shows 7."
    text, reward, terminated, _, info = env.step("hit")
    assert text.startswith("Your cards sum to 2") and (reward, terminated, info["success"]) == (-1.0, True, False)
    results = {}
    for seed in range(30):
        env.reset(seed=seed)
        _, reward, terminated, _, info = env.step("stick")
        results[reward] = info["success"]
        assert terminated
    assert results == {1.0: True, 0.0: False, -1.0: False}


def test_a_time_limit_truncates():
    steps = played("Taxi-v4", ["north"] * 3, max_episode_steps=3)
    assert [step[3] for step in steps] == [False, False, True]


def test_known_games_are_games_of_gymnasium():
    for name, game in KNOWN_GAMES.items():
        env = gymnasium.make(gymnasium.spec(name + "-v" + newest(name)))
        assert env.action_space.n == len(game.action_names)


def newest(name: str) -> str:
    return str(gymnasium.envs.registration.find_highest_version(None, name))

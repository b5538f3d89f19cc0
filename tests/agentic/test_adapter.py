from __future__ import annotations

import gymnasium
import pytest

from roll.agentic.base import BadOption
from roll.agentic.registry import KNOWN_GAMES, TextAdapter, make_env, without_colours
from tests.agentic.sample_envs import Walk


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
    with pytest.raises(TypeError, match="cannot be written as text"):
        TextAdapter(Walk(render_mode="rgb_array"))
    with pytest.raises(TypeError, match="not discrete"):
        TextAdapter(gymnasium.make("Pendulum-v1"))


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

from __future__ import annotations

from collections import Counter, deque

import gymnasium
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.agentic.library.grid_games import (
    CELLS_PER_BOX,
    FrozenLakeEnv,
    Level,
    SokobanEnv,
    make_level,
    moved,
    random_map,
)
from roll.agentic.registry import make_env
from roll.configs.errors import problems_of
from tests.tiers import examples

SEEDS = st.integers(0, 2**31)
DIRECTIONS = tuple(SokobanEnv.DIRECTIONS.values())
ROOMS = st.tuples(st.integers(3, 7), st.integers(5, 7))


def answers(*names: str) -> list[str]:
    return [f"<answer>{name}</answer>" for name in names]


def plain_lake(*rows: str, **options) -> FrozenLakeEnv:
    env = FrozenLakeEnv(map=rows, instructions=False, action_format="plain", **options)
    env.reset(seed=0)
    return env


# FrozenLake


def shortest_path(text: str) -> list[str]:
    """The actions from P to G, over anything but O."""
    rows = text.split("\n")
    start = next((r, row.index("P")) for r, row in enumerate(rows) if "P" in row)
    frontier, seen = deque([(start, [])]), {start}
    while frontier:
        (row, column), path = frontier.popleft()
        if rows[row][column] == "G":
            return path
        for name, (dr, dc) in {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}.items():
            cell = row + dr, column + dc
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0])
            if inside and cell not in seen and rows[cell[0]][cell[1]] != "O":
                seen.add(cell)
                frontier.append((cell, [*path, name]))
    raise AssertionError(f"no way to the goal:\n{text}")


@settings(max_examples=examples(60))
@given(SEEDS, st.integers(2, 9), st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), st.booleans())
def test_every_map_can_be_walked_to_the_goal(seed, size, hole_probability, random_start):
    env = FrozenLakeEnv(size=size, hole_probability=hole_probability, random_start=random_start)
    text, info = env.reset(seed=seed)
    assert info["success"] is False and info["state"] == text
    path = shortest_path(text)
    assert path
    for number, answer in enumerate(answers(*path), start=1):
        text, reward, terminated, truncated, info = env.step(answer)
        is_last = number == len(path)
        assert (reward, terminated, truncated, info["success"]) == (float(is_last), is_last, False, is_last)
    assert "*" in text and "P" not in text


def test_a_seed_makes_the_map_and_another_seed_another_one():
    env, other = FrozenLakeEnv(size=6), FrozenLakeEnv(size=6)
    maps = [env.reset(seed=seed)[0] for seed in range(20)]
    assert [other.reset(seed=seed)[0] for seed in reversed(range(20))][::-1] == maps
    assert len(set(maps)) == 20


def test_more_hole_probability_means_more_holes():
    few, many = (
        sum(sum(row.count("H") for row in random_map(6, share, np.random.default_rng(seed))) for seed in range(50))
        for share in (0.1, 0.3)
    )
    assert few * 1.8 < many


def test_a_hole_ends_the_episode_without_success():
    env = plain_lake("SFG", "HFF", hole_reward=-2.0, step_reward=-0.5)
    assert env.step("right")[:3] == ("_PG\nO__", -0.5, False)
    text, reward, terminated, _, info = env.step("left")
    assert (text, reward, terminated) == ("P_G\nO__", -0.5, False)
    text, reward, terminated, _, info = env.step("DOWN ")
    assert (text, reward, terminated, info["success"]) == ("__G\nX__", -2.0, True, False)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("up")


def test_a_step_into_the_border_changes_nothing_but_is_valid():
    env = plain_lake("SFG")
    text, reward, terminated, _, info = env.step("left")
    assert (text, reward, terminated, info["action_is_valid"]) == ("P_G", 0.0, False, True)
    assert info["metrics"] == {"action_is_effective": False}


@pytest.mark.parametrize("text", ["", "go left", "<answer>left", "<answer>jump</answer>", "left", "l"])
def test_a_text_without_an_action_does_not_move(text):
    env = FrozenLakeEnv(map=["SFG"], step_reward=-1.0)
    env.reset(seed=0)
    answer, reward, terminated, _, info = env.step(text)
    assert (reward, terminated, info["action_is_valid"], info["state"]) == (0.0, False, False, "P_G")
    assert answer.endswith("P_G") and "left, down, right, up" in answer
    assert env.step("<answer>right</answer>")[0] == "_PG"


def test_without_instructions_there_are_only_symbols():
    env = FrozenLakeEnv(map=["SFG"], instructions=False, action_format="plain", action_names=list("LDRU"))
    text, info = env.reset(seed=0)
    assert (text, "system" in info) == ("P_G", False)
    assert env.step("?")[0] == "P_G"
    assert env.step("R")[0] == "_PG"
    assert env.step("l")[0] == "P_G"


def test_instructions_name_the_actions_and_the_symbols():
    _, info = FrozenLakeEnv(action_names=list("LDRU"), symbols={"goal": "!"}).reset(seed=0)
    assert "L, D, R, U" in info["system"] and "! the goal" in info["system"]


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("grid", "P_\nOG"),
        ("spaced", "P _\nO G"),
        ("coordinates", " from (0, 0) at the top left.\nYou: (0, 0)\nGoal: (1, 1)\nHoles: (1, 0)"),
    ],
)
def test_a_grid_is_written_in_several_ways(style, expected):
    env = FrozenLakeEnv(map=["SF", "HG"], observation=style)
    text, info = env.reset(seed=0)
    assert text.endswith(expected)
    assert info["state"] == env.render() == "P_\nOG"


def test_slippery_ice_moves_sideways_as_often_as_ahead():
    rows = ["FFFFF", "FFFFF", "FFSFF", "FFFFF", "FFFFG"]
    env = FrozenLakeEnv(map=rows, is_slippery=True, action_format="plain")
    places = Counter()
    for seed in range(600):
        env.reset(seed=seed)
        env.step("up")
        drawn = env.render().split("\n")
        places[next((r, row.index("P")) for r, row in enumerate(drawn) if "P" in row)] += 1
    assert set(places) == {(1, 2), (2, 1), (2, 3)}
    assert min(places.values()) > 150


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"size": 1}, "size"),
        ({"hole_probability": 1.5}, "hole_probability"),
        ({"observation": "picture"}, "observation"),
        ({"action_format": "json"}, "action_format"),
        ({"action_names": ["a", "b"]}, "action_names"),
        ({"action_names": ["a", "A", "b", "c"]}, "action_names"),
        ({"action_names": ["a", "b", "c", " "]}, "action_names"),
        ({"symbols": {"wolf": "w"}}, "symbols"),
        ({"symbols": {"goal": "P"}}, "symbols"),
        ({"symbols": {"goal": "GG"}}, "symbols"),
        ({"map": []}, "map"),
        ({"map": ["SF", "G"]}, "map"),
        ({"map": ["SX", "FG"]}, "map"),
        ({"map": ["FF", "FG"]}, "map"),
        ({"map": ["SH", "HG"]}, "map"),
    ],
)
def test_an_option_that_cannot_work_is_named(options, option):
    assert [each.path for each in problems_of(lambda: make_env("frozen_lake", options))] == [f"env_config.{option}"]
    with pytest.raises(ValueError, match=option):
        FrozenLakeEnv(**options)


# Sokoban


def solution(level: Level) -> list[int] | None:
    """The shortest way to push all boxes onto targets, by trying everything."""
    frontier, seen = deque([(level, [])]), {(level.boxes, level.player)}
    while frontier:
        now, path = frontier.popleft()
        if now.is_solved():
            return path
        for index, direction in enumerate(DIRECTIONS):
            after = now.after_push(direction)
            if after is not None and (after.boxes, after.player) not in seen:
                seen.add((after.boxes, after.player))
                frontier.append((after, [*path, index]))
    return None


def level_of(text: str) -> Level:
    """A level drawn with the default symbols."""
    cells = {(r, c): each for r, row in enumerate(text.split("\n")) for c, each in enumerate(row)}

    def where(symbols: str) -> frozenset:
        return frozenset(cell for cell, each in cells.items() if each in symbols)

    rows = text.split("\n")
    (player,) = where("PS")
    return Level(len(rows), len(rows[0]), where("#"), where("O*S"), where("X*"), player)


@settings(max_examples=examples(80))
@given(SEEDS, ROOMS, st.integers(1, 3), st.integers(1, 30), st.sampled_from([0.0, 0.2, 0.6]))
def test_every_level_can_be_solved_and_is_not(seed, room, num_boxes, search_depth, wall_share):
    num_boxes = min(num_boxes, (room[0] - 2) * (room[1] - 2) // CELLS_PER_BOX)
    level = make_level(room, num_boxes, search_depth, wall_share, np.random.default_rng(seed))
    assert len(level.boxes) == len(level.targets) == num_boxes
    assert not level.is_solved() and level.is_free(level.player)
    path = solution(level)
    assert path


@settings(max_examples=examples(20))
@given(SEEDS, ROOMS)
def test_a_level_is_found_for_the_most_boxes_allowed(seed, room):
    most = (room[0] - 2) * (room[1] - 2) // CELLS_PER_BOX
    level = make_level(room, most, 10, 0.6, np.random.default_rng(seed))
    assert len(level.boxes) == most and not level.is_solved()


@settings(max_examples=examples(40))
@given(SEEDS, st.lists(st.sampled_from(DIRECTIONS), max_size=60))
def test_pushing_keeps_the_rules(seed, directions):
    level = make_level((6, 6), 2, 12, 0.2, np.random.default_rng(seed))
    for direction in directions:
        after = level.after_push(direction)
        ahead, behind = moved(level.player, direction), moved(level.player, direction, 2)
        if ahead in level.walls or (ahead in level.boxes and (behind in level.walls or behind in level.boxes)):
            assert after is None
            continue
        assert after is not None and after.player == ahead
        assert (after.walls, after.targets) == (level.walls, level.targets)
        assert not after.boxes & after.walls and after.player not in after.boxes
        expected = (level.boxes - {ahead}) | {behind} if ahead in level.boxes else level.boxes
        assert after.boxes == expected
        level = after


def test_more_pulls_make_longer_solutions():
    def mean_length(search_depth: int) -> float:
        levels = (make_level((6, 6), 1, search_depth, 0.2, np.random.default_rng(seed)) for seed in range(40))
        return float(np.mean([len(solution(level) or []) for level in levels]))

    assert mean_length(1) + 2 < mean_length(30)


def test_a_solved_level_earns_the_rewards_of_gym_sokoban():
    env = SokobanEnv(dim_room=(6, 6), num_boxes=2)
    for seed in range(5):
        text, info = env.reset(seed=seed)
        level = level_of(text)
        assert info["state"] == text and "system" in info
        path = solution(level)
        assert path is not None
        for number, index in enumerate(path, start=1):
            after = level.after_push(DIRECTIONS[index])
            gained = len(after.boxes & after.targets) - len(level.boxes & level.targets)
            text, reward, terminated, truncated, info = env.step(answers("up", "down", "left", "right")[index])
            is_last = number == len(path)
            assert reward == pytest.approx(-0.1 + gained + 10 * is_last)
            assert (level_of(text), terminated, info["success"]) == (after, is_last, is_last)
            assert info["metrics"]["boxes_on_target"] == len(after.boxes & after.targets) / 2
            level = after
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("<answer>up</answer>")


def test_a_box_pushed_off_its_target_costs_what_it_earned():
    draw = np.random.default_rng(0)
    env = SokobanEnv(dim_room=(6, 6), num_boxes=2, wall_share=0.0, search_depth=4)
    gains = Counter()
    for seed in range(30):
        before = level_of(env.reset(seed=seed)[0])
        for _ in range(60):
            text, reward, terminated, _, _ = env.step(answers("up", "down", "left", "right")[draw.integers(4)])
            after = level_of(text)
            gained = len(after.boxes & after.targets) - len(before.boxes & before.targets)
            assert reward == pytest.approx(-0.1 + gained + 10 * terminated)
            gains[gained] += 1
            before = after
            if terminated:
                break
    assert gains[-1] > 3 and gains[1] > 3


def test_rewards_can_be_chosen():
    env = SokobanEnv(step_reward=0.0, box_on_target_reward=0.0, finish_reward=1.0)
    path = solution(level_of(env.reset(seed=1)[0]))
    rewards = [env.step(answers("up", "down", "left", "right")[index])[1] for index in path]
    assert rewards == [*[0.0] * (len(path) - 1), 1.0]


def test_a_text_without_an_action_pushes_nothing():
    env = SokobanEnv()
    text, _ = env.reset(seed=3)
    answer, reward, _, _, info = env.step("push it")
    assert answer.endswith(text) and reward == 0.0 and info["action_is_valid"] is False and info["state"] == text


def test_levels_repeat_by_seed():
    env, other = SokobanEnv(num_boxes=2), SokobanEnv(num_boxes=2)
    levels = [env.reset(seed=seed)[0] for seed in range(15)]
    assert [other.reset(seed=seed)[0] for seed in reversed(range(15))][::-1] == levels
    assert len(set(levels)) == 15


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"dim_room": [6]}, "dim_room"),
        ({"dim_room": [2, 6]}, "dim_room"),
        ({"dim_room": [4, 4]}, "dim_room"),
        ({"num_boxes": 0}, "num_boxes"),
        ({"num_boxes": 6}, "num_boxes"),
        ({"search_depth": 0}, "search_depth"),
        ({"wall_share": 0.9}, "wall_share"),
    ],
)
def test_a_room_that_cannot_work_is_named(options, option):
    assert [each.path for each in problems_of(lambda: make_env("sokoban", options))] == [f"env_config.{option}"]
    with pytest.raises(ValueError, match=option):
        SokobanEnv(**options)

"""The tiny FrozenLake: boards as the environment writes them, new lakes in validation, equal models for equal seeds."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from roll.agentic.library.grid_games import FrozenLakeEnv

FOLDER = Path(__file__).parents[2] / "examples" / "frozen_lake-tiny-cpu"


@pytest.fixture(scope="module")
def lake():
    spec = importlib.util.spec_from_file_location("make_frozen_lake_model", FOLDER / "make_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def environment():
    return FrozenLakeEnv(instructions=False, action_format="plain", action_names=["L", "D", "R", "U"])


def test_games_are_played_as_in_the_environment(lake):
    chance = np.random.default_rng(0)
    env = environment()
    for seed in range(40):
        text, _ = env.reset(seed=seed)
        holes = np.array([cell == "O" for cell in text.replace("\n", "")])
        game = lake.LakeGame(holes)
        over = False
        while not over:
            assert game.board() == text
            move = lake.MOVES[chance.integers(4)]
            game.play(move)
            text, reward, over, _, _ = env.step(move)
            assert game.is_over == over and game.is_won == (reward == 1)


def test_the_warm_up_never_sees_a_lake_of_validation(lake):
    lakes = lake.all_lakes()
    seen = lake.seen_in_warm_up(lakes)
    assert 0.4 < seen.mean() < 0.6
    side_of_lake = {tuple(holes): warm for holes, warm in zip(lakes.holes, seen, strict=True)}
    env = environment()
    for seed in range(300):
        text, _ = env.reset(seed=seed)
        assert side_of_lake[tuple(cell == "O" for cell in text.replace("\n", ""))] == (seed % 2 == 0)


def test_lessons_are_the_pupils_and_right_moves_lead_nearer(lake):
    lakes = lake.all_lakes()
    lessons = lake.lesson_maker(lakes, lake.seen_in_warm_up(lakes))(64, np.random.default_rng(1))
    np.testing.assert_allclose(lessons.moves.sum(1), 1)
    assert (lessons.moves.max(1) >= lake.HABIT).all() and len(set(map(len, lessons.boards))) == 1
    right = lake.shortest(lakes)
    nearer = lakes.distances[:, lake.NEIGHBOURS] < lakes.distances[:, :, None]
    reachable = np.isfinite(lakes.distances) & (np.arange(lake.CELLS) != lake.GOAL)
    assert (nearer[reachable] >= (right[reachable] > 0)).all()


@pytest.mark.tier("all")
def test_equal_seeds_make_equal_models_and_a_finished_one_is_kept(lake, tmp_path):
    first, second = (lake.make(tmp_path / name, seed=3, steps=2) for name in ("a", "b"))
    assert first == second
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]

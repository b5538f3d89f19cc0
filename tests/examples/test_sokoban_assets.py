"""The tiny Sokoban: boards as the environment writes them, right moves solve, and validation is about other levels."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "sokoban-tiny-cpu"


@pytest.fixture(scope="module")
def sokoban():
    spec = importlib.util.spec_from_file_location("make_sokoban_model", FOLDER / "make_model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_games_are_played_as_in_the_environment(sokoban):
    chance = np.random.default_rng(0)
    env = sokoban.environment()
    for seed in range(30):
        text, _ = env.reset(seed=seed)
        game = sokoban.SokobanGame(env.level)
        for _ in range(sokoban.MAX_TURNS):
            assert game.board() == text
            move = sokoban.MOVES[chance.integers(4)]
            game.play(move)
            text, _, over, _, _ = env.step(move)
            assert game.is_over == over
            if over:
                break


def test_moves_that_lead_nearer_solve_every_level(sokoban):
    for level in sokoban.levels(range(40)):
        solved_in = sokoban.distances(level)
        steps = solved_in[level]
        for left in range(steps, 0, -1):
            assert solved_in[level] == left
            ahead = [level.after_push(direction) for direction in sokoban.DIRECTIONS]
            level = next(there for there in ahead if solved_in.get(there) == left - 1)
        assert level.is_solved()


def test_the_pupil_is_careless_more_often_than_right(sokoban):
    for level in sokoban.levels(range(40)):
        moves = sokoban.pupil(level, sokoban.distances(level))
        assert moves.sum() == pytest.approx(1) and moves[sokoban.habit(level)] >= sokoban.HABIT


def test_levels_of_validation_are_not_among_those_of_the_warm_up(sokoban):
    train = {sokoban.board(level) for level in sokoban.levels(range(0, 1000, 2))}
    validation = {sokoban.board(level) for level in sokoban.levels(range(1, 1000, 2))}
    assert not train & validation and len(train) > 300


def test_lessons_are_boards_of_one_length_with_the_pupils_moves(sokoban):
    lessons = sokoban.lesson_maker(sokoban.levels(range(0, 40, 2)))(64, np.random.default_rng(1))
    assert len(set(map(len, lessons.boards))) == 1
    np.testing.assert_allclose(lessons.moves.sum(1), 1)

"""Make a tiny model that plays Sokoban as badly as its teacher.

The teacher is a careless pupil. In six moves of ten he walks towards the target himself, whatever stands there; the
other four begin a shortest solution. Greedily the model makes the pupil's most frequent moves. Reinforcement learning
(`agentic.yaml`) then has to teach it to think of the box more often than its teacher. The warm-up uses levels of even
seeds only; validation plays levels of odd seeds. Takes about three minutes on one core.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from roll.agentic.library.grid_games import Level, SokobanEnv

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tiny_player import DrawLessons, Lessons, WarmedModel, make_player, run  # noqa: E402

DIRECTIONS, SYMBOLS = tuple(SokobanEnv.DIRECTIONS.values()), SokobanEnv.SYMBOLS
MOVES = "UDLR"
"""Letters of the moves, in the order of `DIRECTIONS`."""
CHARACTERS = "".join(SYMBOLS.values()) + "\n" + MOVES
ROOM = (6, 6)
MAX_TURNS = 20
HABIT = 0.6
"""Share of the pupil's moves that he makes without a thought of the box."""
STEPS = 800
LEVELS = 3000
"""Levels of the warm-up; every situation of a level that can still be solved is a lesson."""
EVALUATED_LEVELS = 512


def environment() -> SokobanEnv:
    """Return the environment that `agentic.yaml` trains in."""
    return SokobanEnv(dim_room=ROOM, num_boxes=1, instructions=False, action_format="plain", action_names=list(MOVES))


def levels(seeds: Iterator[int] | range) -> list[Level]:
    """Return the levels that the environment makes from these seeds."""
    env, made = environment(), []
    for seed in seeds:
        env.reset(seed=seed)
        made.append(env.level)
    return made


def distances(level: Level) -> dict[Level, int]:
    """Return each solvable situation that the level can reach -> number of moves to the solution."""
    before: dict[Level, list[Level]] = {level: []}
    frontier = deque([level])
    while frontier:
        here = frontier.popleft()
        for direction in DIRECTIONS:
            there = None if here.is_solved() else here.after_push(direction)
            if there is not None:
                if there not in before:
                    before[there] = []
                    frontier.append(there)
                before[there].append(here)
    found = {situation: 0 for situation in before if situation.is_solved()}
    frontier = deque(found)
    while frontier:
        there = frontier.popleft()
        for here in before[there]:
            if here not in found:
                found[here] = found[there] + 1
                frontier.append(here)
    return found


def habit(level: Level) -> int:
    """Return the pupil's move when he ignores the box: towards the target, rows first."""
    (row, column), ((target_row, target_column),) = level.player, tuple(level.targets)
    if row != target_row:
        return MOVES.index("U" if target_row < row else "D")
    return MOVES.index("L" if target_column < column else "R")


def pupil(level: Level, solved_in: dict[Level, int]) -> np.ndarray:
    """Return the probabilities of the pupil's moves, ``[moves]``."""
    moves = np.zeros(len(MOVES))
    ahead = [level.after_push(direction) for direction in DIRECTIONS]
    best = [there is not None and solved_in.get(there, np.inf) < solved_in[level] for there in ahead]
    moves[best] = (1 - HABIT) / sum(best)
    moves[habit(level)] += HABIT
    return moves


def board(level: Level) -> str:
    """Write the level as the environment does."""
    rows = ([SYMBOLS[level.kind((row, column))] for column in range(level.width)] for row in range(level.height))
    return "\n".join(map("".join, rows))


def lesson_maker(made: list[Level]) -> DrawLessons:
    """Return a function that draws lessons from all unsolved situations of these levels."""
    lessons: dict[str, np.ndarray] = {}
    for level in made:
        solved_in = distances(level)
        lessons |= {board(each): pupil(each, solved_in) for each, steps in solved_in.items() if steps}
    boards, moves = list(lessons), np.stack(list(lessons.values()))

    def draw(count: int, chance: np.random.Generator) -> Lessons:
        chosen = chance.integers(len(boards), size=count)
        return Lessons([boards[index] for index in chosen], moves[chosen])

    return draw


@dataclass
class SokobanGame:
    """See `Game`."""

    level: Level

    def board(self) -> str:
        return board(self.level)

    def play(self, move: str) -> None:
        if move in MOVES:
            self.level = self.level.after_push(DIRECTIONS[MOVES.index(move)]) or self.level

    @property
    def is_over(self) -> bool:
        return self.is_won

    @property
    def is_won(self) -> bool:
        return self.level.is_solved()


def make(folder: Path, seed: int, steps: int) -> WarmedModel:
    """Warm up a model and write it."""
    unseen = levels(range(1, 2 * EVALUATED_LEVELS, 2))
    return make_player(
        folder,
        seed=seed,
        steps=steps,
        characters=CHARACTERS,
        moves=MOVES,
        draw=lesson_maker(levels(range(0, 2 * LEVELS, 2))),
        unseen=lambda: [SokobanGame(level) for level in unseen],
        max_turns=MAX_TURNS,
    )


if __name__ == "__main__":
    run(__doc__.splitlines()[0], Path(__file__).parent, STEPS, make)

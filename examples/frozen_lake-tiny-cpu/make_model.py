"""Make a tiny model that plays FrozenLake as badly as its teacher.

The teacher is a careless pupil. He makes six moves in ten as if he mowed the lake, row by row, without looking for
holes; the other four begin a shortest way to the goal. Greedily the model makes the pupil's most frequent moves, and
falls into a hole on nine lakes in ten. Reinforcement learning (`agentic.yaml`) then has to teach it to take a shortest
way more often than its teacher. The warm-up leaves out half of all lakes, which validation uses. Takes about two
minutes on one core.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from roll.agentic.library.grid_games import side_of

sys.path.append(str(Path(__file__).resolve().parents[1]))
from tiny_player import DrawLessons, Lessons, WarmedModel, make_player, run  # noqa: E402

MOVES = "LDRU"
CHARACTERS = "_OPG\n" + MOVES
SIZE = 4
CELLS = SIZE * SIZE
GOAL = CELLS - 1
HOLE_PROBABILITY = 0.2
MAX_TURNS = 12
HABIT = 0.6
"""Share of the pupil's moves that he makes without looking."""
STEPS = 600
EVALUATED_LAKES = 512


@dataclass(frozen=True)
class Lakes:
    """All lakes whose goal can be reached from the top left corner. Cells are numbered row by row."""

    holes: np.ndarray
    """Bool ``[lakes, CELLS]``."""
    probabilities: np.ndarray
    """``[lakes]``: how often a lake is drawn."""
    distances: np.ndarray
    """``[lakes, CELLS]``: moves to the goal; infinite for holes and for ice without a way to the goal."""


def neighbours() -> np.ndarray:
    """Return ``[CELLS, moves]``: the cell that each move leads to; a move over the border stays in its cell."""
    rows, columns = np.divmod(np.arange(CELLS), SIZE)
    shifts = ((0, -1), (1, 0), (0, 1), (-1, 0))
    led = [np.clip(rows + down, 0, SIZE - 1) * SIZE + np.clip(columns + right, 0, SIZE - 1) for down, right in shifts]
    return np.stack(led, axis=1)


NEIGHBOURS = neighbours()


@cache
def all_lakes() -> Lakes:
    """List all lakes with a solution; there are few enough."""
    inner = CELLS - 2
    drawn = (np.arange(2**inner)[:, None] >> np.arange(inner)) & 1 == 1
    holes = np.pad(drawn, ((0, 0), (1, 1)))
    probabilities = np.where(drawn, HOLE_PROBABILITY, 1 - HOLE_PROBABILITY).prod(1)
    distances = np.full(holes.shape, np.inf)
    distances[:, GOAL] = 0
    for _ in range(CELLS):
        over_neighbours = distances[:, NEIGHBOURS].min(2) + 1
        distances = np.where(holes, np.inf, np.minimum(distances, over_neighbours))
    solvable = np.isfinite(distances[:, 0])
    probabilities = probabilities[solvable] / probabilities[solvable].sum()
    return Lakes(holes[solvable], probabilities, distances[solvable])


def habit() -> np.ndarray:
    """Return the pupil's move in each cell when he does not look: along the row, then down, then back."""
    rows, columns = np.divmod(np.arange(CELLS), SIZE)
    to_the_right = (rows % 2 == 0) | (rows == SIZE - 1)
    at_the_end = np.where(to_the_right, columns == SIZE - 1, columns == 0)
    along = np.where(to_the_right, MOVES.index("R"), MOVES.index("L"))
    return np.where(at_the_end, MOVES.index("D"), along)


def shortest(lakes: Lakes) -> np.ndarray:
    """Return ``[lakes, CELLS, moves]``: equal probabilities of all moves that begin a shortest way."""
    ahead = lakes.distances[:, NEIGHBOURS]
    best = ahead == ahead.min(2, keepdims=True)
    return best / best.sum(2, keepdims=True)


def pupil(lakes: Lakes) -> np.ndarray:
    """Return ``[lakes, CELLS, moves]``: probabilities of the pupil's moves."""
    return HABIT * np.eye(len(MOVES))[habit()] + (1 - HABIT) * shortest(lakes)


def board(holes: np.ndarray, player: int) -> str:
    """Write the lake as the environment does."""
    cells = np.where(holes, "O", "_")
    cells[GOAL] = "G"
    cells[player] = "P"
    return "\n".join("".join(row) for row in cells.reshape(SIZE, SIZE))


def seen_in_warm_up(lakes: Lakes) -> np.ndarray:
    """Return ``[lakes]``: True for the half used in training. Validation has the other half, so its lakes are new."""
    drawings = np.where(lakes.holes, "H", "F")
    drawings[:, GOAL] = "G"
    return np.array([side_of("\n".join("".join(row) for row in each.reshape(SIZE, SIZE))) == 0 for each in drawings])


def lesson_maker(lakes: Lakes, seen: np.ndarray) -> DrawLessons:
    """Return a function that draws lessons on seen lakes, from any ice with a way to the goal."""
    probabilities = lakes.probabilities * seen
    probabilities /= probabilities.sum()
    standing = np.isfinite(lakes.distances) & (np.arange(CELLS) != GOAL)
    moves = pupil(lakes)

    def draw(count: int, chance: np.random.Generator) -> Lessons:
        chosen = chance.choice(len(probabilities), count, p=probabilities)
        players = np.where(standing[chosen], chance.random((count, CELLS)), -1.0).argmax(1)
        boards = [board(holes, player) for holes, player in zip(lakes.holes[chosen], players, strict=True)]
        return Lessons(boards, moves[chosen, players])

    return draw


@dataclass
class LakeGame:
    """See `Game`."""

    holes: np.ndarray
    player: int = 0

    def board(self) -> str:
        return board(self.holes, self.player)

    def play(self, move: str) -> None:
        if move in MOVES:
            self.player = int(NEIGHBOURS[self.player, MOVES.index(move)])

    @property
    def is_over(self) -> bool:
        return self.is_won or bool(self.holes[self.player])

    @property
    def is_won(self) -> bool:
        return self.player == GOAL


def unseen_games(lakes: Lakes, seen: np.ndarray, seed: int) -> list[LakeGame]:
    """Return games on lakes that the warm-up leaves out, drawn as the environment draws them."""
    probabilities = lakes.probabilities * ~seen
    chosen = np.random.default_rng(seed).choice(len(seen), EVALUATED_LAKES, p=probabilities / probabilities.sum())
    return [LakeGame(holes) for holes in lakes.holes[chosen]]


def make(folder: Path, seed: int, steps: int) -> WarmedModel:
    """Warm up a model and write it."""
    lakes = all_lakes()
    seen = seen_in_warm_up(lakes)
    return make_player(
        folder,
        seed=seed,
        steps=steps,
        characters=CHARACTERS,
        moves=MOVES,
        draw=lesson_maker(lakes, seen),
        unseen=lambda: unseen_games(lakes, seen, seed),
        max_turns=MAX_TURNS,
    )


if __name__ == "__main__":
    run(__doc__.splitlines()[0], Path(__file__).parent, STEPS, make)

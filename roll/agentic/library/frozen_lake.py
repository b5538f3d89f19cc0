"""FrozenLake with a new solvable map for each seed: walk over the ice to the goal without falling into a hole.

Gymnasium's own game draws its map once, when the environment is made; here the episode's seed draws it. All randomness
comes from the seed of the reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium
import numpy as np

from roll.agentic.base import (
    ActionFormat,
    AnyText,
    BadOption,
    Cell,
    GridStyle,
    action_reader,
    check_style,
    moved,
    reachable,
    side_of,
    with_symbols,
    written,
)

ACTIONS = ("left", "down", "right", "up")
DIRECTIONS: tuple[Cell, ...] = ((0, -1), (1, 0), (0, 1), (-1, 0))
SYMBOLS = {"player": "P", "frozen": "_", "hole": "O", "goal": "G", "fallen": "X", "arrived": "*"}
DRAWS = 64
"""Number of random maps tried before holes are filled to make one solvable."""


class FrozenLakeEnv(gymnasium.Env[str, str]):
    """The game FrozenLake. The goal gives ``goal_reward``; holes and the goal end the episode."""

    metadata = {"render_modes": ["ansi"]}

    def __init__(
        self,
        size: int = 4,
        hole_probability: float = 0.2,
        is_slippery: bool = False,
        random_start: bool = False,
        disjoint_maps: bool = True,
        map: Sequence[str] | None = None,  # gymnasium's name for it
        observation: GridStyle = "grid",
        instructions: bool = True,
        action_format: ActionFormat = "answer_tag",
        action_names: Sequence[str] | None = None,
        symbols: Mapping[str, str] | None = None,
        goal_reward: float = 1.0,
        step_reward: float = 0.0,
        hole_reward: float = 0.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """Check and keep the options. Raises `BadOption`.

        ``map``: rows of ``S`` (start), ``F`` (frozen), ``H`` (hole) and ``G`` (goal), instead of random maps.
        ``is_slippery``: a move goes in the chosen direction, or to its left or right, with equal probability.
        ``instructions``: add a system message and text about invalid actions; without it, observations are only grids.
        ``action_names``: names for left, down, right, up. ``disjoint_maps``: maps of even seeds (training) and of odd
        seeds (validation) do not overlap, except where `random_map` finds no map of the right half. ``step_reward``:
        reward of steps that do not end the episode.
        """
        check_style(observation)
        if size < 2:
            raise BadOption("size", f"{size} is too small", "at least 2")
        if not 0 <= hole_probability <= 1:
            raise BadOption("hole_probability", f"{hole_probability} is no probability", "between 0 and 1")
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.render_mode = render_mode
        self._reader = action_reader(ACTIONS, action_names, action_format)
        self._symbols = with_symbols(SYMBOLS, symbols)
        self._fixed = None if map is None else _read_map(map)
        self._size, self._hole_probability = size, hole_probability
        self._is_slippery, self._random_start = is_slippery, random_start
        self._disjoint_maps = disjoint_maps
        self._style, self._instructions = observation, instructions
        self._rewards = {"G": goal_reward, "F": step_reward, "H": hole_reward}
        self._rows: list[list[str]] = []
        self._player: Cell = (0, 0)
        self._is_over = True

    @property
    def example_actions(self) -> tuple[str, ...]:
        """An answer for each direction, in the requested format."""
        return self._reader.examples()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        if self._fixed is None:
            side = seed % 2 if self._disjoint_maps and seed is not None else None
            self._rows, start = random_map(self._size, self._hole_probability, self.np_random, side), (0, 0)
        else:
            self._rows, start = self._fixed
        self._player = self._random_place() if self._random_start else start
        self._is_over = False
        info = {"state": self.render(), "success": False}
        if self._instructions:
            info["system"] = self._system()
        return self._text(), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self._is_over:
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        chosen = self._reader.read(action)
        if chosen is None:
            note = f"{self._reader.complaint()}\n" if self._instructions else ""
            return note + self._text(), 0.0, False, False, self._info(action_is_valid=False, is_effective=False)
        target = moved(self._player, DIRECTIONS[self._slipped(chosen)])
        is_effective = self._is_inside(target)
        self._player = target if is_effective else self._player
        here = self._rows[self._player[0]][self._player[1]]
        self._is_over = here in "GH"
        info = self._info(action_is_valid=True, is_effective=is_effective)
        return self._text(), self._rewards[here], self._is_over, False, info

    def render(self) -> str:
        return written(self._drawn(), "grid", {})

    def _random_place(self) -> Cell:
        """Return a random cell of ice from which the goal can be reached."""
        goals = _cells(self._rows, "G")
        places = sorted(set().union(*(reachable(goal, DIRECTIONS, self._is_ice) for goal in goals)) - set(goals))
        return places[self.np_random.integers(len(places))]

    def _is_inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < len(self._rows) and 0 <= cell[1] < len(self._rows[0])

    def _is_ice(self, cell: Cell) -> bool:
        return self._is_inside(cell) and self._rows[cell[0]][cell[1]] not in "HG"

    def _slipped(self, chosen: int) -> int:
        if not self._is_slippery:
            return chosen
        return int(chosen + self.np_random.integers(-1, 2)) % len(DIRECTIONS)

    def _info(self, *, action_is_valid: bool, is_effective: bool) -> dict[str, Any]:
        return {
            "action_is_valid": action_is_valid,
            "success": self._rows[self._player[0]][self._player[1]] == "G",
            "state": self.render(),
            "metrics": {"action_is_effective": is_effective},
        }

    def _drawn(self) -> list[list[str]]:
        kinds = {"F": "frozen", "H": "hole", "G": "goal"}
        rows = [[self._symbols[kinds[each]] for each in row] for row in self._rows]
        here = self._rows[self._player[0]][self._player[1]]
        player = {"F": "player", "H": "fallen", "G": "arrived"}[here]
        rows[self._player[0]][self._player[1]] = self._symbols[player]
        return rows

    def _text(self) -> str:
        symbols = self._symbols
        names = {
            symbols["player"]: "You",
            symbols["fallen"]: "You, in a hole",
            symbols["arrived"]: "You, at the goal",
            symbols["goal"]: "Goal",
            symbols["hole"]: "Holes",
        }
        return written(self._drawn(), self._style, names)

    def _system(self) -> str:
        symbols = self._symbols
        slippery = " The ice is slippery: you may move sideways instead." if self._is_slippery else ""
        legend = (
            f" {symbols['player']} is you, {symbols['frozen']} ice, {symbols['hole']} a hole, "
            f"{symbols['goal']} the goal."
        )
        return (
            f"You walk over a frozen lake to the goal, one step at a time. Holes end the game.{slippery}"
            f"{'' if self._style == 'coordinates' else legend} {self._reader.instructions()}"
        )


def random_map(
    size: int, hole_probability: float, random: np.random.Generator, side: int | None = None
) -> list[list[str]]:
    """Return a random square map on which the goal (bottom right) can be reached from the top left.

    ``side`` (0 or 1) restricts it to one half of all maps. If none of `DRAWS` maps qualifies (many holes, large maps),
    holes of the last map are filled one by one until it is solvable, whichever half it is in.
    """
    for _ in range(DRAWS):
        rows = np.where(random.random((size, size)) < hole_probability, "H", "F").tolist()
        rows[0][0], rows[-1][-1] = "F", "G"
        if _is_solvable(rows) and side in (None, side_of("\n".join(map("".join, rows)))):
            return rows
    holes = _cells(rows, "H")
    for index in random.permutation(len(holes)):
        row, column = holes[index]
        rows[row][column] = "F"
        if _is_solvable(rows):
            break
    return rows


def _read_map(map: Sequence[str]) -> tuple[list[list[str]], Cell]:
    """Return rows of `F`, `H` and `G`, and the start. Raises `BadOption`."""
    rows = [list(str(row)) for row in map]
    if len({len(row) for row in rows}) != 1 or not set().union(*rows) <= set("SFHG"):
        raise BadOption("map", f"{list(map)} is no map", "rows of one length, of the letters S, F, H and G")
    starts = _cells(rows, "S")
    if len(starts) != 1:
        raise BadOption("map", f"it has {len(starts)} starts", "exactly one S")
    if not _is_solvable(rows, starts[0]):
        raise BadOption("map", "no goal can be reached from the start", "connect S and G by F")
    rows[starts[0][0]][starts[0][1]] = "F"
    return rows, starts[0]


def _cells(rows: Sequence[Sequence[str]], kind: str) -> list[Cell]:
    return [(r, c) for r, row in enumerate(rows) for c, each in enumerate(row) if each == kind]


def _is_solvable(rows: list[list[str]], start: Cell = (0, 0)) -> bool:
    def is_free(cell: Cell) -> bool:
        return 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0]) and rows[cell[0]][cell[1]] != "H"

    return not set(_cells(rows, "G")).isdisjoint(reachable(start, DIRECTIONS, is_free))

"""Sokoban with generated levels: push every box onto a target.

A level is made backwards: boxes start on the targets and are pulled away. Each pull can be undone by a push, so every
level is solvable. Rewards are those of gym-sokoban. All randomness comes from the seed of the reset.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

ACTIONS = ("up", "down", "left", "right")
DIRECTIONS: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
SYMBOLS = {
    "wall": "#",
    "floor": "_",
    "target": "O",
    "box": "X",
    "box_on_target": "*",
    "player": "P",
    "player_on_target": "S",
}
CELLS_PER_BOX = 3
"""Smallest number of cells inside the outer walls per box, so that a level is found quickly."""
DRAWS = 64
"""Number of levels tried to find one of the seed's own half."""
ROOMS = 400
"""Number of rooms tried for one level."""


@dataclass(frozen=True)
class Level:
    """A room with its boxes and the player."""

    height: int
    width: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    def is_solved(self) -> bool:
        """Return True if each box is on a target."""
        return self.boxes == self.targets

    def is_free(self, cell: Cell) -> bool:
        """Return True if the cell holds neither wall nor box."""
        return cell not in self.walls and cell not in self.boxes

    def after_push(self, direction: Cell) -> Level | None:
        """Return the level after one step, which may push one box; None if the way is blocked."""
        ahead = moved(self.player, direction)
        if self.is_free(ahead):
            return self._with(self.boxes, ahead)
        behind = moved(ahead, direction)
        if ahead in self.boxes and self.is_free(behind):
            return self._with((self.boxes - {ahead}) | {behind}, ahead)
        return None

    def pulls(self) -> list[Level]:
        """Return all levels from which one push leads to these boxes, with the player next to the pushed box."""
        places = reachable(self.player, DIRECTIONS, self.is_free)
        found = []
        for box in sorted(self.boxes):
            for direction in DIRECTIONS:
                place, behind = moved(box, direction), moved(box, direction, 2)
                if place in places and self.is_free(behind):
                    found.append(self._with((self.boxes - {box}) | {place}, behind))
        return found

    def _with(self, boxes: frozenset[Cell], player: Cell) -> Level:
        return Level(self.height, self.width, self.walls, self.targets, boxes, player)


class SokobanEnv(gymnasium.Env[str, str]):
    """The game Sokoban. The episode ends when all boxes are on targets."""

    metadata = {"render_modes": ["ansi"]}

    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: int = 1,
        search_depth: int = 20,
        wall_share: float = 0.2,
        disjoint_levels: bool = True,
        observation: GridStyle = "grid",
        instructions: bool = True,
        action_format: ActionFormat = "answer_tag",
        action_names: Sequence[str] | None = None,
        symbols: Mapping[str, str] | None = None,
        step_reward: float = -0.1,
        box_on_target_reward: float = 1.0,
        box_off_target_reward: float = -1.0,
        finish_reward: float = 10.0,
        render_mode: str | None = "ansi",
    ) -> None:
        """Check and keep the options. Raises `BadOption`.

        ``dim_room``: rows and columns, including the outer walls. ``search_depth``: number of pulls tried when a level
        is made; more give harder levels. ``wall_share``: share of the inside that becomes wall. ``disjoint_levels``:
        levels of even seeds (training) and of odd seeds (validation) do not overlap, except where none of `DRAWS`
        levels is of the right half. ``instructions``: add a system message and text about invalid actions; without it,
        observations are only grids. ``action_names``: names for up, down, left, right.
        """
        check_style(observation)
        self._room = _checked_room(dim_room)
        _check_generation(self._room, num_boxes, search_depth, wall_share)
        self.observation_space = AnyText()
        self.action_space = AnyText()
        self.render_mode = render_mode
        self._reader = action_reader(ACTIONS, action_names, action_format)
        self._symbols = with_symbols(SYMBOLS, symbols)
        self._num_boxes, self._search_depth, self._wall_share = num_boxes, search_depth, wall_share
        self._disjoint_levels = disjoint_levels
        self._style, self._instructions = observation, instructions
        self._step_reward, self._finish_reward = step_reward, finish_reward
        self._on_reward, self._off_reward = box_on_target_reward, box_off_target_reward
        self._level: Level | None = None

    @property
    def example_actions(self) -> tuple[str, ...]:
        """An answer for each direction, in the requested format."""
        return self._reader.examples()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        for _ in range(DRAWS):
            self._level = make_level(self._room, self._num_boxes, self._search_depth, self._wall_share, self.np_random)
            if seed is None or not self._disjoint_levels or side_of(self.render()) == seed % 2:
                break
        info = {"state": self.render(), "success": False}
        if self._instructions:
            info["system"] = self._system()
        return self._text(), info

    @property
    def level(self) -> Level:
        """The current level. Raises `gymnasium.error.ResetNeeded` before the first reset."""
        if self._level is None:
            raise gymnasium.error.ResetNeeded("there is no level before the first reset")
        return self._level

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        before = self._level
        if before is None or before.is_solved():
            raise gymnasium.error.ResetNeeded("the episode is over: reset the environment before its next step")
        chosen = self._reader.read(action)
        if chosen is None:
            note = f"{self._reader.complaint()}\n" if self._instructions else ""
            return note + self._text(), 0.0, False, False, self._info(action_is_valid=False, is_effective=False)
        after = before.after_push(DIRECTIONS[chosen])
        self._level = after or before
        info = self._info(action_is_valid=True, is_effective=after is not None)
        return self._text(), self._reward(before, self._level), self._level.is_solved(), False, info

    def render(self) -> str:
        return "" if self._level is None else written(self._drawn(self._level), "grid", {})

    def _reward(self, before: Level, after: Level) -> float:
        gained = len(after.boxes & after.targets) - len(before.boxes & before.targets)
        reward = self._step_reward
        reward += self._on_reward if gained > 0 else self._off_reward if gained < 0 else 0.0
        return reward + (self._finish_reward if after.is_solved() else 0.0)

    def _info(self, *, action_is_valid: bool, is_effective: bool) -> dict[str, Any]:
        assert self._level is not None
        return {
            "action_is_valid": action_is_valid,
            "success": self._level.is_solved(),
            "state": self.render(),
            "metrics": {
                "action_is_effective": is_effective,
                "boxes_on_target": len(self._level.boxes & self._level.targets) / self._num_boxes,
            },
        }

    def _drawn(self, level: Level) -> list[list[str]]:
        return [[self._symbols[_kind(level, (r, c))] for c in range(level.width)] for r in range(level.height)]

    def _text(self) -> str:
        assert self._level is not None
        symbols = self._symbols
        names = {
            symbols["player"]: "You",
            symbols["player_on_target"]: "You, on a target",
            symbols["box"]: "Boxes",
            symbols["box_on_target"]: "Boxes on targets",
            symbols["target"]: "Targets",
            symbols["wall"]: "Walls",
        }
        return written(self._drawn(self._level), self._style, names)

    def _system(self) -> str:
        symbols = self._symbols
        legend = (
            f" {symbols['player']} is you ({symbols['player_on_target']} on a target), {symbols['wall']} a wall, "
            f"{symbols['floor']} floor, {symbols['box']} a box, {symbols['target']} a target, "
            f"{symbols['box_on_target']} a box on a target."
        )
        return (
            "You push boxes onto targets. You push a box by walking into it; boxes cannot be pulled, nor two pushed at "
            f"once.{'' if self._style == 'coordinates' else legend} {self._reader.instructions()}"
        )


def make_level(
    room: tuple[int, int], num_boxes: int, search_depth: int, wall_share: float, random: np.random.Generator
) -> Level:
    """Return a solvable, unsolved level.

    Boxes are pulled as far from their targets as `search_depth` random pulls get them. Raises `RuntimeError` if none of
    `ROOMS` rooms has space for the level.
    """
    for attempt in range(ROOMS):
        emptier = wall_share * (1 - attempt / ROOMS)
        level = _pulled_apart(_empty_level(room, num_boxes, emptier, random), search_depth, random)
        if level is not None:
            return level
    size = f"{room[0]} x {room[1]}"
    raise RuntimeError(f"no level of {size} with {num_boxes} boxes was found: take fewer boxes or a larger room")


def _empty_level(room: tuple[int, int], num_boxes: int, wall_share: float, random: np.random.Generator) -> Level | None:
    """Return a connected room with its boxes on targets; None if the walls leave too little space."""
    height, width = room
    inside = [(r, c) for r in range(1, height - 1) for c in range(1, width - 1)]
    floor = {cell for cell in inside if random.random() >= wall_share}
    start = inside[random.integers(len(inside))]
    connected = sorted(reachable(start, DIRECTIONS, floor.__contains__))
    if len(connected) < num_boxes + 2:
        return None
    places = [connected[index] for index in random.permutation(len(connected))]
    boxes = frozenset(places[:num_boxes])
    everything = {(r, c) for r in range(height) for c in range(width)}
    return Level(height, width, frozenset(everything - set(connected)), boxes, boxes, places[num_boxes])


def _pulled_apart(level: Level | None, search_depth: int, random: np.random.Generator) -> Level | None:
    """Return the level of a random walk of pulls whose boxes are farthest from their targets; None if no pull helps."""
    best, best_score = None, (0, 0)
    for _ in range(search_depth):
        choices = level.pulls() if level is not None else []
        if not choices:
            break
        level = choices[random.integers(len(choices))]
        score = (len(level.boxes - level.targets), _distance(level))
        if score > best_score:
            best, best_score = level, score
    if best is None:
        return None
    places = sorted(reachable(best.player, DIRECTIONS, best.is_free))
    return best._with(best.boxes, places[random.integers(len(places))])


def _distance(level: Level) -> int:
    """Return the sum of the steps from each box to its nearest target, ignoring walls."""
    return sum(min(abs(r - tr) + abs(c - tc) for tr, tc in level.targets) for r, c in level.boxes)


def _kind(level: Level, cell: Cell) -> str:
    on_target = cell in level.targets
    if cell in level.walls:
        return "wall"
    if cell == level.player:
        return "player_on_target" if on_target else "player"
    if cell in level.boxes:
        return "box_on_target" if on_target else "box"
    return "target" if on_target else "floor"


def _checked_room(dim_room: Sequence[int]) -> tuple[int, int]:
    if len(dim_room) != 2 or min(dim_room) < 3 or max(dim_room) < 5:
        message = f"{list(dim_room)} leaves no place to push"
        raise BadOption("dim_room", message, "[rows, columns], outer walls included, at least [3, 5]")
    return int(dim_room[0]), int(dim_room[1])


def _check_generation(room: tuple[int, int], num_boxes: int, search_depth: int, wall_share: float) -> None:
    most = (room[0] - 2) * (room[1] - 2) // CELLS_PER_BOX
    if not 1 <= num_boxes <= most:
        message = f"{num_boxes} boxes do not fit a room of {room[0]} x {room[1]}"
        raise BadOption("num_boxes", message, f"from 1 to {most}")
    if search_depth < 1:
        raise BadOption("search_depth", f"{search_depth} pulls move no box", "at least 1")
    if not 0 <= wall_share <= 0.6:
        raise BadOption("wall_share", f"{wall_share} is out of range", "between 0 and 0.6")

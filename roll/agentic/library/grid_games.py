"""Games on a grid: FrozenLake (walk to the goal) and Sokoban (push boxes onto targets), with a new map for each seed.

All randomness derives from the seed of the reset. (Gymnasium's own FrozenLake draws its map once, when the environment
is created.) A level of Sokoban is generated backwards: boxes start on the targets and are pulled away. Each pull can be
undone by a push, so every level is solvable. Its rewards are those of gym-sokoban.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, validate_call

from roll.agentic.base import ActionFormat, BadOption, Count, ResetAnswer, StepAnswer, TextGame, action_reader

Cell = tuple[int, int]
"""(row, column), counted from 0 at the top left."""

GridStyle = Literal["grid", "spaced", "coordinates"]
"""``grid``: rows of symbols; ``spaced``: symbols separated by spaces; ``coordinates``: a list of places."""

UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
DRAWS = 64
"""Maximum number of random maps tried per seed."""
CELLS_PER_BOX = 3
"""Minimum number of inner cells per box, so that a level is found quickly."""
ROOMS = 400
"""Maximum number of rooms tried per level."""


def moved(cell: Cell, direction: Cell, steps: int = 1) -> Cell:
    """Return the cell ``steps`` steps away in a direction."""
    return cell[0] + steps * direction[0], cell[1] + steps * direction[1]


def reachable(start: Cell, is_free: Callable[[Cell], bool]) -> set[Cell]:
    """Return all cells that can be reached from ``start`` over free cells, including ``start``."""
    found, frontier = {start}, deque([start])
    while frontier:
        cell = frontier.popleft()
        for direction in (UP, DOWN, LEFT, RIGHT):
            beside = moved(cell, direction)
            if beside not in found and is_free(beside):
                found.add(beside)
                frontier.append(beside)
    return found


def side_of(drawing: str) -> int:
    """Return the half of all maps (0 or 1) to which this map belongs.

    Training has even seeds, validation odd ones. If each seed uses only maps of its half, training and validation share
    no map.
    """
    return hashlib.blake2b(drawing.encode(), digest_size=1).digest()[0] % 2


class GridGame(TextGame):
    """Base class of grid games: symbols, texts, and the parsing of actions."""

    DIRECTIONS: Mapping[str, Cell]
    """Action -> its direction."""
    SYMBOLS: Mapping[str, str]
    """Kind of cell -> its default symbol."""
    NAMES: Mapping[str, str]
    """Kind of cell -> its name, for the kinds that the style `coordinates` lists."""
    RULES: str
    LEGEND: str
    """Explains the symbols, with kinds of cells as format fields. Not used in the style `coordinates`."""

    def __init__(
        self,
        observation: GridStyle,
        instructions: bool,
        action_format: ActionFormat,
        action_names: Sequence[str] | None,
        symbols: Mapping[str, str] | None,
        render_mode: str | None,
    ) -> None:
        """Store the options that all grid games share. Raises `BadOption`."""
        super().__init__(render_mode)
        self._reader = action_reader(tuple(self.DIRECTIONS), action_names, action_format)
        self._symbols = _with_symbols(self.SYMBOLS, symbols)
        self._style, self._instructions, self._rules = observation, instructions, self.RULES

    @property
    def example_actions(self) -> tuple[str, ...]:
        """A well-formed answer for each direction."""
        return self._reader.examples()

    def _act(self, action: str) -> StepAnswer:
        chosen = self._reader.read(action)
        if chosen is None:
            note = f"{self._reader.complaint()}\n" if self._instructions else ""
            info = self._info(action_is_valid=False, action_is_effective=False)
            return note + self._written(self._style), 0.0, False, False, info
        reward, outcome, is_effective = self._move(chosen)
        info = self._info(success=bool(outcome), action_is_effective=is_effective)
        return self._written(self._style), reward, outcome is not None, False, info

    def render(self) -> str:
        return self._written("grid")

    def _move(self, chosen: int) -> tuple[float, bool | None, bool]:
        """Execute the action with this index.

        Returns the reward, the outcome (True: won, False: lost, None: the game continues), and True if the state
        changed.
        """
        raise NotImplementedError

    def _kinds(self) -> list[list[str]]:
        """Return the kind of each cell; empty before the first reset."""
        raise NotImplementedError

    def _begun(self) -> ResetAnswer:
        """Return the values of `reset`."""
        info = self._info()
        if self._instructions:
            legend = "" if self._style == "coordinates" else f" {self.LEGEND.format(**self._symbols)}"
            info["system"] = f"{self._rules}{legend} {self._reader.instructions()}"
        return self._written(self._style), info

    def _written(self, style: GridStyle) -> str:
        kinds = self._kinds()
        if style != "coordinates":
            separator = "" if style == "grid" else " "
            return "\n".join(separator.join(self._symbols[kind] for kind in row) for row in kinds)
        lines = [f"{len(kinds)} rows, {len(kinds[0])} columns. Places are (row, column), from (0, 0) at the top left."]
        for kind, name in self.NAMES.items():
            if cells := _cells(kinds, kind):
                lines.append(f"{name}: {', '.join(f'({r}, {c})' for r, c in cells)}")
        return "\n".join(lines)


def _with_symbols(defaults: Mapping[str, str], symbols: Mapping[str, str] | None) -> dict[str, str]:
    """Return the symbol of each kind of cell, with the user's replacements. Raises `BadOption`."""
    chosen = dict(defaults) | dict(symbols or {})
    unknown = [key for key in chosen if key not in defaults]
    if unknown:
        raise BadOption("symbols", f"there is no `{unknown[0]}`", f"known: {', '.join(defaults)}")
    if any(len(symbol) != 1 or symbol.isspace() for symbol in chosen.values()):
        raise BadOption("symbols", f"{chosen} are not all one visible character", "one character for each")
    if len(set(chosen.values())) < len(chosen):
        raise BadOption("symbols", f"{chosen} are not all different", "a character of its own for each")
    return chosen


def _cells(rows: Sequence[Sequence[str]], kind: str) -> list[Cell]:
    return [(r, c) for r, row in enumerate(rows) for c, each in enumerate(row) if each == kind]


class FrozenLakeEnv(GridGame):
    """The game FrozenLake. Reaching the goal gives ``goal_reward``; holes and the goal end the episode."""

    DIRECTIONS = {"left": LEFT, "down": DOWN, "right": RIGHT, "up": UP}
    SYMBOLS = {"player": "P", "frozen": "_", "hole": "O", "goal": "G", "fallen": "X", "arrived": "*"}
    NAMES = {
        "player": "You",
        "fallen": "You, in a hole",
        "arrived": "You, at the goal",
        "goal": "Goal",
        "hole": "Holes",
    }
    RULES = "You walk over a frozen lake to the goal, one step at a time. Holes end the game."
    LEGEND = "{player} is you, {frozen} ice, {hole} a hole, {goal} the goal."

    @validate_call
    def __init__(
        self,
        size: Annotated[int, Field(ge=2)] = 4,
        hole_probability: Annotated[float, Field(ge=0, le=1)] = 0.2,
        is_slippery: bool = False,
        random_start: bool = False,
        disjoint_maps: bool = True,
        map: Sequence[str] | None = None,  # the option's name; shadows the built-in function
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
        """Store the options, which docs/environments.md explains. Raises `BadOption`."""
        super().__init__(observation, instructions, action_format, action_names, symbols, render_mode)
        self._fixed = None if map is None else _read_map(map)
        self._size, self._hole_probability = size, hole_probability
        self._is_slippery, self._random_start = is_slippery, random_start
        self._rules += " The ice is slippery: you may move sideways instead." if is_slippery else ""
        self._disjoint_maps = disjoint_maps
        self._rewards = {"G": goal_reward, "F": step_reward, "H": hole_reward}
        self._rows: list[list[str]] = []
        self._player: Cell = (0, 0)

    def _begin(self, seed: int | None) -> ResetAnswer:
        if self._fixed is None:
            side = seed % 2 if self._disjoint_maps and seed is not None else None
            self._rows, start = random_map(self._size, self._hole_probability, self.np_random, side), (0, 0)
        else:
            self._rows, start = self._fixed
        if self._random_start:
            places = sorted(starts(self._rows))
            start = places[self.np_random.integers(len(places))]
        self._player = start
        return self._begun()

    def _move(self, chosen: int) -> tuple[float, bool | None, bool]:
        if self._is_slippery:
            chosen = int(chosen + self.np_random.integers(-1, 2)) % len(self.DIRECTIONS)
        target = moved(self._player, tuple(self.DIRECTIONS.values())[chosen])
        is_effective = _is_inside(self._rows, target)
        self._player = target if is_effective else self._player
        here = self._here()
        return self._rewards[here], {"F": None, "H": False, "G": True}[here], is_effective

    def _here(self) -> str:
        return self._rows[self._player[0]][self._player[1]]

    def _kinds(self) -> list[list[str]]:
        kinds = [[{"F": "frozen", "H": "hole", "G": "goal"}[each] for each in row] for row in self._rows]
        if kinds:
            kinds[self._player[0]][self._player[1]] = {"F": "player", "H": "fallen", "G": "arrived"}[self._here()]
        return kinds


def random_map(
    size: int, hole_probability: float, random: np.random.Generator, side: int | None = None
) -> list[list[str]]:
    """Return a random square map on which the goal (bottom right) can be reached from the top left.

    ``side`` (0 or 1) restricts it to one half of all maps. If none of `DRAWS` maps qualifies (many holes, large maps),
    holes of the last map are filled one by one until it is solvable; it may then be in the other half.
    """
    for _ in range(DRAWS):
        rows = np.where(random.random((size, size)) < hole_probability, "H", "F").tolist()
        rows[0][0], rows[-1][-1] = "F", "G"
        if side in (None, side_of("\n".join(map("".join, rows)))) and (0, 0) in starts(rows):
            return rows
    holes = _cells(rows, "H")
    for index in random.permutation(len(holes)):
        row, column = holes[index]
        rows[row][column] = "F"
        if (0, 0) in starts(rows):
            break
    return rows


def _read_map(map: Sequence[str]) -> tuple[list[list[str]], Cell]:
    """Return the rows (`F`, `H`, `G`) and the start of the user's map. Raises `BadOption`."""
    rows = [list(str(row)) for row in map]
    if len({len(row) for row in rows}) != 1 or not set().union(*rows) <= set("SFHG"):
        raise BadOption("map", f"{list(map)} is no map", "rows of one length, of the letters S, F, H and G")
    marked = _cells(rows, "S")
    if len(marked) != 1:
        raise BadOption("map", f"it has {len(marked)} starts", "exactly one S")
    start = marked[0]
    if start not in starts(rows):
        raise BadOption("map", "no goal can be reached from the start", "connect S and G by F")
    rows[start[0]][start[1]] = "F"
    return rows, start


def starts(rows: Sequence[Sequence[str]]) -> set[Cell]:
    """Return the ice cells from which a goal can be reached."""

    def is_ice(cell: Cell) -> bool:
        return _is_inside(rows, cell) and rows[cell[0]][cell[1]] not in "HG"

    goals = _cells(rows, "G")
    return set().union(*(reachable(goal, is_ice) for goal in goals)) - set(goals)


def _is_inside(rows: Sequence[Sequence[str]], cell: Cell) -> bool:
    return 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows[0])


@dataclass(frozen=True)
class Level:
    """A Sokoban room with its boxes and the player."""

    height: int
    width: int
    walls: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell

    def is_solved(self) -> bool:
        """Return True if every box is on a target."""
        return self.boxes == self.targets

    def boxes_on_target(self) -> int:
        """Return the number of boxes on targets."""
        return len(self.boxes & self.targets)

    def kind(self, cell: Cell) -> str:
        """Return the kind of a cell; see `SokobanEnv.SYMBOLS`."""
        on_target = cell in self.targets
        if cell in self.walls:
            return "wall"
        if cell == self.player:
            return "player_on_target" if on_target else "player"
        if cell in self.boxes:
            return "box_on_target" if on_target else "box"
        return "target" if on_target else "floor"

    def is_free(self, cell: Cell) -> bool:
        """Return True if the cell has neither wall nor box."""
        return cell not in self.walls and cell not in self.boxes

    def after_push(self, direction: Cell) -> Level | None:
        """Return the level after a step, which may push one box; None if the way is blocked."""
        ahead = moved(self.player, direction)
        if self.is_free(ahead):
            return replace(self, player=ahead)
        behind = moved(ahead, direction)
        if ahead in self.boxes and self.is_free(behind):
            return replace(self, boxes=(self.boxes - {ahead}) | {behind}, player=ahead)
        return None

    def pulls(self) -> list[Level]:
        """Return all levels from which one push leads to these boxes, with the player next to the pushed box."""
        places = reachable(self.player, self.is_free)
        found = []
        for box in sorted(self.boxes):
            for direction in (UP, DOWN, LEFT, RIGHT):
                place, behind = moved(box, direction), moved(box, direction, 2)
                if place in places and self.is_free(behind):
                    found.append(replace(self, boxes=(self.boxes - {box}) | {place}, player=behind))
        return found


class SokobanEnv(GridGame):
    """The game Sokoban. The episode ends when all boxes are on targets."""

    DIRECTIONS = {"up": UP, "down": DOWN, "left": LEFT, "right": RIGHT}
    SYMBOLS = {
        "wall": "#",
        "floor": "_",
        "target": "O",
        "box": "X",
        "box_on_target": "*",
        "player": "P",
        "player_on_target": "S",
    }
    NAMES = {
        "player": "You",
        "player_on_target": "You, on a target",
        "box": "Boxes",
        "box_on_target": "Boxes on targets",
        "target": "Targets",
        "wall": "Walls",
    }
    RULES = (
        "You push boxes onto targets. You push a box by walking into it; "
        "boxes cannot be pulled, nor two pushed at once."
    )
    LEGEND = (
        "{player} is you ({player_on_target} on a target), {wall} a wall, {floor} floor, {box} a box, "
        "{target} a target, {box_on_target} a box on a target."
    )

    @validate_call
    def __init__(
        self,
        dim_room: Sequence[int] = (6, 6),
        num_boxes: Count = 1,
        search_depth: Count = 20,
        wall_share: Annotated[float, Field(ge=0, le=0.6)] = 0.2,
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
        """Store the options, which docs/environments.md explains. Raises `BadOption`."""
        super().__init__(observation, instructions, action_format, action_names, symbols, render_mode)
        if len(dim_room) != 2 or min(dim_room) < 3 or max(dim_room) < 5:
            message = f"{list(dim_room)} leaves no place to push"
            raise BadOption("dim_room", message, "[rows, columns], outer walls included, at least [3, 5]")
        self._room = rows, columns = dim_room[0], dim_room[1]
        most = (rows - 2) * (columns - 2) // CELLS_PER_BOX
        if num_boxes > most:
            message = f"{num_boxes} boxes do not fit a room of {rows} x {columns}"
            raise BadOption("num_boxes", message, f"from 1 to {most}")
        self._num_boxes, self._search_depth, self._wall_share = num_boxes, search_depth, wall_share
        self._disjoint_levels = disjoint_levels
        self._step_reward, self._finish_reward = step_reward, finish_reward
        self._on_reward, self._off_reward = box_on_target_reward, box_off_target_reward
        self.level = Level(0, 0, frozenset(), frozenset(), frozenset(), (0, 0))
        """The current level; empty before the first reset."""

    def _begin(self, seed: int | None) -> ResetAnswer:
        for _ in range(DRAWS):
            self.level = make_level(self._room, self._num_boxes, self._search_depth, self._wall_share, self.np_random)
            if seed is None or not self._disjoint_levels or side_of(self.render()) == seed % 2:
                break
        return self._begun()

    def _move(self, chosen: int) -> tuple[float, bool | None, bool]:
        before = self.level
        pushed = before.after_push(tuple(self.DIRECTIONS.values())[chosen])
        after = self.level = pushed or before
        gained = after.boxes_on_target() - before.boxes_on_target()
        reward = self._step_reward
        reward += self._on_reward if gained > 0 else self._off_reward if gained < 0 else 0.0
        if after.is_solved():
            return reward + self._finish_reward, True, True
        return reward, None, pushed is not None

    def _info(self, **known: Any) -> dict[str, Any]:
        return super()._info(**known, boxes_on_target=self.level.boxes_on_target() / self._num_boxes)

    def _kinds(self) -> list[list[str]]:
        return [[self.level.kind((r, c)) for c in range(self.level.width)] for r in range(self.level.height)]


def make_level(
    room: tuple[int, int], num_boxes: int, search_depth: int, wall_share: float, random: np.random.Generator
) -> Level:
    """Return a solvable level that is not solved yet.

    Boxes are pulled as far from their targets as `search_depth` random pulls allow. Raises `RuntimeError` if none of
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
    """Return a connected room with all boxes on targets; None if the walls leave too little space."""
    height, width = room
    inside = [(r, c) for r in range(1, height - 1) for c in range(1, width - 1)]
    floor = {cell for cell in inside if random.random() >= wall_share}
    start = inside[random.integers(len(inside))]
    connected = sorted(reachable(start, floor.__contains__))
    if len(connected) < num_boxes + 2:
        return None
    places = [connected[index] for index in random.permutation(len(connected))]
    boxes = frozenset(places[:num_boxes])
    everything = {(r, c) for r in range(height) for c in range(width)}
    return Level(height, width, frozenset(everything - set(connected)), boxes, boxes, places[num_boxes])


def _pulled_apart(level: Level | None, search_depth: int, random: np.random.Generator) -> Level | None:
    """From a random walk of pulls, return the level with the boxes farthest from targets; None if no pull helps."""
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
    places = sorted(reachable(best.player, best.is_free))
    return replace(best, player=places[random.integers(len(places))])


def _distance(level: Level) -> int:
    """Return the sum of the distances from each box to its nearest target, in steps, ignoring walls."""
    return sum(min(abs(r - tr) + abs(c - tc) for tr, tc in level.targets) for r, c in level.boxes)

"""Shared parts of the grid games: cells, moves, and ways to write a grid for a policy."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal

from roll.agentic.env.base import BadOption

Cell = tuple[int, int]
"""Row and column, counted from 0 at the top left."""

GridStyle = Literal["grid", "spaced", "coordinates"]
"""``grid``: rows of symbols; ``spaced``: with spaces between the symbols; ``coordinates``: a list of places."""


def moved(cell: Cell, direction: Cell, steps: int = 1) -> Cell:
    """Return the cell ``steps`` steps away."""
    return cell[0] + steps * direction[0], cell[1] + steps * direction[1]


def reachable(start: Cell, directions: Collection[Cell], is_free: Callable[[Cell], bool]) -> set[Cell]:
    """Return all cells reachable from ``start`` over free cells, including ``start``."""
    found, frontier = {start}, deque([start])
    while frontier:
        cell = frontier.popleft()
        for direction in directions:
            beside = moved(cell, direction)
            if beside not in found and is_free(beside):
                found.add(beside)
                frontier.append(beside)
    return found


def written(rows: Sequence[Sequence[str]], style: GridStyle, names: Mapping[str, str]) -> str:
    """Return a grid of symbols as text. ``names`` maps the symbols that ``coordinates`` lists to their meaning."""
    if style == "grid":
        return "\n".join("".join(row) for row in rows)
    if style == "spaced":
        return "\n".join(" ".join(row) for row in rows)
    lines = [f"{len(rows)} rows, {len(rows[0])} columns. Places are (row, column), from (0, 0) at the top left."]
    for symbol, name in names.items():
        cells = [(r, c) for r, row in enumerate(rows) for c, each in enumerate(row) if each == symbol]
        if cells:
            lines.append(f"{name}: {', '.join(f'({r}, {c})' for r, c in cells)}")
    return "\n".join(lines)


def check_style(style: str) -> None:
    """Raise `BadOption` for an unknown style."""
    if style not in ("grid", "spaced", "coordinates"):
        raise BadOption("observation", f"{style!r} is no way to write a grid", "`grid`, `spaced` or `coordinates`")


def with_symbols(defaults: Mapping[str, str], symbols: Mapping[str, str] | None) -> dict[str, str]:
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


def side_of(drawing: str) -> int:
    """Return 0 or 1: the half of all maps that this map belongs to.

    Training has even seeds and validation odd ones. If each seed uses only maps of its own half, no map is in both.
    """
    return hashlib.blake2b(drawing.encode(), digest_size=1).digest()[0] % 2

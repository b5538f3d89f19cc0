"""Renders text frames as images: PNG, animated GIF, or an array for TensorBoard.

Each character has its own cell, so grids stay aligned in any font. Frames that are too large are cropped, marked with
an ellipsis. If there are too many frames, some between the first and the last are omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

MAX_COLUMNS, MAX_ROWS, MAX_FRAMES = 120, 60, 120
CELL_WIDTH, CELL_HEIGHT, FONT_SIZE, MARGIN = 10, 18, 15, 8
BACKGROUND, INK = (250, 250, 247), (30, 30, 40)
TAB = 4
CUT = "…"


def text_to_png(text: str, path: str | Path) -> None:
    """Write a text frame as PNG."""
    _images([text])[0].save(path, format="PNG")


def frames_to_gif(frames: Sequence[str], path: str | Path, *, seconds_per_frame: float = 0.6) -> None:
    """Write frames as a looping GIF that shows the last frame longer.

    Raises `ValueError` if there are no frames.
    """
    images = _images(frames)
    milliseconds = [max(20, round(1000 * seconds_per_frame))] * len(images)
    milliseconds[-1] *= 3
    images[0].save(path, format="GIF", save_all=True, append_images=images[1:], duration=milliseconds, loop=0)


def frames_to_array(frames: Sequence[str]) -> np.ndarray:
    """Return frames as uint8 ``[frames, height, width, 3]``. Raises `ValueError` if there are none."""
    return np.stack([np.asarray(image) for image in _images(frames)])


def _images(frames: Sequence[str]) -> list[Image.Image]:
    """Render frames as images that all have the size of the largest."""
    if not frames:
        raise ValueError("there are no frames: an episode has at least the one after its reset")
    evenly_spaced = np.linspace(0, len(frames) - 1, min(len(frames), MAX_FRAMES))  # includes both ends
    chosen = [_cells(frames[index]) for index in sorted({round(each) for each in evenly_spaced})]
    columns = max((len(line) for cells in chosen for line in cells), default=0)
    rows = max(len(cells) for cells in chosen)
    size = 2 * MARGIN + CELL_WIDTH * max(columns, 1), 2 * MARGIN + CELL_HEIGHT * max(rows, 1)
    return [_image(cells, size) for cells in chosen]


def _cells(text: str) -> list[str]:
    """Split a text into lines of printable characters, cropped to the maximum size."""
    lines = [
        "".join(each if each.isprintable() else " " for each in line.expandtabs(TAB)) for line in text.splitlines()
    ]
    if len(lines) > MAX_ROWS:
        lines = [*lines[: MAX_ROWS - 1], CUT]
    return [line if len(line) <= MAX_COLUMNS else line[: MAX_COLUMNS - 1] + CUT for line in lines]


def _image(cells: list[str], size: tuple[int, int]) -> Image.Image:
    image = Image.new("RGB", size, BACKGROUND)
    draw = ImageDraw.Draw(image)
    font = ImageFont.load_default(FONT_SIZE)
    for row, line in enumerate(cells):
        for column, character in enumerate(line):
            if character != " ":
                middle = MARGIN + CELL_WIDTH * (column + 0.5), MARGIN + CELL_HEIGHT * (row + 0.5)
                draw.text(middle, character, fill=INK, font=font, anchor="mm")
    return image

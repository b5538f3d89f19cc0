from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from roll.agentic.frames import (
    BACKGROUND,
    CELL_HEIGHT,
    CELL_WIDTH,
    MARGIN,
    MAX_COLUMNS,
    MAX_FRAMES,
    MAX_ROWS,
    frames_to_array,
    frames_to_gif,
    text_to_png,
)
from tests.tiers import examples


def inked_cells(frame: np.ndarray) -> list[tuple[int, int]]:
    """Row and column of each cell that is not empty."""
    inside = frame[MARGIN:-MARGIN, MARGIN:-MARGIN]
    rows, columns = inside.shape[0] // CELL_HEIGHT, inside.shape[1] // CELL_WIDTH
    cells = inside.reshape(rows, CELL_HEIGHT, columns, CELL_WIDTH, 3)
    inked = (cells != np.array(BACKGROUND)).any(axis=(1, 3, 4))
    return [tuple(int(each) for each in place) for place in np.argwhere(inked)]


def test_each_character_is_in_its_cell():
    (frame,) = frames_to_array(["#.P\n\ni  L"])
    assert frame.dtype == np.uint8
    assert frame.shape == (2 * MARGIN + 3 * CELL_HEIGHT, 2 * MARGIN + 4 * CELL_WIDTH, 3)
    assert inked_cells(frame) == [(0, 0), (0, 1), (0, 2), (2, 0), (2, 3)]


def test_frames_are_as_large_as_the_largest():
    frames = frames_to_array(["a", "bb\nb", ""])
    assert frames.shape == (3, 2 * MARGIN + 2 * CELL_HEIGHT, 2 * MARGIN + 2 * CELL_WIDTH, 3)
    assert inked_cells(frames[0]) == [(0, 0)] and inked_cells(frames[2]) == []


def test_a_png_shows_the_text(tmp_path):
    text_to_png("P_\n_G", tmp_path / "frame.png")
    with Image.open(tmp_path / "frame.png") as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image.convert("RGB")), frames_to_array(["P_\n_G"])[0])


def test_a_gif_shows_all_frames_and_the_last_one_longer(tmp_path):
    frames_to_gif(["P__", "_P_", "__P"], tmp_path / "episode.gif", seconds_per_frame=0.5)
    with Image.open(tmp_path / "episode.gif") as image:
        assert image.n_frames == 3 and image.info["loop"] == 0
        durations, inked = [], []
        for index in range(3):
            image.seek(index)
            durations.append(image.info["duration"])
            inked.append(np.asarray(image.convert("RGB")))
    assert durations == [500, 500, 1500]
    assert not np.array_equal(inked[0], inked[1])


def test_one_frame_is_a_gif_too(tmp_path):
    frames_to_gif(["only"], tmp_path / "one.gif")
    with Image.open(tmp_path / "one.gif") as image:
        assert image.n_frames == 1


def test_what_is_too_large_is_cut():
    (frame,) = frames_to_array(["\n".join(["x" * 1000] * 1000)])
    assert frame.shape[:2] == (2 * MARGIN + MAX_ROWS * CELL_HEIGHT, 2 * MARGIN + MAX_COLUMNS * CELL_WIDTH)


def test_of_too_many_frames_the_first_and_the_last_stay():
    frames = frames_to_array(["first", *["x"] * 5000, "last."])
    assert len(frames) == MAX_FRAMES
    assert len(inked_cells(frames[0])) == len(inked_cells(frames[-1])) == 5
    assert not np.array_equal(frames[0], frames[-1])


def test_no_frames_are_an_error():
    with pytest.raises(ValueError, match="no frames"):
        frames_to_array([])


@settings(max_examples=examples(20))
@given(st.lists(st.text(max_size=200), min_size=1, max_size=3))
def test_any_text_becomes_a_picture(frames):
    assert frames_to_array(frames).shape[0] == len(frames)

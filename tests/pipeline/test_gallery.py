"""What is left of a validation to look at: the right episodes, readable, and pictures where there are frames."""

from __future__ import annotations

import numpy as np
from PIL import Image
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from roll.agentic.episode import Episode, TurnRecord
from roll.pipeline.recorder import as_text, chosen, write_episodes
from roll.tracking.run_directory import RunDirectory
from roll.tracking.trackers import TensorBoardTracker


def episode(tag, seed, score, *, success=False, turns=2, frames=True):
    records = [
        TurnRecord(f"obs {seed}.{number}", "L", 0.5, number > 0, f"frame {number}" if frames else None)
        for number in range(turns)
    ]
    return Episode(tag, seed, [], "terminated", success, score, records, "the end" if frames else None, {})


EPISODES = [
    episode("lake", 1, 0.0),
    episode("lake", 3, 1.0, success=True, turns=3),
    episode("lake", 5, 1.0, success=True, turns=2),
    episode("lake", 7, 2.0),
    episode("text", 9, 0.25, frames=False),
]


def test_the_best_succeeded_the_shortest_way_and_the_random_one_is_anyone():
    found = chosen(EPISODES, 4)
    assert found["lake", "best"].seed == 5 and found["lake", "worst"].seed == 1
    assert {chosen(EPISODES, version)["lake", "random"].seed for version in range(40)} == {1, 3, 5, 7}
    assert chosen(EPISODES, 4)["lake", "random"] is found["lake", "random"]
    assert {found["text", which].seed for which in ("best", "worst", "random")} == {9}


def test_texts_say_what_happened_turn_by_turn():
    text = as_text(EPISODES[1])
    assert "lake, seed 3: success, score 1, 3 turns, ended by terminated" in text
    assert "--- turn 0\nobs 3.0\n>>> 'L' (not valid), reward 0.5" in text
    assert "--- turn 2\nobs 3.2\n>>> 'L', reward 0.5" in text and text.rstrip().endswith("the end")


def test_pictures_are_where_there_are_frames_and_tensorboard_shows_them(tmp_path):
    pictures = write_episodes(EPISODES, tmp_path / "episodes", 4)
    assert list(pictures) == [f"val/lake/{which}_episode" for which in ("best", "worst", "random")]
    folder = tmp_path / "episodes" / "version-000004"
    assert {path.name for path in folder.glob("text-*")} == {
        f"text-{which}.txt" for which in ("best", "worst", "random")
    }
    best = pictures["val/lake/best_episode"]
    with Image.open(best) as gif:
        assert gif.n_frames == 3 and np.asarray(gif.convert("RGB")).std() > 0
        size = gif.size
    assert in_tensorboard(best, tmp_path) == size


def in_tensorboard(picture, folder) -> tuple[int, int]:
    """Width and height with which a picture is shown, as it is in its file."""
    run = RunDirectory.create(str(folder / "run"), "x")
    events = TensorBoardTracker(run.tensorboard)
    events.picture("val/lake/best_episode", picture, 4)
    events.close()
    (file,) = run.tensorboard.iterdir()
    values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    (shown,) = [value for value in values if value.tag == "val/lake/best_episode"]
    width, height, data = shown.tensor.string_val[:3]
    assert data == picture.read_bytes()
    return int(width), int(height)


def test_tensorboard_shows_a_png_in_its_size(tmp_path):
    Image.new("RGB", (300, 7)).save(tmp_path / "drawn.png")
    assert in_tensorboard(tmp_path / "drawn.png", tmp_path) == (300, 7)


def test_no_episodes_leave_nothing(tmp_path):
    assert write_episodes([], tmp_path / "episodes", 0) == {} and not (tmp_path / "episodes").exists()

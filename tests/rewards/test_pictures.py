"""Verifiers of pictures see what a person sees in drawn ones, and are not fooled by what is near it."""

from __future__ import annotations

import sys
import time
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from roll.configs.errors import ConfigError
from roll.configs.rewards import RewardConfig
from roll.rewards.base import RewardInput, RewardOutput
from roll.rewards.pictures import COLOURS, FORMS, Ocr, Shapes, edit_distance, jpeg_size, parse_description
from roll.rewards.pool import RewardWorker
from roll.rewards.registry import check_sight, checked_output, resolve_verifier
from roll.runtime.process import DriverFolders
from tests.tiers import need

SIDE = 48


def picture(*parts, side=SIDE):
    """Parts are (colour, form, left, top, size) in pixels of a side of 48, drawn on black."""
    image = Image.new("RGB", (side, side))
    pen = ImageDraw.Draw(image)
    for colour, form, left, top, size in parts:
        fill = tuple(255 * strong for strong in COLOURS[colour])
        x, y, width = (round(each * side / SIDE) for each in (left, top, size))
        box = (x, y, x + width - 1, y + width - 1)
        if form == "circle":
            pen.ellipse(box, fill=fill)
        elif form == "square":
            pen.rectangle(box, fill=fill)
        else:
            pen.polygon([(x, y + width - 1), (x + width - 1, y + width - 1), (x + width // 2, y)], fill=fill)
    return image


def score(image, description, **settings):
    return Shapes(**settings)(image, description)


@pytest.mark.parametrize("size", [12, 17, 22])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("colour", COLOURS)
def test_a_drawn_shape_is_that_shape_and_no_other(colour, form, size):
    image = picture((colour, form, 5, 20, size))
    right = [f"{each} {other}" for each in COLOURS for other in FORMS if score(image, f"{each} {other}")["score"] == 1]
    assert right == [f"{colour} {form}"]


@pytest.mark.parametrize(
    ("description", "parts"),
    [
        ("two blue squares", [("blue", "square", 2, 4, 14), ("blue", "square", 28, 28, 16)]),
        ("three red circles", [("red", "circle", x, x, 12) for x in (1, 17, 33)]),
        ("red circle left of blue square", [("red", "circle", 2, 30, 14), ("blue", "square", 28, 4, 14)]),
        ("blue square right of red circle", [("red", "circle", 2, 30, 14), ("blue", "square", 28, 4, 14)]),
        ("green square above yellow circle", [("green", "square", 30, 2, 14), ("yellow", "circle", 4, 30, 14)]),
        ("yellow circle below two green squares", [("green", "square", x, 2, 14) for x in (2, 30)]
         + [("yellow", "circle", 16, 30, 14)]),
    ],
)  # fmt: skip
def test_descriptions_are_understood(description, parts):
    assert score(picture(*parts), description) == {"score": 1.0, "parts": 1.0}
    assert score(picture(*parts, side=512), description) == {"score": 1.0, "parts": 1.0}
    assert score(picture(*parts[1:]), description)["score"] == 0
    assert score(picture(*parts, ("cyan", "circle", 20, 18, 9)), description)["score"] == 0


def test_the_wrong_relation_scores_only_parts():
    image = picture(("red", "circle", 2, 30, 14), ("blue", "square", 28, 4, 14))
    assert score(image, "blue square left of red circle") == {"score": 0.0, "parts": 1.0}
    assert score(image, "red circle above blue square")["score"] == 0
    assert (
        score(picture(("red", "circle", 2, 2, 14), ("blue", "square", 10, 28, 14)), "red circle left of blue square")[
            "score"
        ]
        == 0
    )


@pytest.mark.parametrize("dust", [0, 10, 60])
def test_dust_is_forgiven_up_to_a_share(dust):
    image = picture(("red", "circle", 4, 4, 20))
    for number in range(dust):
        image.putpixel((28 + 2 * (number % 10), 20 + 2 * (number // 10)), (0, 255, 0))
    assert score(image, "red circle")["score"] == float(dust <= 0.015 * SIDE**2)


def test_what_is_no_picture_of_shapes_scores_nothing():
    noise = np.random.default_rng(0).integers(0, 256, (SIDE, SIDE, 3), np.uint8)
    for image in (Image.new("RGB", (SIDE, SIDE)), Image.new("RGB", (SIDE, SIDE), "red"), Image.fromarray(noise)):
        assert score(image, "red circle")["score"] == 0
    bar = Image.new("RGB", (SIDE, SIDE))
    ImageDraw.Draw(bar).rectangle((2, 20, 45, 28), fill=(255, 0, 0))
    assert score(bar, "red square") == {"score": 0.0, "parts": 0.0}


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1"])
def test_pictures_of_any_mode_are_judged(mode):
    assert score(picture(("white", "square", 8, 8, 20)).convert(mode), "white square")["score"] == 1


@pytest.mark.parametrize("text", ["", "circle", "pink circle", "red circle left of", "five red circles", "red  circle"])
def test_a_description_that_is_none_is_refused_before_the_run(text):
    with pytest.raises(ValueError, match="describes no shapes"):
        parse_description(text)
    verifier = resolve_verifier(RewardConfig(verifier="shapes"), "rewards.shapes")
    assert "describes no shapes" in verifier.fault_of(text)


@pytest.mark.parametrize("text", ["red circle left of red circle", "two red circles above red circle"])
def test_a_relation_of_equal_shapes_that_no_picture_could_show_is_refused_before_the_run(text):
    with pytest.raises(ValueError, match="equal shapes"):
        parse_description(text)


def test_weights_add_up_what_a_verifier_of_pictures_measures():
    config = RewardConfig(verifier="shapes", weights={"score": 0.5, "parts": 0.5})
    verifier = resolve_verifier(config, "rewards.shapes")
    image = picture(("red", "circle", 2, 30, 14))
    record = RewardInput("0", "", "", ground_truth="red circle left of blue square", image=image)
    output = checked_output(verifier.name, verifier(record), verifier.weights)
    assert output.score == 0.25 and output.metrics == {"score": 0.0, "parts": 0.5}


def test_verifiers_return_the_numbers_that_they_name(monkeypatch):
    monkeypatch.setattr(Ocr, "lines", lambda self, image: ["red circle"])
    image = picture(("red", "circle", 2, 30, 14))
    for verifier in (Shapes(), Ocr()):
        assert tuple(verifier(image, "red circle")) == verifier.numbers


@pytest.mark.parametrize("settings", [{"largest_side": 4}, {"smallest_part": 0.0}, {"likeness": 1.5}])
def test_settings_of_shapes_are_checked(settings):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        resolve_verifier(RewardConfig(verifier="shapes", verifier_args=settings), "rewards.shapes")


def test_a_simple_picture_is_a_small_jpeg():
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    plain = Image.new("RGB", (64, 64), "red")
    assert jpeg_size(noise) < -5 < -1 < jpeg_size(plain) < 0
    assert jpeg_size(noise, smaller=False) == -jpeg_size(noise)
    assert jpeg_size(noise, quality=20) > jpeg_size(noise)
    with pytest.raises(ValueError, match="1 to 95"):
        jpeg_size(plain, quality=0)


@pytest.mark.parametrize(
    ("one", "other", "edits"), [("", "", 0), ("abc", "", 3), ("kitten", "sitting", 3), ("flaw", "lawn", 2)]
)
def test_the_edit_distance_is_levenshteins(one, other, edits):
    assert edit_distance(one, other) == edit_distance(other, one) == edits


class ReadsLines:
    """Stands in for the library: the lines that it reads, and how sure it is."""

    def __init__(self, lines):
        self.txts, self.scores = zip(*lines, strict=True) if lines else (None, None)

    def __call__(self, pixels):
        assert pixels.shape == (8, 8, 3)
        return self


@pytest.mark.parametrize(
    ("lines", "score"),
    [
        ([("Hello", 0.9), ("World", 0.9)], 1.0),
        ([("say: HELLO WORLD!", 0.9)], 1.0),
        ([("Hello", 0.9)], 0.5),
        ([("Hello", 0.9), ("World", 0.2)], 0.5),
        ([("xxxxxxxxxxxxxxxxxxxxxxxxx", 0.9)], 0.0),
        ([], 0.0),
    ],
)
def test_ocr_scores_the_share_that_is_read(lines, score):
    verifier = Ocr()
    verifier._reader = ReadsLines(lines)
    result = verifier(Image.new("RGB", (8, 8)), "Hello World")
    assert result == {"score": pytest.approx(score), "exact": float(score == 1)}


def test_ocr_reads_a_drawn_text():
    need("rapidocr", "onnxruntime")
    verifier = resolve_verifier(RewardConfig(verifier="ocr"), "rewards.ocr")
    image = Image.new("RGB", (256, 96), "white")
    ImageDraw.Draw(image).text((20, 30), "Hello World", fill="black", font=ImageFont.load_default(size=32))
    results = [verifier(RewardInput("0", "", "", ground_truth=text, image=image)) for text in ("hello world", "help")]
    assert results[0] == {"score": 1.0, "exact": 1.0}
    assert results[1]["score"] < 0.5
    assert verifier(RewardInput("0", "", "", ground_truth="x", image=Image.new("RGB", (64, 64))))["score"] == 0


class Models(ReadsLines):
    def __init__(self, **settings):
        super().__init__([("a", 0.9)])
        time.sleep(0.3)


def test_models_are_loaded_before_the_time_of_the_first_picture_runs(monkeypatch):
    for name in ("rapidocr", "onnxruntime"):
        library = SimpleNamespace(__spec__=ModuleSpec(name, None), RapidOCR=Models)
        monkeypatch.setitem(sys.modules, name, library)
    config = RewardConfig(verifier="ocr", timeout_seconds=0.2)
    worker = RewardWorker(config, "rewards.ocr", DriverFolders(), {})
    judged = RewardInput("0", "", "", ground_truth="a", image=Image.new("RGB", (8, 8)))
    (verdict,) = worker.judge([judged])
    assert verdict.output == RewardOutput(1.0, {"exact": 1.0}), verdict


def test_a_text_of_nothing_is_refused_before_the_run():
    for truth in (None, 3, " "):
        with pytest.raises(ValueError, match="no text to read"):
            Ocr().check_ground_truth(truth)


def response_length(response) -> float:
    return float(len(response))


@pytest.mark.parametrize(
    ("verifier", "draws", "why"),
    [
        ("shapes", True, None),
        ("jpeg_size", True, None),
        ("exact", False, None),
        (f"{__name__}:response_length", True, "does not look at the picture"),
        ("exact", True, "does not look at the picture"),
        ("shapes", False, "this run generates text"),
    ],
)
def test_a_verifier_has_to_see_what_the_run_makes(verifier, draws, why):
    resolved = resolve_verifier(RewardConfig(verifier=verifier), "rewards.r")
    if why is None:
        return check_sight(resolved, draws, "rewards.r")
    with pytest.raises(ConfigError, match=why):
        check_sight(resolved, draws, "rewards.r")

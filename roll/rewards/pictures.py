"""Verifiers of images: `shapes`, `ocr` and `jpeg_size`.

`shapes` understands descriptions such as ``red circle``, ``two blue squares`` or ``green square left of yellow
circle``, and images with a dark background. Images are untrusted, like texts: only their pixels are read.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from PIL.Image import Image

from roll.rewards.base import PreparedVerifier

COLOURS = {
    "red": (1, 0, 0),
    "green": (0, 1, 0),
    "blue": (0, 0, 1),
    "yellow": (1, 1, 0),
    "magenta": (1, 0, 1),
    "cyan": (0, 1, 1),
    "white": (1, 1, 1),
}
"""Colour name -> (red, green, blue), 1 for each strong component."""
FORMS = ("circle", "square", "triangle")
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
RELATIONS = ("left of", "right of", "above", "below")

_PART = rf"(?:({'|'.join(NUMBERS)}) )?({'|'.join(COLOURS)}) ({'|'.join(FORMS)})s?"
_DESCRIPTION = re.compile(rf"{_PART}(?: ({'|'.join(RELATIONS)}) {_PART})?")


@dataclass(frozen=True)
class Part:
    """One connected part of an image. Its bounding box is in pixels from the upper left corner."""

    colour: str
    form: str | None
    """One of `FORMS`; None if the part resembles none of them."""
    left: int
    top: int
    right: int
    """First column to the right of the part."""
    bottom: int
    """First row below the part."""


Kind = tuple[str, str]
"""Colour and form."""


@dataclass(frozen=True)
class Description:
    """The parts that an image must have, and their relative position."""

    kinds: tuple[Kind, ...]
    """One entry per part; ``two blue squares`` gives two equal ones."""
    relation: str | None = None
    """Position of the first kind relative to the last one, from `RELATIONS`; None: any position."""


@lru_cache(maxsize=1024)
def parse_description(text: str) -> Description:
    """Return the parsed description. Raises `ValueError` if the text describes no shapes, or what no image shows."""
    match = _DESCRIPTION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} describes no shapes; right is `two blue squares` or `red circle left of green square`, "
            f"of the colours {', '.join(COLOURS)}, the forms {', '.join(FORMS)}, with {', '.join(RELATIONS)}"
        )
    many, colour, form, relation, other_many, other_colour, other_form = match.groups()
    kinds = [(colour, form)] * NUMBERS[many or "one"]
    if relation:
        if (other_colour, other_form) == (colour, form):
            raise ValueError(f"{text!r} relates equal shapes, which are not told apart; name two colours or forms")
        kinds += [(other_colour, other_form)] * NUMBERS[other_many or "one"]
    return Description(tuple(kinds), relation)


class Shapes(PreparedVerifier):
    """Verifier that scores 1 if an image shows exactly the coloured shapes that the ground truth describes, else 0.

    The metric ``parts`` is the share of described shapes that are present, reduced by additional ones and at least 0.
    The reward's `weights` can use it for partial credit.
    """

    numbers = ("score", "parts")

    def __init__(self, *, largest_side: int = 64, smallest_part: float = 0.015, likeness: float = 0.8) -> None:
        """Set the thresholds.

        Larger images are scaled down to sides of at most ``largest_side`` pixels (8 or more). Connected parts smaller
        than the share ``smallest_part`` of the image are dust; all dust together may cover at most that share. A part
        has the form with the largest intersection over union in its bounding box, if that is at least ``likeness``.
        Raises `ValueError` if a share is not between 0 and 1.
        """
        if largest_side < 8 or not 0 < smallest_part < 1 or not 0 < likeness <= 1:
            raise ValueError("`largest_side` is at least 8, `smallest_part` and `likeness` are between 0 and 1")
        self._side, self._smallest, self._likeness = largest_side, smallest_part, likeness

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Raise `ValueError` if the ground truth is no description of shapes."""
        parse_description(str(ground_truth))

    def __call__(self, image: Image, ground_truth: Any) -> dict[str, float]:
        """Return ``score`` and ``parts``."""
        wanted = parse_description(str(ground_truth))
        found, dust = self.parts_of(image)
        missing = list(wanted.kinds)
        superfluous = 0
        for part in found:
            kind = (part.colour, part.form)
            if kind in missing:
                missing.remove(kind)
            else:
                superfluous += 1
        right = not missing and not superfluous and dust <= self._smallest
        there = 1 - (len(missing) + superfluous) / len(wanted.kinds)
        return {"score": float(right and _lie_right(wanted, found)), "parts": max(there, 0.0)}

    def parts_of(self, image: Image) -> tuple[list[Part], float]:
        """Return the parts of an image, and the share of its area that is dust."""
        pixels = _pixels(image, self._side)
        strong = pixels > np.maximum(pixels.max(-1, keepdims=True), 1) * 0.5
        codes = (strong @ [4, 2, 1]) * (pixels.max(-1) > 0.5 * 255)
        smallest = self._smallest * codes.size
        parts, dust = [], 0
        for code, rows, columns in _connected(codes):
            if len(rows) < smallest:
                dust += len(rows)
            else:
                parts.append(self._part(_COLOUR_OF[code], rows, columns))
        return parts, dust / codes.size

    def _part(self, colour: str, rows: np.ndarray, columns: np.ndarray) -> Part:
        top, left, bottom, right = rows.min(), columns.min(), rows.max() + 1, columns.max() + 1
        mask = np.zeros((bottom - top, right - left), bool)
        mask[rows - top, columns - left] = True
        form = self._form(mask)
        return Part(colour, form, int(left), int(top), int(right), int(bottom))

    def _form(self, mask: np.ndarray) -> str | None:
        height, width = mask.shape
        if max(height, width) > 1.4 * min(height, width) + 1:
            return None
        outlines = _outlines(height, width)
        alike = [(mask & outline).sum() / (mask | outline).sum() for outline in outlines]
        best = int(np.argmax(alike))
        return FORMS[best] if alike[best] >= self._likeness else None


class Ocr(PreparedVerifier):
    """Verifier that scores how much of the ground truth RapidOCR reads in an image: 1 - edits / length, at least 0.

    ``edits`` is the Levenshtein distance, without regard to case and white space. If the text contains the ground
    truth, the score is 1, even with other text around it. This is the reward of Flow-GRPO (arXiv 2505.05470). The
    metric ``exact`` is 1 if the ground truth is read without an error.
    """

    numbers = ("score", "exact")

    def __init__(self, *, smallest_confidence: float = 0.5) -> None:
        """Set the confidence below which a line is ignored. Raises `ValueError` unless it is between 0 and 1."""
        if not 0 <= smallest_confidence <= 1:
            raise ValueError(f"a confidence is between 0 and 1, not {smallest_confidence}")
        self._confidence = smallest_confidence

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Raise `ValueError` if the ground truth is not a text, or is empty."""
        if not isinstance(ground_truth, str) or not _letters(ground_truth):
            raise ValueError(f"{ground_truth!r} is no text to read")

    def __call__(self, image: Image, ground_truth: str) -> dict[str, float]:
        """Return ``score`` and ``exact``."""
        wanted = _letters(ground_truth)
        read = _letters("".join(self.lines(image)))
        edits = 0 if wanted in read else min(edit_distance(read, wanted), len(wanted))
        return {"score": 1 - edits / len(wanted), "exact": float(edits == 0)}

    def lines(self, image: Image) -> list[str]:
        """Return the lines of text in an image, from top to bottom."""
        found = self._reader(np.asarray(image.convert("RGB"))[:, :, ::-1])  # the library expects BGR
        if not found.txts:
            return []
        return [text for text, sure in zip(found.txts, found.scores, strict=True) if sure >= self._confidence]

    def load(self) -> None:
        """Load RapidOCR's models, which takes seconds."""
        _ = self._reader

    @cached_property
    def _reader(self) -> Any:
        from rapidocr import RapidOCR

        threads = {f"EngineConfig.onnxruntime.{scope}_op_num_threads": 1 for scope in ("intra", "inter")}
        return RapidOCR(params={"Global.log_level": "error", **threads})


def edit_distance(one: str, other: str) -> int:
    """Return the Levenshtein distance: the smallest number of insertions, deletions and replacements of letters."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, start=1):
        above, row = row, [number]
        for place, wanted in enumerate(other):
            row.append(min(above[place] + (letter != wanted), above[place + 1] + 1, row[place] + 1))
    return row[-1]


def jpeg_size(image: Image, *, quality: int = 95, smaller: bool = True) -> float:
    """Return the size of an image as a JPEG in kilobytes (1000 bytes), negated if ``smaller`` is True.

    This is the compressibility reward of DDPO (arXiv 2305.13301). ``quality`` is 1 to 95.
    """
    if not 1 <= quality <= 95:
        raise ValueError(f"the quality of a JPEG is 1 to 95, not {quality}")
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=quality)
    kilobytes = file.tell() / 1000
    return -kilobytes if smaller else kilobytes


_COLOUR_OF = {4 * red + 2 * green + blue: name for name, (red, green, blue) in COLOURS.items()}


def _letters(text: str) -> str:
    return "".join(text.split()).casefold()


def _pixels(image: Image, side: int) -> np.ndarray:
    """Return the RGB pixels as float32 ``[height, width, 3]``, 0 to 255, scaled down to sides of at most ``side``."""
    picture = image.convert("RGB")
    if max(picture.size) > side:
        picture.thumbnail((side, side))
    return np.asarray(picture, np.float32)


def _connected(codes: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Return (code, rows, columns) of each connected part of equal codes above 0; pixels connect at their edges."""
    width = codes.shape[1] + 1  # an empty column separates the last pixel of a row from the first of the next row
    flat = np.pad(codes, ((0, 0), (0, 1))).ravel()
    left = {int(place): int(flat[place]) for place in flat.nonzero()[0]}
    parts = []
    while left:
        start, code = left.popitem()
        places = [start]
        for place in places:
            for neighbour in (place - 1, place + 1, place - width, place + width):
                if left.get(neighbour) == code:
                    del left[neighbour]
                    places.append(neighbour)
        rows, columns = np.divmod(np.array(places), width)
        parts.append((code, rows, columns))
    return parts


@lru_cache(maxsize=1024)
def _outlines(height: int, width: int) -> tuple[np.ndarray, ...]:
    """Return a mask ``[height, width]`` of each of the `FORMS`, filling the box."""
    y = (np.arange(height)[:, None] + 0.5) / height * 2 - 1
    x = (np.arange(width)[None] + 0.5) / width * 2 - 1
    return x**2 + y**2 <= 1, np.ones((height, width), bool), np.abs(x) <= (y + 1) / 2


def _lie_right(wanted: Description, found: list[Part]) -> bool:
    if wanted.relation is None:
        return True
    first, last = wanted.kinds[0], wanted.kinds[-1]
    ones = [part for part in found if (part.colour, part.form) == first]
    others = [part for part in found if (part.colour, part.form) == last]
    if wanted.relation in ("right of", "below"):
        ones, others = others, ones
    if wanted.relation in ("left of", "right of"):
        return max(part.right for part in ones) <= min(part.left for part in others)
    return max(part.bottom for part in ones) <= min(part.top for part in others)

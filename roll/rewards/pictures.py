"""Verifiers of pictures: `shapes`, `ocr` and `jpeg_size`.

`shapes` understands descriptions such as ``red circle``, ``two blue squares`` or ``green square left of yellow
circle``, and pictures on a dark ground. A picture is untrusted, as a text is: nothing but its pixels is read, and a
large one is made smaller first.
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
"""Name -> which of red, green and blue are strong."""
FORMS = ("circle", "square", "triangle")
NUMBERS = {"one": 1, "two": 2, "three": 3, "four": 4}
RELATIONS = ("left of", "right of", "above", "below")

_PART = rf"(?:({'|'.join(NUMBERS)}) )?({'|'.join(COLOURS)}) ({'|'.join(FORMS)})s?"
_DESCRIPTION = re.compile(rf"{_PART}(?: ({'|'.join(RELATIONS)}) {_PART})?")


@dataclass(frozen=True)
class Part:
    """One connected part of a picture; pixels count from the upper left corner."""

    colour: str
    form: str | None
    """``None`` if it resembles no known form."""
    left: int
    top: int
    right: int
    bottom: int
    """The first row below it, as ``right`` is the first column after it."""


Kind = tuple[str, str]
"""Colour and form."""


@dataclass(frozen=True)
class Description:
    """Kinds of parts that a picture must have, each as often as it is named, and how the first lies to the last."""

    kinds: tuple[Kind, ...]
    relation: str | None = None


@lru_cache(maxsize=1024)
def parse_description(text: str) -> Description:
    """Return the meaning of a description. Raises `ValueError` if it is none."""
    match = _DESCRIPTION.fullmatch(text.strip().lower())
    if match is None:
        raise ValueError(
            f"{text!r} describes no shapes; right is `two blue squares` or `red circle left of green square`, "
            f"of the colours {', '.join(COLOURS)}, the forms {', '.join(FORMS)}, with {', '.join(RELATIONS)}"
        )
    many, colour, form, relation, other_many, other_colour, other_form = match.groups()
    kinds = [(colour, form)] * NUMBERS[many or "one"]
    if relation:
        kinds += [(other_colour, other_form)] * NUMBERS[other_many or "one"]
    return Description(tuple(kinds), relation)


class Shapes(PreparedVerifier):
    """Score 1 if a picture shows the coloured shapes that the ground truth describes and nothing else, else 0.

    ``parts`` among the metrics is the share of described shapes that are there, less those that nobody asked for; a
    `weights` of the reward can give partial credit for it.
    """

    def __init__(self, *, largest_side: int = 64, smallest_part: float = 0.015, likeness: float = 0.8) -> None:
        """A longer picture is scaled to ``largest_side`` pixels, at least 8.

        A connected part below the share ``smallest_part`` of the picture is dust, which may cover that share
        altogether. A part has the form whose outline in its bounding box covers it best, if intersection over union is
        at least ``likeness``. Shares are between 0 and 1, or it raises `ValueError`.
        """
        if largest_side < 8 or not 0 < smallest_part < 1 or not 0 < likeness <= 1:
            raise ValueError("`largest_side` is at least 8, `smallest_part` and `likeness` are between 0 and 1")
        self._side, self._smallest, self._likeness = largest_side, smallest_part, likeness

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Raise `ValueError` if it is no description."""
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
        """Return the parts of a picture, and the share of it that is dust."""
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
    """Score how much of the ground truth RapidOCR reads in a picture: 1 - edits / length, at least 0.

    Edits are Levenshtein's; case and white space do not count, and text around the right one does not, either: the
    reward of Flow-GRPO (arXiv 2505.05470). ``exact`` among the metrics is 1 if the text is there without an error.
    """

    def __init__(self, *, smallest_confidence: float = 0.5) -> None:
        """Lines that are read with less confidence do not count; `ValueError` unless it is between 0 and 1."""
        if not 0 <= smallest_confidence <= 1:
            raise ValueError(f"a confidence is between 0 and 1, not {smallest_confidence}")
        self._confidence = smallest_confidence

    def check_ground_truth(self, ground_truth: Any) -> None:
        """Raise `ValueError` if it has no text."""
        if not isinstance(ground_truth, str) or not _letters(ground_truth):
            raise ValueError(f"{ground_truth!r} is no text to read")

    def __call__(self, image: Image, ground_truth: str) -> dict[str, float]:
        """Return ``score`` and ``exact``."""
        wanted = _letters(ground_truth)
        read = _letters("".join(self.lines(image)))
        edits = 0 if wanted in read else min(edit_distance(read, wanted), len(wanted))
        return {"score": 1 - edits / len(wanted), "exact": float(edits == 0)}

    def lines(self, image: Image) -> list[str]:
        """Return the lines of text in a picture, as the library orders them: from top to bottom."""
        found = self._reader(np.asarray(image.convert("RGB"))[:, :, ::-1])  # it expects blue first
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
    """Return Levenshtein's distance: the fewest insertions, deletions and replacements of letters."""
    row = list(range(len(other) + 1))
    for number, letter in enumerate(one, start=1):
        above, row = row, [number]
        for place, wanted in enumerate(other):
            row.append(min(above[place] + (letter != wanted), above[place + 1] + 1, row[place] + 1))
    return row[-1]


def jpeg_size(image: Image, *, quality: int = 95, smaller: bool = True) -> float:
    """Return the size of a picture as a JPEG in kilobytes of 1000 bytes, negative if ``smaller`` ones are better.

    The measure of compressibility of DDPO (arXiv 2305.13301). ``quality`` is 1 to 95.
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
    """Return ``[height, width, 3]`` of 0 to 255, no side longer than ``side``."""
    picture = image.convert("RGB")
    if max(picture.size) > side:
        picture.thumbnail((side, side))
    return np.asarray(picture, np.float32)


def _connected(codes: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Return code, rows and columns of each part of equal codes above 0 that touch at an edge."""
    width = codes.shape[1] + 1  # one empty column keeps the last pixel of a row from touching the first of the next
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
    """Return masks ``[height, width]`` of the `FORMS` that fill this box, in their order."""
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

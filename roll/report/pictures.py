"""Pictures on the page: those in prompts, and validation pictures of an image run as a grid of prompts and versions.

A validation draws the same prompts with the same seeds, so a row shows what training changed. Pictures are made small
and put into the page as data.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

Item = TypeVar("Item")
MAX_VERSIONS = 12
MAX_PROMPTS = 16
MAX_PROMPT_PICTURES = 64
SIDE = 128
"""Longest side of a picture on the page, in pixels."""
CRISP_SIDE = 64
"""Pictures up to this side are kept without loss (PNG); larger ones become JPEGs."""


def picture_grid(folder: Path, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the grid of the pictures in ``folder`` that ``samples`` name; None if there is none.

    ``versions`` are the columns, spread evenly over the validations with the first and the last among them. Each of the
    ``rows`` has a ``prompt`` and, for each version, a picture with ``score`` and ``source`` (a data URL), or None.
    """
    found: dict[tuple[int, str], dict[int, Mapping[str, Any]]] = {}
    for sample in samples:
        name = str(sample["response"])
        if sample["split"] == "val" and name.endswith(".png") and (folder / Path(name).name).is_file():
            found.setdefault((sample["group_id"], sample["prompt"]), {})[sample["step"]] = sample
    if not found:
        return None
    versions = sorted({version for row in found.values() for version in row})
    last = len(versions) - 1
    columns = min(MAX_VERSIONS, len(versions))
    shown = [versions[round(index * last / max(columns - 1, 1))] for index in range(columns)]
    rows = [
        {"prompt": prompt, "pictures": [_cell(folder, row.get(version)) for version in shown]}
        for (_, prompt), row in sorted(found.items())[:MAX_PROMPTS]
    ]
    return {"versions": shown, "versions_recorded": len(versions), "rows": rows, "prompts_recorded": len(found)}


def prompt_pictures(folder: Path, samples: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return data URLs by name for pictures in ``folder`` that are in the prompts of ``samples``.

    From more than `MAX_PROMPT_PICTURES`, some are taken evenly, including the first and the last.
    """
    names = list(dict.fromkeys(name for sample in samples for name in sample.get("pictures", [])))
    sources = {name: _data_url(folder / Path(name).name) for name in spread(names, MAX_PROMPT_PICTURES)}
    return {name: source for name, source in sources.items() if source}


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """Return ``count`` (at least 2) evenly spaced items, including the first and the last."""
    count = max(2, count)
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def _cell(folder: Path, sample: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if sample is None:
        return None
    source = _data_url(folder / Path(str(sample["response"])).name)
    return None if source is None else {"score": sample["score"], "source": source}


def _data_url(file: Path) -> str | None:
    """Return a small version of a picture as a data URL; None if it cannot be read."""
    from PIL import Image  # only pages with pictures need it

    try:
        with Image.open(file) as image:
            small = image.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # what Pillow raises for damaged files
        return None
    form = "PNG" if max(small.size) <= CRISP_SIDE else "JPEG"
    small.thumbnail((SIDE, SIDE))
    data = io.BytesIO()
    small.save(data, form)
    return f"data:image/{form.lower()};base64,{base64.b64encode(data.getvalue()).decode()}"

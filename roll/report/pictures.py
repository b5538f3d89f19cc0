"""Validation pictures of an image run as a grid: a row for each prompt, a column for each validated version.

A validation draws the same prompts with the same seeds, so a row shows what training changed. Pictures are made small
and put into the page as data.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_VERSIONS = 12
MAX_PROMPTS = 16
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


def _cell(folder: Path, sample: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if sample is None:
        return None
    source = _data_url(folder / Path(str(sample["response"])).name)
    return None if source is None else {"score": sample["score"], "source": source}


def _data_url(file: Path) -> str | None:
    """Return a small version of a picture as a data URL; None if it cannot be read."""
    from PIL import Image  # only pages of image runs need it

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

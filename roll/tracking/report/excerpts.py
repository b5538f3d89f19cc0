"""Choice of the samples on the page: as many as fit, from steps spread over the run, long texts cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any

from roll.tracking.report.embedding import embedded

MAX_BYTES = 700_000
LONGEST_TEXT = 4_000
"""Most characters of a prompt or a response."""


def excerpts(samples: Sequence[Mapping[str, Any]], max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """Return samples of as many steps as fit into ``max_bytes``: the first, the last, and evenly between."""
    by_step: dict[int, list[Mapping[str, Any]]] = {}
    for sample in samples:
        by_step.setdefault(sample["step"], []).append(sample)
    steps = sorted(by_step)
    of_step = cache(lambda step: [_sized(sample) for sample in by_step[step]])
    chosen = steps
    while len(chosen) > 2 and not _fit((size for step in chosen for size, _ in of_step(step)), max_bytes):
        chosen = spread(steps, len(chosen) * 3 // 4)
    room, kept = max_bytes, []
    for size, sample in (each for step in chosen for each in of_step(step)):
        room -= size
        if room > 0:
            kept.append(sample)
    return kept


def _sized(sample: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the bytes of a sample on the page, and the sample in its form there."""
    shortened = _shortened(sample)
    return len(embedded(shortened).encode(errors="backslashreplace")), shortened


def _fit(sizes: Iterable[int], room: int) -> bool:
    """Return True if all sizes fit; stop at the first that does not."""
    return all(total <= room for total in accumulate(sizes))


def spread(items: Sequence[int], count: int) -> list[int]:
    """Return ``count`` (at least 2) of the items, evenly spread, with the first and the last among them."""
    count = max(2, count)
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def _shortened(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample in its form on the page. If it has all its tokens, the response is not repeated."""
    tokens = sample.get("tokens")
    response = "" if tokens and not tokens["left_out"] else _cut(sample["response"])
    return {**sample, "prompt": _cut(sample["prompt"]), "response": response}


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"

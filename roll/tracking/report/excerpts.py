"""Which samples stand on the page: those of steps spread over the run, as many as fit, long texts cut in the middle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from roll.tracking.report.embedding import embedded

MAX_BYTES = 700_000
LONGEST_TEXT = 4_000
"""Characters of a prompt or a response."""


def excerpts(samples: Sequence[Mapping[str, Any]], max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """Samples of as many steps as fit into ``max_bytes`` on the page: the first, the last, and evenly between."""
    steps = sorted({sample["step"] for sample in samples})
    shortened = [_shortened(sample) for sample in samples]
    sizes: dict[int, int] = dict.fromkeys(steps, 0)
    for sample in shortened:
        sizes[sample["step"]] += len(embedded(sample).encode(errors="backslashreplace"))
    chosen = steps
    while len(chosen) > 2 and sum(sizes[step] for step in chosen) > max_bytes:
        chosen = spread(steps, len(chosen) * 3 // 4)
    room, kept = max_bytes, []
    for sample in shortened:
        room -= len(embedded(sample).encode(errors="backslashreplace")) if sample["step"] in chosen else 0
        if sample["step"] in chosen and room > 0:
            kept.append(sample)
    return kept


def spread(items: Sequence[int], count: int) -> list[int]:
    """``count`` (at least 2) of the items, the first and the last among them, evenly."""
    count = max(2, count)
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def _shortened(sample: Mapping[str, Any]) -> dict[str, Any]:
    """A sample as the page has it. With all its tokens the response need not be there twice."""
    tokens = sample.get("tokens")
    response = "" if tokens and not tokens["left_out"] else _cut(sample["response"])
    return {**sample, "prompt": _cut(sample["prompt"]), "response": response}


def _cut(text: str) -> str:
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half} characters left out …]\n{text[-half:]}"

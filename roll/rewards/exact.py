"""The verifier `exact`: the response, or the part that a pattern finds, equals the ground truth."""

from __future__ import annotations

import re
from typing import Any


def extract_last(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """Return the last match of ``pattern`` (its first group, if it has one), or the whole text without a pattern."""
    if pattern is None:
        return text
    matches = list(pattern.finditer(text))
    if not matches:
        return None
    return matches[-1].group(1 if pattern.groups else 0)


def exact(
    response: str, ground_truth: Any, *, ignore_case: bool = False, extract: re.Pattern[str] | None = None
) -> float:
    """Return 1 if the answer equals the ground truth up to surrounding white space, else 0.

    ``extract`` is a regular expression whose last match (first group, if any) is the answer; no match scores 0. A list
    as ground truth holds several correct answers; anything else is compared as text. Raises `ValueError` without a
    ground truth.
    """
    accepted = ground_truth if isinstance(ground_truth, list) else [ground_truth]
    if not accepted or any(each is None for each in accepted):
        raise ValueError("there is no ground truth to compare with")
    answer = extract_last(response, extract)
    if answer is None:
        return 0.0
    return float(any(_normal(answer, ignore_case) == _normal(str(each), ignore_case) for each in accepted))


def _normal(text: str, ignore_case: bool) -> str:
    return text.strip().casefold() if ignore_case else text.strip()

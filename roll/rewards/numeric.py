"""The verifier `numeric`: the last number of the response equals the ground truth, within tolerances.

Numbers are compared as fractions, so a long integer with a wrong last digit is wrong. A number of absurd size
(thousands of digits, exponents like 1e999999999) does not count as a number, because model output is untrusted.
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from roll.rewards.exact import extract_last

MAX_DIGITS = 1000
MAX_EXPONENT = 400

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\d.])\.\d+)(?:[eE][-+]?\d+)?"
_SIGN = r"(?:(?<![\w.)}\]])[-+])?"  # after a digit or a bracket the sign subtracts: the last number of `5-3` is 3
_NUMBER = re.compile(rf"({_SIGN})\s?({_DECIMAL})(?:\s?/\s?({_DECIMAL}))?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_LATEX_SPACING = re.compile(r"\{,\}|\\[,!]")


def numeric(
    response: str,
    ground_truth: Any,
    *,
    absolute_tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
    extract: re.Pattern[str] | None = None,
) -> float:
    """Return 1 if the last number of the response is the ground truth's, else 0.

    Understood: signs, thousands separators, decimals, exponents, ``a/b`` and ``\\frac{a}{b}``; words and units around
    the number do not matter. An answer is right if ``|answer - truth| <= max(absolute, relative * |truth|)``.
    ``extract`` first narrows the response to the last match of a regular expression. Raises `ValueError` if the ground
    truth has no number.
    """
    truth = _truth(ground_truth)
    part = extract_last(response, extract)
    answer = None if part is None else last_number(part)
    if answer is None:
        return 0.0
    allowed = max(Fraction(absolute_tolerance), Fraction(relative_tolerance) * abs(truth))
    return float(abs(answer - truth) <= allowed)


def last_number(text: str) -> Fraction | None:
    """Return the last number in the text, exactly; ``None`` if there is none, or if the last one is of absurd size."""
    text = _LATEX_SPACING.sub("", text.replace("\N{MINUS SIGN}", "-"))
    text = _LATEX_FRACTION.sub(r" \1/\2 ", text)
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    sign, numerator, denominator = numbers[-1].groups()
    over = _exact(numerator)
    under = Fraction(1) if denominator is None else _exact(denominator)
    if over is None or not under:
        return None
    return -over / under if sign == "-" else over / under


def _exact(decimal: str) -> Fraction | None:
    mantissa, _, exponent = decimal.lower().partition("e")
    too_large = len(mantissa) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_EXPONENT
    return None if too_large else Fraction(decimal.replace(",", ""))


def _truth(ground_truth: Any) -> Fraction:
    if isinstance(ground_truth, float) and math.isfinite(ground_truth):
        # A double keeps the first 15 digits of any decimal: 0.1 + 0.2 was meant to be 0.3.
        return Fraction(f"{ground_truth:.15g}")
    if isinstance(ground_truth, int):
        return Fraction(ground_truth)
    truth = last_number(ground_truth) if isinstance(ground_truth, str) else None
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    return truth

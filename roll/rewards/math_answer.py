"""The verifier `math`: mathematical answers, compared by math-verify.

math-verify's own time limits are off, because they would take the process's only alarm, which the worker needs.
Expressions whose value is too large to write down (``9^{9^9}``) are rejected before sympy tries: evaluating them blocks
the process in one long C call that no alarm can interrupt.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sympy import Basic, MatrixBase

MAX_BITS = 20_000.0
"""Largest number that an answer may evaluate to, in binary digits."""

_MARKUP = ("$", "\\boxed", "\\(", "\\[")


def math_answer(response: str, ground_truth: Any, *, float_rounding: int = 6, strict: bool = True) -> float:
    """Return 1 if the answer found in the response is mathematically equal to the ground truth, else 0.

    The answer is what math-verify extracts: ``\\boxed{...}``, LaTeX in dollars, or a plain number. The ground truth may
    be bare LaTeX. ``float_rounding`` counts decimals; ``strict`` distinguishes variables, sets and tuples. Raises
    `ValueError` if the ground truth cannot be parsed. Call it in the main thread of a process that has a time limit.
    """
    from math_verify import verify

    truth = parse_ground_truth(str(ground_truth))
    answer = _parse(response)
    if any(_bits(each) > MAX_BITS for each in answer):
        return 0.0
    return float(
        verify(list(truth), answer, float_rounding=float_rounding, strict=strict, timeout_seconds=None)
    )


@lru_cache(maxsize=256)  # the responses of a group share one ground truth
def parse_ground_truth(text: str) -> tuple[Basic | MatrixBase | str, ...]:
    """Return the expressions that math-verify finds in a ground truth. Raises `ValueError` if it finds none."""
    has_markup = any(mark in text for mark in _MARKUP)
    parsed = _parse(text if has_markup else f"${text}$") or _parse(text)
    if not parsed:
        raise ValueError(f"the ground truth {text!r} is no mathematical expression")
    return tuple(parsed)


def _parse(text: str) -> list[Basic | MatrixBase | str]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # otherwise it warns that its time limits are off
    return parse(text, parsing_timeout=None)


def _bits(expression: Any) -> float:
    """Estimate the binary digits of the largest number that evaluating the expression would produce."""
    import sympy
    from sympy.functions.combinatorial.factorials import CombinatorialFunction

    if isinstance(expression, sympy.MatrixBase):
        return max((_bits(entry) for entry in expression), default=1.0)
    if isinstance(expression, sympy.Rational):
        return float(max(expression.p.bit_length(), expression.q.bit_length(), 1))
    if not isinstance(expression, sympy.Basic) or not expression.args:
        return 1.0
    parts = [_bits(part) for part in expression.args]
    if isinstance(expression, sympy.Pow):
        base, exponent = parts
        return max(base, exponent, base * _power_of_two(exponent)) if expression.exp.is_number else max(parts)
    if isinstance(expression, CombinatorialFunction):  # factorials, binomials
        return _power_of_two(max(parts)) * max(parts)
    return sum(parts) if isinstance(expression, sympy.Mul) else max(parts) + 1


def _power_of_two(exponent: float) -> float:
    return 2.0**exponent if exponent < 1000 else math.inf

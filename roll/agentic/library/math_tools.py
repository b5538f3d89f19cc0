"""Arithmetic problems that are tedious by hand and easy with a tool, generated from a seed and checked exactly.

The final answer is given in `<answer>..</answer>`; the last one counts. Higher levels have larger numbers and more
steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from pydantic import validate_call

from roll.agentic.base import BadOption, Count, ResetAnswer, StepAnswer, TextGame, answer_in
from roll.agentic.tools.base import ToolSpec
from roll.agentic.tools.environment import ToolEnv, configured_tools
from roll.configs.errors import nearest_name_hint

_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?(/\d+)?")
_LONGEST_ANSWER = 400
_INSTRUCTIONS = "Solve the problem. Give the final answer, one exact number, as <answer>number</answer>."
_MISSING = "No answer was found. Give the final answer as <answer>number</answer>."
LEVELS = (1, 2, 3, 4, 5)


@dataclass(frozen=True)
class Problem:
    """A question and its exact numeric answer."""

    question: str
    answer: Fraction


def read_number(text: str) -> Fraction | None:
    """Parse a text as an exact number; None if it is not one."""
    text = text.strip().replace(",", "").replace("$", "").replace("_", "").replace("\N{MINUS SIGN}", "-").strip()
    if len(text) > _LONGEST_ANSWER or not _NUMBER.fullmatch(text):
        return None
    number, _, under = text.partition("/")
    if under and not int(under):
        return None
    return Fraction(number) / (int(under) if under else 1)


def _whole(random: np.random.Generator, digits: int) -> int:
    """Return a random integer with this many decimal digits; a single digit is at least 2."""
    return int(random.integers(10 ** (digits - 1) if digits > 1 else 2, 10**digits))


def _multiplication(level: int, random: np.random.Generator) -> Problem:
    left, right = _whole(random, level + 1), _whole(random, level + 1)
    return Problem(f"What is {left} * {right}?", Fraction(left * right))


def _expression(level: int, random: np.random.Generator) -> Problem:
    text, value = str(first := _whole(random, 2)), Fraction(first)
    for _ in range(level + 1):
        operand = _whole(random, 1 + level // 2)
        match int(random.integers(4)):
            case 0:
                text, value = f"({text} + {operand})", value + operand
            case 1:
                text, value = f"({text} - {operand})", value - operand
            case 2:
                text, value = f"{text} * {operand}", value * operand
            case _:
                text, value = f"{text} / {operand}", value / operand
    return Problem(f"What is {text}? If it is no whole number, give it as a fraction a/b.", value)


def _shop(level: int, random: np.random.Generator) -> Problem:
    goods = ("apples", "pens", "lamps", "chairs", "books", "cups")[: level + 1]
    orders = [(_whole(random, 1 + level // 2), _whole(random, 1 + level // 3), name) for name in goods]
    total = sum(number * price for number, price, _ in orders)
    people = int(random.integers(2, 5 + level))
    paid = total + int(random.integers(0, 50 * level))
    bought = ", ".join(f"{number} {name} at {price} coins each" for number, price, name in orders)
    question = (
        f"{people} friends buy {bought}. They pay with {paid} coins and share the change equally. "
        "How many coins does each get back? If it is no whole number, give it as a fraction a/b."
    )
    return Problem(question, Fraction(paid - total, people))


def _savings(level: int, random: np.random.Generator) -> Problem:
    balance, monthly, percent = _whole(random, 3), _whole(random, 2), int(random.integers(1, 10))
    years, value = level + 1, Fraction(balance)
    for _ in range(years):
        value = value * (100 + percent) / 100 + 12 * monthly
    question = (
        f"An account holds {balance} coins. At the end of each year it earns {percent} percent of what it holds, and "
        f"then 12 times {monthly} coins are paid in. Nothing is rounded. "
        f"What does it hold after {years} years? Give the exact number, as a decimal or as a fraction a/b."
    )
    return Problem(question, value)


def _remainder(level: int, random: np.random.Generator) -> Problem:
    base, exponent, modulus = _whole(random, level + 1), _whole(random, level + 1), _whole(random, level + 1)
    question = f"What is the remainder of {base} to the power of {exponent}, divided by {modulus}?"
    return Problem(question, Fraction(pow(base, exponent, modulus)))


def _counting(level: int, random: np.random.Generator) -> Problem:
    top = _whole(random, level + 1)
    divisor, remainder = int(random.integers(3, 10)), int(random.integers(0, 3))
    first = remainder or divisor
    count = max(0, (top - first) // divisor + 1)
    indices, squares = count * (count - 1) // 2, (count - 1) * count * (2 * count - 1) // 6
    total = count * first**2 + 2 * first * divisor * indices + divisor**2 * squares
    question = (
        f"Add up the squares of all whole numbers from 1 to {top} that leave the remainder {remainder} when divided by "
        f"{divisor}. What is the sum?"
    )
    return Problem(question, Fraction(total))


KINDS: dict[str, Callable[[int, np.random.Generator], Problem]] = {
    "multiplication": _multiplication,
    "expression": _expression,
    "shop": _shop,
    "savings": _savings,
    "remainder": _remainder,
    "counting": _counting,
}


class MathProblemEnv(TextGame):
    """One problem per episode, with a limited number of attempts."""

    def __init__(self, kinds: Sequence[str], levels: Sequence[int], attempts: int, instructions: bool) -> None:
        super().__init__()
        self._kinds = list(kinds)
        self._levels = list(levels)
        self._attempts = attempts
        self._instructions = instructions
        self._problem = Problem("", Fraction(0))
        self._left = 0
        self._said = ""

    def _begin(self, seed: int | None) -> ResetAnswer:
        kind = self._kinds[int(self.np_random.integers(len(self._kinds)))]
        level = self._levels[int(self.np_random.integers(len(self._levels)))]
        self._problem = KINDS[kind](level, self.np_random)
        self._left = self._attempts
        self._said = ""
        system = {"system": _INSTRUCTIONS} if self._instructions else {}
        return self._problem.question, self._info(level=level) | system

    def _act(self, action: str) -> StepAnswer:
        answer = answer_in(_TAG.sub(lambda tag: tag[0].lower(), action), "answer_tag")
        if answer is None:
            return _MISSING, 0.0, False, False, self._info(action_is_valid=False)
        self._said = answer[:_LONGEST_ANSWER]
        number = read_number(self._said)
        if number is not None and number == self._problem.answer:
            return "This is right.", 1.0, True, False, self._info(success=True)
        self._left -= 1
        if self._left > 0:
            return "This is wrong. Try again.", 0.0, False, False, self._info(action_is_valid=number is not None)
        return "This is wrong.", 0.0, True, False, self._info(action_is_valid=number is not None)

    def render(self) -> str:
        return f"{self._problem.question}\nright: {self._problem.answer}\nsaid: {self._said or '-'}"

    def _state(self) -> str:
        return f"{self._problem.question}\nattempts left: {self._left}"


class MathToolsEnv(ToolEnv):
    """The environment `math_tools`: arithmetic problems, and tools to solve them."""

    @validate_call
    def __init__(
        self,
        *,
        tools: Sequence[ToolSpec] = ("calculator", "python"),
        tool_settings: Mapping[str, Any] | None = None,
        kinds: Sequence[str] = tuple(KINDS),
        levels: Sequence[int] = (1, 2, 3),
        attempts: Count = 1,
        instructions: bool = True,
    ) -> None:
        """Build the tools. docs/tools.md explains the options. Raises `BadOption` and `ConfigError`."""
        for name, values, known in (("kinds", kinds, tuple(KINDS)), ("levels", levels, LEVELS)):
            if not values:
                raise BadOption(name, "it is empty", "name at least one")
            for value in values:
                if value not in known:
                    hint = nearest_name_hint(str(value), map(str, known))
                    raise BadOption(name, f"there are no problems of {name.removesuffix('s')} `{value}`", hint)
        offered = configured_tools(tools, tool_settings or {})
        super().__init__(MathProblemEnv(kinds, levels, attempts, instructions), *offered)

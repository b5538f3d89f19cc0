"""A calculator with bounded cost: exact arithmetic on integers and fractions, floating point for everything else.

The expression is parsed to a syntax tree, which may contain only numbers, operators and known names; nothing is
evaluated as code. Intermediate and final results have a maximum size.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from roll.agentic.tools.base import Answer, Deadline, Tool

_Number = Fraction | float
_MOST_BITS = 4096
_LONGEST_EXPRESSION = 2000
_LARGEST_FACTORIAL = 500
_CONSTANTS = {"pi": math.pi, "e": math.e}


class CannotCalculate(Exception):
    """An expression cannot be calculated. The message says why."""


class Calculator(Tool):
    """The tool `calculator`."""

    name = "calculator"
    description = (
        "Evaluates an arithmetic expression exactly: + - * / // % **, parentheses, and functions such as sqrt, gcd, "
        "factorial, log, sin, round, min, max."
    )
    parameters = {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "for example (12.5 * 3 + 7) / 2"}},
        "required": ["expression"],
        "additionalProperties": False,
    }

    def call(self, arguments: dict[str, Any], deadline: Deadline) -> Answer:
        try:
            return Answer(calculate(arguments["expression"]))
        except CannotCalculate as error:
            return Answer(f"cannot calculate: {error}", is_error=True)


def calculate(expression: str) -> str:
    """Evaluate an expression. Returns an integer, an exact decimal, or a fraction with its decimal approximation.

    Floating-point results have 15 digits. Raises `CannotCalculate`.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise CannotCalculate(f"the expression is longer than {_LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        return _as_text(_value(tree.body))
    except SyntaxError:
        raise CannotCalculate("this is no arithmetic expression") from None
    except (RecursionError, MemoryError):  # the parser reports deep nesting as either
        raise CannotCalculate("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise CannotCalculate("division by zero") from None
    except OverflowError:
        raise CannotCalculate("the result is too large") from None
    except (ValueError, TypeError) as error:
        raise CannotCalculate(str(error)) from None


def _value(node: ast.expr) -> _Number:
    match node:
        case ast.Constant():
            return _constant(node.value)
        case ast.Name(id=name):
            if name not in _CONSTANTS:
                raise CannotCalculate(f"`{name}` is unknown; known are {', '.join(_CONSTANTS)}")
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.UAdd() | ast.USub()):
            value = _value(node.operand)
            return -value if isinstance(node.op, ast.USub) else value
        case ast.BinOp() if type(node.op) in _OPERATORS:
            return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            if name not in _FUNCTIONS:
                known = ", ".join(sorted(_FUNCTIONS))
                raise CannotCalculate(f"there is no function `{name[:40]}`; known are {known}")
            return _bounded(_FUNCTIONS[name](*map(_value, node.args)))
    raise CannotCalculate(f"`{ast.unparse(node)[:60]}` is not arithmetic")


def _constant(value: Any) -> _Number:
    if type(value) is int:
        return _bounded(value)
    if type(value) is float and math.isfinite(value):
        return Fraction(repr(value))  # the decimal as written, so that 0.1 + 0.2 is 0.3
    raise CannotCalculate(f"{str(value)[:60]!r} is no number")


def _bounded(value: Any) -> _Number:
    """Return a result as an exact fraction or a finite float. Raises `CannotCalculate` if it is too large."""
    if isinstance(value, complex):
        raise CannotCalculate("the result is no real number")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise CannotCalculate("the result is no finite number")
        return value
    value = Fraction(value)
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
        raise CannotCalculate("the result is too large")
    return value


def _power(base: _Number, exponent: _Number) -> Any:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size > 1 and size * abs(exponent) > 2 * _MOST_BITS:
            raise CannotCalculate("the result is too large")
    return base**exponent


def _square_root(value: _Number) -> _Number:
    if value < 0:
        raise CannotCalculate("the square root of a negative number is no real number")
    if isinstance(value, Fraction):
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    return math.sqrt(value)


def _whole(value: _Number) -> int:
    if value != int(value):
        raise CannotCalculate(f"{_as_text(value)} is no whole number")
    return int(value)


def _factorial(value: _Number) -> int:
    number = _whole(value)
    if not 0 <= number <= _LARGEST_FACTORIAL:
        raise CannotCalculate(f"factorials are known from 0 to {_LARGEST_FACTORIAL}")
    return math.factorial(number)


def _choose(of: _Number, which: _Number) -> int:
    if _whole(of) > 10_000:
        raise CannotCalculate("the result is too large")
    return math.comb(_whole(of), _whole(which))


def _rounded(value: _Number, digits: _Number = 0.0) -> _Number:
    if digits > 300 or digits < -300:
        raise CannotCalculate("so many digits cannot be rounded to")
    places = _whole(digits)
    return round(value, places) if isinstance(value, Fraction) else Fraction(repr(round(value, places)))


_OPERATORS: dict[type[ast.operator], Callable[[_Number, _Number], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **{
        each.__name__: each
        for each in (
            math.exp, math.log, math.log2, math.log10, math.sin, math.cos, math.tan, math.asin, math.acos, math.atan,
            math.atan2, math.sinh, math.cosh, math.tanh, math.degrees, math.radians, math.hypot, math.floor, math.ceil,
        )
    },
    "sqrt": _square_root,
    "abs": abs,
    "min": min,
    "max": max,
    "round": _rounded,
    "gcd": lambda *values: math.gcd(*map(_whole, values)),
    "lcm": lambda *values: math.lcm(*map(_whole, values)),
    "factorial": _factorial,
    "comb": _choose,
    "pow": _power,
}  # fmt: skip


def _as_text(value: _Number) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    if value.denominator == 1:
        return str(value.numerator)
    scaled = value * 10**30
    if scaled.denominator == 1:  # the decimal ends within 30 digits
        digits = str(abs(scaled.numerator)).rjust(31, "0")
        return f"{'-' if value < 0 else ''}{digits[:-30]}.{digits[-30:].rstrip('0')}"
    try:
        return f"{value} = {float(value):.15g}"
    except OverflowError:
        return f"{value} = a number too large for a decimal"

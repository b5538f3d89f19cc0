"""A calculator of bounded size: exact arithmetic on whole numbers and fractions, floating point for the rest.

The expression is parsed to a syntax tree. Only numbers, operators and known names are allowed in it, and nothing is
evaluated as code. No intermediate or final result may be too large to be useful.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from roll.agentic.tools.base import Answer, Deadline

_Number = Fraction | float
_MOST_BITS = 4096
_LONGEST_EXPRESSION = 2000
_LARGEST_FACTORIAL = 500
_CONSTANTS = {"pi": math.pi, "e": math.e}
_REAL_FUNCTIONS = {
    each.__name__: each
    for each in (
        math.exp, math.log, math.log2, math.log10, math.sin, math.cos, math.tan, math.asin, math.acos, math.atan,
        math.atan2, math.sinh, math.cosh, math.tanh, math.degrees, math.radians, math.hypot,
    )
}  # fmt: skip


class CannotCalculate(Exception):
    """An expression cannot be calculated. The message says why."""


class Calculator:
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
        """See `Tool.call`; ``expression`` is the text to calculate."""
        try:
            return Answer(calculate(arguments["expression"]))
        except CannotCalculate as error:
            return Answer(f"cannot calculate: {error}", is_error=True)

    def close(self) -> None:
        """Do nothing: the calculator holds nothing."""


def calculate(expression: str) -> str:
    """Return the value as text: a whole number, an exact decimal, or a fraction with its approximate decimal.

    Floating-point results have 15 digits. Raises `CannotCalculate`.
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise CannotCalculate(f"the expression is longer than {_LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
        return _shown(_value(tree.body))
    except SyntaxError:
        raise CannotCalculate("this is no arithmetic expression") from None
    except RecursionError:
        raise CannotCalculate("the expression is nested too deeply") from None
    except MemoryError:  # the parser reports deep nesting this way
        raise CannotCalculate("the expression is nested too deeply") from None
    except ZeroDivisionError:
        raise CannotCalculate("division by zero") from None
    except OverflowError:
        raise CannotCalculate("the result is too large") from None
    except (ValueError, TypeError) as error:
        raise CannotCalculate(str(error)) from None


def _value(node: ast.expr) -> _Number:
    if isinstance(node, ast.Constant):
        return _constant(node)
    if isinstance(node, ast.Name):
        if node.id not in _CONSTANTS:
            raise CannotCalculate(f"`{node.id}` is unknown; known are {', '.join(_CONSTANTS)}")
        return _CONSTANTS[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.UAdd | ast.USub):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _bounded(_OPERATORS[type(node.op)](_value(node.left), _value(node.right)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        return _bounded(_call(node.func.id, [_value(argument) for argument in node.args]))
    raise CannotCalculate(f"`{ast.unparse(node)[:60]}` is not arithmetic")


def _constant(node: ast.Constant) -> _Number:
    if type(node.value) is int:
        return _bounded(Fraction(node.value))
    if type(node.value) is float and math.isfinite(node.value):
        return Fraction(repr(node.value))  # the decimal as written, so that 0.1 + 0.2 is 0.3
    raise CannotCalculate(f"{str(node.value)[:60]!r} is no number")


def _power(base: _Number, exponent: _Number) -> _Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        size = max(base.numerator.bit_length(), base.denominator.bit_length())
        if size > 1 and size * abs(exponent.numerator) > 2 * _MOST_BITS:
            raise CannotCalculate("the result is too large")
        if size <= 1:  # for 0, 1 and -1 only the parity of the exponent matters
            exponent = exponent if base == 0 else Fraction(exponent.numerator % 2)
        return base**exponent.numerator
    result = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise CannotCalculate("the result is no real number")
    return result


def _both_floats(operation: Callable[[Any, Any], Any]) -> Callable[[_Number, _Number], _Number]:
    def apply(left: _Number, right: _Number) -> _Number:
        if isinstance(left, float) or isinstance(right, float):
            return operation(float(left), float(right))
        return Fraction(operation(left, right))

    return apply


_OPERATORS: dict[type[ast.operator], Callable[[_Number, _Number], _Number]] = {
    ast.Add: _both_floats(operator.add),
    ast.Sub: _both_floats(operator.sub),
    ast.Mult: _both_floats(operator.mul),
    ast.Div: _both_floats(operator.truediv),
    ast.FloorDiv: _both_floats(operator.floordiv),
    ast.Mod: _both_floats(operator.mod),
    ast.Pow: _power,
}


def _call(name: str, arguments: list[_Number]) -> _Number:
    if name in _REAL_FUNCTIONS:
        return _REAL_FUNCTIONS[name](*map(float, arguments))
    if name not in _EXACT_FUNCTIONS:
        known = ", ".join(sorted([*_REAL_FUNCTIONS, *_EXACT_FUNCTIONS]))
        raise CannotCalculate(f"there is no function `{name[:40]}`; known are {known}")
    return _EXACT_FUNCTIONS[name](*arguments)


def _square_root(value: _Number) -> _Number:
    if isinstance(value, Fraction) and value >= 0:
        root = Fraction(math.isqrt(value.numerator), math.isqrt(value.denominator))
        if root * root == value:
            return root
    if value < 0:
        raise CannotCalculate("the square root of a negative number is no real number")
    return math.sqrt(value)


def _whole(value: _Number) -> int:
    if value != int(value):
        raise CannotCalculate(f"{_shown(value)} is no whole number")
    return int(value)


def _factorial(value: _Number) -> _Number:
    number = _whole(value)
    if not 0 <= number <= _LARGEST_FACTORIAL:
        raise CannotCalculate(f"factorials are known from 0 to {_LARGEST_FACTORIAL}")
    return Fraction(math.factorial(number))


def _choose(of: _Number, which: _Number) -> _Number:
    if _whole(of) > 10_000:
        raise CannotCalculate("the result is too large")
    return Fraction(math.comb(_whole(of), _whole(which)))


def _rounded(value: _Number, digits: _Number = Fraction(0)) -> _Number:
    if digits > 300 or digits < -300:
        raise CannotCalculate("so many digits cannot be rounded to")
    places = _whole(digits)
    return round(value, places) if isinstance(value, Fraction) else Fraction(round(value, places))


_EXACT_FUNCTIONS: dict[str, Callable[..., _Number]] = {
    "sqrt": _square_root,
    "abs": abs,
    "min": min,
    "max": max,
    "round": _rounded,
    "floor": lambda value: Fraction(math.floor(value)),
    "ceil": lambda value: Fraction(math.ceil(value)),
    "gcd": lambda *values: Fraction(math.gcd(*map(_whole, values))),
    "lcm": lambda *values: Fraction(math.lcm(*map(_whole, values))),
    "factorial": _factorial,
    "comb": _choose,
    "pow": _power,
}


def _bounded(value: _Number) -> _Number:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > _MOST_BITS:
            raise CannotCalculate("the result is too large")
        return value
    if not math.isfinite(value):
        raise CannotCalculate("the result is no finite number")
    return value


def _shown(value: _Number) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    if value.denominator == 1:
        return str(value.numerator)
    decimal = _terminating(value)
    return decimal if decimal else f"{value} = {_quotient(value)}"


def _terminating(value: Fraction) -> str | None:
    """Return a fraction as a decimal if that ends within 30 digits; else None."""
    for digits in range(1, 31):
        if 10**digits % value.denominator == 0:
            scaled = abs(value.numerator) * (10**digits // value.denominator)
            text = str(scaled).rjust(digits + 1, "0")
            return f"{'-' if value < 0 else ''}{text[:-digits]}.{text[-digits:]}"
    return None


def _quotient(value: Fraction) -> str:
    try:
        return f"{float(value):.15g}"
    except OverflowError:
        return "a number too large for a decimal"

"""Exact where exactness is possible, bounded everywhere, and no expression raises anything but its own error."""

from __future__ import annotations

import ast
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.tools.base import Answer, Deadline, Tool, function_schema
from roll.agentic.tools.calculator import Calculator, CannotCalculate, calculate

NUMBERS = st.integers(0, 10**12)
OPERATORS = st.sampled_from(["+", "-", "*", "/", "//", "%"])


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("-(2 ^ 10)", "-1024"),
        ("123456789123456789 * 987654321987654321", str(123456789123456789 * 987654321987654321)),
        ("0.1 + 0.2", "0.3"),
        ("1 / 8", "0.125"),
        ("-1 / 8", "-0.125"),
        ("-1 / 200", "-0.005"),
        ("1 / 3", "1/3 = 0.333333333333333"),
        ("7 // 2", "3"),
        ("-7 % 5", "3"),
        ("sqrt(144)", "12"),
        ("sqrt(2)", "1.4142135623731"),
        ("sqrt(9/4)", "1.5"),
        ("factorial(20)", "2432902008176640000"),
        ("gcd(12, 18) + lcm(4, 6)", "18"),
        ("round(2.567, 2)", "2.57"),
        ("round(sqrt(2), 2)", "1.41"),
        ("max(1, 2.5, 2)", "2.5"),
        ("log(e)", "1"),
        ("comb(5, 2)", "10"),
        ("2 ** -2", "0.25"),
        ("2 ** 0.5", "1.4142135623731"),
        ("(-1) ** (10 ** 100)", "1"),
        ("0 ** (10 ** 100)", "0"),
    ],
)
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "words"),
    [
        ("9**9**9", "too large"),
        ("9**9**9**9", "too large"),
        ("(9**999) ** 999", "too large"),
        ("2 ** 0.5 ** -99999", "too large|finite"),
        ("factorial(10**9)", "factorials are known"),
        ("comb(10**9, 10**8)", "too large"),
        ("round(1, -10**9)", "digits"),
        ("1 / 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("1 % 0", "division by zero"),
        ("exp(10**6)", "too large"),
        ("1e999", "no number"),
        ("sqrt(-1)", "no real number"),
        ("(-8) ** 0.5", "no real number"),
        ("log(-1)", "domain|positive"),
        ("__import__('os')", "no function `__import__`|no number"),
        ("().__class__", "not arithmetic"),
        ("'a' * 10**9", "no number"),
        ("[1] * 10", "not arithmetic"),
        ("x + 1", "`x` is unknown"),
        ("sin()", "argument"),
        ("min()", "argument"),
        ("1 +", "no arithmetic expression"),
        ("", "no arithmetic expression"),
        ("True + 1", "no number"),
        ("1j", "no number"),
        ("(" * 900 + "1" + ")" * 900, "nested|no arithmetic"),
        ("-" * 1900 + "1", "nested"),
        ("1" * 2001, "longer than"),
        ("gcd(1.5, 2)", "no whole number"),
    ],
)
def test_what_cannot_be_calculated_is_said(expression, words):
    with pytest.raises(CannotCalculate, match=words):
        calculate(expression)


@given(NUMBERS, OPERATORS, NUMBERS, OPERATORS, NUMBERS)
def test_it_agrees_with_fractions(first, one, second, other, third):
    def exact(text: str) -> Fraction:
        tree = ast.parse(text, mode="eval")
        functions = {
            ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
            ast.Div: lambda a, b: a / b, ast.FloorDiv: lambda a, b: Fraction(a // b), ast.Mod: lambda a, b: a % b,
        }  # fmt: skip

        def walk(node):
            if isinstance(node, ast.Constant):
                return Fraction(node.value)
            return functions[type(node.op)](walk(node.left), walk(node.right))

        return walk(tree.body)

    expression = f"{first} {one} {second} {other} {third}"
    try:
        expected = exact(expression)
    except ZeroDivisionError:
        with pytest.raises(CannotCalculate, match="division by zero"):
            calculate(expression)
        return
    assert Fraction(calculate(expression).split(" = ")[0]) == expected


@given(st.text(alphabet="0123456789.+-*/()% ,esqrtabpiw\x00\ud800_'[]", max_size=40))
def test_no_text_raises_anything_else(text):
    try:
        assert calculate(text)
    except CannotCalculate:
        pass


def test_it_is_a_tool():
    tool = Calculator()
    assert isinstance(tool, Tool)
    assert function_schema(tool)["function"]["name"] == "calculator"
    assert tool.call({"expression": "1+1"}, Deadline.after(1)) == Answer("2")
    assert tool.call({"expression": "1/0"}, Deadline.after(1)).is_error

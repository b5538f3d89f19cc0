"""The verifiers `exact`, `math`, `numeric` and `reasoning_gym`.

Responses are untrusted. `numeric` compares exact fractions, so a long integer with a wrong last digit is wrong. A
number of absurd size (thousands of digits, exponents like 1e999999999) does not count as a number. `math` rejects
expressions with huge values (``9^{9^9}``) before sympy evaluates them, because that would block the process in a long C
call that the alarm cannot interrupt. The time limits of math-verify are off, because they would use the process's only
alarm, which the worker needs. For `reasoning_gym`, the ground truth is the whole entry of the task, and the metadata
names the data set and its arguments (`roll.data.sources.read_reasoning_gym` writes both).
"""

from __future__ import annotations

import json
import logging
import math
import re
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from roll.data.sources import REASONING_GYM_KEY

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset
    from sympy import Basic, MatrixBase


def extract_last(text: str, pattern: re.Pattern[str] | None) -> str | None:
    """Return the last match of ``pattern`` (its first group, if any); None without a match.

    If ``pattern`` is None, return the whole text.
    """
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

    ``extract`` is a regular expression whose last match (first group, if any) is the answer; without a match the score
    is 0. If the ground truth is a list, any of its entries is correct. Values are compared as text. Raises `ValueError`
    without a ground truth.
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


MAX_BITS = 20_000.0
"""Size of the largest number that an answer may evaluate to, in bits."""

_MARKUP = ("$", "\\boxed", "\\(", "\\[")
_CURRENCY = re.compile(
    r"[€£¥]|\b(?:USD|EUR|GBP|JPY|CNY)\b ?|\bUS(?=\\?\$ ?\.?\d)|(?<!\\)\\\$|(?<=\d)\{,\}(?=\d{3}(?!\d))"
)
_BOLD = re.compile(r"(?<![\w)])\*\*(?=\S)((?:[^*\n]|\*(?!\*))++)(?<=\S)\*\*(?![\w(])")
_MARKDOWN = re.compile(r"`|</?answer>")
MAX_LINE = 1000
"""Length of the longest line, in characters, that is searched for LaTeX without dollars."""
_END_OF_PROOF = re.compile(r"(?:\\(?:q?quad|hfill|blacksquare|square|Box|qed|checkmark)\b|[\s.])++$")
_BARE_LATEX = re.compile(
    r"((?:.*?(?:[:=]|\b(?:is|are))\s+)??)"
    r"((?=[^\n]*\\[A-Za-z])"
    r"(?>\\(?:text|mathrm)\s?\{[^{}$]*\}|\\(?!begin|end|boxed)[A-Za-z]+|\\[^A-Za-z()\[\]]|[^\\$A-Za-z]|[A-Za-z](?![A-Za-z]))++)"
)


def math_answer(response: str, ground_truth: Any, *, float_rounding: int = 6, strict: bool = True) -> float:
    """Return 1 if the answer found in the response is mathematically equal to the ground truth, else 0.

    The answer is what math-verify extracts: ``\\boxed{...}``, LaTeX in dollars, or a plain number. Bare LaTeX also
    counts if it is the last line, or ends that line after ``:``, ``=``, "is" or "are". The ground truth may be bare
    LaTeX. Currencies, bold type, code marks and answer tags are ignored in both. ``float_rounding`` counts decimals;
    ``strict`` distinguishes variables, sets and tuples. Raises `ValueError` if the ground truth cannot be parsed. Call
    it in the main thread of a process that has a time limit.
    """
    from math_verify import verify

    truth = parse_ground_truth(str(ground_truth))
    plain = _plain(response)
    answer = _parse(_with_last_line_in_dollars(plain))
    if all(isinstance(each, str) for each in answer):  # it was no formula
        answer = _parse(plain)
    if any(_bits(each) > MAX_BITS for each in answer):
        return 0.0
    return float(verify(list(truth), answer, float_rounding=float_rounding, strict=strict, timeout_seconds=None))


@lru_cache(maxsize=256)  # the responses of a group share one ground truth
def parse_ground_truth(text: str) -> tuple[Basic | MatrixBase | str, ...]:
    """Return the expressions that math-verify finds in a ground truth. Raises `ValueError` if it finds none."""
    text = _plain(text)
    has_markup = any(mark in text for mark in _MARKUP)
    parsed = _parse(text if has_markup else f"${text}$") or _parse(text)
    if not parsed:
        raise ValueError(f"the ground truth {text!r} is no mathematical expression")
    return tuple(parsed)


def _parse(text: str) -> list[Basic | MatrixBase | str]:
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # otherwise it warns that its time limits are off
    return parse(text, parsing_timeout=None)


def _with_last_line_in_dollars(text: str) -> str:
    """Enclose bare LaTeX at the end of the text's last line in dollars, so that it is read as one formula."""
    before, newline, line = text.rstrip().rpartition("\n")
    found = _BARE_LATEX.fullmatch(_END_OF_PROOF.sub("", line)) if len(line) <= MAX_LINE else None
    return text if found is None else f"{before}{newline}{found[1]}${found[2]}$"


def _plain(text: str) -> str:
    text = _CURRENCY.sub("", _BOLD.sub(r"\1", _MARKDOWN.sub("", text)))
    return text.replace("$", "") if text.count("$") == 1 else text  # a single dollar encloses no formula


def _bits(expression: Any) -> float:
    """Estimate the size, in bits, of the largest number that evaluating the expression would produce."""
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


MAX_DIGITS = 1000
MAX_EXPONENT = 400

_DECIMAL = r"(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|(?<![\d.])\.\d+)(?:[eE][-+]?\d+)?"
_SIGN = r"(?:(?<![\w.)}\]])[-+])?"
_CURRENCY_SIGN = r"\\[$]|(?<!\$-)[A-Z]{0,2}[$€£¥]"
_NUMBER = re.compile(rf"({_SIGN})(?:[ \t]{{1,2}}|{_CURRENCY_SIGN})?({_DECIMAL})(?:\s?/\s?([-+]?)({_DECIMAL}))?")
_NO_SIGN = re.compile(
    r"(?<=[\d%]) *[-+]"  # `5 - 3`, `5 -3`, `5%-3%`
    r"|(?:(?<=[)}\]])|(?<=\b[A-Za-z])|(?<=\d[A-Za-z])) +[-+] "  # `f(2) - 3`, `x - 3`, `2x - 3`, but not `(a) -3`
    r"|(?<=\n)(?<![$\[(=]\n) *[-+] +(?=[\d$])"  # an item of a list
)
_FORMULA_BEGINS = re.compile(
    r"\\begin\{[a-z]*(?:align|array|cases|equation|gather|math|matrix|multline|split)[a-z]*\*?\}"
)
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))")
_LATEX_SPACING = re.compile(r"\{,\}|\\[,!]")
_TEN_TO = r"\s*(?:\\times|\\cdot|[×·*])\s*10\^(?:\{([-+]?\d+)\}|([-+]?\d+))(?!\.?\d)"
_POWER_OF_TEN = re.compile(rf"(?<=\d){_TEN_TO}")
_PLAIN_DECIMAL = r"(?<![\w.,])(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_FRACTION_TIMES_POWER = re.compile(rf"({_PLAIN_DECIMAL})(\s?/\s?[-+]?{_DECIMAL}){_TEN_TO}")
_LATEX_FRACTION_TIMES_POWER = re.compile(
    rf"\\[dt]?frac\s*(?:\{{\s*([-+]?{_PLAIN_DECIMAL})\s*\}}|(\d))\s*(?:\{{([^{{}}]*)\}}|(\d)){_TEN_TO}"
)


def numeric(
    response: str,
    ground_truth: Any,
    *,
    absolute_tolerance: float = 0.0,
    relative_tolerance: float = 0.0,
    extract: re.Pattern[str] | None = None,
) -> float:
    """Return 1 if the last number in the response equals the last one in the ground truth, else 0.

    Numbers may have signs, thousands separators, decimals and exponents, or be fractions ``a/b`` or ``\\frac{a}{b}``;
    words and units around them are ignored. An answer is right if ``|answer - truth| <= max(absolute, relative *
    |truth|)``. With ``extract``, only the last match of this regular expression is searched. Raises `ValueError` if the
    ground truth has no number.
    """
    truth = _truth(ground_truth)
    part = extract_last(response, extract)
    answer = None if part is None else last_number(part)
    if answer is None:
        return 0.0
    allowed = max(Fraction(absolute_tolerance), Fraction(relative_tolerance) * abs(truth))
    return float(abs(answer - truth) <= allowed)


def last_number(text: str) -> Fraction | None:
    """Return the last number in the text as an exact fraction; None if there is none, or if it is absurdly large."""
    text = _LATEX_SPACING.sub("", text.replace("\N{MINUS SIGN}", "-"))
    text = _FORMULA_BEGINS.sub("[", text)
    # `1/2 * 10^3` is 1e3/2, not 1/2e3
    text = _FRACTION_TIMES_POWER.sub(r"\1e\3\4\2", text)
    text = _LATEX_FRACTION_TIMES_POWER.sub(r"\\frac{\1\2e\5\6}{\3\4}", text)
    text = _NO_SIGN.sub(" ", _POWER_OF_TEN.sub(r"e\1\2", text))
    text = _LATEX_FRACTION.sub(r" \1\2/\3\4 ", text)
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    sign, numerator, sign_below, denominator = numbers[-1].groups()
    over = _exact(numerator)
    under = Fraction(1) if denominator is None else _exact(denominator)
    if over is None or not under:
        return None
    return over / under * (-1) ** (sign, sign_below).count("-")


def _exact(decimal: str) -> Fraction | None:
    mantissa, _, exponent = decimal.lower().partition("e")
    too_large = len(mantissa) > MAX_DIGITS or len(exponent) > 5 or abs(int(exponent or 0)) > MAX_EXPONENT
    return None if too_large else Fraction(decimal.replace(",", ""))


def _truth(ground_truth: Any) -> Fraction:
    if isinstance(ground_truth, float) and math.isfinite(ground_truth):
        # A double holds any decimal of 15 digits, so this undoes rounding errors: 0.1 + 0.2 becomes 0.3.
        return Fraction(f"{ground_truth:.15g}")
    if isinstance(ground_truth, int):
        return Fraction(ground_truth)
    truth = last_number(ground_truth) if isinstance(ground_truth, str) else None
    if truth is None:
        raise ValueError(f"the ground truth {ground_truth!r} has no number")
    return truth


def reasoning_gym_task(
    response: str, ground_truth: Any, metadata: dict[str, Any], *, extract: re.Pattern[str] | None = None
) -> float:
    """Return the score that the task's data set gives the answer, usually 0 to 1, possibly with partial credit.

    ``extract`` is a regular expression whose last match (first group, if any) is the answer; without it, the whole
    response is the answer. Raises `ValueError` for a prompt that is not a reasoning-gym task.
    """
    task_set = metadata.get(REASONING_GYM_KEY)
    if task_set is None:
        raise ValueError("the prompt is no reasoning-gym task: list its data set under `data_args.reasoning_gym`")
    answer = extract_last(response, extract)
    dataset = _dataset(task_set["dataset"], json.dumps(task_set["config"], sort_keys=True))
    return float(dataset.score_answer(None if answer is None else answer.strip(), ground_truth))


@lru_cache(maxsize=32)
def _dataset(name: str, config: str) -> ProceduralDataset:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(config))

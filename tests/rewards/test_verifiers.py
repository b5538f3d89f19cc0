"""The built-in verifiers, called as a worker calls them: in a main thread."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.configs.errors import Problems
from roll.configs.roles import ReasoningGymSource
from roll.data.sources import read_reasoning_gym
from roll.rewards.verifiers import exact, last_number, math_answer, numeric, reasoning_gym_task
from tests.tiers import examples

HALVES = [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", "$1/2$", "The answer is 0.5.", r"so \(\dfrac12\)", r"\boxed{50\%}"]


@given(st.text())
def test_exact_accepts_itself_and_nothing_longer(text):
    assert exact(f" {text}\n", text) == 1.0
    assert exact(text + "x", text) == 0.0


def test_exact_options():
    assert exact("Yes", "yes") == 0.0
    assert exact("Yes", "yes", ignore_case=True) == 1.0
    assert exact("b", ["a", "b"]) == 1.0
    assert exact("3", 3) == 1.0
    tag = re.compile(r"<answer>(.*?)</answer>")
    assert exact("<answer>1</answer> no, <answer> 2 </answer>", "2", extract=tag) == 1.0
    assert exact("2", "2", extract=tag) == 0.0
    assert exact("a1b22", "22", extract=re.compile(r"\d+")) == 1.0


@pytest.mark.parametrize("truth", [None, [], [None]])
def test_a_missing_ground_truth_is_an_error_and_not_a_wrong_answer(truth):
    with pytest.raises(ValueError, match="no ground truth"):
        exact("", truth)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("12 apples", 12),
        ("first 3, then 1,234.5!", Fraction(2469, 2)),
        *((f"5{minus}3", 3) for minus in ("-", " - ", " -", "- ", " \N{MINUS SIGN} ", "% - ", " + ")),
        *((f"{term} - 3", 3) for term in ("f(2)", "x", "so x", "2x", "3 - 5m")),
        *((f"{before}-3", -3) for before in ("(a) ", "1. ", "= ", "answer: ", "equals ", "5, ", "5\t", "2 * ")),
        ("answer: - 3", -3),
        ("it is - 3", -3),
        ("- 3", -3),
        ("The solutions are:\n- 2\n- 3", 3),
        ("$$\n- 3\n$$", -3),
        ("x =\n- 3", -3),
        ("\\begin{align}\n- 7", -7),
        ("\\begin{gather*}\n- 7\n\\end{gather*}", -7),
        ("\\(\n- 7\n\\)", -7),
        *((f"\\begin{{{list_or_text}}}\n- 7", 7) for list_or_text in ("itemize", "description", "quote", "center")),
        *((half, 500) for half in ("1/2*10^3", r"1 / 2 \times 10^{3}", r"\frac{1}{2}\cdot 10^3", r"\dfrac12 × 10^3")),
        (r"-\frac{3}{4} \times 10^{-2}", Fraction(-3, 400)),
        ("1,000/2*10^3 = 500,000", 500_000),
        (".5/2*10^3", 250),
        ("3*10^3/2", 1500),
        ("1/2e3", Fraction(1, 2000)),
        ("6/3*10^2.5", Fraction(5, 2)),
        ("3*10^2.5", Fraction(5, 2)),
        ("3*10^2.", 300),
        ("2-3", 3),
        ("10 \N{MINUS SIGN} 4 = 6", 6),
        ("1e-2", Fraction(1, 100)),
        (r"so $2.5 \times 10^{3}$ m", 2500),
        ("-2 \\cdot 10^{\N{MINUS SIGN}3}", Fraction(-1, 500)),
        ("3×10^4", 30000),
        ("range 5-3", 3),
        ("x = -3", -3),
        ("(-3)", -3),
        ("**-5**", -5),
        ("\N{MINUS SIGN}7", -7),
        ("1/2", Fraction(1, 2)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"x = - \frac{3}{4}", Fraction(-3, 4)),
        (r"\frac{3}{-4}", Fraction(-3, 4)),
        (r"is \frac34", Fraction(3, 4)),
        ("a loss of -$5", -5),
        (r"$-\$1,200.50$", Fraction(-2401, 2)),
        ("a loss of -US$5", -5),
        *((amount, 5) for amount in ("US$5", "USD 5", "5 USD", "5 €", "€5")),
        ("from $5-$3", 3),
        ("$5 - $3", 3),
        (r"\boxed{1{,}000}", 1000),
        ("It is 12.", 12),
        (".5", Fraction(1, 2)),
        ("1.2.3", 3),
        ("2.5e3", 2500),
        ("1,2345", 2345),
        ("", None),
        ("none", None),
        ("---\n\n42 apples", 42),
        ("-\n42", 42),
        ("The range is $5$-$10$", 10),
        ("$-5$ and $10$-$5$", 5),
        ("3 / 0", None),
        ("1e999999999", None),
        ("9" * 5000, None),
    ],
)
def test_the_last_number_of_a_text(text, number):
    assert last_number(text) == number


@given(st.text())
def test_any_text_can_be_searched_for_a_number(text):
    assert last_number(text) is None or isinstance(last_number(text), Fraction)


@given(st.integers(-(10**30), 10**30))
def test_integers_are_compared_in_every_digit(number):
    assert numeric(f"It is {number:,} apples.", number) == 1.0
    assert numeric(f"{number}", str(number)) == 1.0
    assert numeric(f"{number + 1}", number) == 0.0


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_exact(number):
    text = f"{number.numerator}/{number.denominator}"
    assert last_number(text) == number
    assert numeric(f"{text} of it", text) == 1.0


@given(st.decimals(-(10**6), 10**6, places=4))
def test_decimals_equal_the_floats_they_mean(number):
    assert numeric(f"about {number:f}", float(number)) == 1.0


def test_numeric_tolerances_and_extraction():
    assert numeric("0.3", 0.1 + 0.2) == 1.0
    assert numeric("3.14", "3.14159") == 0.0
    assert numeric("3.14", "3.14159", absolute_tolerance=0.01) == 1.0
    assert numeric("99", 100, relative_tolerance=0.01) == 1.0
    assert numeric("98", 100, relative_tolerance=0.01) == 0.0
    assert numeric("#### 42 (in 3 steps)", 42, extract=re.compile(r"#### (.*?)\(")) == 1.0
    assert numeric("42", 42, extract=re.compile("####.*")) == 0.0


@pytest.mark.parametrize("truth", [None, "many", [], float("nan"), float("inf")])
def test_a_ground_truth_without_number_is_an_error(truth):
    with pytest.raises(ValueError, match="has no number"):
        numeric("1", truth)


@pytest.mark.parametrize("response", HALVES)
@pytest.mark.parametrize("truth", ["1/2", "0.5", r"\frac{1}{2}", r"$\frac{1}{2}$", r"\boxed{\frac12}"])
def test_equal_mathematics_in_other_words_is_right(response, truth):
    assert math_answer(response, truth) == 1.0


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        ("$x^2 + 2x + 1$", "(x+1)^2", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{1024}", "2^{10}", 1.0),
        ("1,000", 1000, 1.0),
        (r"\boxed{\$18.90}", r"\$18.90", 1.0),
        (r"It costs $\$32,348$.", r"\$32,\!348", 1.0),
        (r"\boxed{\text{USD }5}", r"\text{USD }5", 1.0),
        ("The answer is **1/2**.", "1/2", 1.0),
        ("2 ** 3", "8", 1.0),
        ("2**3", "8", 1.0),
        ("2**-3", "1/8", 1.0),
        (r"\boxed{2**-3}", "-1", 0.0),
        ("2 **3", "8", 1.0),
        ("**Answer: 2 * 3 = 6**", "6", 1.0),
        ("$US$", "US", 1.0),
        (r"\boxed{(1{,}2)}", "(1,2)", 1.0),
        (r"\boxed{(1{,}2)}", "12", 0.0),
        (r"\boxed{1{,}234{,}567}", "1234567", 1.0),
        ("`4`", "4", 1.0),
        ("<answer>4</answer>", "4", 1.0),
        ("so $x = 76{,}926$.", "76926", 1.0),
        (r"\boxed{76{,}926}", r"76{,}926", 1.0),
        (r"\boxed{18}", r"\$19", 0.0),
        (r"\boxed{41} or so", "42", 0.0),
        ("I do not know", "42", 0.0),
        ("", "42", 0.0),
        (r"\boxed{\frac{1}{", "42", 0.0),
        (r"\boxed{x}", "42", 0.0),
        (r"\boxed{42", "43", 0.0),
    ],
)
def test_answers_are_judged_by_their_value(response, truth, score):
    assert math_answer(response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "other"),
    [
        (r"\dfrac{1}{2}", "1/2", "2"),
        (r"The answer is \dfrac{1}{2}.", "1/2", "1"),
        ("We use $3$ and $4$.\nx = \\tfrac{5}{2}", "5/2", "4"),
        ("Hence\n**-\\tfrac12**", "-1/2", "1/2"),
        (r"2\sqrt{2}", r"\sqrt{8}", "2"),
        (r"Answer: \frac{\pi}{2}", r"\pi/2", "2"),
        (r"\frac{1}{2}\pi", r"\pi/2", "1/2"),
        (r"The roots are 1, \sqrt{2}", r"\{1, \sqrt{2}\}", r"\sqrt{2}"),
        (r"\dfrac{1}{2}\text{ cm}", "1/2", "2"),
        (r"x = \frac{1}{2} \quad \checkmark", "1/2", "2"),
        (r"\left(\frac12, 3\right)", "(1/2, 3)", "3"),
        (r"x \leq 2", r"x \leq 2", "2"),
        (r"x = 5 \qquad \blacksquare", "5", "x"),
        (r"x = 5 \hfill \blacksquare", "5", "x"),
        (r"\mathbf{42}", "42", "43"),
    ],
)
def test_the_last_line_may_be_a_formula_without_dollars(response, truth, other):
    assert math_answer(response, truth) == 1.0
    assert math_answer(response, other) == 0.0


@pytest.mark.parametrize(
    ("response", "truth"),
    [
        ("\\boxed{3}\n\\dfrac{1}{2}", "1/2"),
        ("\\sqrt{2}\n3", r"\sqrt{2}"),
        (r"-\dfrac{1}{2}", "1/2"),
        (r"x = 1 + \dfrac{1}{2}", "1/2"),
        (r"x \neq \frac{1}{2}", "1/2"),
        (r"minus \dfrac{1}{2}", "1/2"),
        (r"ab \sqrt{2}", r"\sqrt{2}"),
        (r"not \sqrt{2}", r"\sqrt{2}"),
        (r"\text{not } \frac{1}{2}", "1/2"),
        (r"\frac{1}{2} \text{ or } 3", "3"),
        (r"\frac{1}{2} \text{ or } 3", "1/2"),
        (r"\dfrac{1}{2} or 3", "1/2"),
        (r"1 = \dfrac{1}{2}", "1"),
        (r"x = 3, y = \sqrt{2}", r"\sqrt{2}"),
        (r"\pm\sqrt{2}", r"\sqrt{2}"),
        (": " * 499 + r"\a word", "1/2"),
        (r"= \text{a}" * 90 + " word", "1/2"),
    ],
)
def test_a_part_of_a_formula_without_dollars_is_no_answer(response, truth):
    assert math_answer(response, truth) == 0.0


AMOUNTS = ["$1,200", r"\$1,200", "US$1,200", r"US\$1,200", "USD 1200", "€1200", "1,200 €", "1200"]


@pytest.mark.parametrize("truth", AMOUNTS)
@pytest.mark.parametrize("amount", AMOUNTS)
def test_an_amount_is_its_number_in_the_answer_and_in_the_ground_truth(amount, truth):
    for response in (amount, rf"\boxed{{{amount}}}", f"The answer is {amount}.", f"**{amount}**"):
        assert math_answer(response, truth) == 1.0, response
        assert math_answer(response.replace("2", "3"), truth) == 0.0, response
        assert math_answer(f"-{amount}", truth) == 0.0
    assert math_answer(f"-{amount}", f"-{truth}") == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "9**9**9",
        "$9^{9^9}$",
        r"\boxed{9^{9^{9^9}}}",
        r"\boxed{99999999!}",
        r"$\sqrt{9^{9^9}}$",
        "$((9^{999})^{999})^{999}$",
        "1e999999999",
        r"$2^{-9^{99}}$",
        r"\boxed{\frac{1}{10^{10^{10}}}}",
    ],
)
def test_numbers_too_large_to_write_down_are_wrong_at_once(response):
    assert math_answer(response, "42") == 0.0


def test_a_ground_truth_that_is_no_mathematics_is_an_error():
    with pytest.raises(ValueError, match="no mathematical expression"):
        math_answer("42", "")


@settings(max_examples=examples(40))
@given(st.text(st.sampled_from("0123456789+-*/^(){}$\\ .=xfracboxed"), max_size=15))
def test_no_response_breaks_the_mathematics_verifier(response):
    assert math_answer(response, "-31415926") in (0.0, 1.0)


def test_reasoning_gym_scores_its_own_answers():
    rows = read_reasoning_gym(ReasoningGymSource("basic_arithmetic", size=5, seed=1), 0, "data", Problems())
    for row in rows:
        entry = row.ground_truth
        assert reasoning_gym_task(f" {entry['answer']}\n", entry, row.metadata) == 1.0
        assert reasoning_gym_task("no idea", entry, row.metadata) < 0.5
        tag = re.compile("<a>(.*?)</a>")
        assert reasoning_gym_task(f"well, <a>{entry['answer']}</a>", entry, row.metadata, extract=tag) == 1.0
        assert reasoning_gym_task(entry["answer"], entry, row.metadata, extract=tag) < 0.5


def test_a_prompt_of_another_source_is_an_error_for_reasoning_gym():
    with pytest.raises(ValueError, match="no reasoning-gym task"):
        reasoning_gym_task("1", {}, {})

"""Problems have one answer, found by a second way; tools help to find it; only the exact number is right."""

from __future__ import annotations

import json
import re
from fractions import Fraction

import gymnasium
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.agentic.library.math_tools import KINDS, LEVELS, MathToolsEnv, read_number
from roll.agentic.registry import make_env
from roll.agentic.tools.calculator import calculate
from roll.configs.errors import ConfigError
from tests.sandbox.sandboxes import needs_sandbox

SEEDS = st.integers(0, 2**31)


def problem(kind: str, level: int, seed: int):
    return KINDS[kind](level, np.random.default_rng(seed))


@given(st.sampled_from(sorted(KINDS)), st.sampled_from(LEVELS), SEEDS)
def test_problems_repeat_by_seed_and_their_answers_can_be_written(kind, level, seed):
    made = problem(kind, level, seed)
    assert made == problem(kind, level, seed)
    assert read_number(str(made.answer)) == made.answer


@given(st.sampled_from(["multiplication", "expression"]), st.sampled_from(LEVELS), SEEDS)
def test_expressions_agree_with_the_calculator(kind, level, seed):
    made = problem(kind, level, seed)
    expression = re.match(r"What is (.*?)\?", made.question).group(1)
    assert Fraction(calculate(expression).split(" = ")[0]) == made.answer


@given(st.sampled_from(LEVELS), SEEDS)
def test_powers_and_sums_agree_with_counting(level, seed):
    base, exponent, modulus = map(int, re.findall(r"\d+", problem("remainder", level, seed).question))
    value, square = 1, base
    for bit in reversed(bin(exponent)[2:]):
        value = value * square % modulus if bit == "1" else value
        square = square * square % modulus
    assert problem("remainder", level, seed).answer == value % modulus
    counting = problem("counting", min(level, 4), seed)
    first, last, remainder, divisor = map(int, re.findall(r"\d+", counting.question))
    assert counting.answer == sum(n * n for n in range(first, last + 1) if n % divisor == remainder)


@given(st.sampled_from(LEVELS), SEEDS)
def test_word_problems_agree_with_their_words(level, seed):
    shop = problem("shop", level, seed)
    people, *orders, paid = map(int, re.findall(r"\d+", shop.question))
    spent = sum(number * price for number, price in zip(orders[::2], orders[1::2], strict=True))
    assert shop.answer == Fraction(paid - spent, people) and paid >= spent
    savings = problem("savings", level, seed)
    balance, percent, twelve, monthly, years = map(int, re.findall(r"\d+", savings.question))
    value = Fraction(balance)
    for _ in range(years):
        value += value * Fraction(percent, 100) + twelve * monthly
    assert savings.answer == value


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("42", 42), (" 1,234 ", 1234), ("-3/4", Fraction(-3, 4)), ("$2.50", Fraction(5, 2)), ("+7", 7), ("\u22127", -7),
        ("1/0", None), ("forty", None), ("", None), ("1 2", None), ("1e3", None), ("9" * 500, None), ("nan", None),
    ],
)  # fmt: skip
def test_numbers_are_read_exactly_or_not_at_all(text, number):
    assert read_number(text) == number


@given(st.text())
def test_no_text_makes_reading_raise(text):
    read_number(text)


def begun(seed: int = 3, **options) -> tuple[MathToolsEnv, str]:
    env = MathToolsEnv(**{"kinds": ["multiplication"], "levels": [2], "tools": ["calculator"]} | options)
    return env, env.reset(seed=seed)[0]


def test_the_calculator_leads_to_the_answer():
    env, question = begun()
    expression = re.match(r"What is (.*?)\?", question).group(1)
    call = json.dumps({"name": "calculator", "arguments": {"expression": expression}})
    text, reward, terminated, *_ = env.step(f"<tool_call>{call}</tool_call>")
    assert (reward, terminated) == (0.0, False)
    _, reward, terminated, _, info = env.step(f"So it is <answer>0</answer>, no, <answer>{text}</answer>")
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    assert info["metrics"]["tool_calls"] == 1
    assert f"said: {text}" in env.render()


@needs_sandbox
def test_the_python_tool_leads_to_the_answer():
    env, question = begun(tools=["python"], kinds=["remainder"], tool_settings={"code_block_tool": "python"})
    numbers = ", ".join(re.findall(r"\d+", question))
    text = env.step(f"```python\nprint(pow({numbers}))\n```")[0]
    assert env.step(f"<answer>{text}</answer>")[1] == 1.0


def test_a_call_beside_an_answer_wins():
    env, _ = begun()
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "1"}}</tool_call>'
    assert env.step(f"{call}<answer>1</answer>")[2] is False


def test_a_wrong_answer_ends_the_episode_unless_attempts_are_left():
    env, _ = begun()
    assert env.step("<answer>1</answer>")[1:3] == (0.0, True)
    env, _ = begun(attempts=2)
    assert env.step("<answer>1</answer>")[1:3] == (0.0, False)
    assert env.step("<answer>1</answer>")[1:3] == (0.0, True)


def test_a_text_without_an_answer_is_an_invalid_action():
    env, _ = begun()
    text, reward, terminated, _, info = env.step("I do not know")
    assert "<answer>number</answer>" in text
    assert (reward, terminated, info["action_is_valid"]) == (0.0, False, False)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("tag", ["<answer>", "</answer>"])
def test_answers_without_an_end_are_read_in_linear_time(tag):
    env, _ = begun()
    assert env.step(tag * 60_000)[4]["action_is_valid"] is False


@pytest.mark.parametrize(
    "text", ["<answer>no <answer>{}</answer>", "<answer>no</answer> <Answer> {}</ANSWER> <answer>"]
)
def test_the_last_answer_counts(text):
    env, question = begun()
    first, second = map(int, re.findall(r"\d+", question))
    assert env.step(text.format(first * second))[1] == 1.0


def test_a_step_after_the_end_is_refused():
    env, _ = begun()
    env.step("<answer>-1</answer>")
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("<answer>-1</answer>")


def test_seeds_decide_the_problem():
    assert begun(5)[1] == begun(5)[1]
    assert len({begun(seed)[1] for seed in range(20)}) > 15


def test_instructions_and_tools_are_offered():
    env, _ = begun()
    info = env.reset(seed=1)[1]
    assert "<answer>" in info["system"] and info["tools"][0]["function"]["name"] == "calculator"
    assert "system" not in begun(instructions=False)[0].reset(seed=1)[1]


@pytest.mark.parametrize(
    ("options", "path", "words"),
    [
        ({"kinds": ["multiplicaton"]}, "env_config.kinds", "did you mean `multiplication`?"),
        ({"kinds": []}, "env_config.kinds", "empty"),
        ({"levels": [9]}, "env_config.levels", "no problems of level `9`"),
        ({"attempts": 0}, "env_config.attempts", ">= 1"),
        ({"tools": ["calculater"]}, "env_config.tools[0]", "did you mean `calculator`?"),
        (
            {"tool_settings": {"answer_rol": "user"}},
            "env_config.tool_settings.answer_rol",
            "did you mean `answer_role`?",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(options, path, words):
    with pytest.raises(ConfigError) as caught:
        make_env("math_tools", options)
    (found,) = caught.value.problems
    assert found.path == path and words in str(found)

from __future__ import annotations

import os
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest

import roll
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.rewards import VERIFIERS, RewardConfig
from roll.data.records import Prompt
from roll.rewards.base import VERIFIER_FIELDS, RewardInput, RewardNonsense, RewardOutput
from roll.rewards.registry import (
    check_machine,
    check_prompts,
    checked_output,
    resolve_verifier,
    route_domains,
)
from tests.tiers import is_here

USER = "tests.rewards.sample_verifiers:"
RECORD = RewardInput("p:1", "prompt", "abc", "truth", "sum", {"level": 4}, "length", 6, 3)


def resolve(verifier: str, **arguments):
    return resolve_verifier(RewardConfig(verifier=verifier, verifier_args=arguments), "rewards.x")


def problems_of(verifier: str, **arguments) -> list[ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        resolve(verifier, **arguments)
    return caught.value.problems


def make_prompt(domain: str, ground_truth: object) -> Prompt:
    return Prompt(f"{domain}:1", domain, np.array([1], dtype=np.int32), "text", ground_truth)


def test_a_function_gets_the_fields_it_names_and_its_arguments():
    verifier = resolve(USER + "detailed", scale="2.5")  # converted to the annotated type
    assert verifier.fields == ("response", "metadata")
    assert verifier(RECORD) == {"score": 7.5, "level": 4}


@pytest.mark.parametrize("name", ["LengthOf", "Verdict"])
def test_a_class_whose_objects_are_scores_may_judge(name):
    assert checked_output(name, resolve(USER + name)(RECORD)).score == 3


def test_a_function_of_anything_gets_all_fields():
    verifier = resolve(USER + "everything", scale=2)
    assert verifier(RECORD) == {"score": 3, "fields": len(VERIFIER_FIELDS) + 1, "scale": 2}


def test_annotations_for_type_checkers_only_do_not_matter():
    assert resolve(USER + "lazily_annotated", scale=Decimal(2))(RECORD) == 2.0


def test_async_functions_are_known_as_such():
    assert resolve(USER + "async_answer").is_async
    assert not resolve(USER + "length").is_async


def test_an_object_is_made_of_its_arguments_and_called_with_fields():
    verifier = resolve(USER + "Prepared", limit="2")
    assert verifier(RECORD) == 0.0
    assert (verifier.fields, verifier.arguments, verifier.max_concurrency) == (("response", "ground_truth"), {}, 2)
    assert verifier.needs_ground_truth and not verifier.is_async
    assert (verifier.fault_of("text"), verifier.fault_of(3)) == (None, "no text")
    with pytest.raises(ConfigError, match="rewards.x.verifier: no such machine"):
        check_machine(verifier, "rewards.x")
    check_machine(resolve("exact"), "rewards.x")


@pytest.mark.parametrize(
    ("verifier", "weights", "wrong", "words"),
    [
        ("shapes", {"score": 1, "part": 0.5}, "part", "did you mean `parts`?"),
        ("code", {"score": 1, "tests": 1}, "tests", "known: `score`, `tests_passed`"),
        ("exact", {"right": 1}, "right", "known: `score`"),
    ],
)
def test_weights_of_numbers_that_a_verifier_does_not_return_are_refused(verifier, weights, wrong, words):
    with pytest.raises(ConfigError) as caught:
        resolve_verifier(RewardConfig(verifier=verifier, weights=weights), "rewards.x")
    (problem,) = caught.value.problems
    assert problem.path == f"rewards.x.weights.{wrong}" and words in str(problem)


def test_weights_of_numbers_that_a_verifier_may_return_are_taken():
    for verifier, name in (("shapes", "parts"), ("code", "no_program"), (USER + "detailed", "level")):
        config = RewardConfig(verifier=verifier, weights={"score": 1.0, name: 0.5})
        assert resolve_verifier(config, "rewards.x").weights == {"score": 1.0, name: 0.5}


NEEDED = {"scoring_service": {"url": "http://127.0.0.1:1/score"}}
"""Verifier -> arguments that it cannot do without."""
INSTALLED = [name for name in VERIFIERS.built_in if all(map(is_here, VERIFIERS.built_in[name].requires))]
"""Built-in verifiers whose packages are here."""


def test_built_in_verifiers_judge_by_a_ground_truth():
    without = [name for name in INSTALLED if not resolve(name, **NEEDED.get(name, {})).needs_ground_truth]
    assert without == ["jpeg_size", "scoring_service"]


@pytest.mark.parametrize(
    ("verifier", "arguments", "path", "words"),
    [
        ("maths", {}, ".verifier", "did you mean `math`?"),
        ("no_such_module:judge", {}, ".verifier", "no_such_module"),
        (USER + "no_such_function", {}, ".verifier", "no_such_function"),
        (USER, {}, ".verifier", "package.module:attribute"),
        (USER + "NOT_A_FUNCTION", {}, ".verifier", "is a int"),
        (USER + "MadeForEachResponse", {}, ".verifier", "is a class"),
        (USER + "by_position", {}, ".verifier_args", "by position only"),
        (USER + "needs_more", {}, ".verifier_args.groundtruth", "did you mean `ground_truth`? The run fills"),
        (USER + "detailed", {"scael": 1}, ".verifier_args.scael", "did you mean `scale`?"),
        (USER + "detailed", {"response": "x"}, ".verifier_args.response", "filled by the run"),
        (USER + "detailed", {"scale": "much"}, ".verifier_args.scale", "does not fit"),
        (USER + "Prepared", {"limt": 3}, ".verifier_args.limt", "did you mean `limit`?"),
        (USER + "Prepared", {"limit": 11}, ".verifier_args", "`limit` is too long"),
        ("exact", {"extract": "("}, ".verifier_args.extract", "valid regular expression"),
        ("builtins:max", {}, ".verifier", "cannot be read"),
    ],
)
def test_what_cannot_work_is_a_problem_with_its_path(verifier, arguments, path, words):
    (problem,) = problems_of(verifier, **arguments)
    assert problem.path == f"rewards.x{path}"
    assert words in str(problem)


def test_all_wrong_arguments_are_reported_at_once_and_secrets_never():
    problems = problems_of("exact", ignore_case="perhaps", extract="(", api_key=1, pattern="a")
    assert len(problems) == 4
    assert "sesame" not in str(problems_of(USER + "detailed", scale=1, secret="sesame"))


def test_resolving_imports_no_heavy_library():
    script = (
        "import sys; from roll.rewards.registry import *\n"
        f"for name in {INSTALLED}:\n"
        f"    needed = {NEEDED}.get(name, {{}})\n"
        "    resolve_verifier(RewardConfig(verifier=name, verifier_args=needed), 'rewards.x')\n"
        "heavy = {'torch', 'ray', 'sympy', 'math_verify', 'reasoning_gym', 'transformers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(roll.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment)


@pytest.mark.parametrize(
    ("value", "output"),
    [
        (True, RewardOutput(1.0)),
        (3, RewardOutput(3.0)),
        (np.float32(0.5), RewardOutput(0.5)),
        (np.array(2.0), RewardOutput(2.0)),
        ({"score": 1, "length": 7}, RewardOutput(1.0, {"length": 7.0})),
        (RewardOutput(1, {"a": 2}), RewardOutput(1.0, {"a": 2.0})),
    ],
)
def test_numbers_are_scores(value, output):
    assert checked_output("v", value) == output


@pytest.mark.parametrize(
    ("value", "score", "metrics"),
    [
        ({"right": True, "short": 0.5, "length": 7}, 1.1, {"right": 1.0, "short": 0.5, "length": 7.0}),
        ({"right": 0, "short": 1, "score": 9}, 0.2, {"right": 0.0, "short": 1.0, "score": 9.0}),
    ],
)
def test_several_rewards_are_summed_with_their_weights_and_stay_metrics(value, score, metrics):
    output = checked_output("v", value, {"right": 1.0, "short": 0.2})
    assert output.score == pytest.approx(score) and output.metrics == metrics


def test_a_score_may_be_one_of_several_rewards():
    weights = {"score": 2.0, "tests_passed": -1.0}
    assert checked_output("v", {"score": 1, "tests_passed": 0.5}, weights).score == 1.5
    assert checked_output("v", 3, {"score": 2.0}) == RewardOutput(6.0, {"score": 3.0})


def test_empty_weights_are_no_weights():
    verifier = resolve_verifier(RewardConfig(verifier="exact", weights={}), "rewards.x")
    record = RewardInput("p:1", "prompt", "truth", "truth", "sum", {}, "length", 6, 3)
    assert checked_output("exact", verifier(record), verifier.weights) == RewardOutput(1.0, {})


@pytest.mark.parametrize(
    ("value", "words"),
    [(1.0, "has no `right`"), ({"score": 1.0}, "has no `right`"), ({"right": 1e308, "short": 1}, "no finite number")],
)
def test_a_missing_reward_or_a_sum_without_bounds_is_nonsense(value, words):
    with pytest.raises(RewardNonsense, match=words):
        checked_output("v", value, {"right": 1e308 if words.endswith("number") else 1.0, "short": 0.2})


@pytest.mark.parametrize(
    "value",
    [
        None, "1.0", b"1", float("nan"), float("inf"), 10**400, [1.0], (1.0, 2.0), np.array([1.0, 2.0]), 1j, object(),
        {}, {"value": 1.0}, {"score": None}, {"score": 1.0, "why": "because"}, RewardOutput(float("nan")),
    ],
)  # fmt: skip
def test_nonsense_is_named_with_its_verifier(value):
    with pytest.raises(RewardNonsense, match="`my verifier` answered"):
        checked_output("my verifier", value)


def test_domains_belong_to_their_own_name_or_to_the_tags():
    rewards = {"math": RewardConfig(verifier="math"), "other": RewardConfig(verifier="exact", tag_included=["a", "b"])}
    assert route_domains(rewards) == {"math": "math", "a": "other", "b": "other"}


def test_prompts_that_no_reward_can_judge_are_problems_once_per_domain():
    routes = {"sum": "sum", "free": "free"}
    verifiers = {"sum": resolve("exact"), "free": resolve(USER + "length")}
    good = [make_prompt("sum", 0), make_prompt("free", None)]
    assert check_prompts(routes, verifiers, good, "data") == []
    bad = [make_prompt("summ", "3"), make_prompt("summ", "4"), make_prompt("sum", None)]
    no_reward, no_truth = check_prompts(routes, verifiers, good + bad, "data")
    assert "did you mean `sum`?" in no_reward.remedy
    assert "sum:1 has no ground truth" in no_truth.message

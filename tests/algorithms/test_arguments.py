"""Wrong names and arguments of losses and estimators are reported at once, with what would be right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from roll.algorithms.advantages.base import make_advantage_estimator
from roll.algorithms.losses.base import LossRequirements, PolicyInputs, make_policy_loss, nothing_clipped, policy_loss
from roll.algorithms.losses.dppo import PAPER_THRESHOLDS
from roll.configs.errors import ConfigError
from roll.configs.plugins import made
from tests.algorithms.policy_loss_reference import random_inputs


def paths_of(caught) -> list[str]:
    return [problem.path for problem in caught.value.problems]


def test_defaults_are_those_of_the_papers():
    ppo = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    expected = {
        "vanilla": {},
        "ppo": ppo,
        "tis": {"lower": 0.0, "upper": 1.0, "level": "token"},
        "decoupled_ppo": {**ppo, "behaviour_weight_cap": None},
        "topr": {"positive_weight": 1.0, "negative_weight": 1.0, "positive_above": 0.0, "level": "sequence"},
        "cispo": {"epsilon_low": 1.0, "epsilon_high": 0.28, "use_unified_mask": False},
        "kimi15": {"tau": 0.1, "level": "token"},
        "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "level": "sequence"},
        "gmpo": {"clip_low": 0.4, "clip_high": 0.4},
        "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
        "dppo": {"divergence": "tv", "threshold": None, "threshold_high": None, "ratio_cap": None},
    }
    assert {name: make_policy_loss(name).arguments for name in expected} == expected
    assert PAPER_THRESHOLDS == {"tv": 0.15, "kl": 0.05}
    assert make_advantage_estimator("grpo").arguments == {"normalize_by_std": True, "eps": 1e-6}


def test_integers_become_floats():
    upper = make_policy_loss("tis", {"lower": 0, "upper": 2}).arguments["upper"]
    assert isinstance(upper, float) and upper == 2.0
    assert isinstance(make_policy_loss("ppo", {"dual_clip": 3}).arguments["dual_clip"], float)


def test_unknown_variant_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean `vanilla`") as caught:
        make_policy_loss("vanila")
    assert paths_of(caught) == ["pg_variant"]


def test_every_problem_is_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        make_policy_loss("ppo", {"clip_lwo": 0.1, "upper": 1.0, "clip_high": "0.3"})
    found = {problem.path.removeprefix("pg_variant_args."): str(problem) for problem in caught.value.problems}
    assert set(found) == {"clip_lwo", "upper", "clip_high"}
    assert "did you mean `clip_low`" in found["clip_lwo"]
    assert "belongs to `tis`" in found["upper"]
    assert "number" in found["clip_high"]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ppo", {"clip_low": 1.5}),
        ("ppo", {"clip_high": -0.1}),
        ("ppo", {"dual_clip": 1.0}),
        ("ppo", {"clip_low": True}),
        ("ppo", {"clip_low": float("nan")}),
        ("ppo", {"clip_low": None}),
        ("ppo", {"clip_low": -0.1}),
        ("tis", {"lower": 2.0, "upper": 1.0}),
        ("tis", {"lower": 1.0, "upper": 1.0}),
        ("tis", {"lower": -1.0}),
        ("tis", {"upper": 0.0}),
        ("decoupled_ppo", {"clip_low": 1.5}),
        ("decoupled_ppo", {"clip_high": -0.1}),
        ("decoupled_ppo", {"dual_clip": 0.5}),
        ("decoupled_ppo", {"behaviour_weight_cap": 0.0}),
        ("topr", {"positive_weight": -1.0}),
        ("topr", {"negative_weight": -1.0}),
        ("topr", {"positive_weight": 0.0, "negative_weight": 0.0}),
        ("topr", {"level": "response"}),
        ("topr", {"level": None}),
        ("cispo", {"epsilon_low": -0.1}),
        ("cispo", {"epsilon_high": 0.0}),
        ("cispo", {"epsilon_high": -0.2}),
        ("cispo", {"use_unified_mask": 1}),
        ("kimi15", {"tau": -0.1}),
        ("kimi15", {"tau": 0}),
        ("kimi15", {"level": "geometric"}),
        ("gspo", {"clip_low": 2.0}),
        ("gspo", {"clip_high": -1e-4}),
        ("gmpo", {"clip_low": -0.4}),
        ("gmpo", {"clip_high": -0.4}),
        ("sapo", {"tau_positive": 0.0}),
        ("sapo", {"tau_negative": -1.0}),
        ("dppo", {"divergence": "js"}),
        ("dppo", {"threshold": 0.0}),
        ("dppo", {"threshold": 1.0}),
        ("dppo", {"ratio_cap": 1.0}),
        ("vanilla", {"clip_low": 0.2}),
    ],
)
def test_wrong_policy_loss_values_are_refused(name, args):
    with pytest.raises(ConfigError):
        make_policy_loss(name, args)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("ppo", {"clip_low": 1, "clip_high": 0, "dual_clip": 3}),
        ("tis", {"upper": math.inf}),
        ("decoupled_ppo", {"behaviour_weight_cap": None}),
        ("topr", {"negative_weight": 0, "positive_above": -1.0, "level": "token"}),
        ("cispo", {"epsilon_low": 10.0}),
        ("kimi15", {"tau": 1e-9}),
        ("gspo", {"clip_low": 1.0}),
        ("dppo", {"divergence": "kl", "threshold": 2.0}),
    ],
)
def test_values_on_the_edge_of_their_range_are_accepted(name, args):
    arguments = make_policy_loss(name, args).arguments
    assert {key: arguments[key] for key in args} == args


def test_an_upper_bound_of_cispo_taken_for_a_distance_from_one_is_explained():
    with pytest.raises(ConfigError, match="-0.2 does not fit .*\n.*number, > 0") as caught:
        make_policy_loss("cispo", {"epsilon_high": -0.2})
    assert paths_of(caught) == ["pg_variant_args.epsilon_high"]


def test_a_wrong_choice_names_the_nearest():
    with pytest.raises(ConfigError, match="did you mean `sequence`") as caught:
        make_policy_loss("topr", {"level": "sequnce", "positive_weight": -1.0})
    assert sorted(paths_of(caught)) == ["pg_variant_args.level", "pg_variant_args.positive_weight"]


def test_a_relation_between_arguments_is_checked_when_each_alone_is_right():
    with pytest.raises(ConfigError, match="lower must be below upper") as caught:
        make_policy_loss("tis", {"lower": 2.0})
    assert paths_of(caught) == ["pg_variant_args"]
    with pytest.raises(ConfigError) as caught:
        make_policy_loss("tis", {"lower": 2.0, "upper": -1.0})
    assert paths_of(caught) == ["pg_variant_args.upper"]


@dataclass(frozen=True)
class Ranged:
    at_least: Annotated[float, Field(ge=1)] = 1.0
    above: Annotated[float, Field(gt=1)] = 2.0
    at_most: Annotated[int, Field(le=1)] = 1
    below: Annotated[float | None, Field(lt=1)] = None
    between: Annotated[float, Field(gt=0, le=1)] = 0.5
    choice: Literal["a", "b"] = "a"
    free: Annotated[float, Field(ge=-math.inf)] = 0.0


@pytest.mark.parametrize(
    ("name", "inside", "outside", "limits"),
    [
        ("at_least", [1, 1e9, math.inf], [0.999, -math.inf], "number, >= 1"),
        ("above", [1.001], [1, 1.0, -1.0], "number, > 1"),
        ("at_most", [1, -5], [2], "whole number, <= 1"),
        ("below", [None, 0.999, -math.inf], [1, 1.0], "number or null, < 1"),
        ("between", [0.001, 1], [0, 1.001], "number, > 0 and <= 1"),
        ("choice", ["a", "b"], ["c", None, 0], "`a`"),
        ("free", [-1e30, 0, math.inf, -math.inf], [math.nan, "0", False], "number"),
    ],
)
def test_a_range_accepts_what_is_inside_and_names_itself_otherwise(name, inside, outside, limits):
    for value in inside:
        assert getattr(made("toy", Ranged, {name: value}, "here"), name) == value
    for value in outside:
        with pytest.raises(ConfigError) as caught:
            made("toy", Ranged, {name: value}, "here")
        (problem,) = caught.value.problems
        assert problem.path == f"here.{name}" and limits in problem.remedy


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("grpo", {"normalize_by_std": 1}),
        ("grpo", {"eps": 0.0}),
        ("grpo", {"gamma": 1.0}),
        ("reinforce", {"gamma": 1.1}),
    ],
)
def test_wrong_estimator_values_are_refused(name, args):
    with pytest.raises(ConfigError):
        make_advantage_estimator(name, args)


def halved(inputs: PolicyInputs, factor: float, *, halves: Annotated[int, Field(ge=1)] = 1):
    losses = -factor * inputs.advantages * inputs.logprobs / 2**halves
    return losses, nothing_clipped(losses)


@policy_loss(requirements=LossRequirements(needs_scores=True))
def scored(inputs: PolicyInputs):
    return -inputs.scores[:, None] * inputs.logprobs, nothing_clipped(inputs.logprobs)


def test_a_loss_of_ones_own_is_a_function_whose_arguments_are_its_settings():
    loss = make_policy_loss(f"{__name__}:halved", {"factor": 4, "halves": 2})
    plain = make_policy_loss("vanilla")
    inputs = random_inputs(3)
    assert loss(inputs)[0].equal(plain(inputs)[0])
    assert loss.arguments == {"factor": 4.0, "halves": 2} and loss.requirements == LossRequirements()
    wrong = (({}, "needs `factor`"), ({"factor": True}, "true does not fit"), ({"inputs": 1}, "no argument"))
    for args, words in wrong:
        with pytest.raises(ConfigError, match=words):
            make_policy_loss(f"{__name__}:halved", args)
    assert make_policy_loss(f"{__name__}:scored").requirements.needs_scores
    with pytest.raises(ConfigError, match="has no 'nothing'"):
        make_policy_loss(f"{__name__}:nothing")

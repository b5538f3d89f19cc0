"""Wrong names and knobs of variants are reported at once, with what would be right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import pytest

from roll.algorithms.advantages.estimator import make_advantage_estimator
from roll.algorithms.losses.base import make_policy_loss
from roll.algorithms.registry import KnobError, Registry, build_knobs, knob


def test_defaults_are_those_of_the_papers():
    ppo = make_policy_loss("ppo").knobs
    assert (ppo.clip_low, ppo.clip_high, ppo.dual_clip) == (0.2, 0.2, None)
    tis = make_policy_loss("tis").knobs
    assert (tis.lower, tis.upper) == (0.0, 1.0)
    decoupled = make_policy_loss("decoupled_ppo").knobs
    assert (decoupled.clip_low, decoupled.clip_high, decoupled.dual_clip) == (0.2, 0.2, None)
    assert decoupled.behaviour_weight_cap is None
    topr = make_policy_loss("topr").knobs
    assert (topr.positive_weight, topr.negative_weight, topr.positive_above, topr.level) == (1.0, 1.0, 0.0, "sequence")
    cispo = make_policy_loss("cispo").knobs
    assert (cispo.epsilon_low, cispo.epsilon_high, cispo.use_unified_mask) == (1.0, 0.28, False)
    kimi15 = make_policy_loss("kimi15").knobs
    assert (kimi15.tau, kimi15.level) == (0.1, "token")
    gspo, gmpo = make_policy_loss("gspo").knobs, make_policy_loss("gmpo").knobs
    assert (gspo.clip_low, gspo.clip_high) == (3e-4, 4e-4)
    assert (gmpo.clip_low, gmpo.clip_high) == (0.4, 0.4)
    sapo = make_policy_loss("sapo").knobs
    assert (sapo.tau_positive, sapo.tau_negative) == (1.0, 1.05)
    dppo = make_policy_loss("dppo").knobs
    assert (dppo.divergence, dppo.ratio_cap, dppo.largest_divergence) == ("tv", None, 0.15)
    assert make_policy_loss("dppo", {"divergence": "kl"}).knobs.largest_divergence == 0.05
    assert make_policy_loss("dppo", {"threshold": 0.3}).knobs.largest_divergence == 0.3
    assert make_advantage_estimator("grpo").knobs.normalize_by_std is True


def test_integers_become_floats():
    knobs = make_policy_loss("tis", {"lower": 0, "upper": 2}).knobs
    assert isinstance(knobs.upper, float) and knobs.upper == 2.0
    assert isinstance(make_policy_loss("ppo", {"dual_clip": 3}).knobs.dual_clip, float)


def test_unknown_variant_names_the_nearest():
    with pytest.raises(KnobError, match="did you mean 'vanilla'") as caught:
        make_policy_loss("vanila")
    assert caught.value.problems[0].knob is None


def test_every_problem_is_reported_at_once():
    with pytest.raises(KnobError) as caught:
        make_policy_loss("ppo", {"clip_lwo": 0.1, "upper": 1.0, "clip_high": "0.3"})
    by_knob = {problem.knob: str(problem) for problem in caught.value.problems}
    assert set(by_knob) == {"clip_lwo", "upper", "clip_high"}
    assert "did you mean 'clip_low'" in by_knob["clip_lwo"]
    assert "belongs to 'tis'" in by_knob["upper"]
    assert "float" in by_knob["clip_high"]


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
    with pytest.raises(KnobError):
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
    knobs = make_policy_loss(name, args).knobs
    assert {key: getattr(knobs, key) for key in args} == args


def test_an_upper_bound_of_cispo_taken_for_a_distance_from_one_is_explained():
    with pytest.raises(KnobError, match="'epsilon_high' is -0.2; it must be > 0") as caught:
        make_policy_loss("cispo", {"epsilon_high": -0.2})
    assert [problem.knob for problem in caught.value.problems] == ["epsilon_high"]


def test_a_wrong_choice_names_the_nearest():
    with pytest.raises(KnobError, match="did you mean 'sequence'") as caught:
        make_policy_loss("topr", {"level": "sequnce", "positive_weight": -1.0})
    assert [problem.knob for problem in caught.value.problems] == ["positive_weight", "level"]


def test_a_relation_between_knobs_is_checked_when_each_alone_is_right():
    with pytest.raises(KnobError, match="lower must be below upper") as caught:
        make_policy_loss("tis", {"lower": 2.0})
    assert [problem.knob for problem in caught.value.problems] == [None]
    with pytest.raises(KnobError) as caught:
        make_policy_loss("tis", {"lower": 2.0, "upper": -1.0})
    assert [problem.knob for problem in caught.value.problems] == ["upper"]


@dataclass(frozen=True)
class RangedKnobs:
    at_least: float = knob(1.0, help="", at_least=1)
    above: float = knob(2.0, help="", above=1)
    at_most: int = knob(1, help="", at_most=1)
    below: float | None = knob(None, help="", below=1)
    between: float = knob(0.5, help="", above=0, at_most=1)
    choice: Literal["a", "b"] = knob("a", help="")
    free: float = knob(0.0, help="")


@pytest.mark.parametrize(
    ("name", "inside", "outside", "limits"),
    [
        ("at_least", [1, 1e9, math.inf], [0.999, -math.inf], ">= 1"),
        ("above", [1.001], [1, 1.0, -1.0], "> 1"),
        ("at_most", [1, -5], [2], "<= 1"),
        ("below", [None, 0.999, -math.inf], [1, 1.0], "< 1"),
        ("between", [0.001, 1], [0, 1.001], "> 0 and <= 1"),
        ("choice", ["a", "b"], ["c", None, 0], "valid: a, b"),
        ("free", [-1e30, 0, math.inf], [math.nan, "0", False], "float"),
    ],
)
def test_a_range_accepts_what_is_inside_and_names_itself_otherwise(name, inside, outside, limits):
    for value in inside:
        assert getattr(build_knobs(RangedKnobs, {name: value}, "toy"), name) == value
    for value in outside:
        with pytest.raises(KnobError) as caught:
            build_knobs(RangedKnobs, {name: value}, "toy")
        (problem,) = caught.value.problems
        assert problem.knob == name and limits in str(problem)


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
    with pytest.raises(KnobError):
        make_advantage_estimator(name, args)


def test_a_new_variant_needs_one_line_and_a_knob_without_default_must_be_set():
    registry = Registry("toy")

    @dataclass(frozen=True)
    class Knobs:
        size: int

    texts = {"formula": "n", "source": "none", "use": "never"}

    @registry.register("one", Knobs, **texts, traits="any")
    def one(knobs):
        return knobs.size

    function, knobs = registry.build("one", {"size": 3})
    assert function(knobs) == 3
    with pytest.raises(KnobError, match="'size' is True, a bool"):
        registry.build("one", {"size": True})
    with pytest.raises(KnobError, match="needs the knob 'size'"):
        registry.build("one", {})
    with pytest.raises(ValueError, match="twice"):
        registry.register("one", **texts)(one)
    variant = registry.variant("one")
    assert (variant.formula, variant.source, variant.use, variant.traits) == ("n", "none", "never", "any")
    with pytest.raises(KnobError, match="unknown toy 'two'"):
        registry.variant("two")

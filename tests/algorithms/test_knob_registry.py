"""Wrong names and knobs of variants are reported at once, with what would be right."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from roll.algorithms.advantages import make_advantage_estimator
from roll.algorithms.policy_losses import make_policy_loss
from roll.algorithms.registry import KnobError, Registry


def test_defaults_are_those_of_the_papers():
    ppo = make_policy_loss("ppo").knobs
    assert (ppo.clip_low, ppo.clip_high, ppo.dual_clip) == (0.2, 0.2, None)
    tis = make_policy_loss("tis").knobs
    assert (tis.lower, tis.upper) == (0.0, 1.0)
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
        ("tis", {"lower": 2.0, "upper": 1.0}),
        ("tis", {"lower": -1.0}),
        ("vanilla", {"clip_low": 0.2}),
    ],
)
def test_wrong_policy_loss_values_are_refused(name, args):
    with pytest.raises(KnobError):
        make_policy_loss(name, args)


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

    @registry.register("one", Knobs)
    def one(knobs):
        return knobs.size

    function, knobs = registry.build("one", {"size": 3})
    assert function(knobs) == 3
    with pytest.raises(KnobError, match="needs the knob 'size'"):
        registry.build("one", {})
    with pytest.raises(ValueError, match="twice"):
        registry.register("one")(one)

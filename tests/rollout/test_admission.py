"""Admission follows its two inequalities exactly, and says why it refuses."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.admission import Admission, DropLimit, TooManyDrops, exact_ratio


def admitted(admission):
    number = 0
    while admission.refusal(number) is None:
        number += 1
    return number


@pytest.mark.parametrize(
    ("ratio", "expected"), [(0, 4), (0.25, 5), (0.5, 6), (1, 8), (1.5, 10), (2, 12), (3, 16), (0.1, 5), (0.3, 6)]
)
def test_the_first_step_admits_one_batch_and_the_ratio_ahead(ratio, expected):
    assert admitted(Admission(batch_size=4, max_steps=100, ratio=ratio, max_staleness=9)) == expected


def test_a_decimal_ratio_means_what_its_digits_say():
    """As a binary float, 0.1 is a little more than 1/10, and ten times it would admit an eleventh group ahead."""
    assert exact_ratio(0.1) == Fraction(1, 10)
    assert admitted(Admission(batch_size=10, max_steps=100, ratio=0.1, max_staleness=9)) == 11


@pytest.mark.parametrize("ratio", [-0.5, float("inf"), float("nan")])
def test_an_impossible_ratio_is_refused(ratio):
    with pytest.raises(ValueError, match="finite number >= 0"):
        exact_ratio(ratio)


@given(
    batch_size=st.integers(1, 5),
    ratio=st.sampled_from([0, 0.25, 0.5, 1, 1.5, 2, 3]),
    staleness=st.integers(0, 4),
    steps=st.integers(0, 8),
    lag=st.integers(0, 8),
    number=st.integers(0, 60),
)
def test_a_group_may_start_iff_both_inequalities_hold(batch_size, ratio, staleness, steps, lag, number):
    admission = Admission(batch_size=batch_size, max_steps=10, ratio=ratio, max_staleness=staleness)
    for step in range(1, steps + 1):
        admission.training_step_done(step)
    version = max(steps - lag, 0)
    admission.weights_published(version)
    in_budget = number < (steps + 1) * batch_size + Fraction(ratio) * batch_size
    new_enough = version >= number // batch_size - staleness
    assert (admission.refusal(number) is None) == (in_budget and new_enough and number < 10 * batch_size)


def test_each_refusal_has_its_reason():
    admission = Admission(batch_size=2, max_steps=3, ratio=1, max_staleness=0)
    assert admission.refusal(0) is None
    assert admission.refusal(2) == "version"
    assert admission.refusal(4) == "budget"
    assert admission.refusal(6) == "complete"
    admission.pause()
    assert admission.refusal(0) == "paused"


def test_pauses_of_two_owners_add_up():
    admission = Admission(batch_size=1, max_steps=1, ratio=0, max_staleness=0)
    for _ in range(2):
        admission.pause()
        assert admission.refusal(0) == "paused" and admission.is_paused
    for pauses in (1, 0):
        admission.resume()
        assert admission.refusal(0) == ("paused" if pauses else None)
        assert admission.is_paused == (pauses > 0)
    with pytest.raises(RuntimeError, match="without being paused"):
        admission.resume()


def test_steps_and_versions_only_go_forward():
    admission = Admission(batch_size=1, max_steps=9, ratio=0, max_staleness=0)
    admission.training_step_done(1)
    admission.training_step_done(2)
    admission.weights_published(2)
    admission.weights_published(2)
    with pytest.raises(ValueError, match="never go back"):
        admission.weights_published(1)
    with pytest.raises(ValueError, match="only 2 training steps"):
        admission.weights_published(3)
    for wrong in (2, 4):
        with pytest.raises(ValueError, match=f"step {wrong} was reported done after step 2"):
            admission.training_step_done(wrong)


def test_drops_in_a_row_end_with_reasons_and_the_last_cause():
    cap = DropLimit(3)
    cause = OSError("no route")
    cap.dropped("filtered", None)
    cap.dropped("failed", cause)
    with pytest.raises(TooManyDrops, match="3 groups were dropped in a row") as caught:
        cap.dropped("failed", cause)
    assert "2 failed, 1 filtered" in str(caught.value)
    assert "no route" in str(caught.value)
    assert caught.value.__cause__ is cause


def test_an_accepted_group_begins_a_new_row():
    cap = DropLimit(2)
    for _ in range(10):
        cap.dropped("filtered", None)
        cap.accepted()

"""The ledger equation holds under every legal history, and every illegal transition is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.rollout.ledger import DROP_REASONS, Ledger, LedgerError


def test_ids_follow_the_order_of_issue_and_are_never_used_again():
    ledger = Ledger()
    first = ledger.issue()
    ledger.drop(first, "failed")
    assert [first, ledger.issue(), ledger.issue()] == [0, 1, 2]
    assert ledger.net_issued == 2


def test_counts_follow_a_group_through_its_life():
    ledger = Ledger()
    group_id = ledger.issue()
    assert (ledger.in_flight, ledger.buffered, ledger.consumed) == (1, 0, 0)
    ledger.finish(group_id)
    assert (ledger.in_flight, ledger.buffered, ledger.consumed) == (0, 1, 0)
    ledger.consume(group_id)
    assert (ledger.in_flight, ledger.buffered, ledger.consumed) == (0, 0, 1)
    assert ledger.open_groups() == []


@pytest.mark.parametrize(
    ("history", "illegal", "message"),
    [
        ([], lambda ledger: ledger.finish(0), "never issued"),
        (["issue"], lambda ledger: ledger.consume(0), "is in flight, not buffered"),
        (["issue", "finish"], lambda ledger: ledger.finish(0), "is buffered, not in flight"),
        (["issue", "finish", "consume"], lambda ledger: ledger.consume(0), "already ended"),
        (["issue", "finish", "consume"], lambda ledger: ledger.drop(0, "failed"), "already ended"),
        (["issue", "drop"], lambda ledger: ledger.drop(0, "failed"), "already ended"),
        (["issue", "drop"], lambda ledger: ledger.finish(0), "already ended"),
        (["issue"], lambda ledger: ledger.drop(0, "bored"), "unknown drop reason 'bored'"),
    ],
)
def test_an_illegal_transition_is_refused_and_changes_nothing(history, illegal, message):
    ledger = Ledger()
    steps = {
        "issue": ledger.issue,
        "finish": lambda: ledger.finish(0),
        "consume": lambda: ledger.consume(0),
        "drop": lambda: ledger.drop(0, "filtered"),
    }
    for step in history:
        steps[step]()
    before = ledger.counts()
    with pytest.raises(LedgerError, match=message):
        illegal(ledger)
    assert ledger.counts() == before
    ledger.check()


@pytest.mark.parametrize("counts", [["consumed"], ["issued"], ["issued", "in_flight"], ["issued", "buffered"]])
def test_a_wrong_count_is_found_by_the_check(counts):
    """Also where the equation holds, if so many groups are not there."""
    ledger = Ledger()
    ledger.issue()
    ledger.check()
    for name in counts:
        setattr(ledger, name, getattr(ledger, name) + 1)
    with pytest.raises(LedgerError, match="does not add up"):
        ledger.check()


@given(st.lists(st.tuples(st.sampled_from(["issue", "finish", "consume", "drop"]), st.integers(0, 5)), max_size=60))
def test_the_equation_holds_whatever_is_tried(attempts):
    ledger = Ledger()
    for verb, group_id in attempts:
        try:
            if verb == "issue":
                ledger.issue()
            elif verb == "drop":
                ledger.drop(group_id, DROP_REASONS[group_id % len(DROP_REASONS)])
            else:
                getattr(ledger, verb)(group_id)
        except LedgerError:
            pass
        ledger.check()
        assert ledger.issued == ledger.consumed + sum(ledger.dropped.values()) + ledger.buffered + ledger.in_flight


def test_ended_groups_leave_nothing_behind():
    ledger = Ledger()
    for _ in range(1000):
        group_id = ledger.issue()
        ledger.finish(group_id)
        ledger.consume(group_id)
    assert len(ledger._open) == 0

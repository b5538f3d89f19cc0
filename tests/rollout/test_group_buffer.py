"""Batches keep every deadline, wait no longer than they must, and prefer what finished first."""

import itertools
from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.buffer import FinishedGroup, GroupBuffer
from tests.tiers import examples


class Bench:
    """A buffer driven by hand, with the accounts that the brute-force rule below needs."""

    def __init__(self, batch_size, max_staleness, order):
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.buffer = GroupBuffer(batch_size=batch_size, max_staleness=max_staleness, order=order)
        self.in_flight = {}
        self.ready = {}
        self.issued = 0
        self.dropped = 0
        self.version = 0

    def may_start(self):
        number = self.issued - self.dropped
        return self.version + self.max_staleness >= number // self.batch_size

    def start(self):
        self.buffer.start(self.issued, self.version)
        self.in_flight[self.issued] = self.version
        self.issued += 1

    def finish(self, group_id):
        version = self.in_flight.pop(group_id)
        self.ready[group_id] = version
        self.buffer.finish(FinishedGroup(group_id, None, None, version))

    def drop(self, group_id):
        del self.in_flight[group_id]
        self.dropped += 1
        self.buffer.drop(group_id)

    def restart(self, group_id):
        self.in_flight[group_id] = self.version
        self.buffer.restart(group_id, self.version)

    def take(self):
        batch = self.buffer.take()
        if batch is None:
            return None
        ids = [group.group_id for group in batch]
        for group_id in ids:
            del self.ready[group_id]
        return ids

    def choose(self):
        already = len(self.buffer.chosen)
        self.buffer.choose()
        return [group.group_id for group in self.buffer.chosen[already:]]

    def adopt(self, other):
        """Become a copy that has chosen nothing."""
        self.in_flight, self.ready = dict(other.in_flight), dict(other.ready)
        self.issued, self.dropped, self.version = other.issued, other.dropped, other.version
        self.buffer = deepcopy(other.buffer)

    def best_batch(self):
        """By trying all: the earliest finished groups that may be taken such that all later batches have room."""
        index = self.buffer.batches_taken
        unconsumed = {**self.in_flight, **self.ready}
        deadlines = {group_id: version + self.max_staleness for group_id, version in unconsumed.items()}

        def keeps_deadlines(batch):
            left = [deadline for group_id, deadline in deadlines.items() if group_id not in batch]
            return all(
                sum(deadline <= last for deadline in left) <= (last - index) * self.batch_size
                for last in range(index, max(deadlines.values()) + 1)
            )

        for batch in itertools.combinations(self.ready, self.batch_size):
            if keeps_deadlines(batch):
                return sorted(batch)
        return None


def test_waiting_only_for_groups_due_now_would_be_too_late():
    """R = 2, B = 1: three groups of version 0. If the youngest takes batch 0, the other two meet in batch 2 or before;
    a fourth group started at version 1 must not take batch 1."""
    bench = Bench(batch_size=1, max_staleness=2, order="ready_first")
    for _ in range(3):
        bench.start()
    bench.finish(2)
    assert bench.take() == [2]
    bench.version = 1
    bench.start()
    bench.finish(3)
    assert bench.take() is None, "groups 0 and 1 need batches 1 and 2"
    assert bench.buffer.overdue() == [0]
    bench.finish(1)
    assert bench.take() == [1]
    bench.finish(0)
    assert bench.take() == [0]
    assert bench.take() == [3]


def test_a_ready_group_that_no_later_batch_has_room_for_goes_before_earlier_finished_ones():
    bench = Bench(batch_size=1, max_staleness=1, order="ready_first")
    bench.start()
    bench.start()
    bench.finish(1)
    assert bench.take() == [1]
    bench.version = 1
    bench.start()
    bench.finish(2)
    bench.finish(0)
    assert bench.take() == [0]
    assert bench.take() == [2]


def test_fifo_takes_a_group_that_a_resumed_run_started_anew_after_those_with_earlier_deadlines():
    """Group 3 was in flight when the run was killed; group 5 had finished, with older weights."""
    buffer = GroupBuffer(batch_size=1, max_staleness=1, order="fifo")
    buffer.start(5, 0)
    buffer.finish(FinishedGroup(5, None, None, 0))
    buffer.start(3, 1)
    assert [group.group_id for group in buffer.take()] == [5]
    buffer.finish(FinishedGroup(3, None, None, 1))
    assert [group.group_id for group in buffer.take()] == [3]


def test_in_fifo_a_group_keeps_its_place_when_it_is_tried_again():
    bench = Bench(batch_size=1, max_staleness=1, order="fifo")
    bench.start()
    bench.start()
    bench.version = 1
    bench.restart(0)
    bench.finish(1)
    assert bench.take() is None
    bench.finish(0)
    assert bench.take() == [0]
    assert bench.take() == [1]


def test_ready_first_takes_completion_order_where_deadlines_allow():
    bench = Bench(batch_size=2, max_staleness=3, order="ready_first")
    for _ in range(6):
        bench.start()
    for group_id in (5, 3, 0, 1):
        bench.finish(group_id)
    assert bench.take() == [3, 5]
    assert bench.take() == [0, 1]


def test_fifo_waits_for_the_oldest_and_skips_dropped_groups():
    bench = Bench(batch_size=2, max_staleness=2, order="fifo")
    for _ in range(5):
        bench.start()
    for group_id in (4, 3, 1):
        bench.finish(group_id)
    assert bench.take() is None
    bench.drop(0)
    assert bench.take() is None
    bench.finish(2)
    assert bench.take() == [1, 2]
    assert bench.take() == [3, 4]


def test_a_retry_with_newer_weights_moves_the_deadline():
    bench = Bench(batch_size=1, max_staleness=0, order="ready_first")
    bench.start()
    bench.finish(0)
    assert bench.take() == [0]
    bench.version = 1
    bench.start()
    bench.version = 2
    bench.restart(1)
    bench.start()
    bench.finish(2)
    assert bench.buffer.overdue() == []
    assert bench.take() == [2], "group 1 began anew and is due one batch later"


def test_a_start_that_admission_would_never_allow_is_refused():
    bench = Bench(batch_size=2, max_staleness=0, order="ready_first")
    bench.start()
    bench.start()
    with pytest.raises(ValueError, match="group 2 started too early: it is due in batch 0.* and 3 groups need a place"):
        bench.start()


def test_versions_of_groups_never_go_back():
    """Deadlines are looked through in the order in which they came."""
    bench = Bench(batch_size=1, max_staleness=3, order="ready_first")
    bench.version = 1
    bench.start()
    bench.version = 0
    with pytest.raises(ValueError, match="group 1 starts with deadline 3 after one of 4"):
        bench.start()


@settings(max_examples=examples(300))
@given(data=st.data())
def test_batches_equal_those_of_trying_all(data):
    bench = Bench(
        batch_size=data.draw(st.integers(1, 3)), max_staleness=data.draw(st.integers(0, 3)), order="ready_first"
    )
    for _ in range(data.draw(st.integers(5, 30))):
        events = ["publish"] if bench.version < bench.buffer.batches_taken else []
        if bench.may_start() and len(bench.in_flight) + len(bench.ready) < 9:
            events += ["start"] * 3
        if bench.in_flight:
            events += ["finish"] * 3 + ["drop", "restart"]
        if len(bench.ready) >= bench.batch_size:
            events += ["take"] * 2
        event = data.draw(st.sampled_from(events))
        if event == "publish":
            bench.version = data.draw(st.integers(bench.version, bench.buffer.batches_taken))
        elif event == "start":
            bench.start()
        elif event == "take":
            expected = bench.best_batch()
            assert bench.take() == expected
        else:
            getattr(bench, event)(data.draw(st.sampled_from(sorted(bench.in_flight))))


def test_groups_are_chosen_as_they_finish_where_no_older_one_needs_their_place():
    bench = Bench(batch_size=2, max_staleness=1, order="ready_first")
    for _ in range(4):
        bench.start()
    bench.finish(3)
    assert bench.choose() == [3]
    bench.finish(2)
    assert bench.choose() == [2] and bench.take() == [2, 3]
    bench.version = 1
    bench.start()
    bench.finish(4)
    assert bench.choose() == [], "groups 0 and 1 are due in this batch"
    bench.finish(1)
    assert bench.choose() == [1] and bench.take() is None
    bench.finish(0)
    assert bench.take() == [0, 1]


def test_fifo_chooses_a_group_once_the_batch_has_room_for_all_before_it():
    bench = Bench(batch_size=2, max_staleness=1, order="fifo")
    for _ in range(4):
        bench.start()
    bench.finish(2)
    assert bench.choose() == []
    bench.finish(1)
    assert bench.choose() == [1]
    bench.drop(0)
    assert bench.choose() == [2] and bench.take() == [1, 2]


@settings(max_examples=examples(300))
@given(data=st.data())
def test_what_was_chosen_never_leads_into_a_dead_end(data):
    """Whatever is chosen on the way, a batch is complete exactly when one could be taken at once."""
    order = data.draw(st.sampled_from(["ready_first", "fifo"]))
    size, bound = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 3))
    choosing, waiting = (Bench(batch_size=size, max_staleness=bound, order=order) for _ in range(2))
    chosen = set()
    for _ in range(data.draw(st.integers(5, 40))):
        events = ["publish"] if choosing.version < choosing.buffer.batches_taken else []
        if choosing.may_start() and len(choosing.in_flight) + len(choosing.ready) < 9:
            events += ["start"] * 3
        if choosing.in_flight:
            events += ["finish"] * 3 + ["drop", "restart"]
        if not events:
            break
        event = data.draw(st.sampled_from(events))
        newest = st.integers(choosing.version, choosing.buffer.batches_taken)
        version = data.draw(newest) if event == "publish" else None
        group = None if event in ("publish", "start") else data.draw(st.sampled_from(sorted(choosing.in_flight)))
        for bench in (choosing, waiting):
            if event == "publish":
                bench.version = version
            elif event == "start":
                bench.start()
            else:
                getattr(bench, event)(group)
        chosen |= {*choosing.choose()}
        assert choosing.buffer.batch_ready() == waiting.buffer.batch_ready() == (len(chosen) == size)
        if len(chosen) == size:
            assert {*choosing.take()} == chosen
            if order == "fifo":
                assert {*waiting.take()} == chosen
            else:  # which groups it is may differ; go on with those that were chosen
                waiting.adopt(choosing)
            chosen = set()


@settings(max_examples=examples(100))
@given(data=st.data())
def test_dropping_the_overdue_frees_the_batch_and_no_fewer_would(data):
    bench = Bench(
        batch_size=data.draw(st.integers(1, 3)), max_staleness=data.draw(st.integers(0, 3)), order="ready_first"
    )
    for _ in range(40):
        while bench.may_start() and len(bench.in_flight) + len(bench.ready) < 9:
            bench.start()
        if bench.in_flight:
            bench.finish(data.draw(st.sampled_from(sorted(bench.in_flight))))
        overdue = bench.buffer.overdue()
        for position, group_id in enumerate(overdue):
            assert not bench.buffer.batch_ready(), f"{overdue[position:]} need not be dropped"
            bench.drop(group_id)
        while bench.take() is not None:
            bench.version = data.draw(st.integers(bench.version, bench.buffer.batches_taken))
        assert not bench.buffer.held_up() or bench.buffer.overdue()

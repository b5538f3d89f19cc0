"""What the journal gives back after any crash: every finished group that still counts, and nothing else."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.rollout.journal import (
    Journal,
    Recovered,
    RolloutProgress,
    dropped_record,
    finished_record,
    read_journal,
    recover,
    segments,
    went_back_record,
)
from tests.tiers import examples

START = RolloutProgress.at_start()


def write(folder, *records) -> None:
    journal = Journal(folder)
    for record in records:
        journal.append(record)
    journal.close()


def test_records_come_back_in_order_over_several_runs(tmp_path):
    first = [finished_record(3, 0, b"three"), dropped_record(1, 0, "failed")]
    second = [went_back_record(0), finished_record(0, 1, bytes(range(256)))]
    write(tmp_path, *first)
    write(tmp_path, *second)
    assert list(read_journal(tmp_path)) == first + second
    assert len(segments(tmp_path)) == 2


@pytest.mark.parametrize("keep", range(0, 60, 7))
def test_a_torn_record_is_left_out_and_later_segments_are_read(tmp_path, keep):
    write(tmp_path, finished_record(0, 0, b"whole"), finished_record(1, 0, b"torn " * 8))
    (segment,) = segments(tmp_path)
    whole = segment.stat().st_size - (8 + 17 + 40)
    segment.write_bytes(segment.read_bytes()[: whole + keep])
    write(tmp_path, finished_record(2, 0, b"later"))
    assert [record.group_id for record in read_journal(tmp_path)] == [0, 2]


def test_segments_of_earlier_versions_are_read_and_those_of_others_are_not(tmp_path):
    record = finished_record(3, 0, b"three")
    write(tmp_path, record)
    (path,) = segments(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"rolljnl2", b"rolljnl1", 1))
    assert list(read_journal(tmp_path)) == [record]
    path.write_bytes(whole.replace(b"rolljnl2", b"rolljnl3", 1))
    assert list(read_journal(tmp_path)) == []


def test_damage_is_noticed_wherever_it_is(tmp_path):
    records = [finished_record(number, 0, b"payload of some length") for number in range(3)]
    write(tmp_path, *records)
    (segment,) = segments(tmp_path)
    good = segment.read_bytes()
    for place in range(len(good)):
        segment.write_bytes(good[:place] + bytes([good[place] ^ 0x10]) + good[place + 1 :])
        found = list(read_journal(tmp_path))
        assert found == records[: len(found)] and len(found) < 3


def test_a_group_that_was_in_flight_is_made_again_and_finished_ones_are_not():
    progress = RolloutProgress(2, 6, {"failed": 1}, (3, 5))
    records = [finished_record(number, 2, b"%d" % number) for number in (0, 1, 2, 5, 7)]
    assert recover(records, progress) == Recovered(8, {5: b"5", 7: b"7"}, {}, (3, 6))


def test_what_depends_on_lost_weights_is_made_again():
    records = [finished_record(0, 1, b""), finished_record(1, 2, b""), dropped_record(2, 2, "filtered")]
    assert recover(records, RolloutProgress(1, 3, {}, (0, 1, 2))) == Recovered(3, {0: b""}, {}, (1, 2))


def test_a_lost_future_stays_lost_when_versions_come_by_again():
    """Group 1 finished at version 3 of a run that went back to 1. At version 4 of the next run it has not ended."""
    records = [finished_record(0, 1, b"kept"), finished_record(1, 3, b"lost"), went_back_record(1)]
    assert recover(records, RolloutProgress(4, 2, {}, (0, 1))) == Recovered(2, {0: b"kept"}, {}, (1,))


def test_nothing_counts_that_was_made_in_another_way():
    before = [finished_record(1, 0, b"old"), dropped_record(2, 0, "filtered")]
    progress = RolloutProgress(0, 1, {}, (0,))
    again = recover([*before, went_back_record(-1), finished_record(0, 0, b"new")], progress)
    assert again.finished == {0: b"new"} and again.dropped == {} and (again.issued, again.in_flight) == (1, ())


def test_the_last_record_of_a_group_counts():
    records = [finished_record(0, 0, b"first"), dropped_record(0, 0, "filtered")]
    assert recover(records, START) == Recovered(1, {}, {0: "filtered"}, ())
    assert recover(reversed(records), START) == Recovered(1, {0: b"first"}, {}, ())


def test_pruning_keeps_what_the_oldest_checkpoint_needs(tmp_path):
    journal = Journal(tmp_path)
    for group_id in range(8):
        journal.append(finished_record(group_id, 0, b""))
        journal.prune(START)
    assert len(segments(tmp_path)) == 9
    journal.prune(RolloutProgress(1, 6, {}, (3, 5)))
    assert [record.group_id for record in read_journal(tmp_path)] == [3, 4, 5, 6, 7]
    journal.prune(RolloutProgress(2, 8, {}, ()))
    assert list(read_journal(tmp_path)) == []
    journal.append(finished_record(9, 2, b""))
    journal.close()
    assert [record.group_id for record in read_journal(tmp_path)] == [9]


def test_a_segment_of_an_earlier_run_is_pruned_too(tmp_path):
    write(tmp_path, finished_record(0, 0, b""))
    write(tmp_path, went_back_record(0), finished_record(1, 0, b""))
    journal = Journal(tmp_path)
    journal.prune(RolloutProgress(1, 1, {}, ()))
    assert list(read_journal(tmp_path)) == [went_back_record(0), finished_record(1, 0, b"")]
    journal.close()


def test_a_marker_is_not_deleted_before_what_it_makes_void(tmp_path):
    """Only the oldest segments go, so no lost future comes back to life."""
    write(tmp_path, finished_record(5, 3, b"lost"))
    write(tmp_path, went_back_record(1), finished_record(0, 1, b""))
    journal = Journal(tmp_path)
    journal.prune(RolloutProgress(2, 6, {}, (5,)))
    journal.close()
    assert recover(read_journal(tmp_path), RolloutProgress(3, 6, {}, (5,))).in_flight == (5,)


@settings(max_examples=examples(200))
@given(st.data())
def test_nothing_is_lost_or_doubled_over_any_history_of_crashes(data):
    """A model keeps what each run knew; after each crash the journal must say the same, whatever was pruned."""
    records, checkpoints = [], [START]
    finished: dict[int, tuple[int, bytes]] = {}
    ended: set[int] = set()
    issued, payloads = 0, itertools.count()
    step = 0
    for _ in range(data.draw(st.integers(1, 6), "runs")):
        for _ in range(data.draw(st.integers(0, 12), "events")):
            event = data.draw(st.sampled_from(["issue", "finish", "drop", "step", "checkpoint"]))
            in_flight = sorted(set(range(issued)) - finished.keys() - ended)
            if event == "issue":
                issued += 1
            elif event == "finish" and in_flight:
                group_id = data.draw(st.sampled_from(in_flight))
                finished[group_id] = (step, b"%d" % next(payloads))
                records.append(finished_record(group_id, *finished[group_id]))
            elif event == "drop" and in_flight:
                group_id = data.draw(st.sampled_from(in_flight))
                ended.add(group_id)
                records.append(dropped_record(group_id, step, "failed"))
            elif event == "step" and finished:
                consumed = data.draw(st.sampled_from(sorted(finished)))
                del finished[consumed]
                ended.add(consumed)
                step += 1
            elif event == "checkpoint":
                open_groups = tuple(sorted(set(range(issued)) - ended))
                checkpoints.append(RolloutProgress(step, issued, {}, open_groups))
        back = data.draw(st.sampled_from(checkpoints))
        checkpoints = checkpoints[: checkpoints.index(back) + 1]
        recovered = recover(records, back)
        records.append(went_back_record(back.steps_done))
        assert recover(records, back) == recovered
        everything = [*recovered.finished, *recovered.dropped, *recovered.in_flight]
        assert sorted(everything) == sorted({*back.open_groups, *range(back.issued, recovered.issued)})
        for group_id, payload in recovered.finished.items():
            written = [r for r in records if r.group_id == group_id and r.payload == payload]
            assert written and written[0].version <= back.steps_done
        still = {group_id for group_id, (version, _) in finished.items() if version <= back.steps_done}
        assert {g for g in still if g in everything} <= recovered.finished.keys()
        step, issued = back.steps_done, recovered.issued
        finished = {
            group_id: (next(r.version for r in reversed(records) if r.group_id == group_id), payload)
            for group_id, payload in recovered.finished.items()
        }
        ended = set(range(issued)) - finished.keys() - set(recovered.in_flight)

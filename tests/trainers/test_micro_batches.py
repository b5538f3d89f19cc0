"""Micro-batch plans cover every row once within the budget, and tokens meet the logits that predict them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.records import SampleBatch
from roll.trainers.base import MicroBatchLimits
from roll.trainers.step import (
    Packing,
    _greedy,
    build_micro_batch,
    plan_micro_batches,
    predicted_tokens,
    results_by_token,
)
from tests.tiers import examples

LENGTHS = st.lists(st.integers(1, 50), max_size=40)


@settings(max_examples=examples(200))
@given(lengths=LENGTHS, world_size=st.integers(1, 4), max_tokens=st.integers(1, 200))
def test_token_budget_holds_and_every_row_appears_once(lengths, world_size, max_tokens):
    plan = plan_micro_batches(lengths, world_size, MicroBatchLimits(max_tokens, 1))
    rows = [row for rank in plan for micro_batch in rank for row in micro_batch]
    assert sorted(rows) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    for micro_batch in (micro_batch for rank in plan for micro_batch in rank if len(micro_batch) > 1):
        assert len(micro_batch) * max(lengths[row] for row in micro_batch) <= max_tokens


@settings(max_examples=examples(200))
@given(lengths=st.lists(st.integers(0, 50), max_size=40), world_size=st.integers(1, 4), max_tokens=st.integers(1, 200))
def test_packed_budget_counts_real_tokens_and_is_used_well(lengths, world_size, max_tokens):
    plan = plan_micro_batches(lengths, world_size, MicroBatchLimits(max_tokens, 1, packed=True))
    assert sorted(row for rank in plan for micro_batch in rank for row in micro_batch) == list(range(len(lengths)))
    assert len({len(rank) for rank in plan}) == 1 and len(plan[0]) >= 1
    for rank in plan:
        loads = [sum(lengths[row] for row in micro_batch) for micro_batch in rank]
        assert all(load <= max_tokens or len(micro_batch) == 1 for load, micro_batch in zip(loads, rank, strict=True))
        assert loads == sorted(loads, reverse=True)
        filled = [load for load, micro_batch in zip(loads, rank, strict=True) if micro_batch]
        assert all(first + second > max_tokens for first, second in zip(filled, filled[1:], strict=False))
    tokens = [sum(lengths[row] for micro_batch in rank for row in micro_batch) for rank in plan]
    assert max(tokens) - min(tokens) <= max(lengths, default=0)


def test_packing_puts_a_row_where_least_room_remains():
    plan = plan_micro_batches([7, 5, 3, 5], 1, MicroBatchLimits(10, 1, packed=True))
    assert plan == [[[0, 2], [1, 3]]]


def test_a_row_longer_than_the_budget_is_packed_alone():
    plan = plan_micro_batches([5, 100, 5, 0], 1, MicroBatchLimits(20, 1, packed=True))
    assert plan == [[[1], [0, 2, 3]]]


@settings(max_examples=examples(100))
@given(lengths=LENGTHS, world_size=st.integers(1, 4), size=st.integers(1, 8))
def test_fixed_size_holds_and_every_row_appears_once(lengths, world_size, size):
    plan = plan_micro_batches(lengths, world_size, MicroBatchLimits(None, size))
    sizes = [len(micro_batch) for rank in plan for micro_batch in rank]
    assert max(sizes) <= size and sum(sizes) == len(lengths)
    assert len(plan[0]) == max(1, -(-max(sum(map(len, rank)) for rank in plan) // size))


@settings(max_examples=examples(100))
@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), world_size=st.integers(1, 4))
def test_ranks_get_about_equally_many_tokens(lengths, world_size):
    plan = plan_micro_batches(lengths, world_size, MicroBatchLimits(100, 1))
    loads = [sum(lengths[row] for micro_batch in rank for row in micro_batch) for rank in plan]
    assert max(loads) - min(loads) <= max(lengths)


def loads_of(plan, lengths):
    return sorted(sum(lengths[row] for micro_batch in rank for row in micro_batch) for rank in plan)


def test_differencing_is_nearer_to_an_even_split_than_the_least_loaded_rank():
    """Longest first to the least loaded rank gives 17 and 13."""
    lengths = [8, 7, 6, 5, 4]
    assert loads_of(plan_micro_batches(lengths, 2, MicroBatchLimits(100, 1)), lengths) == [14, 16]
    assert _greedy(lengths, 2) == [[0, 3, 4], [1, 2]]


@settings(max_examples=examples(100))
@given(
    lengths=st.lists(st.integers(0, 50), max_size=40),
    world_size=st.integers(1, 6),
    max_tokens=st.sampled_from([None, 60]),
)
def test_no_rank_has_more_tokens_than_with_the_least_loaded_rank_or_there_are_fewer_micro_batches(
    lengths, world_size, max_tokens
):
    limits = MicroBatchLimits(max_tokens, 2)
    plan = plan_micro_batches(lengths, world_size, limits)
    assert plan == plan_micro_batches(np.array(lengths, dtype=np.int64), world_size, limits)
    greedy = _greedy(lengths, world_size)
    most = max(sum(lengths[row] for row in rows) for rows in greedy)
    if max_tokens is None:
        assert len(plan[0]) == max(1, -(-len(lengths) // (2 * world_size)))
    else:
        assert loads_of(plan, lengths)[-1] <= most


def test_tokens_of_long_tailed_responses_are_balanced_to_a_thousandth():
    lengths = np.minimum(np.random.default_rng(3).lognormal(6.5, 1, 512).astype(int), 8192)
    loads = loads_of(plan_micro_batches(lengths, 8, MicroBatchLimits(16384, 1)), lengths)
    assert loads[-1] / loads[0] < 1.0001


def test_a_row_longer_than_the_budget_is_alone():
    assert plan_micro_batches([5, 100, 5], 1, MicroBatchLimits(20, 1)) == [[[1], [0, 2]]]


def test_a_rank_short_of_work_gets_empty_micro_batches():
    assert plan_micro_batches([3], 2, MicroBatchLimits(100, 1)) == [[[0]], [[]]]


def make_batch():
    lengths = np.array([4, 2, 5, 1])
    total = int(lengths.sum())
    return SampleBatch(
        lengths,
        {
            "token_ids": np.arange(10, 10 + total, dtype=np.int32),
            "response_mask": np.ones(total, dtype=bool),
            "advantages": np.arange(total, dtype=np.float32),
        },
    )


def test_every_target_is_paired_with_the_position_before_it():
    batch = make_batch()
    wanted = np.zeros(12, dtype=bool)
    wanted[[2, 3, 10]] = True
    micro_batch = build_micro_batch(batch, [2, 0], wanted, ["advantages"], torch.device("cpu"))
    assert micro_batch.input_ids.tolist() == [[16, 17, 18, 19, 20], [10, 11, 12, 13, 0]]
    assert micro_batch.positions.tolist() == [1, 2, 3]
    assert micro_batch.targets[micro_batch.mask].tolist() == [20, 12, 13]
    assert micro_batch.fields["advantages"][micro_batch.mask].tolist() == [10, 2, 3]


def test_a_packed_row_holds_samples_one_behind_the_other_and_keeps_wanted_positions_only():
    batch = make_batch()
    wanted = np.zeros(12, dtype=bool)
    wanted[[2, 3, 10]] = True
    micro_batch = build_micro_batch(batch, [2, 0, 3], wanted, ["advantages"], torch.device("cpu"), packed=True)
    assert micro_batch.input_ids.tolist() == [[16, 17, 18, 19, 20, 10, 11, 12, 13, 21]]
    assert micro_batch.packing.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0]]
    assert micro_batch.packing.boundaries.tolist() == [0, 5, 9, 10] and micro_batch.packing.longest == 5
    assert micro_batch.positions.tolist() == [3, 6, 7] and micro_batch.targets.tolist() == [[20, 12, 13]]
    padded = build_micro_batch(batch, [2, 0, 3], wanted, ["advantages"], torch.device("cpu"))
    assert torch.equal(micro_batch.mask, padded.mask)
    assert torch.equal(micro_batch.fields["advantages"], padded.fields["advantages"])
    by_sample = micro_batch.by_sample(micro_batch.targets)
    assert torch.equal(by_sample, torch.where(padded.mask, padded.targets, 0))


@pytest.mark.parametrize(("multiple", "sample_multiple"), [(1, 1), (4, 1), (4, 4), (8, 4)])
def test_widened_rows_hold_the_same_samples_and_targets(multiple, sample_multiple):
    batch, device = make_batch(), torch.device("cpu")
    wanted = np.zeros(12, dtype=bool)
    wanted[[2, 3, 10]] = True
    for packed in (False, True):
        narrow = build_micro_batch(batch, [2, 0, 3], wanted, ["advantages"], device, packed=packed)
        wide = narrow.widened(multiple, sample_multiple)
        assert wide.input_ids.shape[1] % multiple == 0 and wide.input_ids.sum() == narrow.input_ids.sum()
        assert torch.equal(wide.input_ids[:, wide.positions], narrow.input_ids[:, narrow.positions])
        assert wide.targets is narrow.targets and wide.mask is narrow.mask and wide.fields is narrow.fields
        if packed:
            bounds = wide.packing.boundaries.tolist()
            assert bounds[-1] == wide.input_ids.shape[1] < 10 + multiple + 3 * sample_multiple
            assert all(bound % sample_multiple == 0 for bound in bounds)
            for start, sample in zip(bounds, ([16, 17, 18, 19, 20], [10, 11, 12, 13], [21]), strict=False):
                assert wide.input_ids[0, start : start + len(sample)].tolist() == sample
            lengths = np.diff(bounds)
            assert wide.packing.longest == max(lengths) and not any(wide.input_ids[0, bounds[3] :])
            assert wide.packing.position_ids.tolist() == [[each for length in lengths for each in range(length)]]


def test_samples_without_tokens_leave_no_trace_in_a_packed_row():
    packing = Packing.of([0, 3, 0, 2, 0], torch.device("cpu"))
    assert packing.boundaries.tolist() == [0, 3, 5] and packing.position_ids.tolist() == [[0, 1, 2, 0, 1]]


def test_the_packed_stand_ins_ask_for_nothing_and_keep_a_graph():
    empty = SampleBatch(np.array([0, 1]), {"token_ids": np.array([7], dtype=np.int32)})
    wanted = np.zeros(1, dtype=bool)
    for rows in ([], [0], [1], [0, 1]):
        micro_batch = build_micro_batch(empty, rows, wanted, (), torch.device("cpu"), packed=True)
        assert not micro_batch.mask.any() and micro_batch.mask.shape[0] == max(1, len(rows))
        assert micro_batch.targets.shape == (1, 1) and micro_batch.positions.shape == (1,)
        values = torch.ones(micro_batch.targets.shape, requires_grad=True)
        by_sample = micro_batch.by_sample(values)
        assert by_sample.shape == micro_batch.mask.shape and not by_sample.any()
        by_sample.sum().backward()
        assert values.grad is not None and not values.grad.any()


def test_the_stand_in_for_no_rows_asks_for_nothing():
    micro_batch = build_micro_batch(make_batch(), [], np.ones(12, dtype=bool), ["advantages"], torch.device("cpu"))
    assert micro_batch.input_ids.shape == (1, 2) and micro_batch.targets.shape == (1, 1)
    assert not micro_batch.mask.any()


def test_values_return_to_their_tokens_and_first_tokens_stay():
    batch = make_batch()
    assert np.flatnonzero(~predicted_tokens(batch)).tolist() == [0, 4, 6, 11]

    def token_ids(micro_batches):
        return (micro_batch.by_sample(micro_batch.targets.float()) for micro_batch in micro_batches)

    for packed in (False, True):
        for rows in ([[2, 0, 1, 3]], [[0], [], [3], [1, 2]]):
            out = results_by_token(batch, rows, torch.device("cpu"), packed, token_ids)
            assert out.tolist() == [0, 11, 12, 13, 0, 15, 0, 17, 18, 19, 20, 0]
    assert results_by_token(batch, [[1, 3]], torch.device("cpu"), False, token_ids).nonzero()[0].tolist() == [5]

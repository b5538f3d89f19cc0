"""Records of experts: of an episode's turns, and in a batch."""

from __future__ import annotations

import numpy as np
import pytest

from roll.data.records import Sample, SampleBatch, joined_routing


def experts(tokens, mark=0):
    """Of two layers and three experts each; no two tokens have the same, nor the same token in records of two marks."""
    return (np.arange(tokens * 6, dtype=np.int16) + 1000 * mark).reshape(tokens, 2, 3)


def sample(length, routed=True):
    nothing = np.zeros(length, np.int32)
    found = joined_routing([experts(length - 1)], length) if routed else None
    return Sample(nothing, nothing > 0, nothing.astype(np.float32), nothing, "stop", routed_experts=found)


def test_each_turn_of_an_episode_keeps_its_own_record_and_the_text_between_has_that_of_the_next():
    whole = joined_routing([experts(4, mark=1), experts(9, mark=2), experts(11, mark=3)], 12)
    assert whole.dtype == np.int16
    for start, end, mark in ((0, 4, 1), (4, 9, 2), (9, 11, 3)):
        assert np.array_equal(whole[start:end], experts(11, mark)[start:end])
    assert not whole[11].any(), "nothing is known of the last token"


def test_an_episode_with_a_turn_without_record_has_none():
    assert joined_routing([experts(4), None, experts(11)], 12) is None
    assert joined_routing([None], 5) is None


def test_records_stay_with_their_tokens_in_batches():
    lengths = (5, 3, 7)
    batch = SampleBatch.from_samples([sample(length) for length in lengths])
    chosen = batch.select([2, 0])
    assert np.array_equal(chosen.tokens["routed_experts"][:6], experts(6))
    padded = chosen.padded("routed_experts", length=8)
    assert padded.shape == (2, 8, 2, 3) and np.array_equal(padded[1, :4], experts(4)) and not padded[1, 4:].any()
    joined = SampleBatch.concatenated([chosen, batch])
    assert joined.tokens["routed_experts"].shape == (2 * sum(lengths) - 3, 2, 3)
    bare = joined.unrouted()
    assert "routed_experts" not in bare.tokens and bare.tokens.keys() < joined.tokens.keys()
    assert "routed_experts" not in SampleBatch.from_samples([sample(5, routed=False)]).tokens


def test_samples_with_and_without_records_are_no_batch():
    with pytest.raises(ValueError, match="some samples of the batch record their experts and others do not"):
        SampleBatch.from_samples([sample(5), sample(5, routed=False)])

from dataclasses import replace

import numpy as np
import pytest

from roll.engines.base import Completion, GenerateRequest, SamplingParams, TokenChunk
from roll.engines.response import PartialResponse


def response(tokens=5, min_version=None, max_length=64, first_token_index=0):
    request = GenerateRequest("r", np.array([7, 8]), SamplingParams(tokens, seed=3), first_token_index)
    return PartialResponse(request, min_version=min_version, max_length=max_length)


def chunk(*numbers, version=0, finish_reason=None):
    tokens = np.array(numbers, dtype=np.int32)
    return TokenChunk(tokens, -tokens.astype(np.float32), np.full(len(numbers), version, np.int32), finish_reason)


def test_the_first_attempt_asks_for_everything():
    first = response(first_token_index=2).remaining()
    assert first.prompt_token_ids.tolist() == [7, 8] and first.prompt_token_ids.dtype == np.int32
    assert (first.sampling.max_new_tokens, first.first_token_index, first.sampling.seed) == (5, 2, 3)


def test_the_next_attempt_asks_for_the_rest_and_the_whole_is_handed_back():
    partial = response(first_token_index=2)
    partial.add(chunk(10, 11, version=3))
    partial.add(chunk(12, version=4))
    assert partial.attempt_tokens == 3
    assert partial.cut_off() == 3
    assert partial.attempt_tokens == 0 and partial.completion is None
    rest = partial.remaining()
    assert rest.prompt_token_ids.tolist() == [7, 8, 10, 11, 12]
    assert (rest.sampling.max_new_tokens, rest.first_token_index) == (2, 5)
    last = chunk(13, 14, version=5)
    whole = partial.joined_to(Completion("other", last.token_ids, last.logprobs, last.versions, "stop"))
    assert (whole.request_id, whole.finish_reason) == ("r", "stop")
    assert whole.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert whole.logprobs.tolist() == [-10, -11, -12, -13, -14]
    assert whole.versions.tolist() == [3, 3, 4, 5, 5]


def test_what_is_known_of_an_attempt_that_ends_well_is_not_counted_twice():
    partial = response()
    partial.add(chunk(10))
    everything = chunk(10, 11)
    whole = partial.joined_to(Completion("r", everything.token_ids, everything.logprobs, everything.versions, "stop"))
    assert whole.token_ids.tolist() == [10, 11]


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, 4), (2, 4), (9, 9)], ids=["no bound", "an older bound", "a newer bound"]
)
def test_no_engine_older_than_the_last_token_goes_on(asked, expected):
    partial = response(min_version=asked)
    assert partial.min_version == asked
    partial.add(chunk(10, version=3))
    partial.add(chunk(11, version=4))
    assert partial.min_version == asked, "the present attempt says nothing of the next one before it is over"
    partial.cut_off()
    assert partial.min_version == expected


def test_a_response_that_was_complete_needs_no_other_attempt():
    full = response(tokens=3)
    full.add(chunk(10, 11, 12))
    full.cut_off()
    assert (full.completion.finish_reason, full.completion.token_ids.tolist()) == ("length", [10, 11, 12])
    stopped = response()
    stopped.add(chunk(10))
    stopped.add(chunk(1, finish_reason="stop"))
    stopped.cut_off()
    assert (stopped.completion.finish_reason, stopped.completion.token_ids.tolist()) == ("stop", [10, 1])
    long = response(tokens=50, max_length=4)
    long.add(chunk(10, 11))
    long.cut_off()
    assert long.completion.finish_reason == "length", "an engine would refuse a prompt that fills it"


def test_an_attempt_of_which_nothing_is_known_leaves_everything_to_the_next():
    partial = response()
    assert partial.cut_off() == 0
    assert partial.completion is None
    assert partial.remaining().prompt_token_ids.tolist() == [7, 8]
    assert partial.min_version is None


def test_with_experts_each_attempt_computes_at_least_the_last_token():
    partial = response(tokens=3)
    partial._request = replace(partial._request, with_routing=True)
    partial.add(chunk(10, 11, version=1))
    partial.add(chunk(12, version=2, finish_reason="length"))
    assert partial.cut_off() == 2 and partial.completion is None
    assert partial.remaining().prompt_token_ids.tolist() == [7, 8, 10, 11] and partial.min_version == 1
    assert partial.cut_off() == 0, "an attempt of which nothing is known takes nothing away"
    last, routed = chunk(13, version=4), np.arange(4 * 6, dtype=np.uint8).reshape(4, 2, 3)
    told = Completion("other", last.token_ids, last.logprobs, last.versions, "stop", routed_experts=routed)
    whole = partial.joined_to(told)
    assert whole.token_ids.tolist() == [10, 11, 13] and whole.routed_experts is routed

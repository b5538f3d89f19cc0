from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.prompts import DomainSchedule, PromptStream
from roll.data.records import Prompt
from tests.tiers import examples

SHARE = st.integers(0, 1000) | st.floats(1e-3, 1.0)
SHARES = st.lists(SHARE, min_size=1, max_size=12).filter(lambda each: sum(each) > 0)
SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=4)


def make_prompts(sizes: list[int]) -> list[Prompt]:
    return [
        Prompt(f"{domain}:{index}", f"domain{domain}", np.array([index], dtype=np.int32), str(index))
        for domain, size in enumerate(sizes)
        for index in range(size)
    ]


def draw(stream: PromptStream, count: int) -> list[Prompt]:
    return [next(stream) for _ in range(count)]


@settings(max_examples=examples(150))
@given(SHARES, st.integers(1, 300))
def test_no_domain_is_ever_a_whole_prompt_from_its_share(values, turns):
    shares = {str(index): value for index, value in enumerate(values)}
    exact = {domain: Fraction(str(value)) for domain, value in shares.items()}
    total = sum(exact.values())
    schedule = DomainSchedule(shares)
    had = Counter()
    for turn in range(1, turns + 1):
        had[schedule.next()] += 1
        for domain in shares:
            assert abs(had[domain] - exact[domain] / total * turn) < 1


def test_a_share_far_below_a_batch_still_gets_its_prompts():
    schedule = DomainSchedule({"common": 0.999, "rare": 0.001})
    had = Counter(schedule.next() for _ in range(10_000))
    assert had == {"common": 9990, "rare": 10}


@pytest.mark.parametrize("shares", [{"a": -0.1, "b": 1.0}, {"a": 0.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_impossible_shares_are_refused(shares):
    with pytest.raises(ValueError, match="shares"):
        DomainSchedule(shares)


@settings(max_examples=examples(60))
@given(SIZES, st.integers(0, 3), st.booleans(), st.data())
def test_each_prompt_comes_exactly_once_per_epoch_of_its_domain(sizes, seed, shuffle, data):
    shares = data.draw(st.none() | st.lists(st.floats(0.05, 1), min_size=len(sizes), max_size=len(sizes)))
    probs = shares and {f"domain{index}": share for index, share in enumerate(shares)}
    stream = PromptStream(make_prompts(sizes), seed=seed, shuffle=shuffle, domain_interleave_probs=probs)
    drawn = draw(stream, 60)
    for domain, size in enumerate(sizes):
        ids = [prompt.prompt_id for prompt in drawn if prompt.domain == f"domain{domain}"]
        everything = {f"{domain}:{index}" for index in range(size)}
        for start in range(0, len(ids), size):
            epoch = ids[start : start + size]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < size or set(epoch) == everything


def test_without_shares_all_domains_finish_an_epoch_together():
    stream = PromptStream(make_prompts([6, 3, 1]), seed=0)
    assert len({prompt.prompt_id for prompt in draw(stream, 10)}) == 10


def test_order_changes_with_epoch_and_seed_and_not_with_the_other_domains():
    def order(seed: int, sizes: list[int], epoch: int) -> list[str]:
        stream = PromptStream(make_prompts(sizes), seed=seed)
        ids = [prompt.prompt_id for prompt in draw(stream, (epoch + 1) * sum(sizes)) if prompt.domain == "domain0"]
        return ids[epoch * sizes[0] :]

    assert order(1, [30, 5], 0) == order(1, [30, 60], 0)
    assert order(1, [30, 5], 0) != order(1, [30, 5], 1)
    assert order(1, [30, 5], 0) != order(2, [30, 5], 0)


def test_without_shuffling_prompts_come_in_the_order_of_the_data():
    stream = PromptStream(make_prompts([4]), seed=3, shuffle=False)
    assert [prompt.prompt_id for prompt in draw(stream, 6)] == ["0:0", "0:1", "0:2", "0:3", "0:0", "0:1"]


def test_a_share_without_prompts_and_an_empty_stream_are_refused():
    with pytest.raises(ValueError, match="domain9"):
        PromptStream(make_prompts([2]), seed=0, domain_interleave_probs={"domain0": 0.5, "domain9": 0.5})
    with pytest.raises(ValueError, match="at least one prompt"):
        PromptStream([], seed=0)

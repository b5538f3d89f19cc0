"""A group comes back with the same bits, whatever it holds."""

import json
from dataclasses import dataclass, fields
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.data.records import Group, Prompt, Sample, decode_group, encode_group
from tests.tiers import examples

FLOATS = st.floats(allow_nan=True, width=64)
TEXT = st.text(st.characters(exclude_categories=[]), max_size=20)


@st.composite
def samples(draw) -> Sample:
    length = draw(st.integers(0, 30))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    with_turns = draw(st.booleans())
    return Sample(
        token_ids=rng.integers(0, 2**31, length).astype(np.int32),
        response_mask=rng.random(length) < 0.5,
        behaviour_logprobs=np.where(rng.random(length) < 0.1, np.nan, -rng.random(length)).astype(np.float32),
        versions=rng.integers(-1, 9, length).astype(np.int32),
        finish_reason=draw(TEXT),
        response_text=draw(TEXT),
        score=draw(FLOATS),
        reward=draw(FLOATS),
        metrics=draw(st.dictionaries(TEXT, FLOATS, max_size=3)),
        episode=draw(st.none() | st.integers(0, 9)),
        turns=rng.integers(-1, 5, length).astype(np.int32) if with_turns else None,
        turn_rewards=rng.random(length).astype(np.float32) if with_turns else None,
        turn_states=rng.integers(-1, 2**62, length) if with_turns else None,
        means=rng.random((2, 3, 1)).astype(np.float32) if draw(st.booleans()) else None,
        latents=rng.random((draw(st.integers(1, 4)), 2, 3, 1)).astype(np.float32) if draw(st.booleans()) else None,
        routed_experts=rng.integers(0, 99, (length, 2, 3)).astype(draw(st.sampled_from(["uint8", "int16"])))
        if draw(st.booleans())
        else None,
    )


def groups() -> st.SearchStrategy[Group]:
    ids = st.integers(0, 40).map(lambda length: np.arange(length, dtype=np.int32))
    prompts = st.builds(Prompt, TEXT, TEXT, ids, TEXT)
    return st.builds(Group, st.integers(0, 2**40), prompts, st.lists(samples(), max_size=4), st.none() | FLOATS)


def assert_same(one, other) -> None:
    assert type(one) is type(other)
    for field in fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape), field.name
            assert mine.tobytes() == theirs.tobytes(), field.name
        elif isinstance(mine, Prompt):
            assert_same(mine, theirs)
        elif field.name == "samples":
            assert len(mine) == len(theirs)
            for pair in zip(mine, theirs, strict=True):
                assert_same(*pair)
        else:
            assert repr(mine) == repr(theirs), field.name


@settings(max_examples=examples(150))
@given(groups())
def test_a_group_comes_back_with_the_same_bits(group):
    back = decode_group(encode_group(group))
    assert_same(group, back)
    for sample in back.samples:
        sample.token_ids[:] = 0  # its own memory, as of a group that was never written


def test_numbers_of_numpy_are_numbers():
    group = Group(1, Prompt("p", "d", np.zeros(0, np.int32), ""), [], baseline_score=np.float32(0.5))
    assert decode_group(encode_group(group)).baseline_score == 0.5


def test_what_only_the_judge_needs_is_left_out():
    prompt = Prompt("p", "d", np.zeros(0, np.int32), "", ground_truth=object(), metadata={"x": object()})
    back = decode_group(encode_group(Group(1, prompt, [])))
    assert back.prompt.ground_truth is None and back.prompt.metadata == {}


def test_a_picture_that_has_been_seen_is_left_out_and_its_latents_stay():
    sample = Sample(np.zeros(3, np.int32), np.ones(3, bool), np.zeros(3, np.float32), np.zeros(3, np.int32), "stop")
    sample.latents, sample.image = np.ones((4, 2, 2, 2), np.float32), np.zeros((900, 900, 3), np.uint8)
    data = encode_group(Group(0, Prompt("a", "pictures", np.zeros(1, np.int32), "red"), [sample]))
    (found,) = decode_group(data).samples
    assert len(data) < 2000 and found.image is None and found.latents.shape == (4, 2, 2, 2)
    found.latents[0] = 2  # memory of its own


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: data[:5]])
def test_other_bytes_are_refused(change):
    sample = Sample(np.ones(3, np.int32), np.ones(3, bool), np.ones(3, np.float32), np.ones(3, np.int32), "stop")
    data = encode_group(Group(1, Prompt("p", "d", np.zeros(2, np.int32), ""), [sample]))
    with pytest.raises(ValueError):
        decode_group(change(data))


def test_groups_of_earlier_versions_are_read():
    """They had the texts in the header, and all fields."""
    ids, half, text = np.arange(3, dtype=np.int32), np.full(3, 0.5, np.float32), "é\ud800"
    array = {"dtype": "<i4", "length": 3}
    sample = {
        "token_ids": array,
        "response_mask": {"dtype": "|b1", "length": 3},
        "behaviour_logprobs": {"dtype": "<f4", "length": 3},
        "versions": array,
        "finish_reason": "stop",
        "response_text": text,
        "turns": None,
    }
    prompt = {"prompt_id": "p", "domain": "d", "token_ids": array, "text": "a", "pictures": []}
    header = {"group_id": 7, "prompt": prompt, "samples": [sample], "baseline_score": None, "times": {}, "waits": []}
    encoded = json.dumps(header).encode()
    arrays = [ids, ids, ids > 0, half, ids + 1]
    data = len(encoded).to_bytes(8, "little") + encoded + b"".join(each.tobytes() for each in arrays)
    made = Sample(ids, ids > 0, half, ids + 1, "stop", text)
    assert_same(decode_group(data), Group(7, Prompt("p", "d", ids, "a"), [made]))


def test_records_of_a_plug_in_are_written_as_their_declared_fields():
    @dataclass
    class Mine(Sample):
        kind: ClassVar[str] = "x"

    mine = Mine(np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    mine.response_text, mine.note = None, "an attribute of its own"
    (back,) = decode_group(encode_group(Group(0, Prompt("a", "d", np.zeros(1, np.int32), ""), [mine]))).samples
    assert back.response_text is None and back.finish_reason == "stop" and not hasattr(back, "note")


def test_a_text_is_written_as_it_is():
    sample = Sample(np.zeros(1, np.int32), np.ones(1, bool), np.zeros(1, np.float32), np.zeros(1, np.int32), "stop")
    sample.response_text = 'a "quoted"\nline, é\ud800'
    data = encode_group(Group(0, Prompt("a", "d", np.zeros(1, np.int32), ""), [sample]), before=b"before")
    assert data.startswith(b"before") and sample.response_text.encode(errors="surrogatepass") in data
    assert decode_group(data[6:]).samples[0].response_text == sample.response_text

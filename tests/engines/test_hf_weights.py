"""Weights as bytes: nothing is changed, split or lost on the way."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.weights.buckets import (
    BucketLocation,
    WeightBucket,
    WeightMismatch,
    copy_with_checksum,
    manifest,
    pack_buckets,
    split_bucket,
    tensor_checksum,
    views,
)
from tests.tiers import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8]


@settings(max_examples=examples(60))
@given(
    shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), max_size=8),
    bucket_bytes=st.integers(1, 2000),
    seed=st.integers(0, 1000),
)
def test_any_tensors_come_back_bit_for_bit_in_order(shapes, bucket_bytes, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [
        (f"t{i}", (torch.randn(shape, generator=generator) * 5).to(DTYPES[i % len(DTYPES)]))
        for i, shape in enumerate(shapes)
    ]
    buckets = list(pack_buckets(tensors, bucket_bytes))
    for bucket in buckets:
        assert len(bucket.data) <= bucket_bytes or len(bucket.tensors) == 1
    received = [pair for bucket in buckets for pair in views(bucket)]
    assert [name for name, _ in received] == [name for name, _ in tensors]
    for (_, sent), (_, got) in zip(tensors, received, strict=True):
        assert sent.dtype == got.dtype and torch.equal(sent, got)
        assert tensor_checksum(sent) == tensor_checksum(got)


def test_a_tensor_larger_than_the_bucket_travels_alone():
    tensors = [("a", torch.zeros(2)), ("big", torch.zeros(100)), ("b", torch.zeros(2))]
    assert [[entry[0] for entry in bucket.tensors] for bucket in pack_buckets(tensors, 64)] == [["a"], ["big"], ["b"]]


def test_a_bucket_is_filled_to_its_last_byte_and_split_at_it():
    tensors = [(name, torch.arange(16.0)) for name in "abcd"]  # 64 bytes each
    buckets = list(pack_buckets(tensors, 128))
    assert [[entry[0] for entry in bucket.tensors] for bucket in buckets] == [["a", "b"], ["c", "d"]]
    (whole,) = pack_buckets(tensors, 256)
    for most_bytes, names in ((256, ["abcd"]), (192, ["abc", "d"]), (128, ["ab", "cd"]), (127, list("abcd"))):
        parts = list(split_bucket(whole, most_bytes))
        assert ["".join(entry[0] for entry in part.tensors) for part in parts] == names


def test_a_bucket_that_does_not_hold_what_it_says_is_refused():
    memory = np.zeros(64, dtype=np.uint8)
    for name, entry in (
        ("before", ("before", "float32", (2,), -4)),
        ("behind", ("behind", "float32", (2, 2), 52)),
        ("odd", ("odd", "float3", (2,), 0)),
    ):
        with pytest.raises(WeightMismatch, match=f"tensor '{name}'"):
            list(views(WeightBucket([entry], memory)))
    ((_, last),) = views(WeightBucket([("last", "float32", (2, 2), 48)], memory))
    assert last.shape == (2, 2)


def test_buckets_are_counted_as_memory_is_asked_for():
    asked: list[tuple[int, int]] = []

    def allocate(index, size):
        asked.append((index, size))
        return np.zeros(size, dtype=np.uint8)

    tensors = [("a", torch.zeros(2)), ("big", torch.zeros(100)), ("b", torch.zeros(2))]
    assert len(list(pack_buckets(tensors, 64, allocate=allocate))) == 3
    assert asked == [(0, 64), (1, 400), (2, 64)]


def test_packing_copies_before_the_next_tensor_is_drawn():
    shared = torch.zeros(3)

    def tensors():
        for value in (1.0, 2.0, 3.0):
            yield f"t{value:.0f}", shared.fill_(value)

    received = dict(pair for bucket in pack_buckets(tensors(), 10_000) for pair in views(bucket))
    assert [received[f"t{i}"][0].item() for i in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_packing_casts_on_the_way_and_leaves_whole_numbers_alone():
    tensors = [("w", torch.randn(5, 3).T), ("steps", torch.arange(3))]
    (bucket,) = pack_buckets(tensors, 1000, float_dtype=torch.bfloat16)
    received = dict(views(bucket))
    assert torch.equal(received["w"], tensors[0][1].bfloat16())
    assert torch.equal(received["steps"], tensors[1][1])


def test_the_memory_of_earlier_publications_leaves_no_trace():
    used = np.full(1000, 7, dtype=np.uint8)
    tensors = [("a", torch.ones(3)), ("b", torch.ones(2))]
    (bucket,) = pack_buckets(tensors, 1000, allocate=lambda index, size: used)
    (fresh,) = pack_buckets(tensors, 1000)
    assert bucket.data.tobytes() == fresh.data.tobytes()
    assert np.shares_memory(bucket.data, used)


@settings(max_examples=examples(60))
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=9), most_bytes=st.integers(1, 400))
def test_buckets_are_split_without_a_copy_and_keep_their_place_in_the_file(sizes, most_bytes):
    tensors = [(f"t{i}", torch.randn(size)) for i, size in enumerate(sizes)]
    (whole,) = pack_buckets(tensors, 100_000)
    whole = replace(whole, location=BucketLocation("somewhere", 4096), lasting=True)
    parts = list(split_bucket(whole, most_bytes))
    received = [pair for part in parts for pair in views(part)]
    assert [name for name, _ in received] == [name for name, _ in tensors]
    assert all(torch.equal(got, sent) for (_, got), (_, sent) in zip(received, tensors, strict=True))
    for part in parts:
        assert len(part.data) <= most_bytes or len(part.tensors) == 1
        assert part.lasting
        start = part.location.offset - 4096
        assert np.array_equal(part.data, whole.data[start : start + len(part.data)])
        assert not len(part.data) or np.shares_memory(part.data, whole.data)


def test_tensors_are_viewed_where_they_lie_even_in_memory_that_cannot_be_written(recwarn):
    (bucket,) = pack_buckets([("a", torch.arange(4.0)), ("b", torch.ones(2, dtype=torch.bfloat16))], 1000)
    memory = np.frombuffer(bytes(bucket.data), dtype=np.uint8)
    received = dict(views(replace(bucket, data=memory)))
    assert received["a"].tolist() == [0, 1, 2, 3] and received["b"].tolist() == [1, 1]
    assert received["a"].data_ptr() == memory.ctypes.data
    assert not recwarn.list


def test_a_view_keeps_its_memory_alive():
    memory = np.frombuffer(torch.arange(1000.0).numpy().tobytes(), dtype=np.uint8)
    last = weakref.ref(memory)
    ((_, tensor),) = views(WeightBucket([("a", "float32", (1000,), 0)], memory))
    del memory
    gc.collect()
    assert last() is not None
    assert tensor[999] == 999
    del tensor
    gc.collect()
    assert last() is None


def test_a_misaligned_tensor_is_copied():
    memory = np.zeros(100, dtype=np.uint8)
    memory[1:9] = np.arange(2, dtype=np.float32).view(np.uint8)
    ((_, tensor),) = views(WeightBucket([("a", "float32", (2,), 1)], memory))
    assert tensor.tolist() == [0, 1]


@pytest.mark.parametrize("size", [0, 1, 131_072, 131_073, 700_000])
def test_a_copy_is_made_and_hashed_in_one_pass(size):
    tensor = torch.randn(size)
    copy, checksum = copy_with_checksum(tensor)
    assert torch.equal(copy, tensor) and (not size or copy.data_ptr() != tensor.data_ptr())
    assert checksum == tensor_checksum(tensor)


def test_the_manifest_counts_and_sums_what_the_buckets_hold():
    tensors = {"embed": torch.arange(6.0).reshape(2, 3), "head": torch.ones(4), "none": torch.zeros(0, 3)}
    count, checksums = manifest(pack_buckets(tensors.items(), 30))
    assert count == 10
    assert checksums == {name: tensor_checksum(tensor) for name, tensor in tensors.items()}


def test_checksum_is_that_of_the_elements_in_row_major_order():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert tensor_checksum(matrix) == xxhash.xxh3_64_intdigest(matrix.numpy().tobytes())
    assert tensor_checksum(matrix.T) == xxhash.xxh3_64_intdigest(np.ascontiguousarray(matrix.numpy().T).tobytes())
    assert tensor_checksum(matrix.bfloat16()) != tensor_checksum(matrix)


def test_bad_publications_are_refused_by_name():
    with pytest.raises(ValueError, match="'a' occurs twice"):
        list(pack_buckets([("a", torch.zeros(1)), ("a", torch.zeros(1))], 100))
    with pytest.raises(ValueError, match="complex64"):
        list(pack_buckets([("c", torch.zeros(1, dtype=torch.complex64))], 100))
    with pytest.raises(ValueError, match="bucket_bytes"):
        list(pack_buckets([("a", torch.zeros(1))], 0))
    data = np.zeros(8, dtype=np.uint8)
    with pytest.raises(WeightMismatch, match="'a': bytes 4 to 12"):
        list(views(WeightBucket([("a", "float32", (2,), 4)], data)))
    with pytest.raises(WeightMismatch, match="'a': unknown dtype 'float33'"):
        list(views(WeightBucket([("a", "float33", (2,), 0)], data)))

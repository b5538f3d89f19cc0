"""Weights as bytes: nothing is changed, split or lost on the way."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roll.strategies.infer.base import WeightBucket, WeightMismatch
from roll.strategies.weights import pack_buckets, tensor_checksum, unpack

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8]


@settings(max_examples=60, deadline=None)
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
    received = [pair for bucket in buckets for pair in unpack(bucket)]
    assert [name for name, _ in received] == [name for name, _ in tensors]
    for (_, sent), (_, got) in zip(tensors, received, strict=True):
        assert sent.dtype == got.dtype and torch.equal(sent, got)
        assert tensor_checksum(sent) == tensor_checksum(got)


def test_a_tensor_larger_than_the_bucket_travels_alone():
    tensors = [("a", torch.zeros(2)), ("big", torch.zeros(100)), ("b", torch.zeros(2))]
    assert [[entry[0] for entry in bucket.tensors] for bucket in pack_buckets(tensors, 64)] == [["a"], ["big"], ["b"]]


def test_packing_copies_before_the_next_tensor_is_drawn():
    shared = torch.zeros(3)

    def tensors():
        for value in (1.0, 2.0, 3.0):
            yield f"t{value:.0f}", shared.fill_(value)

    received = dict(pair for bucket in pack_buckets(tensors(), 10_000) for pair in unpack(bucket))
    assert [received[f"t{i}"][0].item() for i in (1, 2, 3)] == [1.0, 2.0, 3.0]


def test_unpacked_tensors_outlive_the_bucket():
    (bucket,) = pack_buckets([("a", torch.arange(4.0))], 1000)
    ((_, tensor),) = unpack(bucket)
    bucket.data[:] = 255
    assert tensor.tolist() == [0, 1, 2, 3]


def test_checksum_is_that_of_the_elements_in_row_major_order():
    matrix = torch.arange(6.0).reshape(2, 3)
    assert tensor_checksum(matrix) == zlib.crc32(matrix.numpy().tobytes())
    assert tensor_checksum(matrix.T) == zlib.crc32(np.ascontiguousarray(matrix.numpy().T).tobytes())
    assert tensor_checksum(matrix.bfloat16()) != tensor_checksum(matrix)


def test_bad_publications_are_refused_by_name():
    with pytest.raises(ValueError, match="'a' comes twice"):
        list(pack_buckets([("a", torch.zeros(1)), ("a", torch.zeros(1))], 100))
    with pytest.raises(ValueError, match="complex64"):
        list(pack_buckets([("c", torch.zeros(1, dtype=torch.complex64))], 100))
    with pytest.raises(ValueError, match="bucket_bytes"):
        list(pack_buckets([("a", torch.zeros(1))], 0))
    data = np.zeros(8, dtype=np.uint8)
    with pytest.raises(WeightMismatch, match="'a': bytes 4 to 12"):
        list(unpack(WeightBucket([("a", "float32", (2,), 4)], data)))
    with pytest.raises(WeightMismatch, match="'a': unknown dtype 'float33'"):
        list(unpack(WeightBucket([("a", "float33", (2,), 0)], data)))

import threading

import numpy as np
import pytest
import torch
import xxhash

from roll.weights.buckets import HeldWeights, checksum, checksums, manifest, pack_buckets
from roll.weights.publisher import Publication, WeightsDiffer, check_weights


def published():
    tensors = {"embed": torch.arange(6.0).reshape(2, 3), "head": torch.ones(4)}
    buckets = list(pack_buckets(tensors.items(), 8, float_dtype=torch.bfloat16))
    count, found = manifest(buckets)
    return buckets, Publication(3, [], count, found, sum(bucket.data.nbytes for bucket in buckets))


def receipt(publication, **changes):
    facts = {"version": 3, "parameter_count": publication.parameter_count, "checksums": dict(publication.checksums)}
    return HeldWeights(**{**facts, **changes})


def test_what_was_published_is_what_is_counted():
    buckets, publication = published()
    assert publication.parameter_count == 10
    assert publication.total_bytes == 20
    assert publication.checksums.keys() == {"embed", "head"}
    check_weights("actor_infer/0", publication, receipt(publication))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "actor_infer/0 holds version 2 after version 3"),
        ({"parameter_count": 9}, "9 parameters held, 10 published"),
        ({"checksums": {"embed": 1}}, r"never received: \['head'\]"),
        ({"checksums": {"embed": 1, "head": 2, "adapter": 3}}, r"never published: \['adapter'\]"),
    ],
)
def test_every_difference_is_named(changes, message):
    _, publication = published()
    with pytest.raises(WeightsDiffer, match=message):
        check_weights("actor_infer/0", publication, receipt(publication, **changes))


def test_one_changed_bit_names_its_tensor():
    buckets, publication = published()
    held = [np.array(bucket.data) for bucket in buckets]
    held[0][0] ^= 1
    for bucket, data in zip(buckets, held, strict=True):
        bucket.data = data
    _, found = manifest(buckets)
    with pytest.raises(WeightsDiffer, match="the content of 'embed' differs from what was published$"):
        check_weights("actor_infer/0", publication, receipt(publication, checksums=found))


def test_several_threads_share_the_checksums_if_torch_may_use_them(monkeypatch):
    meeting = threading.Barrier(3)

    def of_tensor(data):
        meeting.wait(timeout=60)  # breaks unless three threads are here at once
        return checksum(data)

    data = {str(size): np.arange(size, dtype=np.uint8) for size in (0, 1, 200, 17, 64, 255)}
    expected = {name: xxhash.xxh3_64_intdigest(values.tobytes()) for name, values in data.items()}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert list(checksums(data, of_tensor).items()) == list(expected.items())
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert checksums(data, checksum) == expected

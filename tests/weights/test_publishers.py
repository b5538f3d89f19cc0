"""A trainer rank's side of a publication, without an engine: which buffer keeps what, for whom, and what is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from roll.weights.buckets import pack_buckets, tensor_checksum, views
from roll.weights.publisher import BucketPublisher, PushPublisher, PushTarget, build_publisher, cast
from roll.weights.transports import TransportSpec


def weights(value: float, shape=(2, 3)):
    """A matrix and a counter; the counter is no floating-point number and keeps its type."""
    return [("layer.weight", torch.full(shape, value)), ("steps", torch.tensor([7]))]


class Drawn:
    """Weights that are made as they are drawn, as by a collective of all ranks."""

    def __init__(self, value: float) -> None:
        self.drawn: list[str] = []
        self.value = value

    def __iter__(self):
        for name, tensor in weights(self.value):
            self.drawn.append(name)
            yield name, tensor


def push_publisher(rank: int = 0, transport: str = "nccl") -> tuple[PushPublisher, dict[int, dict[str, torch.Tensor]]]:
    spec = TransportSpec(transport, 2, Path("unused"), 4096, 10.0)
    publisher = PushPublisher(spec, rank, "here", export=lambda memory: ("gpu", ()))
    return publisher, publisher.copies


def test_what_will_be_pushed_is_told_with_its_checksums_in_the_precision_of_the_engine():
    publisher, buffers = push_publisher()
    publisher.gather(3, 0, weights(1.5), torch.bfloat16, 4096)
    told = publisher.send(3)
    expected = torch.full((2, 3), 1.5, dtype=torch.bfloat16)
    assert (told.version, told.handles, told.parameter_count, told.total_bytes) == (3, [], 7, 2 * 6 + 8)
    assert told.layout == {"layer.weight": ("bfloat16", (2, 3)), "steps": ("int64", (1,))}
    assert told.checksums == {
        "layer.weight": tensor_checksum(expected),
        "steps": tensor_checksum(torch.tensor([7])),
    }
    assert torch.equal(buffers[0]["layer.weight"], expected)
    assert told.seconds.keys() == {"gather", "send"} and min(told.seconds.values()) >= 0


def test_copies_on_a_device_are_there_before_anybody_reads_them(monkeypatch):
    order: list[str] = []

    def drawn():
        for each in weights(1.5):
            yield each
            order.append(each[0])

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: order.append("synchronised"))
    publisher, _ = push_publisher()
    publisher.gather(3, 0, drawn(), torch.bfloat16, 4096)
    assert order == ["layer.weight", "steps", "synchronised"]


def test_two_versions_lie_in_two_halves_until_a_half_is_written_again():
    publisher, buffers = push_publisher()
    for version, buffer in ((1, 0), (2, 1)):
        publisher.gather(version, buffer, weights(version), torch.float32, 4096)
    places = [{name: tensor.data_ptr() for name, tensor in buffers[buffer].items()} for buffer in (0, 1)]
    assert not set(places[0].values()) & set(places[1].values()), "each half has memory of its own"
    first, second = publisher.send(1), publisher.send(2)
    assert first.checksums["layer.weight"] != second.checksums["layer.weight"]
    assert [buffers[buffer]["layer.weight"][0, 0].item() for buffer in (0, 1)] == [1.0, 2.0]
    publisher.gather(3, 0, weights(3), torch.float32, 4096)
    with pytest.raises(KeyError):
        publisher.send(1)
    assert publisher.send(3).checksums != first.checksums
    assert {name: tensor.data_ptr() for name, tensor in buffers[0].items()} == places[0], "written over in place"
    assert [buffers[buffer]["layer.weight"][0, 0].item() for buffer in (0, 1)] == [3.0, 2.0]


@pytest.mark.parametrize(
    ("rank", "transport", "keeps"),
    [(0, "nccl", True), (1, "nccl", False), (0, "cuda_ipc", True), (1, "cuda_ipc", True)],
)
def test_every_rank_draws_all_weights_and_those_keep_them_that_push(transport, rank, keeps):
    publisher, buffers = push_publisher(rank, transport)
    drawn = Drawn(1.0)
    publisher.gather(1, 0, drawn, torch.float32, 4096)
    assert drawn.drawn == ["layer.weight", "steps"]
    assert list(buffers[0]) == (["layer.weight", "steps"] if keeps else [])


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_a_half_is_written_over_in_place_where_the_weights_have_the_same_form(transport):
    publisher, buffers = push_publisher(0, transport)
    publisher.gather(1, 0, weights(1.0), torch.float32, 4096)
    place = buffers[0]["layer.weight"].data_ptr()
    publisher.gather(2, 0, weights(2.0), torch.float32, 4096)
    assert buffers[0]["layer.weight"].data_ptr() == place and buffers[0]["layer.weight"][0, 0] == 2.0
    publisher.gather(3, 0, weights(3.0), torch.float16, 4096)
    assert buffers[0]["layer.weight"].dtype == torch.float16 and buffers[0]["layer.weight"][1, 2] == 3.0
    publisher.gather(4, 0, weights(4.0, (3, 2)), torch.float16, 4096)
    assert buffers[0]["layer.weight"].shape == (3, 2)
    publisher.gather(5, 0, weights(4.0)[:1], torch.float16, 4096)
    assert list(buffers[0]) == ["layer.weight"], "what the model has no more is not sent"


def test_a_name_that_comes_twice_is_refused():
    with pytest.raises(ValueError, match="'steps' occurs twice"):
        list(cast([*weights(1.0), weights(1.0)[1]], torch.float32))


def spec(folder, name: str) -> TransportSpec:
    return TransportSpec(name=name, buffers=2, directory=folder)


def test_only_the_first_rank_packs_buckets_and_all_draw(tmp_path):
    first, second = (BucketPublisher(spec(tmp_path, "shared_memory"), rank) for rank in (0, 1))
    for publisher in (first, second):
        drawn = Drawn(2.0)
        publisher.gather(1, 0, drawn, torch.float16, 8)
        assert drawn.drawn == ["layer.weight", "steps"]
    told = first.send(1)
    assert (told.version, told.parameter_count, told.total_bytes, told.layout) == (1, 7, 12 + 8, None)
    assert len(told.handles) == 2, "buckets of at most 8 bytes: one tensor each"
    assert told.checksums["layer.weight"] == tensor_checksum(torch.full((2, 3), 2.0, dtype=torch.float16))
    assert told.seconds.keys() == {"gather", "send"} and min(told.seconds.values()) >= 0
    with pytest.raises(KeyError):
        first.send(1)
    with pytest.raises(KeyError):
        second.send(1)
    with pytest.raises(RuntimeError, match="version 1 travels in buckets, which actor_infer/0 fetches"):
        first.push(1, PushTarget("actor_infer/0", None, 1), [])


@pytest.mark.parametrize(("transport", "rank", "keeps"), [("nccl", 0, True), ("nccl", 1, False), ("cuda_ipc", 1, True)])
def test_the_transport_says_how_weights_leave_a_rank(tmp_path, monkeypatch, transport, rank, keeps):
    publisher = build_publisher(spec(tmp_path, transport), rank=rank, host="here")
    monkeypatch.setattr("roll.weights.publisher.reduce_tensor", lambda memory: (None, ()))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="gpu"))
    publisher.gather(1, 0, weights(1.0), torch.float32, 4096)
    assert isinstance(publisher, PushPublisher)
    assert (publisher.send(1).parameter_count > 0) == keeps
    assert isinstance(build_publisher(spec(tmp_path, "checkpoint"), rank=0, host="here"), BucketPublisher)


def test_what_lies_between_the_tensors_of_a_bucket_is_nothing_of_an_earlier_publication():
    """Memory is written again and again, and files are made of it."""
    used = torch.full((512,), 255, dtype=torch.uint8).numpy()
    tensors = [("a", torch.ones(3)), ("b", torch.ones(5)), ("c", torch.ones(1))]
    (bucket,) = pack_buckets(tensors, 512, allocate=lambda index, size: used)
    assert [offset for *_, offset in bucket.tensors] == [0, 64, 128] and bucket.data.nbytes == 132
    assert not bucket.data[12:64].any() and not bucket.data[84:128].any()
    assert all(torch.equal(tensor, dict(tensors)[name]) for name, tensor in views(bucket))


def test_a_bucket_has_room_for_a_byte_at_least_and_for_a_whole_tensor_always():
    tensors = [("a", torch.ones(3)), ("b", torch.ones(1))]
    assert [bucket.data.nbytes for bucket in pack_buckets(tensors, 1)] == [12, 4]
    with pytest.raises(ValueError, match="at least one byte"):
        list(pack_buckets(tensors, 0))

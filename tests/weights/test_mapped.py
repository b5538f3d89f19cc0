"""Page-locked weight memory. CUDA is pretended: its functions only note what they are asked."""

import logging
import mmap
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from roll.engines.vllm.strategy import located
from roll.weights import mapped
from roll.weights.buckets import (
    BucketLocation,
    MemoryFile,
    WeightMismatch,
    pack_buckets,
    split_bucket,
    tensor_checksum,
    views,
)
from roll.weights.delta import DeltaReceiver
from roll.weights.mapped import MappedMemory, lock_pages
from roll.weights.publisher import BucketPublisher, PushPublisher, host_memory
from roll.weights.transports import SharedMemoryReceiver, TransportSpec


@dataclass
class PretendedCuda:
    """Page-locking with CUDA's rules: no part twice, and nothing unlocked that is not locked."""

    locked: dict[int, int] = field(default_factory=dict)
    calls: int = 0
    unlocked: int = 0
    refuses: bool = False
    errors_taken: int = 0

    def cudaHostRegister(self, address, size, flags):  # noqa: N802
        self.calls += 1
        first, last = address // mmap.PAGESIZE, (address + size - 1) // mmap.PAGESIZE
        taken = any(
            first <= (start + length - 1) // mmap.PAGESIZE and start // mmap.PAGESIZE <= last
            for start, length in self.locked.items()
        )
        if self.refuses or taken or flags:
            return 712
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address):  # noqa: N802
        self.unlocked += 1
        return 0 if self.locked.pop(address, None) else 713


@pytest.fixture
def cuda(monkeypatch):
    pretended = PretendedCuda()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pretended)

    def take_last_error():
        pretended.errors_taken += 1

    monkeypatch.setattr(mapped, "_take_last_error", take_last_error)
    return pretended


def weights(version):
    return {name: torch.full((900,), version + place, dtype=torch.float32) for place, name in enumerate("abc")}


def publisher(tmp_path):
    return BucketPublisher(TransportSpec("shared_memory", buffers=2, directory=tmp_path), rank=0)


def publish(trainer, version, bucket_bytes=4096):
    trainer.gather(version, version % 2, weights(version).items(), torch.float32, bucket_bytes)
    return trainer.send(version)


def test_each_bucket_is_locked_once_at_both_ends_and_reused_by_later_versions(cuda, tmp_path):
    trainer, receiver, calls = publisher(tmp_path), SharedMemoryReceiver(), []
    for version in range(6):
        publication = publish(trainer, version)
        received = list(receiver.receive(publication.handles, version))
        found = {name: tensor_checksum(tensor) for bucket in received for name, tensor in views(bucket)}
        assert found == publication.checksums
        calls.append(cuda.calls)
    # Three buckets in each of two buffers, at two ends.
    assert calls == [6, 12, 12, 12, 12, 12] and len(cuda.locked) == 12 and not cuda.unlocked and not cuda.errors_taken
    assert all(
        any(start <= bucket.data.ctypes.data < start + size for start, size in cuda.locked.items())
        for bucket in received
    )


def test_parts_of_a_bucket_share_its_locked_region(cuda, tmp_path):
    trainer = publisher(tmp_path)
    publication = publish(trainer, 0, bucket_bytes=2**20)
    (bucket,) = SharedMemoryReceiver().receive(publication.handles, 0)
    parts = list(split_bucket(bucket, 3600))
    entries, copies = located(parts)
    assert len(parts) == 3 and not copies and {entry["region"] for entry in entries} == {bucket.location.region}
    before, engine = cuda.calls, MappedMemory()
    for part, entry in zip(parts, entries, strict=True):
        location = BucketLocation(entry["path"], entry["offset"], entry["region"])
        assert engine.read(location, entry["size"]).tobytes() == part.data.tobytes()
    assert cuda.calls == before + 1 and not cuda.errors_taken


def test_memory_of_a_trainer_that_was_replaced_is_unlocked(cuda, tmp_path):
    trainer, receiver = publisher(tmp_path), SharedMemoryReceiver()
    (handle, *others) = publish(trainer, 0).handles
    list(receiver.receive([handle, *others], 0))
    assert len(cuda.locked) == 6
    with pytest.raises(WeightMismatch, match="cannot open"):
        list(receiver.receive([replace(handle, path="/proc/0/fd/3")], 0))
    assert cuda.unlocked == 3 == len(cuda.locked) and not cuda.errors_taken


def test_a_refusal_is_a_warning_and_the_weights_are_right(cuda, tmp_path, caplog):
    cuda.refuses = True
    trainer = publisher(tmp_path)
    with caplog.at_level(logging.WARNING, "roll.weights.mapped"):
        publication = publish(trainer, 0)
        received = list(SharedMemoryReceiver().receive(publication.handles, 0))
    assert sum("cannot be page-locked" in record.message for record in caplog.records) == 6 == cuda.errors_taken
    assert torch.equal(dict(pair for bucket in received for pair in views(bucket))["b"], weights(0)["b"])


def test_nothing_is_locked_without_cuda(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("CUDA is not used"))
    trainer = publisher(tmp_path)
    publication = publish(trainer, 0)
    assert len(list(SharedMemoryReceiver().receive(publication.handles, 0))) == 3
    lock_pages(np.zeros(10, np.uint8))


def test_received_memory_cannot_be_written_though_cuda_needs_a_writable_mapping(cuda, tmp_path):
    trainer = publisher(tmp_path)
    publication = publish(trainer, 0)
    bucket = next(SharedMemoryReceiver().receive(publication.handles, 0))
    with pytest.raises(ValueError, match="read-only"):
        bucket.data[0] = 1


def test_a_file_that_grew_is_mapped_anew(cuda):
    file = MemoryFile(2 * mmap.PAGESIZE)
    file.data[:] = 7
    memory, place = MappedMemory(), BucketLocation(file.path, mmap.PAGESIZE, (mmap.PAGESIZE, mmap.PAGESIZE))
    assert memory.read(place, 10).tolist() == [7] * 10 and cuda.calls == 1
    with pytest.raises(OSError, match="ends before byte"):
        memory.read(place, 2 * mmap.PAGESIZE)
    with pytest.raises(OSError, match="another file by now"):
        memory.read(place, 10, inode=1)
    assert memory.read(place, 10).tolist() == [7] * 10 and len(cuda.locked) == 1


def test_copies_on_the_host_are_locked(cuda):
    memory = host_memory(1000, pinned=True)
    assert cuda.locked == {memory.data_ptr(): 1000}


def test_only_what_buckets_hold_is_locked_at_either_end(cuda, tmp_path):
    """Buckets are rarely full, and locked pages take memory whether they are written or not."""
    trainer, receiver, sizes = publisher(tmp_path), SharedMemoryReceiver(), set()
    for version, count in enumerate((900, 900, 500, 500, 1500, 1500)):
        tensors = {"a": torch.full((count,), float(version)), "b": torch.ones(7)}
        trainer.gather(version, version % 2, tensors.items(), torch.float32, 2**20)
        publication = trainer.send(version)
        (bucket,) = receiver.receive(publication.handles, version)
        assert {name: tensor_checksum(tensor) for name, tensor in views(bucket)} == publication.checksums
        sizes.add(len(bucket.data))
        assert set(cuda.locked.values()) <= sizes
    assert list(cuda.locked.values()) == [max(sizes)] * 4 and cuda.unlocked == 4 and not cuda.errors_taken


def test_deltas_are_not_locked(cuda, tmp_path):
    """The host alone reads them, and the memory that is kept for them is half a model."""
    spec = TransportSpec("shared_memory", buffers=2, directory=tmp_path, content="delta")
    trainer, receiver = BucketPublisher(spec, rank=0), DeltaReceiver(SharedMemoryReceiver())
    for version in range(4):
        tensors = {"a": torch.arange(900.0)}
        tensors["a"][version] = -1.0
        trainer.gather(version, version % 2, tensors.items(), torch.float32, 4096)
        publication = trainer.send(version)
        (bucket,) = receiver.receive(publication)
        assert torch.equal(dict(views(bucket))["a"], tensors["a"])
    assert publication.delta.since is not None
    # Two buffers of the trainer, and the first of them, which was fetched whole.
    assert list(cuda.locked.values()) == [3600] * 3


class OnDevice(torch.Tensor):
    """A tensor that says that it is on a GPU, and notes the types of what is copied from it."""

    device = torch.device("cuda")  # type: ignore[assignment]
    copied: ClassVar[list[torch.dtype]] = []

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.copy_:
            cls.copied.append(args[1].dtype)
        return super().__torch_function__(func, types, args, kwargs)


def test_weights_of_a_device_are_cast_there():
    """torch would copy them to other memory of the host as they are, and cast them there."""
    tensors = {name: torch.arange(4.0).as_subclass(OnDevice) for name in ("cast", "kept")}
    (bucket,) = pack_buckets(tensors.items(), 4096, float_dtype=torch.bfloat16, uncast=["kept"])
    assert OnDevice.copied == [torch.bfloat16, torch.float32]
    assert [tensor.tolist() for _, tensor in views(bucket)] == [[0, 1, 2, 3]] * 2


def test_copies_on_a_device_are_hashed_in_locked_memory_of_the_host(cuda, monkeypatch):
    """The device is pretended: its memory is the host's, but has handles."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    spec = TransportSpec("cuda_ipc", buffers=1, directory=None, bucket_bytes=4000)
    pushing = PushPublisher(spec, rank=0, host="", export=lambda memory: ("GPU-0", ()))
    for version, extra in enumerate((0, 1500, 0)):
        tensors = weights(version) | {"wide": torch.arange(1000.0 + extra), "bias": torch.ones(3)}
        pushing.gather(version, 0, tensors.items(), torch.bfloat16, 0, uncast=["wide"])
        publication = pushing.send(version)
        assert publication.checksums == {
            name: tensor_checksum(tensor if name == "wide" else tensor.bfloat16()) for name, tensor in tensors.items()
        }
    assert set(cuda.locked.values()) == {10_000} and cuda.unlocked == 1 and not cuda.errors_taken

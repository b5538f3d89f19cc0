"""Each transport between real processes: what is gathered is what arrives, and what must not be read is refused.

The checks of an update run on `hf_infer` and the real worker: a corrupted bucket, a missing tensor, a wrong shape and a
stale version are each caught and named, with the old weights still in use.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.engines.base import GenerateRequest, SamplingParams
from roll.engines.worker import EngineSpec, InferWorker
from roll.runtime.placement import WorkerPlace
from roll.runtime.workers import WorkerIdentity
from roll.weights.buckets import WeightMismatch, manifest, pack_buckets, tensor_checksum, views
from roll.weights.publisher import Publication, WeightsDiffer
from roll.weights.transports import TRANSPORTS, Segment, TransportSpec, WeightSender

pytestmark = pytest.mark.usefixtures("local_ray")

NAMES = sorted(TRANSPORTS)
BUCKET_BYTES = 4096


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(vocab_size=40, eos_token_id=1, pad_token_id=0, **sizes, **heads)).save_pretrained(path)
    return str(path)


def weights_like(model_path: str, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    parameters = Qwen2ForCausalLM.from_pretrained(model_path).named_parameters()
    return {name: parameter.detach() + 0.1 * torch.randn(parameter.shape) for name, parameter in parameters}


class Trainer:
    """The sending half of `TrainWorker`, in this process."""

    def __init__(self, transport: str, directory: Path, buffers: int = 2):
        self.transport = transport
        self.buffers = buffers
        self.sender = TRANSPORTS[transport].sender(TransportSpec(transport, buffers, directory))

    def publish(self, version: int, tensors: dict[str, torch.Tensor], dtype=torch.float32) -> Publication:
        buffer = version % self.buffers
        self.sender.begin(buffer)
        allocate = partial(self.sender.allocate, buffer)
        buckets = list(pack_buckets(tensors.items(), BUCKET_BYTES, float_dtype=dtype, allocate=allocate))
        count, checksums = manifest(buckets)
        handles = self.sender.send(buffer, version, buckets)
        return Publication(version, handles, count, checksums, sum(len(bucket.data) for bucket in buckets))


def received(transport: str, publication: Publication, version: int | None = None) -> dict[str, torch.Tensor]:
    receiver = TRANSPORTS[transport].receiver()
    wanted = publication.version if version is None else version
    return {name: tensor for bucket in receiver.receive(publication.handles, wanted) for name, tensor in views(bucket)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transport", NAMES)
def test_what_arrives_is_what_was_gathered(transport, dtype, tmp_path):
    tensors = {f"t{i}": torch.randn(7, 100 * i) for i in range(8)}
    trainer = Trainer(transport, tmp_path)
    for version in range(5):  # each buffer several times
        changed = {name: tensor + version for name, tensor in tensors.items()}
        publication = trainer.publish(version, changed, dtype)
        got = received(transport, publication)
        assert list(got) == list(tensors)
        assert all(torch.equal(got[name], changed[name].to(dtype)) for name in tensors)
        assert publication.checksums == {name: tensor_checksum(tensor) for name, tensor in got.items()}
        trainer.sender.release(version)


@pytest.mark.parametrize("transport", NAMES)
def test_another_version_than_the_expected_one_is_refused_with_both_numbers(transport, tmp_path):
    trainer = Trainer(transport, tmp_path)
    publication = trainer.publish(3, {"a": torch.ones(4)})
    with pytest.raises(WeightMismatch, match=r"version 3, expected 4"):
        received(transport, publication, version=4)


def test_a_version_that_a_killed_process_left_on_the_disk_is_replaced(tmp_path):
    killed = Trainer("checkpoint", tmp_path)
    killed.publish(6, {"a": torch.ones(4), "b": torch.ones(4)})
    publication = Trainer("checkpoint", tmp_path).publish(6, {"a": torch.zeros(4)})
    assert torch.equal(received("checkpoint", publication)["a"], torch.zeros(4))


def test_memory_of_the_host_is_touched_once():
    memory = WeightSender()
    first, second = memory.allocate(0, 0, 100), memory.allocate(1, 0, 100)
    for size in (100, 10):
        assert np.shares_memory(memory.allocate(0, 0, size), first)
    assert not np.shares_memory(first, second) and len(memory.allocate(1, 0, 101)) >= 101


@pytest.mark.parametrize("transport", ["shared_memory", "checkpoint"])
def test_a_bucket_says_where_other_processes_find_it(transport, tmp_path):
    publication = Trainer(transport, tmp_path).publish(0, {f"t{i}": torch.randn(900) for i in range(5)})
    for bucket in TRANSPORTS[transport].receiver().receive(publication.handles, 0):
        code = f"""
            import mmap
            with open({bucket.location.path!r}, "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
                print(memory[{bucket.location.offset} : {bucket.location.offset + len(bucket.data)}].hex())
        """
        run = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
        assert run.stdout.strip() == bucket.data.tobytes().hex()


def test_memory_that_was_written_again_is_noticed_by_who_comes_late(tmp_path):
    trainer = Trainer("shared_memory", tmp_path)
    late = trainer.publish(0, {"a": torch.ones(4)})
    trainer.publish(2, {"a": torch.zeros(4)})
    with pytest.raises(WeightMismatch, match="holds version 2, expected 0"):
        received("shared_memory", late)
    with pytest.raises(WeightMismatch, match="expected 2"):
        received("shared_memory", late, version=2)  # what is there is laid out in another way, perhaps


@pytest.mark.parametrize("version", range(5))
def test_memory_that_is_being_written_holds_no_version_at_all(tmp_path, version):
    trainer = Trainer("shared_memory", tmp_path)
    publication = trainer.publish(version, {"a": torch.zeros(4)})
    trainer.sender.begin(version % 2)
    with pytest.raises(WeightMismatch, match=f"holds no finished version, expected {version}"):
        received("shared_memory", publication)


def test_memory_that_somebody_else_wrote_to_is_refused(tmp_path):
    publication = Trainer("shared_memory", tmp_path).publish(3, {"a": torch.zeros(4)})
    (handle,) = publication.handles
    with open(handle.path, "r+b") as file:
        file.write(b"other")
    with pytest.raises(WeightMismatch, match="expected 3"):
        received("shared_memory", publication)


def test_a_half_is_mapped_once_until_it_has_grown_and_leaves_one_file_open(tmp_path):
    trainer, receiver = Trainer("shared_memory", tmp_path), TRANSPORTS["shared_memory"].receiver()

    def open_files():
        links = (os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())
        return sum("roll-weights-0" in link for link in links)

    small, large = {"a": torch.zeros(4)}, {"a": torch.zeros(4), "b": torch.ones(100, 100), "c": torch.ones(4)}
    mapped, opened = [], []
    for version, tensors in ((0, small), (2, small), (4, large), (6, large)):
        publication = trainer.publish(version, tensors)
        before = open_files()
        buckets = list(receiver.receive(publication.handles, version))
        opened.append(open_files() - before)
        assert torch.equal(dict(pair for bucket in buckets for pair in views(bucket))["a"], torch.zeros(4))
        mapped.append(buckets[0].data.ctypes.data)
    assert mapped[0] == mapped[1] != mapped[2] == mapped[3]
    assert opened[1] == opened[3] == 0 and opened[0] <= 1 and opened[2] <= 1


def test_memory_of_a_process_that_is_gone_or_another_one_is_refused_with_the_remedy(tmp_path):
    publication = Trainer("shared_memory", tmp_path).publish(0, {"a": torch.ones(4)})
    (handle,) = publication.handles
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    gone.wait()
    with pytest.raises(WeightMismatch, match="cannot open.*weight_update.transport: object_store"):
        received("shared_memory", replace(publication, handles=[replace(handle, path=f"/proc/{gone.pid}/fd/3")]))
    other = os.memfd_create("other")
    end = handle.offset + handle.length
    os.ftruncate(other, end)
    try:
        for wrong in (replace(handle, path=f"/proc/{os.getpid()}/fd/{other}"), replace(handle, length=end + 1)):
            with pytest.raises(WeightMismatch, match="of version 0: .*(is another file by now|ends before byte)"):
                received("shared_memory", replace(publication, handles=[wrong]))
    finally:
        os.close(other)


@pytest.mark.tier("all")
def test_the_memory_of_a_killed_trainer_is_freed_when_the_last_reader_has_left():
    """It has no name that could stay behind, and a reader is not hurt."""
    code = """
        import pickle, sys, torch
        from roll.weights.transports import SharedMemorySender
        from roll.weights.buckets import pack_buckets
        sender = SharedMemorySender(lasting=True)
        sender.begin(0)
        buckets = list(pack_buckets([("a", torch.arange(5.0))], 100, allocate=lambda *at: sender.allocate(0, *at)))
        print(pickle.dumps(sender.send(0, 7, buckets)).hex(), flush=True)
        sys.stdin.read()
    """
    trainer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    handles = pickle.loads(bytes.fromhex(trainer.stdout.readline().decode()))
    (bucket,) = TRANSPORTS["shared_memory"].receiver().receive(handles, 7)
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdin.close()
    trainer.stdout.close()
    assert dict(views(bucket))["a"].tolist() == [0, 1, 2, 3, 4]
    assert not bucket.data.flags.writeable
    inode = str(handles[0].inode)
    assert any(inode in line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    del bucket
    gc.collect()
    assert not any(inode in line.split() for line in Path("/proc/self/maps").read_text().splitlines())


def test_buckets_lie_apart_and_stay_where_they_are_as_a_half_grows():
    segment = Segment("test")
    sizes = [1, 5000, 100_000, 10, 1_000_000]
    extents = [segment.extent(index, size) for index, size in enumerate(sizes)]
    for index, extent in enumerate(extents):
        assert len(extent) == sizes[index] and extent.ctypes.data % 64 == 0
        extent[:] = index
    for index, extent in enumerate(extents):
        assert (extent == index).all()
        assert os.pread(segment.fd, sizes[index], segment.offset(index)) == bytes([index]) * sizes[index]
        assert np.shares_memory(segment.extent(index, sizes[index]), extent)
    with pytest.raises(RuntimeError, match="bucket 0 of 2 bytes does not fit"):
        segment.extent(0, 2)
    with pytest.raises(RuntimeError, match="bucket 9 of 1 bytes does not fit"):
        segment.extent(9, 1)
    os.close(segment.fd)


@pytest.mark.parametrize("buckets", [0, 1, 7, 12, 15])
def test_memory_grows_by_doubling_and_not_before_it_is_full(buckets):
    """Buckets of a page each, behind the page of the stamp."""
    segment = Segment("test")
    for index in range(buckets):
        segment.extent(index, mmap.PAGESIZE if index % 2 else 1)
    pages = segment.size // mmap.PAGESIZE
    assert pages == 1 << buckets.bit_length() == os.fstat(segment.fd).st_size // mmap.PAGESIZE
    os.close(segment.fd)


def test_files_appear_whole_and_go_when_their_version_is_released(tmp_path):
    trainer = Trainer("checkpoint", tmp_path / "weights")
    first = trainer.publish(0, {"a": torch.ones(4)})
    (tmp_path / "weights" / ".version-000001.unfinished").mkdir()  # an earlier attempt was cut off
    trainer.publish(1, {"a": torch.zeros(4)})
    assert sorted(os.listdir(tmp_path / "weights")) == ["version-000000", "version-000001"]
    reader = received("checkpoint", first)
    trainer.sender.release(0)
    trainer.sender.release(0)
    assert os.listdir(tmp_path / "weights") == ["version-000001"]
    assert reader["a"].tolist() == [1, 1, 1, 1]
    with pytest.raises(WeightMismatch, match="version-000000"):
        received("checkpoint", first)


def test_a_file_that_was_cut_off_names_what_is_lost(tmp_path):
    publication = Trainer("checkpoint", tmp_path).publish(0, {"a": torch.ones(4), "b": torch.ones(4)})
    (path,) = publication.handles
    os.truncate(path, os.path.getsize(path) - 8)
    with pytest.raises(WeightMismatch, match="tensor 'b'.*outside its bucket"):
        received("checkpoint", publication)
    os.truncate(path, 20)
    with pytest.raises(WeightMismatch, match="cannot read"):
        received("checkpoint", publication)


def run_engine(model_path: str, transport: str, scenario):
    async def main():
        worker = InferWorker(WorkerIdentity("actor_infer", 0, 1, WorkerPlace(0, "cpu", (0,), 1), None))
        await worker.start(EngineSpec("hf_infer", {}, model_path, "float32", "sdpa", False, 128, transport=transport))
        try:
            return await asyncio.wait_for(scenario(worker), 60)
        finally:
            await worker._strategy.shutdown()

    return asyncio.run(main())


async def completion_of(worker: InferWorker, name: str = "r"):
    request = GenerateRequest(name, np.array([5, 6, 7], dtype=np.int32), SamplingParams(12, ignore_eos=True))
    return await worker._strategy.generate(request)


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("transport", NAMES)
def test_every_transport_gives_the_engine_the_same_bits(model_path, transport, buffers, tmp_path):
    expected = []

    async def scenario(worker, name):
        trainer = Trainer(name, tmp_path, buffers)
        results = []
        for version in range(4):
            publication = trainer.publish(version, weights_like(model_path, version))
            receipt, seconds = await worker.load_weights(publication, BUCKET_BYTES // 2, "keep")
            assert receipt.checksums == publication.checksums
            assert receipt.in_place == (name == "shared_memory" and buffers == 2)
            assert seconds.keys() == {"fetch", "load", "stall"}
            if buffers == 1:
                trainer.sender.begin(0)  # the engine has its own copy
                if name == "shared_memory":
                    trainer.sender.allocate(0, 0, 1)[:] = 255
            completion = await completion_of(worker, f"r{version}")
            assert set(completion.versions) == {version}
            results.append(completion.logprobs.tobytes())
        return results

    got = run_engine(model_path, transport, lambda worker: scenario(worker, transport))
    expected = run_engine(model_path, "object_store", lambda worker: scenario(worker, "object_store"))
    assert got == expected
    assert len(set(got)) == 4


def test_engines_of_one_host_share_one_copy(model_path, tmp_path):
    async def scenario(worker):
        trainer = Trainer("shared_memory", tmp_path)
        publication = trainer.publish(0, weights_like(model_path, 0))
        await worker.load_weights(publication, BUCKET_BYTES // 2, "keep")
        parameters = worker._strategy._live_thread().engine._model.parameters()
        maps = Path("/proc/self/maps").read_text().splitlines()
        ranges = [line.split()[0].split("-") for line in maps if "roll-weights-0" in line and " r--s " in line]
        for parameter in parameters:
            assert any(int(start, 16) <= parameter.data_ptr() < int(end, 16) for start, end in ranges)
        # Sleeping and waking leave them where they are.
        await worker.sleep()
        await worker.wake()
        return await completion_of(worker)

    assert run_engine(model_path, "shared_memory", scenario).finish_reason == "length"


FAULTS = {
    "corrupted bucket": (WeightsDiffer, "content of 'model.norm.weight' differs"),
    "missing tensor": (WeightMismatch, "'model.norm.weight' is missing"),
    "wrong shape": (WeightMismatch, r"'model.norm.weight' has shape \(15,\)"),
    "stale version": (WeightMismatch, "version 4, expected 2"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("transport", NAMES)
def test_a_bad_update_is_caught_and_named_before_a_request_sees_it(model_path, transport, fault, tmp_path):
    name = "model.norm.weight"
    weights = weights_like(model_path, 2)
    if fault == "missing tensor":
        del weights[name]
    if fault == "wrong shape":
        weights[name] = weights[name][:15]

    async def scenario(worker):
        trainer = Trainer(transport, tmp_path)
        await worker.load_weights(trainer.publish(1, weights_like(model_path, 1)), BUCKET_BYTES // 2, "keep")
        before = await completion_of(worker)
        publication = trainer.publish(2, weights)
        if fault == "corrupted bucket":
            corrupt(transport, trainer, publication, name)
        if fault == "stale version":
            publication = replace(trainer.publish(4, weights), version=2)
        error, words = FAULTS[fault]
        with pytest.raises(error, match=words):
            await worker.load_weights(publication, BUCKET_BYTES // 2, "keep")
        after = await completion_of(worker)
        assert set(after.versions) == {1}
        assert after.logprobs.tobytes() == before.logprobs.tobytes()

    run_engine(model_path, transport, scenario)


def corrupt(transport: str, trainer: Trainer, publication: Publication, name: str) -> None:
    """Change one bit of a tensor on its way."""
    for index, bucket in enumerate(TRANSPORTS[transport].receiver().receive(publication.handles, 2)):
        offsets = {entry[0]: entry[3] for entry in bucket.tensors}
        if name not in offsets:
            continue
        if transport == "object_store":
            data = bucket.data.copy()
            data[offsets[name]] ^= 1
            stored = replace(publication.handles[index], reference=ray.put(replace(bucket, data=data)))
            publication.handles[index] = stored
        else:
            with open(bucket.location.path, "r+b") as file:
                file.seek(bucket.location.offset + offsets[name])
                file.write(bytes([int(bucket.data[offsets[name]]) ^ 1]))


def test_a_failed_update_can_be_followed_by_a_good_one(model_path, tmp_path):
    async def scenario(worker):
        trainer = Trainer("shared_memory", tmp_path)
        bad = trainer.publish(0, weights_like(model_path, 0))
        bad.checksums["model.norm.weight"] ^= 1
        with pytest.raises(WeightsDiffer):
            await worker.load_weights(bad, BUCKET_BYTES // 2, "keep")
        await worker.load_weights(trainer.publish(1, weights_like(model_path, 1)), BUCKET_BYTES // 2, "keep")
        return await completion_of(worker)

    assert set(run_engine(model_path, "shared_memory", scenario).versions) == {1}

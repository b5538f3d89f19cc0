"""Deltas of weights: bit for bit what whole publications bring, or fetched whole; never used after half a change."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.engines.hf.weights import ModelEngine
from roll.rollout.clock import run_virtual
from roll.weights.buckets import WeightBucket, WeightMismatch, tensor_checksum, views
from roll.weights.delta import BLOCK, DeltaReceiver, apply, encode
from roll.weights.publisher import BucketPublisher, Publication
from roll.weights.transports import TRANSPORTS, TransportSpec
from tests.engines.test_one_checksum_per_host import MappedPool
from tests.runtime.local_engines import LOAD_SECONDS, START_SECONDS

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.bool)


class Trainer:
    """A trainer's first rank that publishes deltas, with two buffers."""

    def __init__(self, transport: str = "shared_memory", full_every: int = 0, bucket_bytes: int = 4096, corrupted=()):
        spec = TransportSpec(
            transport,
            2,
            Path("unused"),
            content="delta",
            full_every=full_every,
            corrupted_versions=frozenset(corrupted),
        )
        self.publisher, self.bucket_bytes = BucketPublisher(spec, 0), bucket_bytes

    def publish(self, version: int, tensors, dtype=torch.bfloat16, buffer: int | None = None) -> Publication:
        buffer = version % 2 if buffer is None else buffer
        self.publisher.gather(version, buffer, iter(tensors.items()), dtype, self.bucket_bytes)
        return self.publisher.send(version)


def receiver(transport: str = "shared_memory") -> DeltaReceiver:
    return DeltaReceiver(TRANSPORTS[transport].receiver())


def tensors_of(buckets) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for bucket in buckets for name, tensor in views(bucket)}


def same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return mine.dtype == other.dtype and mine.shape == other.shape and tensor_checksum(mine) == tensor_checksum(other)


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    shapes = {"embed": (40, 16), "norm": (16,), "scale": (), "none": (0, 3), "layer.weight": (64, 32), "head": (3000,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def trained(tensors: dict[str, torch.Tensor], share: float = 0.02) -> dict[str, torch.Tensor]:
    """Return the tensors with some of their numbers moved a little, and some that no arithmetic keeps."""
    moved = {name: each + 0.01 * each * (torch.rand(each.shape) < share) for name, each in tensors.items()}
    moved["head"][:3] = torch.tensor([0x7FC12345, 0xFFA00001, 0x80000000], dtype=torch.uint32).view(torch.float32)
    return moved


@settings(deadline=None, max_examples=60)
@given(
    dtype=st.sampled_from(DTYPES),
    count=st.sampled_from([0, 1, 2, 31, 257, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 77]),
    share=st.sampled_from([0.0, 1e-4, 0.01, 0.05, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_delta_turns_any_bytes_into_any_others(dtype, count, share, seed):
    dice = np.random.default_rng(seed)
    size = count * dtype.itemsize
    old = dice.integers(0, 256, size, dtype=np.uint8)
    new = np.where(dice.random(size) < share, dice.integers(0, 256, size, dtype=np.uint8), old)
    layout = [("a", str(dtype).removeprefix("torch."), (count,), 0)]
    before, after = WeightBucket(layout, old.copy()), WeightBucket(layout, new)
    made = np.concatenate([np.empty(0, np.uint8), *encode(before, after)])
    data = old.copy()
    apply(data, before, made)
    assert (data == new).all() and (before.data == old).all()
    planes = dtype.itemsize * -(-count // BLOCK)
    assert len(made) <= size + 4 * planes
    changed = int((old != new).sum())
    assert len(made) <= 3 * changed + 4 * planes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("transport", ["shared_memory", pytest.param("object_store", marks=pytest.mark.tier("all"))])
def test_every_version_is_the_whole_one_bit_for_bit_in_a_part_of_its_bytes(transport, dtype, request):
    if transport == "object_store":
        request.getfixturevalue("local_ray")
    trainer, engine, tensors = Trainer(transport), receiver(transport), model()
    for version in range(7):
        publication = trainer.publish(version, tensors, dtype)
        buckets = list(engine.receive(publication))
        whole = tensors_of(
            bucket
            for handle in publication.handles
            for bucket in TRANSPORTS[transport].receiver().receive([handle], version)
        )
        got = tensors_of(buckets)
        assert list(got) == list(whole) == list(tensors)
        assert all(same_bits(got[name], whole[name]) for name in whole) and not engine.healed
        size = sum(each.nbytes for each in whole.values())
        if version == 0:
            assert publication.total_bytes >= size and not any(bucket.verified for bucket in buckets)
        else:
            assert publication.total_bytes < 0.3 * size
            assert {name: each for bucket in buckets for name, each in bucket.verified.items()} == publication.checksums
        tensors = trained(tensors)
        trainer.publisher.release(version)
    assert torch.isnan(got["head"][:2]).all() and got["head"][2].signbit()


def test_any_wrong_byte_of_a_delta_is_found_and_its_bucket_fetched_whole():
    trainer, tensors = Trainer(), model()
    first, second = trainer.publish(0, tensors), trainer.publish(1, trained(tensors))
    (handle,) = second.delta.handles
    (made,) = TRANSPORTS["shared_memory"].receiver().receive([handle], 1)
    healed, names, places = 0, set(), range(0, len(made.data), 7)
    for place in places:
        engine = receiver()
        list(engine.receive(first))
        with open(handle.path, "r+b") as file:
            file.seek(handle.offset + place)
            file.write(bytes([made.data[place] ^ 0x55]))
            file.flush()
            got = tensors_of(engine.receive(second))
            file.seek(handle.offset + place)
            file.write(bytes([made.data[place] ^ 0x55]))
        assert {name: tensor_checksum(each) for name, each in got.items()} == second.checksums
        healed += bool(engine.healed)
        names |= set(engine.healed)
    assert names >= {"embed", "layer.weight", "head"}
    assert healed > 0.8 * len(places), "all but those after the last change"


def test_a_delta_that_is_cut_off_or_gone_is_fetched_whole():
    trainer, tensors, engine = Trainer(), model(), receiver()
    list(engine.receive(trainer.publish(0, tensors)))
    second = trainer.publish(1, trained(tensors))
    (handle,) = second.delta.handles
    gone = replace(second, delta=replace(second.delta, handles=[replace(handle, path="/proc/self/fd/999")]))
    got = tensors_of(engine.receive(gone))
    assert {name: tensor_checksum(each) for name, each in got.items()} == second.checksums
    assert {"embed", "head"} <= set(engine.healed)
    layout = WeightBucket([("a", "bfloat16", (3000,), 0)], np.zeros(6000, np.uint8))
    new = replace(layout, data=np.random.default_rng(0).integers(0, 9, 6000, dtype=np.uint8))
    made = np.concatenate(list(encode(layout, new)))
    for size in range(0, len(made), 250):
        with pytest.raises((ValueError, IndexError)):
            apply(layout.data.copy(), layout, made[: min(size, len(made) - 1)])
    with pytest.raises(ValueError, match="up to byte"):
        apply(layout.data.copy(), layout, np.append(made, np.uint8(0)))


def is_delta(publication: Publication) -> bool:
    return publication.delta is not None and publication.delta.since is not None


def test_whole_weights_come_first_and_every_n_and_where_a_delta_saves_little():
    trainer, tensors = Trainer(full_every=3), model()
    versions = []
    for version in range(8):
        versions.append(trainer.publish(version, tensors))
        tensors = trained(tensors)
    assert [is_delta(each) for each in versions] == [False, True, True, False, True, True, False, True]
    assert not is_delta(trainer.publish(8, model(1))), "nearly every number is another one"
    assert is_delta(trainer.publish(9, trained(model(1))))
    assert not is_delta(trainer.publish(10, {**model(1), "more": torch.ones(2)})), "another model"


def test_nothing_is_compared_with_a_buffer_that_was_written_over():
    trainer, tensors = Trainer(), model()
    trainer.publish(0, tensors, buffer=0)
    assert not is_delta(trainer.publish(1, trained(tensors), buffer=0))
    assert is_delta(trainer.publish(2, trained(tensors), buffer=1))


def test_a_new_replica_and_one_that_missed_a_version_fetch_whole_and_heal_nothing():
    trainer, tensors, engine = Trainer(), model(), receiver()
    list(engine.receive(trainer.publish(0, tensors)))
    trainer.publish(1, trained(tensors))
    late = trainer.publish(2, trained(trained(tensors)))
    for each in (engine, receiver()):
        got = tensors_of(each.receive(late))
        assert {name: tensor_checksum(tensor) for name, tensor in got.items()} == late.checksums and not each.healed
    last = trainer.publish(3, tensors)
    assert (
        is_delta(last)
        and {name: tensor_checksum(t) for name, t in tensors_of(engine.receive(last)).items()} == last.checksums
    )


def test_a_trainer_that_begins_again_is_not_taken_for_the_one_before():
    """Version 1 comes twice, with other weights; the numbers say nothing."""
    tensors, engine = model(), receiver()
    first = Trainer()
    list(engine.receive(first.publish(0, tensors)))
    list(engine.receive(first.publish(1, trained(tensors))))
    again = Trainer()
    again.publish(0, tensors)
    again.publish(1, trained(tensors, 0.3))
    publication = again.publish(2, tensors)
    assert is_delta(publication)
    got = tensors_of(engine.receive(publication))
    assert {name: tensor_checksum(tensor) for name, tensor in got.items()} == publication.checksums
    assert not engine.healed, "the delta was not tried"


def test_a_base_that_was_left_in_the_middle_of_a_change_is_never_used_again():
    trainer, tensors, engine = Trainer(), model(), receiver()
    list(engine.receive(trainer.publish(0, tensors)))
    second = trainer.publish(1, trained(tensors))
    next(engine.receive(second))  # the engine failed at its first bucket
    fetched = []
    within = engine._receiver
    engine._receiver = type("Counted", (), {"receive": lambda _, *a: fetched.append(a) or within.receive(*a)})()
    got = tensors_of(engine.receive(second))
    assert {name: tensor_checksum(tensor) for name, tensor in got.items()} == second.checksums
    assert len(fetched) == len(second.handles) and not engine.healed


def test_an_engine_computes_with_its_own_version_while_the_next_one_is_rebuilt():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=50, num_hidden_layers=1, **sizes)).requires_grad_(False)
    tensors = {name: each.clone() for name, each in model.named_parameters()}
    engine, arriving, trainer = ModelEngine(model), receiver(), Trainer()
    for version in range(3):
        publication = trainer.publish(version, tensors, torch.float32)
        assert is_delta(publication) == (version > 0)
        before = {name: tensor_checksum(each) for name, each in model.named_parameters()}
        staged = engine.stage_weights(arriving.receive(publication), version)
        assert {name: tensor_checksum(each) for name, each in model.named_parameters()} == before
        engine.load_weights(staged)
        held = {name: tensor_checksum(each) for name, each in model.named_parameters()}
        assert held == publication.checksums and (version == 0 or held != before)
        tensors = {name: each * (1 + (torch.rand(each.shape) < 0.02)) for name, each in tensors.items()}


def test_replicas_heal_are_counted_and_named_and_a_new_process_begins_with_whole_weights(monkeypatch):
    """Damage in the delta alone: no replica stops, and all have what was published."""

    async def scenario():
        pool = MappedPool(monkeypatch, ("a", "a", "b"))
        monkeypatch.setitem(TRANSPORTS, "nothing", TRANSPORTS["shared_memory"])
        async with pool as local:
            trainer, tensors, counts = Trainer(corrupted=[2]), model(), []
            for version in range(1, 5):
                publication = trainer.publish(version, tensors)
                await local.pool.buffers.acquire(version)
                counts.append((await local.pool.publish(publication)).healed)
                assert all(each.engine.held.checksums == publication.checksums for each in local.handles[-3:])
                tensors = trained(tensors)
                if version == 3:
                    local.handles[0].kill()
                    await asyncio.sleep(START_SECONDS + LOAD_SECONDS + 1)
            assert counts == [0, 3, 0, 0]
            assert len(local.handles) == 4 and [each.engine.version for each in local.handles[1:]] == [4, 4, 4]
            said = [event for event in local.events if "fetched whole" in event]
            assert len(said) == 3 and all("version 2: the delta of 'embed'" in event for event in said)

    run_virtual(scenario())


def test_a_replica_that_kept_a_version_and_heals_as_it_is_let_go_is_counted(monkeypatch):
    async def scenario():
        pool = MappedPool(monkeypatch, ("a", "a"), pinned_replicas=1)
        monkeypatch.setitem(TRANSPORTS, "nothing", TRANSPORTS["shared_memory"])
        async with pool as local, asyncio.timeout(500):
            trainer, tensors, counts = Trainer(corrupted=[2]), model(), []
            for version in range(1, 4):
                buffer = await local.pool.buffers.acquire(version)
                counts.append((await local.pool.publish(trainer.publish(version, tensors, buffer=buffer))).healed)
                tensors = trained(tensors)
                if version == 1:
                    local.pool.pin()
                if version == 2:
                    await local.pool.unpin()
            assert counts == [0, 1, 1] and [each.engine.version for each in local.handles] == [3, 3]

    run_virtual(scenario())


@pytest.mark.tier("all")
def test_a_trainer_that_is_killed_while_a_delta_is_fetched_leaves_no_half_of_it():
    code = """
        import pickle, sys, torch
        from tests.weights.test_delta import Trainer, model, trained
        trainer, tensors = Trainer(), model()
        for version in range(2):
            publication = trainer.publish(version, tensors)
            sys.stdout.buffer.write(pickle.dumps(publication).hex().encode() + b"\\n")
            sys.stdout.flush()
            tensors = trained(tensors)
        sys.stdin.read()
    """
    killed = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    first, second = (pickle.loads(bytes.fromhex(killed.stdout.readline().decode())) for _ in range(2))
    engine = DeltaReceiver(TRANSPORTS["shared_memory"].receiver())
    list(engine.receive(first))
    arriving = engine.receive(second)
    next(arriving)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    killed.stdin.close()
    killed.stdout.close()
    stranger = receiver()
    for each in (engine, stranger):
        with pytest.raises(WeightMismatch, match="cannot open"):
            list(each.receive(second))
    # The next trainer resumes from a checkpoint.
    trainer, tensors = Trainer(), model(3)
    for version in range(3):
        publication = trainer.publish(version, tensors)
        for each in (engine, stranger):
            got = tensors_of(each.receive(publication))
            assert {name: tensor_checksum(tensor) for name, tensor in got.items()} == publication.checksums
        tensors = trained(tensors)

"""Weights pushed through vLLM's own transfer interface: everything but the GPUs. The loop of calls is the library's
(trainer's engine, client, worker's engine); only the bytes take mapped memory instead of NCCL or CUDA IPC."""

from __future__ import annotations

import pytest
import torch
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, VLLMWeightSyncClient
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from roll.distributed.publishers import PushPublisher
from roll.distributed.transports.engine_push import DeviceHalves, PushTarget, RayEngineCalls, WeightPusher, half_source
from roll.distributed.weights import AttestationError, attest
from roll.strategies.infer.base import WeightMismatch
from roll.strategies.infer.vllm_publication import bucket_info, locate
from roll.strategies.weights import pack_buckets, tensor_checksum
from tests.strategies.infer.vllm_helpers import assert_close, make_model, request


class MappedTransfer(TrainerWeightTransferEngine):
    """The trainer's end of a transfer, through mapped memory."""

    closed = 0

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self):
        assert [(meta.name, meta.shape) for meta in self.source.metadata()] == [
            (name, tuple(tensor.shape)) for name, tensor in self.source
        ]
        buckets, self.memory = locate(list(pack_buckets(self.source, 100_000)))
        self.client.start_weight_update()
        for bucket in buckets:
            self.client.update_weights(bucket_info(bucket))
        self.client.finish_weight_update()

    def shutdown(self):
        self.closed += 1


class LocalCalls(RayEngineCalls):
    """The calls without an actor between."""

    def __init__(self, engine):
        self.engine = engine

    def _call(self, step, payload):
        self.engine.run(self.engine.strategy.transfer_step, step, payload)


def connect_to(engine):
    def connect(init_info, *, client, source):
        assert isinstance(client, VLLMWeightSyncClient)
        return MappedTransfer.trainer_init(init_info, client=LocalCalls(engine), source=source)

    return connect


def publisher_to(engine) -> PushPublisher:
    return PushPublisher(WeightPusher("nccl", 0, "127.0.0.1", 1 << 20, 10.0, connect_to(engine)), 0, all_ranks=False)


def push(engine, publisher, version):
    """What the pool and the engine's worker do for one replica."""
    engine.run(engine.strategy.pause, "keep")
    publisher.push(version, PushTarget("actor_infer/0", "this process", 1))
    publication = publisher.send(version)
    try:
        receipt = engine.run(engine.strategy.weights_pushed, version, publication.layout)
        attest("actor_infer/0", publication, receipt)
    finally:
        engine.run(engine.strategy.resume)
        engine.version = max(engine.version, version)
    return receipt


def test_pushed_weights_are_held_attested_and_sampled_from(published):
    publisher = publisher_to(published)
    for seed in (1, 2):
        version, model = published.version + 1, make_model(seed)
        publisher.gather(version, seed % 2, model.named_parameters(), torch.float32, 1 << 20)
        receipt = push(published, publisher, version)
        assert receipt.version == version
        read_back = {name: checksum for name, checksum in receipt.checksums.items() if checksum is not None}
        assert read_back and set(receipt.checksums) == {name for name, _ in model.named_parameters()}
        assert all(tensor_checksum(dict(model.named_parameters())[name]) == read_back[name] for name in read_back)
        completion = published.run(published.strategy.generate, request("a", 20, ignore_eos=True))
        assert set(completion.versions) == {version}
        tokens = torch.tensor([[5, 6, 7, *completion.token_ids.tolist()]])
        expected = torch.log_softmax(model(tokens).logits[0, 2:-1].float(), -1).gather(1, tokens[0, 3:, None])[:, 0]
        assert_close(completion.logprobs, expected.detach().numpy())


def test_an_engine_that_holds_something_else_than_was_pushed_is_named_with_the_tensor(published):
    publisher = publisher_to(published)
    version, model = published.version + 1, make_model(3)
    publisher.gather(version, 0, model.named_parameters(), torch.float32, 1 << 20)
    published.run(published.strategy.pause, "keep")
    publisher.push(version, PushTarget("actor_infer/0", "this process", 1))
    publisher._pusher.halves.tensors(0)["model.norm.weight"][3] += 1.0
    publication = publisher.send(version)
    receipt = published.run(published.strategy.weights_pushed, version, publication.layout)
    published.run(published.strategy.resume)
    published.version = version
    with pytest.raises(AttestationError, match=r"model\.norm\.weight"):
        attest("actor_infer/0", publication, receipt)


def test_a_push_that_leaves_a_tensor_out_is_refused_by_name(published):
    layout = {name: ("float32", tuple(tensor.shape)) for name, tensor in make_model().named_parameters()}
    del layout["model.layers.2.mlp.down_proj.weight"]
    with pytest.raises(WeightMismatch, match=r"model\.layers\.2\.mlp\.down_proj\.weight.*missing"):
        published.run(published.strategy.weights_pushed, published.version, layout)


def test_halves_are_cast_kept_apart_and_written_in_place_again():
    halves = DeviceHalves()
    halves.gather(0, [("a", torch.full((3,), 1.5)), ("n", torch.tensor([7]))], torch.bfloat16)
    halves.gather(1, [("a", torch.full((3,), 2.5)), ("n", torch.tensor([8]))], torch.bfloat16)
    place = halves.tensors(0)["a"].data_ptr()
    assert halves.layout(0) == {"a": ("bfloat16", (3,)), "n": ("int64", (1,))}
    halves.gather(0, [("a", torch.full((3,), 3.5)), ("n", torch.tensor([9]))], torch.bfloat16)
    assert halves.tensors(0)["a"].data_ptr() == place
    assert [halves.tensors(half)["a"][0].item() for half in (0, 1)] == [3.5, 2.5]
    source = half_source(halves)
    source.half = 1
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == [
        ("a", torch.bfloat16, (3,)),
        ("n", torch.int64, (1,)),
    ]
    assert [name for name, _ in source] == ["a", "n"] == [name for name, _ in source]
    with pytest.raises(ValueError, match="'a' comes twice"):
        halves.gather(0, [("a", torch.zeros(1)), ("a", torch.zeros(1))], torch.float32)


class Recorder(TrainerWeightTransferEngine):
    """Notes how it was made and what was asked of it."""

    made: list = []

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine.init_info, engine.sent, engine.closed, engine.broken = init_info, 0, False, False
        cls.made.append(engine)
        return engine

    def send_weights(self):
        if self.broken:
            raise OSError("the peer is gone")
        self.sent += 1

    def shutdown(self):
        self.closed = True


@pytest.fixture
def recorder():
    Recorder.made = []
    return Recorder


def test_each_engine_process_has_one_connection_and_a_new_process_a_new_one(recorder):
    pusher = WeightPusher("nccl", 0, "10.0.0.1", 4096, 10.0, recorder.trainer_init)
    pusher.halves.gather(0, [("a", torch.zeros(1))], torch.float32)
    for actor in ("first", "first", "second"):
        pusher.push(0, PushTarget("actor_infer/0", actor, 4))
    pusher.push(0, PushTarget("actor_infer/1", "other", 4))
    first, second, other = recorder.made
    assert (first.sent, first.closed) == (2, True)
    assert (second.sent, second.closed, other.sent) == (1, False, 1)
    info = second.init_info
    assert isinstance(info, NCCLTrainerInitInfo) and info.is_sender
    assert (info.master_address, info.world_size, info.packed_buffer_size_bytes) == ("10.0.0.1", 5, 4096)
    second.broken = True
    with pytest.raises(OSError):
        pusher.push(0, PushTarget("actor_infer/0", "second", 4))
    assert second.closed
    pusher.push(0, PushTarget("actor_infer/0", "second", 4))
    assert recorder.made[-1].sent == 1


def test_shared_devices_use_cuda_ipc_on_every_rank(recorder):
    for rank in (0, 1):
        pusher = WeightPusher("cuda_ipc", rank, "10.0.0.1", 4096, 10.0, recorder.trainer_init)
        publisher = PushPublisher(pusher, rank, all_ranks=True)
        publisher.gather(3, 1, [("a", torch.ones(2))], torch.float32, 4096)
        publisher.push(3, PushTarget("actor_infer/0", "actor", 1))
        engine = recorder.made[-1]
        assert isinstance(engine.init_info, IPCTrainerInitInfo) and engine.init_info.packed
        assert engine.is_sender == (rank == 0)
        assert [tensor.tolist() for _, tensor in engine.source] == [[1.0, 1.0]]


def test_other_ranks_of_an_nccl_push_keep_no_copy_but_draw_every_weight(recorder):
    drawn = []

    def weights():
        for name in ("a", "b"):
            drawn.append(name)
            yield name, torch.zeros(2)

    publisher = PushPublisher(WeightPusher("nccl", 1, "h", 4096, 10.0, recorder.trainer_init), 1, all_ranks=False)
    publisher.gather(1, 0, weights(), torch.float32, 4096)
    publisher.push(1, PushTarget("actor_infer/0", "actor", 1))
    assert drawn == ["a", "b"]
    assert list(recorder.made[-1].source) == []


def test_engine_calls_travel_as_the_workers_method_with_a_deadline(monkeypatch):
    """The client's four calls, one after the other, on a Ray actor."""
    import ray

    seen = []

    class Method:
        def remote(self, *args):
            seen.append(args)
            return "ref"

    class Actor:
        invoke = Method()

    monkeypatch.setattr(ray, "get", lambda ref, timeout: seen.append((ref, timeout)))
    calls = RayEngineCalls(Actor(), 9.0)
    calls.init_weight_transfer_engine({"packed": True})
    calls.start_weight_update()
    calls.update_weights({"names": ["a"]})
    calls.finish_weight_update()
    asked = [args for args in seen if args != ("ref", 9.0)]
    assert asked == [
        ("transfer_step", "init", {"packed": True}),
        ("transfer_step", "start", None),
        ("transfer_step", "update", {"names": ["a"]}),
        ("transfer_step", "finish", None),
    ]
    assert len(seen) == 8


def test_an_unknown_step_of_a_transfer_is_refused(published):
    with pytest.raises(ValueError, match="one of init, start, update, finish"):
        published.run(published.strategy.transfer_step, "restart", None)

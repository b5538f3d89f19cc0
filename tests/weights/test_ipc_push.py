"""A push by CUDA IPC without GPUs: what a rank keeps and offers, what an engine is told, and that vLLM's own receiver
finds every tensor in it. Only opening memory of another process is pretended."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from roll.weights import publisher
from roll.weights.publisher import IpcConnection, PushPublisher, PushTarget, cast, packed
from roll.weights.transports import TransportSpec

FLOATS = {"a": (7, 3), "bias": (5,), "b": (300,)}
UNCAST = {"bias"}
CHUNK_BYTES = 128


def weights(seed: int = 0):
    torch.manual_seed(seed)
    return [*((name, torch.randn(shape)) for name, shape in FLOATS.items()), ("n", torch.tensor([seed, 2, 3]))]


class Memories:
    """Devices whose memory any process can open."""

    def __init__(self) -> None:
        self.exported: list[tuple[str, torch.Tensor]] = []

    def allocate(self, size, device):
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, self.export_from("gpu")(memory)

    def export_from(self, device: str):
        def export(memory):
            self.exported.append((device, memory))
            return device, (None, None, None, None, None, None, 0, len(self.exported) - 1)

        return export


class Engine:
    """Notes calls; fails at the one that it is told."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.calls: list[tuple] = []
        self.fails_at = fails_at

    def __getattr__(self, name):
        def call(*args):
            self.calls.append((name, *args))
            if len(self.calls) == self.fails_at:
                raise OSError("the engine died")

        return call


def rank(memories: Memories, number: int) -> PushPublisher:
    spec = TransportSpec("cuda_ipc", 1, Path("unused"), CHUNK_BYTES, 10.0)
    return PushPublisher(spec, number, "here", export=memories.export_from(f"gpu-{number}"))


@pytest.fixture
def ranks():
    memories = Memories()
    both = [rank(memories, number) for number in (0, 1)]
    for each in both:
        each.gather(1, 0, weights(), torch.bfloat16, 1, UNCAST)
    return memories, both


def test_chunks_hold_every_tensor_one_dtype_each_and_no_more_than_their_size():
    memories = Memories()
    chunks = packed(cast(weights(), torch.bfloat16, UNCAST), CHUNK_BYTES, [], memories.allocate)
    assert [list(chunk.tensors) for chunk in chunks] == [["a"], ["bias"], ["b"], ["n"]]
    assert [len(chunk.memory) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, 600, CHUNK_BYTES]
    for chunk in chunks:
        position = 0
        for tensor in chunk.tensors.values():
            assert tensor.data_ptr() == chunk.memory.data_ptr() + position
            position += tensor.nbytes
    small = [(str(number), torch.full((10,), float(number))) for number in range(8)]
    chunks = packed(cast(small, torch.float32), CHUNK_BYTES, [], memories.allocate)
    assert [list(chunk.tensors) for chunk in chunks] == [["0", "1", "2"], ["3", "4", "5"], ["6", "7"]]


def test_memory_is_offered_once_and_written_over(ranks):
    memories, (first, _) = ranks
    before, offered = list(memories.exported), first.offer(1)
    first.gather(2, 0, weights(1), torch.bfloat16, 1, UNCAST)
    assert memories.exported == before and first.offer(2) == offered
    assert torch.equal(first.copies[0]["b"], weights(1)[2][1].bfloat16())
    with pytest.raises(KeyError):
        first.offer(1)


def test_an_engine_is_told_where_each_devices_chunks_are(ranks):
    _, (first, second) = ranks
    engine = Engine()
    first._engines["e"] = ("actor", IpcConnection(engine))
    first.push(1, PushTarget("e", "actor", 2), [first.offer(1), second.offer(1)])
    first.push(1, PushTarget("e", "actor", 2), [first.offer(1), second.offer(1)])
    names = [name for name, *_ in engine.calls]
    update = ["start_weight_update", *["update_weights"] * 4, "finish_weight_update"]
    assert names == ["init_weight_transfer_engine", *update, *update]
    chunks = [call[1] for call in engine.calls if call[0] == "update_weights"][:4]
    assert [chunk["names"] for chunk in chunks] == [["a"], ["bias"], ["b"], ["n"]]
    assert all(chunk["ipc_handles"].keys() == {"gpu-0", "gpu-1"} for chunk in chunks)
    calls = len(engine.calls)
    with pytest.raises(ValueError, match="rank 1 offers 3 chunks"):
        first.push(1, PushTarget("e", "actor", 2), [first.offer(1), second.offer(1)[:-1]])
    assert len(engine.calls) == calls, "nothing of the update has begun"


def test_a_large_model_takes_little_more_than_its_bytes():
    """Two of its matrices do not fit into what one of them leaves of 256 MiB."""
    hidden, inner, layers = 3584, 18944, 28
    shapes = [(152064, hidden)] * 2 + [(inner, hidden), (inner, hidden), (hidden, inner), (hidden, hidden)] * layers
    tensors = [(str(number), torch.empty(shape, device="meta")) for number, shape in enumerate(shapes)]

    def allocate(size, device):
        return torch.empty(size, dtype=torch.uint8, device=device), None

    chunks = packed(cast(tensors, torch.bfloat16), publisher.CHUNK_BYTES, [], allocate)
    held, needed = sum(len(chunk.memory) for chunk in chunks), sum(2 * tensor.numel() for _, tensor in tensors)
    assert needed <= held < 1.05 * needed


@pytest.mark.parametrize("fails_at", [2, 3, 5, 7])
def test_an_engine_that_dies_in_a_push_leaves_no_rank_waiting(ranks, monkeypatch, fails_at):
    """No collective is called, so there is nothing that another rank could wait in."""
    _, (first, second) = ranks

    def collective(*_, **__):
        raise AssertionError("ranks that train would meet here")

    for name in ("all_gather_object", "barrier", "all_gather", "broadcast", "all_reduce"):
        monkeypatch.setattr(torch.distributed, name, collective)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda *_: 2)
    first._engines["e"] = ("actor", IpcConnection(Engine(fails_at)))
    with pytest.raises(OSError, match="the engine died"):
        first.push(1, PushTarget("e", "actor", 1), [first.offer(1), second.offer(1)])
    assert not first._engines, "the process that takes its place gets a connection of its own"


@pytest.mark.tier("all")
@pytest.mark.needs("vllm")
@pytest.mark.parametrize("device", [0, 1])
def test_vllms_own_receiver_finds_every_tensor(ranks, monkeypatch, device):
    from vllm.distributed.weight_transfer import ipc_engine, packed_tensor

    memories, (first, second) = ranks
    opened = []

    def rebuild(*arguments):
        assert arguments[6] == device
        owner, memory = memories.exported[arguments[7]]
        assert owner == f"gpu-{device}", "an engine opens memory of its own device only"
        opened.append(memory)
        return memory

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=f"gpu-{device}"))
    monkeypatch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", rebuild)
    loaded = {}
    receiver = object.__new__(ipc_engine.IPCWeightTransferEngine)
    receiver.device = SimpleNamespace(index=device)
    receiver.model = SimpleNamespace(load_weights=lambda tensors: loaded.update(tensors))
    receiver._packed_importer = packed_tensor.PackedBufferImporter()
    client = SimpleNamespace(
        init_weight_transfer_engine=lambda info: receiver.init_transfer_engine(receiver.init_info_cls(**info)),
        start_weight_update=lambda: None,
        update_weights=lambda info: receiver.receive_weights(receiver.update_info_cls(**info)),
        finish_weight_update=lambda: receiver._packed_importer.close(),
    )
    IpcConnection(client).send(first._chunks[0], [first.offer(1), second.offer(1)])
    expected = dict(cast(weights(), torch.bfloat16, UNCAST))
    assert loaded.keys() == expected.keys() and len(opened) == 4
    for name, tensor in expected.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)

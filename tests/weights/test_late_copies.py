"""Copies that do not block, on a device that makes them as late as it may: nothing reads what they write, and nothing
writes over what they read, before they are waited for.

The device is pretended: its copies are queued, and what they are to write holds other bytes until then. Our code has no
streams of its own, so there is one queue.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import roll
from roll.weights import publisher as publishing
from roll.weights.buckets import manifest, pack_buckets, tensor_checksum
from roll.weights.publisher import PushPublisher, PushTarget
from roll.weights.transports import TransportSpec

aten = torch.ops.aten
UNWRITTEN = 0xA5


class LateDevice(TorchDispatchMode):
    """Makes copies that do not block when it is synchronised. Each use of their memory before that is in ``early``."""

    def __init__(self) -> None:
        super().__init__()
        self.queued: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Destination, source, and what the source holds now."""
        self.early: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # else the compiler is imported, which takes seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        late = kwargs.get("non_blocking", False) or (func is aten.copy_.default and len(args) > 2 and args[2])
        if not func.is_view:
            self._look(func, args)
        if not late:
            return func(*args, **kwargs)
        if func is aten.copy_.default:
            destination, source = args[:2]
        else:  # to the other device, which is not there: the copy is made on this one
            source, destination = args[0], torch.empty_like(args[0])
        destination.view(-1).view(torch.uint8).fill_(UNWRITTEN)
        self.queued.append((destination, source, source.clone()))
        return destination

    def _look(self, func, args) -> None:
        written = args[0] if func._schema.name.endswith("_") else None
        for tensor in (each for each in args if isinstance(each, torch.Tensor)):
            for destination, source, _ in self.queued:
                if overlap(tensor, destination) or (tensor is written and overlap(tensor, source)):
                    self.early.append(func._schema.name)

    def synchronize(self) -> None:
        queued, self.queued = self.queued, []
        for destination, _, content in queued:
            destination.copy_(content)


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have memory in common. Both are without gaps."""
    starts = one.data_ptr(), other.data_ptr()
    return starts[0] < starts[1] + other.nbytes and starts[1] < starts[0] + one.nbytes


@pytest.fixture
def device(monkeypatch):
    late = LateDevice()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", late.synchronize)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 0))
    with late:
        yield late


@pytest.fixture
def engine(device, monkeypatch):
    """An engine that takes pushes: it copies at once, from a stream of its own, and keeps what it got."""
    held = {}

    def update(message):
        start = 0
        (memory,) = message["ipc_handles"]["gpu"]
        for name, size in zip(message["names"], message["tensor_sizes"], strict=True):
            held[name] = tensor_checksum(memory[start : start + size].clone())
            start += size

    calls = ("init_weight_transfer_engine", "start_weight_update", "finish_weight_update")
    client = SimpleNamespace(**dict.fromkeys(calls, lambda *_: None), update_weights=update)
    monkeypatch.setattr(publishing, "RayEngineCalls", lambda actor, seconds: client)
    return held


def weights(value: float):
    return [("embedding", torch.full((40, 3), value)), ("norm", torch.arange(5.0) + value)]


def publisher(transport: str, **options) -> PushPublisher:
    spec = TransportSpec(transport, 2, Path("unused"), 4096, 10.0)
    return PushPublisher(spec, 0, "here", export=lambda memory: ("gpu", (memory,)), **options)


def checksums(value: float) -> dict[str, int]:
    return {name: tensor_checksum(tensor) for name, tensor in weights(value)}


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_the_copy_is_whole_when_its_checksums_are_taken(device, transport):
    sender = publisher(transport)
    for version in (1, 2, 3):
        sender.gather(version, version % 2, weights(version), torch.float32, 4096)
        assert not device.queued
        assert sender.send(version).checksums == checksums(version)
    assert device.early == []


@pytest.mark.parametrize("transport", ["nccl", "cuda_ipc"])
def test_a_copy_that_is_not_waited_for_is_found(device, monkeypatch, transport):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sender = publisher(transport)
    sender.gather(1, 0, weights(1), torch.float32, 4096)
    assert device.queued
    assert sender.send(1).checksums.items().isdisjoint(checksums(1).items())


@pytest.mark.parametrize("waits", [True, False])
def test_an_engine_copies_from_memory_that_is_written(device, engine, monkeypatch, waits):
    if not waits:
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    sender = publisher("cuda_ipc")
    sender.gather(1, 0, weights(1), torch.float32, 4096)
    sender.push(1, PushTarget("engine", None, 1), [sender.offer(1)])
    assert (engine == checksums(1)) is waits
    assert bool(device.early) is not waits


@pytest.mark.parametrize("waits", [True, False])
def test_memory_is_not_written_over_while_it_is_sent(device, monkeypatch, waits):
    """vLLM's end waits for its streams before it returns (contract: `packed_nccl_broadcast_producer`)."""
    library = SimpleNamespace(WeightSource=object, ParamMeta=SimpleNamespace, __path__=[])
    library.WeightTransferTrainerFactory, library.NCCLTrainerInitInfo = None, SimpleNamespace
    for name in ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer"):
        monkeypatch.setitem(sys.modules, name, library)
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.nccl_engine", library)
    sent = []

    def connect(info, client, source):
        def send_weights():
            sent.extend(source)
            if waits:
                device.synchronize()

        return SimpleNamespace(source=source, send_weights=send_weights, shutdown=lambda: None)

    sender = publisher("nccl", connect=connect)
    sender.gather(1, 0, weights(1), torch.float32, 4096)
    sender._device = torch.device("meta")  # another one than the host
    sender.push(1, PushTarget("engine", None, 1), [])
    sender.gather(2, 0, weights(2), torch.float32, 4096)
    assert bool(device.early) is not waits
    assert waits is False or {name: tensor_checksum(tensor) for name, tensor in sent} == checksums(1)


@pytest.mark.parametrize("late", [False, True])
def test_buckets_are_written_when_they_are_handed_on(device, monkeypatch, late):
    if late:
        copy = torch.Tensor.copy_
        monkeypatch.setattr(torch.Tensor, "copy_", lambda tensor, source: copy(tensor, source, non_blocking=True))
    buckets = list(pack_buckets(weights(1), 4096))
    assert bool(device.queued) is late
    assert (manifest(buckets)[1] == checksums(1)) is not late


def test_no_other_code_copies_without_blocking():
    found = []
    texts = ((path, path.read_text(encoding="utf-8")) for path in Path(roll.__file__).parent.rglob("*.py"))
    for path, text in texts:
        for function in ast.walk(ast.parse(text)) if "non_blocking" in text else ():
            if isinstance(function, ast.FunctionDef):
                words = [
                    word.arg for node in ast.walk(function) if isinstance(node, ast.Call) for word in node.keywords
                ]
                found += [f"{path.stem}.{function.name}"] * words.count("non_blocking")
    assert sorted(found) == ["publisher.__iter__", "publisher.buffer_source", "publisher.packed"]

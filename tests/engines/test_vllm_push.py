"""The trainer's end of weights that are pushed through vLLM's own transfer interface, without an engine; with one, and
without GPUs, it is in `test_vllm_engine.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from roll.weights.publisher import PushPublisher, PushTarget, RayEngineCalls, buffer_source
from roll.weights.transports import TransportSpec

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("vllm")]


def test_halves_are_cast_kept_apart_and_written_in_place_again():
    publisher = PushPublisher(spec("nccl"), 0, "here")
    buffers = publisher.copies
    for version, buffer, value in ((1, 0, 1.5), (2, 1, 2.5)):
        publisher.gather(version, buffer, [("a", torch.full((3,), value)), ("n", torch.tensor([7]))], torch.bfloat16, 1)
    place = buffers[0]["a"].data_ptr()
    assert buffers[1]["a"].data_ptr() != place
    publisher.gather(3, 0, [("a", torch.full((3,), 3.5)), ("n", torch.tensor([9]))], torch.bfloat16, 1)
    assert buffers[0]["a"].data_ptr() == place
    assert [buffers[buffer]["a"][0].item() for buffer in (0, 1)] == [3.5, 2.5]
    source = buffer_source(buffers, torch.device("cpu"))
    source.buffer = 1
    assert [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()] == [
        ("a", torch.bfloat16, (3,)),
        ("n", torch.int64, (1,)),
    ]
    assert [name for name, _ in source] == ["a", "n"] == [name for name, _ in source]


def spec(transport: str) -> TransportSpec:
    return TransportSpec(transport, 2, Path("unused"), 4096, 10.0)


@pytest.fixture
def recorder():
    """Importing vLLM takes ten seconds."""
    from tests.engines.vllm_transfers import Recorder

    Recorder.made = []
    return Recorder


def test_each_engine_process_has_one_connection_and_a_new_process_a_new_one(recorder):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    pusher = PushPublisher(spec("nccl"), 0, "10.0.0.1", recorder.trainer_init)
    pusher.gather(0, 0, [("a", torch.zeros(1))], torch.float32, 4096)
    for actor in ("first", "first", "second"):
        pusher.push(0, PushTarget("actor_infer/0", actor, 4), [])
    pusher.push(0, PushTarget("actor_infer/1", "other", 4), [])
    first, second, other = recorder.made
    assert (first.sent, first.closed) == (2, True)
    assert (second.sent, second.closed, other.sent) == (1, False, 1)
    info = second.init_info
    assert isinstance(info, NCCLTrainerInitInfo) and info.is_sender
    assert (info.master_address, info.world_size, info.packed_buffer_size_bytes) == ("10.0.0.1", 5, 4096)
    second.broken = True
    with pytest.raises(OSError):
        pusher.push(0, PushTarget("actor_infer/0", "second", 4), [])
    assert second.closed
    pusher.push(0, PushTarget("actor_infer/0", "second", 4), [])
    assert recorder.made[-1].sent == 1


def test_the_librarys_buffer_has_room_for_the_largest_tensor(recorder):
    publisher = PushPublisher(spec("nccl"), 0, "10.0.0.1", recorder.trainer_init)
    embedding = ("embedding", torch.zeros(3000))
    publisher.gather(0, 0, [("a", torch.zeros(2)), embedding], torch.bfloat16, 4096)
    publisher.push(0, PushTarget("actor_infer/0", "actor", 1), [])
    assert recorder.made[-1].init_info.packed_buffer_size_bytes == 3000 * 2
    publisher.gather(1, 1, [("a", torch.zeros(2))], torch.bfloat16, 4096)
    publisher.push(1, PushTarget("actor_infer/1", "actor", 1), [])
    assert recorder.made[-1].init_info.packed_buffer_size_bytes == 6000, "the other half still holds it"


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

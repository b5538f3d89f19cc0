"""Trainers' ends of vLLM's weight transfer for tests. Imports vLLM, so is itself imported where it is used."""

from __future__ import annotations

from pathlib import Path

from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, VLLMWeightSyncClient

from roll.engines.vllm.strategy import located
from roll.weights.buckets import pack_buckets
from roll.weights.publisher import PushPublisher, RayEngineCalls
from roll.weights.transports import TransportSpec


class MappedTransfer(TrainerWeightTransferEngine):
    """Through mapped memory."""

    closed = 0

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self):
        assert [(meta.name, meta.shape) for meta in self.source.metadata()] == [
            (name, tuple(tensor.shape)) for name, tensor in self.source
        ]
        buckets, self.memory = located(list(pack_buckets(self.source, 100_000)))
        self.client.start_weight_update()
        for bucket in buckets:
            self.client.update_weights(bucket)
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
    return PushPublisher(TransportSpec("nccl", 2, Path("unused"), 1 << 20, 10.0), 0, "127.0.0.1", connect_to(engine))


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

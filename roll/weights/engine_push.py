"""Weights pushed by vLLM's own transfer: NCCL between devices, CUDA IPC between processes that share devices.

Nothing travels through the host: the gathered copy stays on the trainer's device, and the transfer puts it into each
engine while that engine is paused. The library drives both ends; this module gives it the weights, a way to call the
engine, and one connection per engine process.

Other transports verify every byte on arrival. Here the engine's own memory is the first place where bytes can be
checked: a sample of tensors is read back after each update, and the parity check shows what the engine computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from roll.runtime.placement import free_port
from roll.weights.buckets import dtype_name, tensor_checksum

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Hugging Face name -> (dtype name, shape), in the order of sending."""


@dataclass(frozen=True)
class PushTarget:
    """An engine process that weights are pushed to."""

    name: str
    actor: Any
    """The engine's Ray actor."""
    devices: int
    """Number of devices that the engine computes on."""


class RemoteCalls(Protocol):
    """The four engine calls that the library's transfer makes, with plain dictionaries as payload."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group of trainer and engine."""

    def start_weight_update(self) -> None:
        """Begin a weight update."""

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load the tensors that ``update_info`` describes."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End a weight update."""


class EngineCallFailed(RuntimeError):
    """A transfer stopped because its engine refused a call. The engine is at fault, not the trainer."""


class RayEngineCalls:
    """`RemoteCalls` on an engine worker. The calls block, because the transfer runs in its own thread."""

    def __init__(self, actor: Any, timeout_seconds: float) -> None:
        self._actor = actor
        self._timeout_seconds = timeout_seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `RemoteCalls`."""
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        """See `RemoteCalls`."""
        self._call("start", None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """See `RemoteCalls`."""
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `RemoteCalls`."""
        self._call("finish", weight_version)

    def _call(self, step: str, payload: Any) -> None:
        import ray

        try:
            ray.get(self._actor.invoke.remote("transfer_step", step, payload), timeout=self._timeout_seconds)
        except Exception as error:
            raise EngineCallFailed(f"{step}: {type(error).__name__}: {error}") from error


class DeviceBuffers:
    """Copies of the weights on the trainer's device, one per buffer of the double buffer, allocated once."""

    def __init__(self) -> None:
        self._buffers: dict[int, dict[str, torch.Tensor]] = {}

    def gather(self, buffer: int, weights: Iterable[tuple[str, torch.Tensor]], float_dtype: torch.dtype) -> None:
        """Copy the weights, cast to the engine's precision. Raises ``ValueError`` for a name that occurs twice."""
        held = self._buffers.get(buffer, {})
        fresh: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in fresh:
                raise ValueError(f"tensor {name!r} comes twice in one publication")
            dtype = float_dtype if tensor.is_floating_point() else tensor.dtype
            target = held.get(name)
            if target is None or target.shape != tensor.shape or target.dtype != dtype:
                target = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
            fresh[name] = target.copy_(tensor.detach())
        self._buffers[buffer] = fresh

    def tensors(self, buffer: int) -> dict[str, torch.Tensor]:
        """Return the tensors gathered into a buffer."""
        return self._buffers[buffer]

    def layout(self, buffer: int) -> Layout:
        """Return names, dtypes and shapes of a buffer."""
        return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in self._buffers[buffer].items()}

    def checksums(self, buffer: int) -> dict[str, int]:
        """Return the checksum of each tensor's bytes."""
        return {name: tensor_checksum(tensor) for name, tensor in self._buffers[buffer].items()}


class WeightPusher:
    """The end of one trainer rank. All ranks push together; the first one talks to the engine."""

    def __init__(
        self,
        transport: str,
        rank: int,
        host: str,
        bucket_bytes: int,
        timeout_seconds: float,
        connect: Callable[..., TrainerWeightTransferEngine] | None = None,
    ) -> None:
        """Prepare without connecting. ``connect(init_info, client=, source=)`` defaults to vLLM's own factory."""
        self.buffers = DeviceBuffers()
        self._backend = WEIGHT_BACKENDS[transport]
        self._rank = rank
        self._host = host
        self._bucket_bytes = bucket_bytes
        self._timeout_seconds = timeout_seconds
        self._connect = connect
        self._engines: dict[str, tuple[Any, TrainerWeightTransferEngine]] = {}
        self._turn = threading.Lock()

    def push(self, buffer: int, target: PushTarget) -> None:
        """Send a buffer's weights to a paused engine.

        Passes on what the library or the engine raises, after closing the connection.
        """
        with self._turn:
            try:
                engine = self._connected(target)
                engine.source.buffer = buffer
                engine.send_weights()
            except BaseException:
                self.disconnect(target.name)
                raise

    def disconnect(self, name: str) -> None:
        """Close the connection to an engine. This also ends a transfer that waits for a dead engine."""
        _, engine = self._engines.pop(name, (None, None))
        if engine is not None:
            engine.shutdown()

    def _connected(self, target: PushTarget) -> TrainerWeightTransferEngine:
        """Return the connection to this engine process, with a new one for a process that replaced another."""
        actor, engine = self._engines.get(target.name, (None, None))
        if engine is not None and actor == target.actor:
            return engine
        self.disconnect(target.name)
        engine = (self._connect or _library_connect())(
            self._init_info(target),
            client=RayEngineCalls(target.actor, self._timeout_seconds),
            source=buffer_source(self.buffers),
        )
        self._engines[target.name] = (target.actor, engine)
        return engine

    def _init_info(self, target: PushTarget) -> Any:
        if self._backend == "ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=self._rank, packed=True, packed_buffer_size_bytes=self._bucket_bytes)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=self._rank,
            master_address=self._host,
            master_port=free_port(),
            world_size=1 + target.devices,
            packed_buffer_size_bytes=self._bucket_bytes,
        )


def _library_connect() -> Callable[..., TrainerWeightTransferEngine]:
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

    return WeightTransferTrainerFactory.trainer_init


def buffer_source(buffers: DeviceBuffers) -> Any:
    """Return the buffers as vLLM's ``WeightSource``; its attribute ``buffer`` selects the buffer that is sent next.

    The class is made here because its base class is vLLM's, which a trainer imports only if it pushes.
    """
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class HalfSource(WeightSource):
        buffer = 0

        def metadata(self) -> list[ParamMeta]:
            tensors = buffers.tensors(self.buffer)
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(buffers.tensors(self.buffer).items())

    return HalfSource()


WEIGHT_BACKENDS = {"nccl": "nccl", "cuda_ipc": "ipc"}
"""Transports that vLLM itself implements -> vLLM's names for them."""

"""Weight update: from the trainer's tensors to the engine's, with proof that they are the same.

Gather copies the weights into the transport's memory (brief, collective). Send takes their checksums and hands them
over in the background. Load happens in the engine. Before the engine serves a request, its weights are compared with
those that the trainer gathered: version, number of parameters, and the checksum of each tensor over all its bytes. A
tensor that the engine cannot read back is not compared. A difference names the tensor and stops the run.

There are two ways. With buckets, the first rank packs the weights into the transport's memory and the engines fetch
them from there. With a push, copies stay on the devices, and vLLM's own transfer puts them into each engine while it is
paused: NCCL between devices, CUDA IPC between processes that share devices. The library drives both ends; this module
gives it the weights, a way to call the engine, and one connection per engine process. A pushed byte can be checked only
in the engine's own memory, so a sample of tensors is read back after each update.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch

from roll.runtime.placement import free_port
from roll.weights.buckets import HeldWeights, WeightBucket, dtype_name, manifest, pack_buckets, tensor_checksum
from roll.weights.transports import TRANSPORTS, TransportSpec

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine

NamedTensors = Iterable[tuple[str, torch.Tensor]]

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name in a checkpoint -> (dtype name, shape), in the order of sending."""

WEIGHT_BACKENDS = {"nccl": "nccl", "cuda_ipc": "ipc"}
"""Transports that vLLM itself implements -> vLLM's names for them."""


@dataclass
class Publication:
    """One version of the weights on its way to the engines."""

    version: int
    handles: list[Any]
    """Handles that the transport's receiver needs, bucket by bucket."""
    parameter_count: int
    checksums: dict[str, int]
    total_bytes: int
    layout: Layout | None = None
    """Layout of pushed weights; None if engines fetch by the handles."""
    base: Mapping[str, int] | None = None
    """Checksums of the base model, which each engine has already; None if all weights travel."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of ``gather`` and ``send``."""


@dataclass(frozen=True)
class PushTarget:
    """An engine process that weights are pushed to."""

    name: str
    actor: Any
    """The engine's Ray actor."""
    devices: int
    """Number of devices that the engine computes on."""


def build_publisher(spec: TransportSpec, *, rank: int, host: str) -> WeightPublisher:
    """Return the publisher of a rank for the configured transport."""
    if spec.name not in WEIGHT_BACKENDS:
        return BucketPublisher(spec, rank)
    return PushPublisher(spec, rank, host)


class WeightPublisher:
    """The trainer rank's interface for handing out weights."""

    def gather(
        self,
        version: int,
        buffer: int,
        weights: NamedTensors,
        dtype: torch.dtype,
        bucket_bytes: int,
        uncast: Collection[str] = (),
    ) -> None:
        """Copy the weights, casting floating-point ones to ``dtype``, but for those named in ``uncast``. Every rank
        must consume all of ``weights``."""
        raise NotImplementedError

    def send(self, version: int) -> Publication:
        """Take the checksums of a gathered version, hand it over, and return the `Publication` for the engines.

        First rank only; runs while training continues.
        """
        raise NotImplementedError

    def push(self, version: int, target: PushTarget) -> None:
        """Push a version into one paused engine. Every rank calls this."""
        raise RuntimeError(f"version {version} travels in buckets, which {target.name} fetches")

    def disconnect(self, name: str) -> None:
        """Close the connection to an engine, if there is one. This also ends a push that waits for a dead engine."""

    def release(self, version: int) -> None:
        """Release a version that no engine will ask for again."""


class BucketPublisher(WeightPublisher):
    """A publisher that writes to memory or files that engines read; only the first rank keeps anything."""

    def __init__(self, spec: TransportSpec, rank: int) -> None:
        self._sender = TRANSPORTS[spec.name].sender(spec)
        self._corrupted_versions = spec.corrupted_versions
        self._rank = rank
        self._gathered: dict[int, tuple[int, list[WeightBucket], float]] = {}
        """Version -> its buffer, its buckets, and the seconds that gathering them took."""

    def gather(
        self,
        version: int,
        buffer: int,
        weights: NamedTensors,
        dtype: torch.dtype,
        bucket_bytes: int,
        uncast: Collection[str] = (),
    ) -> None:
        started = time.perf_counter()
        if self._rank != 0:
            _draw(weights)
            return
        self._sender.begin(buffer)
        allocate = partial(self._sender.allocate, buffer)
        buckets = list(pack_buckets(weights, bucket_bytes, float_dtype=dtype, uncast=uncast, allocate=allocate))
        self._gathered[version] = buffer, buckets, time.perf_counter() - started

    def send(self, version: int) -> Publication:
        started = time.perf_counter()
        buffer, buckets, gather_seconds = self._gathered.pop(version)
        parameter_count, checksums = manifest(buckets)
        if version in self._corrupted_versions:
            _, _, _, offset = buckets[0].tensors[0]
            buckets[0].data[offset] ^= 0xFF
        return Publication(
            version=version,
            handles=self._sender.send(buffer, version, buckets),
            parameter_count=parameter_count,
            checksums=checksums,
            total_bytes=sum(bucket.data.nbytes for bucket in buckets),
            seconds={"gather": gather_seconds, "send": time.perf_counter() - started},
        )

    def release(self, version: int) -> None:
        self._sender.release(version)


class PushPublisher(WeightPublisher):
    """A publisher that uses the engine library's own transfer, from device to device.

    All ranks push together; the first one talks to the engine. With CUDA IPC every rank keeps a copy, because an engine
    reads the one on its own device; with NCCL only the first rank does.
    """

    def __init__(
        self,
        spec: TransportSpec,
        rank: int,
        host: str,
        connect: Callable[..., TrainerWeightTransferEngine] | None = None,
    ) -> None:
        """Prepare without connecting. ``connect(init_info, client=, source=)`` defaults to vLLM's own factory."""
        self.copies: dict[int, dict[str, torch.Tensor]] = {}
        """Buffer -> copies of the weights on the trainer's device, in memory that is allocated once."""
        self._spec = spec
        self._rank = rank
        self._host = host
        self._connect = connect
        self._buffers: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._engines: dict[str, tuple[Any, TrainerWeightTransferEngine]] = {}
        self._turn = threading.Lock()

    def gather(
        self,
        version: int,
        buffer: int,
        weights: NamedTensors,
        dtype: torch.dtype,
        bucket_bytes: int,
        uncast: Collection[str] = (),
    ) -> None:
        """Copy the weights on the device; ``bucket_bytes`` is unused, because the transfer has its own buckets."""
        started = time.perf_counter()
        self._buffers = {other: each for other, each in self._buffers.items() if each != buffer} | {version: buffer}
        if self._rank != 0 and self._spec.name == "nccl":
            _draw(weights)
            weights = []
        self.copies[buffer] = copied(weights, dtype, self.copies.get(buffer, {}), uncast)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # checksums and transfers read the copies in other streams
        self._seconds[version] = time.perf_counter() - started

    def send(self, version: int) -> Publication:
        """Take the checksums, and return the `Publication`. The bytes are pushed once each engine is paused."""
        started = time.perf_counter()
        tensors = self.copies[self._buffers[version]]
        checksums = {name: tensor_checksum(tensor) for name, tensor in tensors.items()}
        return Publication(
            version=version,
            handles=[],
            parameter_count=sum(tensor.numel() for tensor in tensors.values()),
            checksums=checksums,
            total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            layout={name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()},
            seconds={"gather": self._seconds.pop(version), "send": time.perf_counter() - started},
        )

    def push(self, version: int, target: PushTarget) -> None:
        """Push a version into a paused engine.

        Passes on what the library or the engine raises, after closing the connection.
        """
        with self._turn:
            try:
                engine = self._connected(target)
                engine.source.buffer = self._buffers[version]
                engine.send_weights()
            except BaseException:
                self.disconnect(target.name)
                raise

    def disconnect(self, name: str) -> None:
        _, engine = self._engines.pop(name, (None, None))
        if engine is not None:
            engine.shutdown()

    def _connected(self, target: PushTarget) -> TrainerWeightTransferEngine:
        """Return the connection to this engine process, with a new one for a process that replaced another."""
        actor, engine = self._engines.get(target.name, (None, None))
        if engine is not None and actor == target.actor:
            return engine
        self.disconnect(target.name)
        connect = self._connect
        if connect is None:
            from vllm.distributed.weight_transfer import WeightTransferTrainerFactory

            connect = WeightTransferTrainerFactory.trainer_init
        client = RayEngineCalls(target.actor, self._spec.timeout_seconds)
        engine = connect(self._init_info(target), client=client, source=buffer_source(self.copies))
        self._engines[target.name] = (target.actor, engine)
        return engine

    def _init_info(self, target: PushTarget) -> Any:
        # A tensor must fit into the library's buffer as a whole.
        largest = max((tensor.nbytes for copies in self.copies.values() for tensor in copies.values()), default=0)
        bucket_bytes = max(self._spec.bucket_bytes, largest)
        if self._spec.name == "cuda_ipc":
            from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

            return IPCTrainerInitInfo(rank=self._rank, packed=True, packed_buffer_size_bytes=bucket_bytes)
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        return NCCLTrainerInitInfo(
            rank=self._rank,
            master_address=self._host,
            master_port=free_port(),
            world_size=1 + target.devices,
            packed_buffer_size_bytes=bucket_bytes,
        )


def _draw(weights: NamedTensors) -> None:
    """Consume ``weights`` to take part in its collectives."""
    for _ in weights:
        pass


def copied(
    weights: NamedTensors,
    float_dtype: torch.dtype,
    memory: Mapping[str, torch.Tensor],
    uncast: Collection[str] = (),
) -> dict[str, torch.Tensor]:
    """Copy weights on their device, cast to the engine's precision (but for those named in ``uncast``), into the
    ``memory`` of earlier copies if they fit.

    Raises ``ValueError`` for a name that occurs twice.
    """
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if name in copies:
            raise ValueError(f"tensor {name!r} comes twice in one publication")
        dtype = float_dtype if tensor.is_floating_point() and name not in uncast else tensor.dtype
        target = memory.get(name)
        if target is None or target.shape != tensor.shape or target.dtype != dtype:
            target = torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
        copies[name] = target.copy_(tensor.detach())
    return copies


def buffer_source(copies: Mapping[int, Mapping[str, torch.Tensor]]) -> Any:
    """Return copies by buffer as vLLM's ``WeightSource``; its attribute ``buffer`` selects those that are sent next.

    The class is made here because its base class is vLLM's, which a trainer imports only if it pushes.
    """
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class BufferSource(WeightSource):
        buffer = 0

        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(copies[self.buffer].items())

    return BufferSource()


class EngineCallFailed(RuntimeError):
    """A transfer stopped because its engine refused a call. The engine is at fault, not the trainer."""


class RayEngineCalls:
    """The four engine calls that vLLM's transfer makes (its ``VLLMWeightSyncClient``), on an engine worker.

    They block, because the transfer runs in its own thread.
    """

    def __init__(self, actor: Any, timeout_seconds: float) -> None:
        self._actor = actor
        self._timeout_seconds = timeout_seconds

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Join the group of trainer and engine."""
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        """Begin a weight update."""
        self._call("start", None)

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        """Load the tensors that ``update_info`` describes."""
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End a weight update."""
        self._call("finish", weight_version)

    def _call(self, step: str, payload: Any) -> None:
        try:
            ray.get(self._actor.invoke.remote("transfer_step", step, payload), timeout=self._timeout_seconds)
        except Exception as error:
            raise EngineCallFailed(f"{step}: {type(error).__name__}: {error}") from error


class WeightsDiffer(RuntimeError):
    """An engine does not hold the published weights."""


def check_base(engine: str, publication: Publication, held: Mapping[str, int]) -> None:
    """Compare the base model that an engine has with the one that published adapters belong to; nothing to do if all
    weights travel. Raises `WeightsDiffer` naming the difference."""
    if publication.base is not None:
        wanted = Publication(publication.version, [], 0, dict(publication.base), 0)
        check_weights(f"the base model of {engine}", wanted, HeldWeights(publication.version, 0, held))


def check_weights(engine: str, publication: Publication, held: HeldWeights) -> None:
    """Compare an engine's weights with the published ones. Raises `WeightsDiffer` naming the difference."""
    if held.version != publication.version:
        raise WeightsDiffer(f"{engine} holds version {held.version} after version {publication.version} was sent")
    about = f"{engine}, version {publication.version}"
    missing = sorted(publication.checksums.keys() - held.checksums.keys())
    unknown = sorted(held.checksums.keys() - publication.checksums.keys())
    if missing or unknown:
        lists = f"tensors never received: {missing[:5]}; held but never published: {unknown[:5]}"
        raise WeightsDiffer(f"{about}: {lists}")
    if held.parameter_count != publication.parameter_count:
        counts = f"{held.parameter_count} parameters held, {publication.parameter_count} published"
        raise WeightsDiffer(f"{about}: {counts}")
    differing = [name for name, digest in publication.checksums.items() if held.checksums[name] not in (digest, None)]
    if differing:
        others = f" (and of {len(differing) - 1} more tensors)" if len(differing) > 1 else ""
        raise WeightsDiffer(f"{about}: the content of {differing[0]!r} differs from what was published{others}")

"""Weight updates: they send the trainer's weights to the engines, and verify that the engines hold the same weights.

`gather` copies the weights into the transport's memory (brief, collective). `send` computes their checksums and hands
them over in the background. The engine then loads them. Before it serves a request, its weights are compared with the
gathered ones: version, number of parameters, and the checksum of each tensor over all its bytes. A tensor that the
engine cannot read back is not compared. A difference stops the run with an error that names the tensor.

There are two ways to send. With buckets, the first rank packs the weights into the transport's memory, and the engines
fetch them from there. With a push, vLLM's own transfer writes the weights into each engine while it is paused: by NCCL
between devices, or by CUDA IPC between processes that share a device. Pushed weights can only be verified in the
engine's memory, so a sample of tensors is read back after each update.

Only the first rank pushes, without collective calls of the trainers: if an engine died during one, the other ranks
would wait for ever in the process group of training. With NCCL, the first rank keeps a copy on the host and moves it to
its device tensor by tensor. With CUDA IPC, each rank keeps a copy on its own device and gives handles to the first.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import torch
from torch.multiprocessing.reductions import reduce_tensor

from roll.runtime.placement import free_port
from roll.weights.buckets import (
    HeldWeights,
    WeightBucket,
    checksum,
    checksums,
    dtype_name,
    manifest,
    pack_buckets,
)
from roll.weights.delta import Delta, DeltaSource
from roll.weights.mapped import lock_pages, unlock_pages
from roll.weights.transports import TRANSPORTS, TransportSpec

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine

NamedTensors = Iterable[tuple[str, torch.Tensor]]

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Checkpoint name -> (dtype name, shape), in the order of sending."""

Offer = list[dict[str, tuple[Any, ...]]]
"""For each chunk: device UUID -> arguments with which another process opens this rank's copy on that device."""

CHUNK_BYTES = 64 * 2**20
"""Size of the chunks of memory that small tensors of a pushed copy share. A larger tensor gets a chunk of its own size.
Much larger chunks would waste memory: often one matrix would fill over half of a chunk, and the next would not fit."""
Handle = tuple[str, tuple[Any, ...]]
"""Device UUID, and the arguments with which another process opens memory on that device."""

WEIGHT_BACKENDS = {"nccl": "nccl", "cuda_ipc": "ipc"}
"""Transports that vLLM implements -> vLLM's names for them."""


@dataclass
class Publication:
    """A weight update that is ready for the engines: one version of the weights."""

    version: int
    handles: list[Any]
    """One handle per bucket, for the transport's receiver."""
    parameter_count: int
    checksums: dict[str, int]
    total_bytes: int
    """Bytes that an engine fetches, if it has the publication before."""
    layout: Layout | None = None
    """Layout of pushed weights; None if engines fetch the weights by their handles."""
    base: Mapping[str, int] | None = None
    """Checksums of the base model, which each engine has already; None if all weights travel."""
    delta: Delta | None = None
    """What changed since the publication before; None if engines do not keep that one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Duration of ``gather`` and of ``send``."""


@dataclass(frozen=True)
class PushTarget:
    """An engine to push weights to."""

    name: str
    actor: Any
    """The engine's Ray actor."""
    devices: int
    """Number of devices of the engine."""


def build_publisher(spec: TransportSpec, *, rank: int, host: str) -> WeightPublisher:
    """Return the `WeightPublisher` of a trainer rank for the configured transport."""
    if spec.name not in WEIGHT_BACKENDS:
        return BucketPublisher(spec, rank)
    return PushPublisher(spec, rank, host)


class WeightPublisher:
    """Interface with which a trainer rank sends its weights."""

    def gather(
        self,
        version: int,
        buffer: int,
        weights: NamedTensors,
        dtype: torch.dtype,
        bucket_bytes: int,
        uncast: Collection[str] = (),
    ) -> None:
        """Copy the weights; cast floating-point ones to ``dtype``, except for those named in ``uncast``.

        Every rank must call this, and must consume all of ``weights``, because their iterator makes collective calls.
        """
        raise NotImplementedError

    def send(self, version: int) -> Publication:
        """Compute the checksums of a gathered version, hand it over, and return the `Publication` for the engines.

        Call it on the first rank only. It runs while training continues.
        """
        raise NotImplementedError

    def offer(self, version: int) -> Offer:
        """Return handles of this rank's copy of a version, for the engines on its device. Call it on every rank."""
        return []

    def push(self, version: int, target: PushTarget, offers: Sequence[Offer]) -> None:
        """Push a version into one paused engine. ``offers`` has the `offer` of each rank. First rank only."""
        raise RuntimeError(f"version {version} travels in buckets, which {target.name} fetches")

    def disconnect(self, name: str) -> None:
        """Close the connection to an engine, if there is one. This also ends a push that waits for a dead engine."""

    def release(self, version: int) -> None:
        """Release the memory or files of a version that no engine needs any more."""


class BucketPublisher(WeightPublisher):
    """A publisher that writes memory or files, from which engines fetch the weights. Only the first rank has a copy."""

    def __init__(self, spec: TransportSpec, rank: int) -> None:
        self._sender = TRANSPORTS[spec.name].sender(spec)
        self._corrupted_versions = spec.corrupted_versions
        self._deltas = DeltaSource(self._sender, spec.full_every) if spec.content == "delta" else None
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
            deque(weights, maxlen=0)  # takes part in the collective calls of this iterator
            return
        self._sender.begin(buffer)
        if self._deltas is not None:
            self._deltas.overwritten(buffer)
        allocate = partial(self._sender.allocate, buffer)
        buckets = list(pack_buckets(weights, bucket_bytes, float_dtype=dtype, uncast=uncast, allocate=allocate))
        self._gathered[version] = buffer, buckets, time.perf_counter() - started

    def send(self, version: int) -> Publication:
        started = time.perf_counter()
        buffer, buckets, gather_seconds = self._gathered.pop(version)
        parameter_count, found = manifest(buckets)
        corrupted, delta = version in self._corrupted_versions, None
        if self._deltas is not None:
            delta = self._deltas.delta(version, buffer, buckets, found, corrupted)
        is_whole = delta is None or delta.since is None
        if corrupted and is_whole:
            _, _, _, offset = buckets[0].tensors[0]
            buckets[0].data[offset] ^= 0xFF
        return Publication(
            version=version,
            handles=self._sender.send(buffer, version, buckets),
            parameter_count=parameter_count,
            checksums=found,
            total_bytes=sum(bucket.data.nbytes for bucket in buckets)
            if delta is None or is_whole
            else delta.total_bytes,
            delta=delta,
            seconds={"gather": gather_seconds, "send": time.perf_counter() - started},
        )

    def release(self, version: int) -> None:
        self._sender.release(version)


class PushPublisher(WeightPublisher):
    """A publisher that uses the engine library's own transfer from device to device; see the module docstring."""

    def __init__(
        self,
        spec: TransportSpec,
        rank: int,
        host: str,
        connect: Callable[..., TrainerWeightTransferEngine] | None = None,
        export: Callable[[torch.Tensor], Handle] | None = None,
    ) -> None:
        """Prepare without connecting.

        ``connect(init_info, client=, source=)`` defaults to vLLM's own factory, ``export`` to `device_handle`.
        """
        self.copies: dict[int, dict[str, torch.Tensor]] = {}
        """Buffer -> copies of the weights by checkpoint name."""
        self._chunks: dict[int, list[Chunk]] = {}
        """Buffer -> memory of these copies. It is allocated once, on the host (``nccl``) or on the trainer's device."""
        self._spec = spec
        self._rank = rank
        self._host = host
        self._connect = connect
        self._export = export or device_handle
        self._staging = torch.empty(0, dtype=torch.uint8)
        """Page-locked memory of the host, through which copies on a device pass for their checksums."""
        self._device = torch.device("cpu")
        """Device of the weights."""
        self._buffers: dict[int, int] = {}
        self._seconds: dict[int, float] = {}
        self._engines: dict[str, tuple[Any, TrainerWeightTransferEngine | IpcConnection]] = {}
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
        """Copy the weights. ``bucket_bytes`` is unused, because vLLM's transfer has its own buckets."""
        started = time.perf_counter()
        self._buffers = {other: each for other, each in self._buffers.items() if each != buffer} | {version: buffer}
        if self._rank == 0 or self._spec.name == "cuda_ipc":
            size, earlier = min(CHUNK_BYTES, self._spec.bucket_bytes), self._chunks.get(buffer, [])
            self._chunks[buffer] = packed(cast(weights, dtype, uncast), size, earlier, self._allocate)
            self.copies[buffer] = {name: view for chunk in self._chunks[buffer] for name, view in chunk.tensors.items()}
        else:
            deque(weights, maxlen=0)
            self.copies[buffer] = {}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # checksums and transfers read the copies in other streams
        self._seconds[version] = time.perf_counter() - started

    def _allocate(self, size: int, device: torch.device) -> tuple[torch.Tensor, Handle | None]:
        """Return memory (uint8 ``[size]``) for copies of tensors on ``device``, and its handle if it is on a device."""
        self._device = device
        if self._spec.name == "nccl":
            return host_memory(size, pinned=device.type == "cuda"), None
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, self._export(memory)

    def send(self, version: int) -> Publication:
        """Compute the checksums, and return the `Publication`. `push` sends the weights when an engine is paused."""
        started = time.perf_counter()
        tensors = self.copies[self._buffers[version]]
        found: dict[str, int] = {}
        for chunk in self._chunks.get(self._buffers[version], []):
            found |= checksums(self._on_host(chunk), checksum)
        return Publication(
            version=version,
            handles=[],
            parameter_count=sum(tensor.numel() for tensor in tensors.values()),
            checksums=found,
            total_bytes=sum(tensor.nbytes for tensor in tensors.values()),
            layout={name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()},
            seconds={"gather": self._seconds.pop(version), "send": time.perf_counter() - started},
        )

    def _on_host(self, chunk: Chunk) -> dict[str, np.ndarray]:
        """Return the bytes of a chunk's tensors, valid until the next call."""
        memory = chunk.memory
        if chunk.handle is not None:
            if len(self._staging) < len(memory):
                unlock_pages(self._staging.numpy())
                self._staging = host_memory(len(memory), pinned=True)
            memory = self._staging[: len(memory)].copy_(memory)
        ends = list(accumulate(tensor.nbytes for tensor in chunk.tensors.values()))
        return dict(zip(chunk.tensors, np.split(memory.numpy()[: ends[-1]], ends[:-1]), strict=True))

    def offer(self, version: int) -> Offer:
        chunks = self._chunks.get(self._buffers[version], [])
        return [dict([chunk.handle]) for chunk in chunks if chunk.handle is not None]

    def push(self, version: int, target: PushTarget, offers: Sequence[Offer]) -> None:
        """Push a version into a paused engine. After an error of the library or the engine, close the connection."""
        with self._turn:
            try:
                engine = self._connected(target)
                if isinstance(engine, IpcConnection):
                    engine.send(self._chunks[self._buffers[version]], offers)
                else:
                    engine.source.buffer = self._buffers[version]
                    engine.send_weights()
            except BaseException:
                self.disconnect(target.name)
                raise

    def disconnect(self, name: str) -> None:
        _, engine = self._engines.pop(name, (None, None))
        if engine is not None:
            engine.shutdown()

    def _connected(self, target: PushTarget) -> TrainerWeightTransferEngine | IpcConnection:
        """Return the connection to this engine; a new one if its process was replaced."""
        actor, engine = self._engines.get(target.name, (None, None))
        if engine is not None and actor == target.actor:
            return engine
        self.disconnect(target.name)
        client = RayEngineCalls(target.actor, self._spec.timeout_seconds)
        engine = IpcConnection(client) if self._spec.name == "cuda_ipc" else self._join(target, client)
        self._engines[target.name] = (target.actor, engine)
        return engine

    def _join(self, target: PushTarget, client: RayEngineCalls) -> TrainerWeightTransferEngine:
        """Form an NCCL group with an engine's processes."""
        from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        # A tensor must fit into the library's buffer as a whole.
        largest = max((tensor.nbytes for copies in self.copies.values() for tensor in copies.values()), default=0)
        info = NCCLTrainerInitInfo(
            rank=self._rank,
            master_address=self._host,
            master_port=free_port(),
            world_size=1 + target.devices,
            packed_buffer_size_bytes=max(self._spec.bucket_bytes, largest),
        )
        connect = self._connect or WeightTransferTrainerFactory.trainer_init
        return connect(info, client=client, source=buffer_source(self.copies, self._device))


def cast(weights: NamedTensors, float_dtype: torch.dtype, uncast: Collection[str] = ()) -> NamedTensors:
    """Yield the weights, floating-point ones cast to ``float_dtype`` except for those named in ``uncast``.

    Raises ``ValueError`` for a duplicate name.
    """
    names = set()
    for name, tensor in weights:
        if name in names:
            raise ValueError(f"tensor {name!r} occurs twice in one weight update")
        names.add(name)
        is_cast = tensor.is_floating_point() and name not in uncast
        yield name, tensor.detach().to(float_dtype) if is_cast else tensor.detach()


@dataclass(frozen=True)
class Chunk:
    """A block of memory with several tensors of one dtype, one after the other without gaps."""

    memory: torch.Tensor
    """uint8 ``[bytes]``."""
    handle: Handle | None
    """Handle with which another process opens the memory; None for host memory."""
    tensors: dict[str, torch.Tensor]


def packed(
    weights: NamedTensors,
    chunk_bytes: int,
    earlier: Sequence[Chunk],
    allocate: Callable[[int, torch.device], tuple[torch.Tensor, Handle | None]],
) -> list[Chunk]:
    """Copy weights into chunks of ``chunk_bytes`` each; a larger tensor gets a chunk of its own.

    Memory of ``earlier`` chunks is reused, with its handle, where it is large enough; if the tensors are the same, no
    new memory is needed. Chunks are in the order of their first tensors, which is the same on all ranks.
    """
    spare = list(earlier)
    chunks: list[Chunk] = []
    open_chunks: dict[torch.dtype, tuple[Chunk, int]] = {}
    for name, tensor in weights:
        chunk, filled = open_chunks.get(tensor.dtype, (None, 0))
        if chunk is None or filled + tensor.nbytes > len(chunk.memory):
            size = max(chunk_bytes, tensor.nbytes)
            fitting = next((number for number, each in enumerate(spare) if len(each.memory) >= size), None)
            if fitting is None:
                chunk, filled = Chunk(*allocate(size, tensor.device), {}), 0
            else:
                chunk, filled = replace(spare.pop(fitting), tensors={}), 0
            chunks.append(chunk)
        view = chunk.memory[filled : filled + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        chunk.tensors[name] = view.copy_(tensor, non_blocking=True)
        if tensor.nbytes <= chunk_bytes:  # after a larger tensor, the chunk that was open before stays open
            open_chunks[tensor.dtype] = chunk, filled + tensor.nbytes
    return chunks


def host_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Return host memory (uint8 ``[size]``). Copies to or from ``pinned`` memory can run while the device computes.

    torch rounds the size of pinned memory up to a power of two, which nearly doubles it for some models. So the memory
    is allocated first and then pinned.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned:
        lock_pages(memory.numpy())
    return memory


def device_handle(memory: torch.Tensor) -> Handle:
    """Return the UUID of the memory's device, and the arguments of torch's ``rebuild_cuda_tensor`` for it."""
    _, arguments = reduce_tensor(memory)
    return str(torch.cuda.get_device_properties(memory.device).uuid), arguments


class IpcConnection:
    """The trainer's end of vLLM's transfer by CUDA IPC: it sends an engine the handles of the memory to copy from.

    It replaces vLLM's own trainer end, which exchanges handles by collective calls in the process group of training.
    """

    def __init__(self, client: RayEngineCalls) -> None:
        self._client = client
        client.init_weight_transfer_engine({"packed": True})

    def send(self, chunks: Sequence[Chunk], offers: Sequence[Offer]) -> None:
        """Let the engine copy the chunks, one after the other. ``offers``: the handles of each rank.

        Raises ``ValueError`` if a rank offers another number of chunks.
        """
        for rank, offer in enumerate(offers):
            if len(offer) != len(chunks):
                raise ValueError(f"rank {rank} offers {len(offer)} chunks of weights, the first rank has {len(chunks)}")
        self._client.start_weight_update()
        for chunk, *handles in zip(chunks, *offers, strict=True):
            tensors = chunk.tensors.values()
            self._client.update_weights(
                {
                    "names": list(chunk.tensors),
                    "dtype_names": [dtype_name(tensor.dtype) for tensor in tensors],
                    "shapes": [list(tensor.shape) for tensor in tensors],
                    "tensor_sizes": [tensor.nbytes for tensor in tensors],
                    "ipc_handles": {device: handle for offer in handles for device, handle in offer.items()},
                }
            )
        self._client.finish_weight_update()

    def shutdown(self) -> None:
        """Do nothing: this end holds no connection that would have to be closed."""


def buffer_source(copies: Mapping[int, Mapping[str, torch.Tensor]], device: torch.device) -> Any:
    """Return a vLLM ``WeightSource`` of the copies in the buffer that its attribute ``buffer`` selects.

    Tensors are moved to ``device`` one by one. The class is defined in this function so that only trainers that push
    import vLLM.
    """
    from vllm.distributed.weight_transfer import ParamMeta, WeightSource

    class BufferSource(WeightSource):
        buffer = 0

        def metadata(self) -> list[ParamMeta]:
            held = copies[self.buffer].items()
            return [ParamMeta(name=name, dtype=copy.dtype, shape=tuple(copy.shape)) for name, copy in held]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, copy in copies[self.buffer].items():
                yield name, copy.to(device, non_blocking=True)

    return BufferSource()


class EngineCallFailed(RuntimeError):
    """A call to the engine failed during a push. The fault is in the engine, not in the trainer."""


class RayEngineCalls:
    """The four engine calls of vLLM's transfer (its ``VLLMWeightSyncClient``), sent to a Ray engine worker.

    The calls block, because the transfer runs in a thread of its own.
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
    """Compare the base model of an engine with the one that the sent adapters belong to.

    Does nothing if all weights are sent. Raises `WeightsDiffer` naming the difference.
    """
    if publication.base is not None:
        wanted = Publication(publication.version, [], 0, dict(publication.base), 0)
        check_weights(f"the base model of {engine}", wanted, HeldWeights(publication.version, 0, held))


def check_weights(engine: str, publication: Publication, held: HeldWeights) -> None:
    """Compare an engine's weights with those that were sent. Raises `WeightsDiffer` naming the difference."""
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

"""Weight update: from the trainer's tensors to the engine's, with proof that they are the same.

Gather copies the weights into the transport's memory (brief, collective). Send takes their checksums and hands them
over in the background. Load happens in the engine. Before the engine serves a request, its weights are compared with
those that the trainer gathered: version, number of parameters, and the checksum of each tensor over all its bytes. A
tensor that the engine cannot read back is not compared. A difference names the tensor and stops the run.

There are two ways. With buckets, the first rank packs the weights into the transport's memory and the engines fetch
them from there. With a push, the weights go into each engine while it is paused, by vLLM's own transfer: NCCL between
devices, CUDA IPC between processes that share devices. A pushed byte can be checked only in the engine's own memory, so
a sample of tensors is read back after each update.

A push is one rank's work. It makes no collective call: an engine that dies in the middle of one would leave the other
ranks waiting, on the group that training uses. With NCCL the first rank keeps the copy on the host and moves it to its
device tensor by tensor. With CUDA IPC each rank keeps a copy on its own device, and offers handles of it to the first.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
import torch
from torch.cuda import check_error, cudart
from torch.multiprocessing.reductions import reduce_tensor

from roll.runtime.placement import free_port
from roll.weights.buckets import HeldWeights, WeightBucket, dtype_name, manifest, pack_buckets, tensor_checksum
from roll.weights.delta import Delta, DeltaSource
from roll.weights.transports import TRANSPORTS, TransportSpec

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer import TrainerWeightTransferEngine

NamedTensors = Iterable[tuple[str, torch.Tensor]]

Layout = dict[str, tuple[str, tuple[int, ...]]]
"""Name in a checkpoint -> (dtype name, shape), in the order of sending."""

Offer = list[dict[str, tuple[Any, ...]]]
"""Chunk by chunk: UUID of a device -> what opens the chunk's copy there in another process."""

CHUNK_BYTES = 64 * 2**20
"""Size of the memory that smaller tensors of a pushed copy share. Larger ones have memory of their own size: with much
larger chunks, two matrices of a large model would not fit into one, and half of it would be empty."""
Handle = tuple[str, tuple[Any, ...]]
"""UUID of a device, and what opens memory there in another process."""

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
    """Bytes that an engine fetches, if it has the publication before."""
    layout: Layout | None = None
    """Layout of pushed weights; None if engines fetch by the handles."""
    base: Mapping[str, int] | None = None
    """Checksums of the base model, which each engine has already; None if all weights travel."""
    delta: Delta | None = None
    """What changed since the publication before; None if engines do not keep that one."""
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

    def offer(self, version: int) -> Offer:
        """Return handles of this rank's copy of a version, for the engines on its device. Every rank."""
        return []

    def push(self, version: int, target: PushTarget, offers: Sequence[Offer]) -> None:
        """Push a version into one paused engine, given what each rank offers. First rank only."""
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
            _draw(weights)
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
        parameter_count, checksums = manifest(buckets)
        corrupted, delta = version in self._corrupted_versions, None
        if self._deltas is not None:
            delta = self._deltas.delta(version, buffer, buckets, checksums, corrupted)
        is_whole = delta is None or delta.since is None
        if corrupted and is_whole:
            _, _, _, offset = buckets[0].tensors[0]
            buckets[0].data[offset] ^= 0xFF
        return Publication(
            version=version,
            handles=self._sender.send(buffer, version, buckets),
            parameter_count=parameter_count,
            checksums=checksums,
            total_bytes=sum(bucket.data.nbytes for bucket in buckets)
            if delta is None or is_whole
            else delta.total_bytes,
            delta=delta,
            seconds={"gather": gather_seconds, "send": time.perf_counter() - started},
        )

    def release(self, version: int) -> None:
        self._sender.release(version)


class PushPublisher(WeightPublisher):
    """A publisher that uses the engine library's own transfer, from device to device. See the module."""

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
        """Buffer -> copies of the weights."""
        self._chunks: dict[int, list[Chunk]] = {}
        """Buffer -> their memory, which is allocated once: on the host (``nccl``), or on the trainer's device."""
        self._spec = spec
        self._rank = rank
        self._host = host
        self._connect = connect
        self._export = export or device_handle
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
        """Copy the weights; ``bucket_bytes`` is unused, because the transfer has its own buckets."""
        started = time.perf_counter()
        self._buffers = {other: each for other, each in self._buffers.items() if each != buffer} | {version: buffer}
        if self._rank == 0 or self._spec.name == "cuda_ipc":
            size, earlier = min(CHUNK_BYTES, self._spec.bucket_bytes), self._chunks.get(buffer, [])
            self._chunks[buffer] = packed(cast(weights, dtype, uncast), size, earlier, self._allocate)
            self.copies[buffer] = {name: view for chunk in self._chunks[buffer] for name, view in chunk.tensors.items()}
        else:
            _draw(weights)
            self.copies[buffer] = {}
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # checksums and transfers read the copies in other streams
        self._seconds[version] = time.perf_counter() - started

    def _allocate(self, size: int, device: torch.device) -> tuple[torch.Tensor, Handle | None]:
        """Return memory (uint8 ``[size]``) for copies of tensors of a device, and its handle if it is on the device."""
        self._device = device
        if self._spec.name == "nccl":
            return host_memory(size, pinned=device.type == "cuda"), None
        memory = torch.empty(size, dtype=torch.uint8, device=device)
        return memory, self._export(memory)

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

    def offer(self, version: int) -> Offer:
        chunks = self._chunks.get(self._buffers[version], [])
        return [dict([chunk.handle]) for chunk in chunks if chunk.handle is not None]

    def push(self, version: int, target: PushTarget, offers: Sequence[Offer]) -> None:
        """Push a version into a paused engine.

        Passes on what the library or the engine raises, after closing the connection.
        """
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
        """Return the connection to this engine process, with a new one for a process that replaced another."""
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


def _draw(weights: NamedTensors) -> None:
    """Consume ``weights`` to take part in its collectives."""
    for _ in weights:
        pass


def cast(weights: NamedTensors, float_dtype: torch.dtype, uncast: Collection[str] = ()) -> NamedTensors:
    """Yield the weights in the engine's precision, but for those named in ``uncast``.

    Raises ``ValueError`` for a name that occurs twice.
    """
    names = set()
    for name, tensor in weights:
        if name in names:
            raise ValueError(f"tensor {name!r} comes twice in one publication")
        names.add(name)
        is_cast = tensor.is_floating_point() and name not in uncast
        yield name, tensor.detach().to(float_dtype) if is_cast else tensor.detach()


@dataclass(frozen=True)
class Chunk:
    """Memory that several tensors of one dtype fill from its start, without gaps."""

    memory: torch.Tensor
    """uint8 ``[bytes]``."""
    handle: Handle | None
    """What opens it in another process; None on the host."""
    tensors: dict[str, torch.Tensor]


def packed(
    weights: NamedTensors,
    chunk_bytes: int,
    earlier: Sequence[Chunk],
    allocate: Callable[[int, torch.device], tuple[torch.Tensor, Handle | None]],
) -> list[Chunk]:
    """Copy weights into chunks of ``chunk_bytes``, or of one larger tensor.

    The memory of ``earlier`` chunks is used again, under its handle, where it is large enough; with the same tensors
    that is all of it. The order of chunks is that of their first tensors, the same on all ranks.
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
        if tensor.nbytes <= chunk_bytes:  # what stands beside a larger one goes on to be filled
            open_chunks[tensor.dtype] = chunk, filled + tensor.nbytes
    return chunks


def host_memory(size: int, *, pinned: bool) -> torch.Tensor:
    """Return memory of the host (uint8 ``[size]``), ``pinned`` for copies that run while the device computes.

    torch's own pinned memory is rounded up to a power of two, which for a large model is nearly twice its size.
    """
    memory = torch.empty(size, dtype=torch.uint8)
    if pinned:
        check_error(cudart().cudaHostRegister(memory.data_ptr(), size, 0))
    return memory


def device_handle(memory: torch.Tensor) -> Handle:
    """Return the UUID of the memory's device, and the arguments of torch's ``rebuild_cuda_tensor`` for it."""
    _, arguments = reduce_tensor(memory)
    return str(torch.cuda.get_device_properties(memory.device).uuid), arguments


class IpcConnection:
    """The trainer's end of vLLM's transfer by CUDA IPC: tells an engine's processes where to open which memory.

    vLLM's own end lets all ranks exchange handles by collectives, on the group that training uses.
    """

    def __init__(self, client: RayEngineCalls) -> None:
        self._client = client
        client.init_weight_transfer_engine({"packed": True})

    def send(self, chunks: Sequence[Chunk], offers: Sequence[Offer]) -> None:
        """Have the engine copy the chunks, one after the other. ``offers``: each rank's handles of them.

        Raises ``ValueError`` if a rank does not offer as many chunks.
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
        """Do nothing: an engine that has died opens no memory."""


def buffer_source(copies: Mapping[int, Mapping[str, torch.Tensor]], device: torch.device) -> Any:
    """Return copies by buffer as vLLM's ``WeightSource``; its attribute ``buffer`` selects those that are sent next.

    They come to ``device`` one by one. The class is made here because its base class is vLLM's, which a trainer imports
    only if it pushes.
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

"""Weight update: from the trainer's tensors to the engine's, with proof that they are the same.

Gather copies the weights into the transport's memory (brief, collective). Send takes their checksums and hands them
over in the background. Load happens in the engine. Before the engine serves a request, its weights are compared with
those that the trainer gathered: version, number of parameters, and the checksum of each tensor over all its bytes. A
tensor that the engine cannot read back is not compared. A difference names the tensor and stops the run.

There are two ways. With buckets, the first rank packs the weights into the transport's memory and the engines fetch
them from there. With a push, copies stay on the devices and the engine library's own transfer sends them, engine by
engine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from roll.weights.buckets import HeldWeights, WeightBucket, manifest, pack_buckets
from roll.weights.engine_push import WEIGHT_BACKENDS, PushTarget, WeightPusher
from roll.weights.transports import TRANSPORTS, CorruptingSender, TransportSpec

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class WeightPublisher(Protocol):
    """The trainer rank's interface for handing out weights."""

    def gather(self, version: int, buffer: int, weights: NamedTensors, dtype: torch.dtype, bucket_bytes: int) -> None:
        """Copy the weights, casting floating-point ones to ``dtype``. Every rank must consume all of ``weights``."""

    def send(self, version: int) -> Publication:
        """Return what engines need to know about a gathered version. First rank only; runs while training continues."""

    def push(self, version: int, target: PushTarget) -> None:
        """Push a version into one paused engine. Every rank calls this."""

    def disconnect(self, name: str) -> None:
        """Drop the connection to a dead engine."""

    def release(self, version: int) -> None:
        """Release a version that no engine will ask for again."""


@dataclass(frozen=True)
class Gathered:
    """Weights copied out of the trainer, ready to be sent."""

    buffer: int
    buckets: list[WeightBucket]
    seconds: float


class BucketPublisher:
    """A publisher that writes to memory or files that engines read."""

    def __init__(self, spec: TransportSpec, rank: int) -> None:
        sender = TRANSPORTS[spec.name].sender(spec)
        self._sender = CorruptingSender(sender, spec.corrupted_versions) if spec.corrupted_versions else sender
        self._rank = rank
        self._gathered: dict[int, Gathered] = {}

    def gather(self, version: int, buffer: int, weights: NamedTensors, dtype: torch.dtype, bucket_bytes: int) -> None:
        """See `WeightPublisher.gather`; only the first rank keeps anything."""
        started = time.perf_counter()
        if self._rank != 0:
            _draw(weights)
            return
        self._sender.begin(buffer)
        allocate = partial(self._sender.allocate, buffer)
        buckets = list(pack_buckets(weights, bucket_bytes, float_dtype=dtype, allocate=allocate))
        self._gathered[version] = Gathered(buffer, buckets, time.perf_counter() - started)

    def send(self, version: int) -> Publication:
        """Take the checksums, hand the buckets to the transport, and return what engines need to know."""
        started = time.perf_counter()
        gathered = self._gathered.pop(version)
        parameter_count, checksums = manifest(gathered.buckets)
        handles = self._sender.send(gathered.buffer, version, gathered.buckets)
        return Publication(
            version=version,
            handles=handles,
            parameter_count=parameter_count,
            checksums=checksums,
            total_bytes=sum(bucket.data.nbytes for bucket in gathered.buckets),
            seconds={"gather": gathered.seconds, "send": time.perf_counter() - started},
        )

    def push(self, version: int, target: PushTarget) -> None:
        """Raise ``RuntimeError``: engines fetch buckets, so this is never called."""
        raise RuntimeError(f"version {version} travels in buckets, which {target.name} fetches")

    def disconnect(self, name: str) -> None:
        """Do nothing: nothing is connected."""

    def release(self, version: int) -> None:
        """See `WeightPublisher.release`."""
        self._sender.release(version)


class PushPublisher:
    """A publisher that uses the engine library's own transfer, from device to device."""

    def __init__(self, pusher: WeightPusher, rank: int, *, all_ranks: bool) -> None:
        """Keep the pusher.

        ``all_ranks``: every rank keeps a copy (an engine reads the one on its own device); otherwise only the first
        rank does.
        """
        self._pusher = pusher
        self._keeps = all_ranks or rank == 0
        self._buffers: dict[int, int] = {}
        self._seconds: dict[int, float] = {}

    def gather(self, version: int, buffer: int, weights: NamedTensors, dtype: torch.dtype, bucket_bytes: int) -> None:
        """See `WeightPublisher.gather`; ``bucket_bytes`` is unused, because the transfer has its own buckets."""
        started = time.perf_counter()
        self._buffers = {other: each for other, each in self._buffers.items() if each != buffer} | {version: buffer}
        if self._keeps:
            self._pusher.buffers.gather(buffer, weights, dtype)
        else:
            _draw(weights)
            self._pusher.buffers.gather(buffer, [], dtype)
        self._seconds[version] = time.perf_counter() - started

    def send(self, version: int) -> Publication:
        """Take the checksums, and return what engines need to know. The bytes are pushed once each engine is paused."""
        started = time.perf_counter()
        buffers, buffer = self._pusher.buffers, self._buffers[version]
        layout = buffers.layout(buffer)
        checksums = buffers.checksums(buffer)
        return Publication(
            version=version,
            handles=[],
            parameter_count=sum(math.prod(shape) for _, shape in layout.values()),
            checksums=checksums,
            total_bytes=sum(tensor.nbytes for tensor in buffers.tensors(buffer).values()),
            layout=layout,
            seconds={"gather": self._seconds.pop(version), "send": time.perf_counter() - started},
        )

    def push(self, version: int, target: PushTarget) -> None:
        """See `WeightPublisher.push`."""
        self._pusher.push(self._buffers[version], target)

    def disconnect(self, name: str) -> None:
        """See `WeightPublisher.disconnect`."""
        self._pusher.disconnect(name)

    def release(self, version: int) -> None:
        """Do nothing: the next version reuses the memory."""


def build_publisher(spec: TransportSpec, *, rank: int, host: str) -> WeightPublisher:
    """Return the publisher of a rank for the configured transport."""
    if spec.name not in WEIGHT_BACKENDS:
        return BucketPublisher(spec, rank)
    pusher = WeightPusher(spec.name, rank, host, spec.bucket_bytes, spec.timeout_seconds)
    return PushPublisher(pusher, rank, all_ranks=spec.name == "cuda_ipc")


def _draw(weights: NamedTensors) -> None:
    """Consume ``weights`` to take part in its collectives."""
    for _ in weights:
        pass


@dataclass
class Publication:
    """One version of the weights on its way to the engines."""

    version: int
    handles: list[Any]
    """Handles that the transport's receiver needs, bucket by bucket."""
    parameter_count: int
    checksums: dict[str, int]
    total_bytes: int
    layout: dict[str, tuple[str, tuple[int, ...]]] | None = None
    """Name -> (dtype name, shape) of pushed weights; None if engines fetch by the handles."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of ``gather`` and ``send``."""


class WeightsDiffer(RuntimeError):
    """An engine does not hold the published weights."""


def check_weights(engine: str, publication: Publication, receipt: HeldWeights) -> None:
    """Compare an engine's weights with the published ones. Raises `WeightsDiffer` naming the difference."""
    if receipt.version != publication.version:
        raise WeightsDiffer(f"{engine} holds version {receipt.version} after version {publication.version} was sent")
    missing = sorted(publication.checksums.keys() - receipt.checksums.keys())
    unknown = sorted(receipt.checksums.keys() - publication.checksums.keys())
    if missing or unknown:
        raise WeightsDiffer(
            f"{engine}, version {publication.version}: tensors never received: {missing[:5]}; "
            f"held but never published: {unknown[:5]}"
        )
    if receipt.parameter_count != publication.parameter_count:
        raise WeightsDiffer(
            f"{engine}, version {publication.version}: {receipt.parameter_count} parameters held, "
            f"{publication.parameter_count} published"
        )
    differing = [
        name for name, checksum in publication.checksums.items() if receipt.checksums[name] not in (checksum, None)
    ]
    if differing:
        raise WeightsDiffer(
            f"{engine}, version {publication.version}: the content of {differing[0]!r} differs from what was published"
            + (f" (and of {len(differing) - 1} more tensors)" if len(differing) > 1 else "")
        )

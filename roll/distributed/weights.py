"""Weight publication: from the trainer's tensors to what an engine holds, and the proof that they are the same.

Gather copies the weights into buckets in the trainer (brief, collective); send hands the buckets to a transport in the
background; load happens in the engine. What the engine then holds is compared with what the trainer gathered: version,
number of parameters and the checksum of each tensor. A difference names the tensor and stops the run.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray
import torch

from roll.strategies.infer.base import WeightBucket, WeightReceipt


@dataclass
class Publication:
    """One version of the weights, on its way to the engines."""

    version: int
    handles: list[Any]
    """What the transport's receiver needs, bucket by bucket."""
    parameter_count: int
    checksums: dict[str, int]
    total_bytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    """``gather`` and ``send``."""


class WeightTransport(Protocol):
    """How buckets travel. `send` runs in the trainer, `receive` in the engine's process."""

    def send(self, bucket: WeightBucket) -> Any:
        """Hand one bucket over; the returned handle travels to the receivers."""

    def receive(self, handles: Sequence[Any]) -> Iterator[WeightBucket]:
        """The buckets again, one at a time."""


class ObjectStoreTransport:
    """Ray's object store: shared memory on one host, copied once to each further host."""

    def send(self, bucket: WeightBucket) -> Any:
        return ray.put(bucket)

    def receive(self, handles: Sequence[Any]) -> Iterator[WeightBucket]:
        for handle in handles:
            yield ray.get(handle)


TRANSPORTS: dict[str, type[WeightTransport]] = {"object_store": ObjectStoreTransport}


class AttestationError(RuntimeError):
    """An engine does not hold the weights that were published."""


def cast_weights(weights: Iterable[tuple[str, torch.Tensor]], dtype: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Floating-point tensors in the dtype the engine holds, so that both sides have the same bytes to compare."""
    target = getattr(torch, dtype)
    for name, tensor in weights:
        yield name, tensor.to(target) if tensor.is_floating_point() else tensor


def manifest(buckets: Iterable[WeightBucket]) -> tuple[int, dict[str, int]]:
    """Number of parameters and the crc32 of each tensor's bytes."""
    parameter_count = 0
    checksums: dict[str, int] = {}
    for bucket in buckets:
        for name, dtype, shape, offset in bucket.tensors:
            elements = math.prod(shape)
            parameter_count += elements
            checksums[name] = zlib.crc32(bucket.data[offset : offset + elements * getattr(torch, dtype).itemsize])
    return parameter_count, checksums


def attest(engine: str, publication: Publication, receipt: WeightReceipt) -> None:
    """Compare what an engine holds with what was published. Raises `AttestationError` naming the difference."""
    if receipt.version != publication.version:
        raise AttestationError(f"{engine} holds version {receipt.version} after version {publication.version} was sent")
    missing = sorted(publication.checksums.keys() - receipt.checksums.keys())
    unknown = sorted(receipt.checksums.keys() - publication.checksums.keys())
    if missing or unknown:
        raise AttestationError(
            f"{engine}, version {publication.version}: tensors never received: {missing[:5]}; "
            f"held but never published: {unknown[:5]}"
        )
    if receipt.parameter_count != publication.parameter_count:
        raise AttestationError(
            f"{engine}, version {publication.version}: {receipt.parameter_count} parameters held, "
            f"{publication.parameter_count} published"
        )
    differing = [name for name, checksum in publication.checksums.items() if receipt.checksums[name] != checksum]
    if differing:
        raise AttestationError(
            f"{engine}, version {publication.version}: the content of {differing[0]!r} differs from what was published"
            + (f" (and of {len(differing) - 1} more tensors)" if len(differing) > 1 else "")
        )

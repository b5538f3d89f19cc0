"""Deltas: a weight update as what changed since the one before, for engines that keep that one on their host.

A delta stands between transport and engine: each replica's process has a copy of the last weights that it received, the
base, and turns a delta into whole tensors there. Engines, their loaders and their checks see what they see without it.
The trainer needs no copy: the version before is in the other buffer of the double buffer.

Promises: a rebuilt tensor has the checksum of the whole tensor before an engine gets it; a delta is applied to the very
bytes that it was made from, or not at all; where one does not fit, the bucket is fetched whole. So each publication is
there as a whole, too. A base that was only partly changed is never used again.

A delta holds, for every block of elements and every byte of an element, where this byte differs and the exclusive or of
both. The high bytes of numbers that moved little are the same, so they take nearly no room. Bytes are compared, not
numbers: NaN and -0.0 are nothing special.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from roll.configs.run import LARGEST_DELTA
from roll.weights.buckets import (
    DTYPES,
    BucketLocation,
    MemoryFile,
    WeightBucket,
    WeightMismatch,
    checksum,
    tensor_spans,
)

if TYPE_CHECKING:
    from roll.weights.publisher import Publication
    from roll.weights.transports import WeightReceiver, WeightSender

logger = logging.getLogger(__name__)

BLOCK = 2**16
"""Elements that are compared at a time. A place among them has two bytes."""


@dataclass(frozen=True)
class Delta:
    """Changes of a weight update since the one before, for the replicas that have that one."""

    since: int | None = None
    """`fingerprint` of the publication that it applies to; None: this publication is fetched whole, and kept."""
    handles: Sequence[Any] = ()
    """Handles that the transport's receiver needs: of one bucket, with a tensor for each bucket of the publication."""
    total_bytes: int = 0


def fingerprint(checksums: Mapping[str, int]) -> int:
    """Return a number that is the same for publications of the same bytes only."""
    return checksum(np.fromiter(checksums.values(), np.uint64, len(checksums)).view(np.uint8))


def encode(old: WeightBucket, new: WeightBucket) -> Iterator[np.ndarray]:
    """Yield, as uint8 arrays, what `apply` needs to turn the bytes of ``old`` into those of ``new``, which has the same
    tensors."""
    for (_, dtype, *_), (start, end) in zip(new.tensors, tensor_spans(new), strict=True):
        size = DTYPES[dtype].itemsize
        for first in range(start, end, BLOCK * size):
            block = slice(first, min(first + BLOCK * size, end))
            before, after = old.data[block].view(f"u{size}"), new.data[block].view(f"u{size}")
            places = np.flatnonzero(before != after)
            for plane in (before[places] ^ after[places]).view(np.uint8).reshape(-1, size).T:
                differs = plane != 0
                yield from _encode_plane(places[differs], plane[differs], len(before))


def apply(data: np.ndarray, like: WeightBucket, delta: np.ndarray) -> None:
    """Change the bytes of a bucket (uint8, its tensors are those of ``like``) by a delta.

    Raises ``ValueError`` or ``IndexError`` if the delta does not fit, when some bytes have changed already.
    """
    place = 0
    for (_, dtype, *_), (start, end) in zip(like.tensors, tensor_spans(like), strict=True):
        size = DTYPES[dtype].itemsize
        for first in range(start, end, BLOCK * size):
            block = data[first : min(first + BLOCK * size, end)].reshape(-1, size)
            for plane in block.T:
                place += _apply_plane(plane, delta[place:])
    if place != len(delta):
        raise ValueError(f"a delta of {len(delta)} bytes was read up to byte {place}")


def _form(changed: int, count: int) -> str:
    """Return the shortest form for so many changed bytes of a plane of ``count`` bytes."""
    sizes = {"places": 3 * changed, "bits": -(-count // 8) + changed, "all": count}
    return min(sizes, key=lambda form: sizes[form])


def _encode_plane(places: np.ndarray, values: np.ndarray, count: int) -> Iterator[np.ndarray]:
    """Yield the number of changed bytes, where they are, and their exclusive or."""
    yield np.array([len(places)], "<u4").view(np.uint8)
    form = _form(len(places), count)
    if form == "places":
        yield places.astype("<u2").view(np.uint8)
        yield values
        return
    plane = np.zeros(count, np.uint8)
    plane[places] = values
    if form == "bits":
        yield np.packbits(plane != 0)
        yield values
    else:
        yield plane


def _apply_plane(plane: np.ndarray, delta: np.ndarray) -> int:
    """Change one byte of each element of a block. Return how many bytes of the delta this took."""
    (changed,), count = delta[:4].view("<u4").tolist(), len(plane)
    if changed > count:
        raise ValueError(f"{changed} of {count} elements changed")
    form, start = _form(changed, count), 4
    if form == "all":
        plane ^= delta[start : start + count]
        return start + count
    if form == "places":
        values = start + 2 * changed
        places = delta[start:values].view("<u2")
    else:
        values = start + -(-count // 8)
        places = np.flatnonzero(np.unpackbits(delta[start:values], count=count))
    plane[places] ^= delta[values : values + changed]
    return values + changed


class DeltaSource:
    """The trainer's end: makes the delta of each publication from the one before, which is in another buffer."""

    def __init__(self, sender: WeightSender, full_every: int) -> None:
        """``full_every``: number of publications of which one is sent whole; 0: only the first one."""
        self._sender = sender
        self._full_every = full_every
        self._last: tuple[int, list[WeightBucket], int] | None = None
        """Buffer, buckets and `fingerprint` of the last publication; None if it cannot be compared with."""
        self._since_whole = 0

    def overwritten(self, buffer: int) -> None:
        """Forget the publication in this buffer, which is about to be overwritten."""
        if self._last is not None and self._last[0] == buffer:
            self._last = None

    def delta(
        self, version: int, buffer: int, buckets: list[WeightBucket], checksums: Mapping[str, int], corrupted: bool
    ) -> Delta:
        """Make a publication's delta and hand it over to the transport. ``corrupted``: with one wrong byte."""
        last, self._last = self._last, (buffer, buckets, fingerprint(checksums))
        self._since_whole += 1
        is_whole = last is None or self._since_whole == self._full_every
        made = None if last is None or is_whole else self._made(last[1], buckets, buffer)
        if last is None or made is None:
            self._since_whole = 0
            return Delta()
        if corrupted:
            made.data[0] ^= 0xFF
        return Delta(last[2], self._sender.send(_memory_of_deltas(buffer), version, [made]), made.data.nbytes)

    def _made(self, last: list[WeightBucket], buckets: list[WeightBucket], buffer: int) -> WeightBucket | None:
        """Return the delta; None if the tensors are other ones, or if too many bytes changed."""
        if [each.tensors for each in last] != [each.tensors for each in buckets]:
            return None
        largest = int(LARGEST_DELTA * sum(each.data.nbytes for each in buckets))
        memory = _memory_of_deltas(buffer)
        self._sender.begin(memory)
        data, filled = self._sender.allocate(memory, 0, largest), 0
        made = WeightBucket([], data)
        for index, (old, new) in enumerate(zip(last, buckets, strict=True)):
            start = filled
            for part in encode(old, new):
                if filled + len(part) > largest:
                    return None
                data[filled : filled + len(part)] = part
                filled += len(part)
            made.tensors.append((str(index), "uint8", (filled - start,), start))
        return replace(made, data=data[:filled])


def _memory_of_deltas(buffer: int) -> int:
    """Return the sender's number for the memory of a buffer's delta."""
    return -1 - buffer


class DeltaReceiver:
    """The engine's end: keeps the last publication that it received, and turns deltas into whole tensors there.

    Each bucket's memory may be changed as soon as the engine has loaded it, by the next delta.
    """

    def __init__(self, receiver: WeightReceiver) -> None:
        self._receiver = receiver
        self._base: list[WeightBucket] = []
        self._memory: list[MemoryFile] = []
        self._held: int | None = None
        """`fingerprint` of the base; None while it changes, and if that was given up."""
        self.healed: list[str] = []
        """Tensors of the last publication whose delta did not fit."""

    def receive(self, publication: Publication) -> Iterator[WeightBucket]:
        """Yield the buckets of a publication, whole. ``verified`` is set in those that were rebuilt.

        A bucket without a base, or whose delta does not fit, is fetched whole. Raises as `WeightReceiver.receive` does.
        """
        delta, held, self._held, self.healed = publication.delta, self._held, None, []
        applies = delta is not None and delta.since is not None and delta.since == held
        parts = self._parts(publication.version, delta) if delta is not None and applies else None
        for index, handle in enumerate(publication.handles):
            rebuilt = None if parts is None else self._rebuilt(index, publication, parts)
            yield rebuilt or self._kept(index, *self._receiver.receive([handle], publication.version))
        self._held = fingerprint(publication.checksums)

    def _parts(self, version: int, delta: Delta) -> list[np.ndarray]:
        """Return the delta of each bucket; [] if it cannot be read."""
        try:
            (made,) = self._receiver.receive(delta.handles, version)
            return [made.data[start:end] for start, end in tensor_spans(made)]
        except WeightMismatch as error:
            logger.warning("the delta to version %d cannot be read: %s", version, error)
            return []

    def _rebuilt(self, index: int, publication: Publication, parts: Sequence[np.ndarray]) -> WeightBucket | None:
        """Apply a bucket's delta to the base; None if the result is not what was published."""
        base = self._base[index]
        try:
            if parts:  # else they could not be read
                apply(base.data, base, parts[index])
        except (ValueError, IndexError) as error:
            logger.warning("the delta to version %d cannot be applied: %s", publication.version, error)
        spans = {name: span for (name, *_), span in zip(base.tensors, tensor_spans(base), strict=True)}
        found = {name: checksum(base.data[start:end]) for name, (start, end) in spans.items()}
        wrong = [name for name, digest in found.items() if digest != publication.checksums[name]]
        if not wrong:
            return replace(base, verified=found)
        logger.warning("version %d: the delta of %s did not give what was published", publication.version, wrong)
        self.healed += wrong
        return None

    def _kept(self, index: int, bucket: WeightBucket) -> WeightBucket:
        """Copy a bucket that was fetched whole into the base."""
        size = len(bucket.data)
        if index == len(self._memory):
            self._memory.append(MemoryFile(size))
        elif self._memory[index].size != size:
            self._memory[index] = MemoryFile(size)
        memory = self._memory[index]
        memory.data[:] = bucket.data
        kept = WeightBucket(bucket.tensors, memory.data, BucketLocation(memory.path, 0))
        self._base[index : index + 1] = [kept]
        return kept

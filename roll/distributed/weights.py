"""Weight update: from the trainer's tensors to the engine's, with proof that they are the same.

Gather copies the weights into the transport's memory (brief, collective). Send takes their checksums and hands them
over in the background. Load happens in the engine. Before the engine serves a request, its weights are compared with
those that the trainer gathered: version, number of parameters, and the checksum of each tensor over all its bytes. A
tensor that the engine cannot read back is not compared. A difference names the tensor and stops the run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from roll.strategies.infer.base import WeightReceipt


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


class AttestationError(RuntimeError):
    """An engine does not hold the published weights."""


def attest(engine: str, publication: Publication, receipt: WeightReceipt) -> None:
    """Compare an engine's weights with the published ones. Raises `AttestationError` naming the difference."""
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
    differing = [
        name
        for name, checksum in publication.checksums.items()
        if receipt.checksums[name] not in (checksum, None)
    ]
    if differing:
        raise AttestationError(
            f"{engine}, version {publication.version}: the content of {differing[0]!r} differs from what was published"
            + (f" (and of {len(differing) - 1} more tensors)" if len(differing) > 1 else "")
        )

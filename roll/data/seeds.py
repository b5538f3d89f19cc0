"""Reproducible seeds: a run's seed and a name give the same seed on any machine, in any order.

No random generator is shared between parts of a run, so what one part draws never changes what another one sees.
"""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *parts: int | str) -> int:
    """Derive the seed of a named part of a run.

    ``derive_seed(seed, group_id, sample_index, turn)`` is the seed of one request. Different parts give unrelated
    seeds; ``1`` and ``"1"`` are different parts.

    Returns an integer in ``[0, 2**63)``. Raises `TypeError` for a part that is neither an integer nor text.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in (run_seed, *parts):
        if isinstance(part, bool) or not isinstance(part, int | str):
            raise TypeError(f"a seed derives from integers and texts, not from {part!r}")
        kind = "i" if isinstance(part, int) else "s"
        encoded = str(part).encode(errors="surrogatepass")
        digest.update(f"{kind}{len(encoded)}:".encode() + encoded)
    return int.from_bytes(digest.digest(), "big") >> 1

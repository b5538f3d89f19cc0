"""The endless stream of training prompts, or examples.

Two promises hold for any number of prompts drawn: within a domain each prompt comes exactly once per epoch, and no
domain is ever a whole prompt away from its share. The stream is a pure function of prompts and seed, so a resumed run
draws what the first one drew.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Generic, Protocol, TypeVar

import numpy as np

from roll.data.records import derive_seed


class DomainSchedule:
    """A deterministic order of domains that keeps to given shares.

    After ``n`` turns a domain with share ``p`` has had ``p * n`` turns to within less than one, for any shares. The
    rule is that of Tijdeman, "The chairman assignment problem" (Discrete Mathematics 32, 1980): among the domains far
    enough behind their share, take the one whose deadline comes first. (Serving the largest deficit can fall behind by
    more than one turn when there are many domains.)
    """

    def __init__(self, shares: Mapping[str, float | int]) -> None:
        """Set the ``shares``, which need not add up to 1.

        Raises `ValueError` if one is negative or not finite, or all are 0.
        """
        if not all(math.isfinite(share) and share >= 0 for share in shares.values()) or sum(shares.values()) <= 0:
            raise ValueError(f"shares must be finite, at least 0, and not all 0: {dict(shares)}")
        exact = {domain: Fraction(str(share)) for domain, share in shares.items() if share > 0}
        denominator = math.lcm(*(share.denominator for share in exact.values()))
        self._weights = {domain: int(share * denominator) for domain, share in exact.items()}
        self._total_weight = sum(self._weights.values())
        self.turns = dict.fromkeys(self._weights, 0)
        """Number of turns that each domain has had."""

    def next(self) -> str:
        """Return the domain of the next turn, and count the turn."""
        # Integer arithmetic: with surplus(d) = (share * n - turns) * total_weight nothing is ever rounded.
        turn = sum(self.turns.values()) + 1
        surplus = {
            domain: weight * turn - self.turns[domain] * self._total_weight for domain, weight in self._weights.items()
        }
        slack = max(2 * len(self._weights) - 2, 1)
        due = [domain for domain in surplus if surplus[domain] * slack >= self._total_weight]
        latest_surplus = Fraction(self._total_weight * (slack - 1), slack)
        chosen = min(due, key=lambda domain: (latest_surplus - surplus[domain]) / self._weights[domain])
        self.turns[chosen] += 1
        return chosen


class HasDomain(Protocol):
    """A prompt, or an example."""

    @property
    def domain(self) -> str:
        """Its domain tag."""


Item = TypeVar("Item", bound=HasDomain)


class PromptStream(Generic[Item]):
    """An endless iterator of prompts by domain shares; each domain has epochs of its own."""

    def __init__(
        self,
        prompts: Sequence[Item],
        *,
        seed: int,
        shuffle: bool = True,
        domain_interleave_probs: Mapping[str, float] | None = None,
    ) -> None:
        """Set up the stream; by default each domain's share is its part of the prompts.

        ``shuffle`` reorders each domain's prompts at each epoch, from ``(seed, domain, epoch)`` alone. Raises
        `ValueError` if there are no prompts, or a domain with a share has none.
        """
        if not prompts:
            raise ValueError("a stream needs at least one prompt")
        self._by_domain: dict[str, list[Item]] = {}
        for prompt in prompts:
            self._by_domain.setdefault(prompt.domain, []).append(prompt)
        if domain_interleave_probs is None:
            domain_interleave_probs = {domain: len(members) for domain, members in self._by_domain.items()}
        self._schedule = DomainSchedule(domain_interleave_probs)
        missing = set(self._schedule.turns) - set(self._by_domain)
        if missing:
            raise ValueError(f"no prompts of domain {', '.join(sorted(missing))}, which has a share of the stream")
        self._seed = seed
        self._shuffle = shuffle
        self._orders: dict[str, tuple[int, np.ndarray]] = {}

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        domain = self._schedule.next()
        members = self._by_domain[domain]
        epoch, position = divmod(self._schedule.turns[domain] - 1, len(members))
        return members[self._order(domain, epoch)[position]]

    def _order(self, domain: str, epoch: int) -> np.ndarray:
        """Return the order of the domain's prompts in an epoch; it is cached until another epoch is requested."""
        known_epoch, order = self._orders.get(domain, (-1, np.arange(0)))
        if known_epoch != epoch:
            size = len(self._by_domain[domain])
            if self._shuffle:
                order = np.random.default_rng(derive_seed(self._seed, "epoch", domain, epoch)).permutation(size)
            else:
                order = np.arange(size)
            self._orders[domain] = (epoch, order)
        return order

"""Assertions in places whose failures the code under test retries, replaces or drops.

A rollout that raises is made again, an engine that raises is replaced: there an `AssertionError` is one failure more,
and the test that made it passes. What a witness saw is kept, and raised when the test asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Witness:
    """Keeps the assertions that failed."""

    def __init__(self) -> None:
        self.seen: list[AssertionError] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Keep a failed assertion of this block, and raise it as it would be without a witness."""
        try:
            yield
        except AssertionError as violation:
            self.seen.append(violation)
            raise

    def testify(self) -> None:
        """Raise the first assertion that failed, if any did. For the end of a test, whatever else it ended with."""
        if self.seen:
            raise self.seen[0]

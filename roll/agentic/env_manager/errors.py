"""Episodes that cannot be had. Whoever asked for one decides whether to try again; none of these is data."""

from __future__ import annotations


class EpisodeRefused(ValueError):
    """The episode cannot begin: its first prompt leaves the policy no room. Names tag, seed, lengths and key."""


class PolicyAborted(RuntimeError):
    """The policy was stopped inside a turn, so the episode has no end. Names tag, seed and turn."""

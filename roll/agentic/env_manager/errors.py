"""Errors of episodes that yield no data. The caller decides whether to try again."""

from __future__ import annotations


class EpisodeRefused(ValueError):
    """The first prompt leaves the policy no room, so the episode cannot begin.

    The message names tag, seed, lengths and key.
    """


class PolicyAborted(RuntimeError):
    """The policy was stopped inside a turn, so the episode has no end. The message names tag, seed and turn."""

"""Parity-check sequences: fixed token sequences that trainer and engines score, to compare their log-probabilities.

Prompts alone would only cover what the model expects to see. The pseudo-random tokens after them also reach parts of
the distribution to which a good model gives little weight. Equal prompts and seed give equal sequences on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.seeds import derive_seed

VOCABULARY_PROMPTS = 1024
"""Number of prompts whose tokens the random part is drawn from."""


def canary_sequences(prompts: Sequence[np.ndarray], *, count: int, length: int, seed: int) -> list[np.ndarray]:
    """Return ``count`` sequences of ``length`` tokens, int32 ``[length]`` each.

    A sequence begins with the beginning of one of ``prompts`` (int32 ``[prompt]`` each), at most half of its length
    (rounded up). Tokens drawn from those of the prompts follow. The prompts are a random choice by ``seed``, without
    repetition as long as there are enough.
    """
    rng = np.random.default_rng(derive_seed(seed, "canaries"))
    order = rng.permutation(len(prompts))
    vocabulary = np.unique(np.concatenate([prompts[index] for index in order[:VOCABULARY_PROMPTS]]))
    sequences = []
    for position in range(count):
        head = prompts[order[position % len(order)]][: (length + 1) // 2]
        tail = rng.choice(vocabulary, length - len(head))
        sequences.append(np.concatenate([head, tail]).astype(np.int32))
    return sequences

"""Canary sequences: fixed token sequences that trainer and engine score to see whether they agree.

Prompts alone would show what the model expects to see; the pseudo-random tokens behind them also reach parts of the
distribution that a good model gives little weight. Equal prompts and seed give equal sequences on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roll.data.seeds import derive_seed

VOCABULARY_PROMPTS = 1024
"""Prompts whose tokens the random part is drawn from."""


def canary_sequences(prompts: Sequence[np.ndarray], *, count: int, length: int, seed: int) -> list[np.ndarray]:
    """``count`` sequences of ``length`` tokens, int32 ``[length]`` each: the beginning of one of ``prompts`` (int32
    ``[prompt]`` each), at most half of the sequence (rounded up), then tokens drawn from those of the prompts.

    The prompts are a random choice by ``seed``, without repetition as long as there are enough.
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

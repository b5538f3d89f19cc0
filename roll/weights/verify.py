"""Log-probability parity check: the trainer and each engine score the same sequences at the same weight version.

Checksums prove that the bytes arrived. This check shows that the engine also computes the same as the trainer with
them. It detects a tensor in the wrong place, a stale copy in use, or a different scaling or position encoding. A mean
difference that is above the tolerance or not finite stops the run.

The sequences are prompts followed by pseudo-random tokens. Prompts alone would only test likely tokens; the random ones
also test parts of the distribution with low probability. The same prompts and seed give the same sequences on any
machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roll.data.records import PictureStep, derive_seed
from roll.weights.publisher import WeightsDiffer

VOCABULARY_PROMPTS = 1024
"""Number of prompts from whose tokens the random part is drawn."""


def canary_sequences(prompts: Sequence[np.ndarray], *, count: int, length: int, seed: int) -> list[np.ndarray]:
    """Return ``count`` sequences of ``length`` tokens, int32 ``[length]`` each.

    Each sequence begins with the first tokens of one of ``prompts`` (int32 ``[prompt]`` each), up to half of its length
    (rounded up). Random tokens that occur in the prompts follow. Prompts are chosen at random by ``seed``, and none is
    used twice if there are enough.
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


SHOWN_TOKENS = 12
"""Number of token ids of the worst sequence that an error message quotes."""


@dataclass(frozen=True)
class CanaryScores:
    """The trainer's log-probabilities of the check sequences at one weight version."""

    version: int
    token_ids: list[np.ndarray]
    """int32 ``[length]`` each."""
    logprobs: list[np.ndarray]
    """float32 ``[length]`` each, at temperature 1; the first entry has no meaning."""
    tolerance: float
    """Largest allowed mean absolute difference, in nats per token."""
    steps: Sequence[PictureStep] | None = None
    """Denoising steps of pictures that an engine is asked for in place of the sequences: one step for each, as its
    second token."""


def canary_metrics(differences: Sequence[np.ndarray]) -> dict[str, float]:
    """Return the ``mismatch/canary_...`` metrics for the results of `compare_canaries`, one array per engine."""
    everything = np.concatenate(differences)
    sizes, tokens = np.abs(everything), len(everything)
    return {
        "mismatch/canary_mean": float(everything.sum()) / max(tokens, 1),
        "mismatch/canary_abs_mean": float(sizes.sum()) / max(tokens, 1),
        "mismatch/canary_max": float(sizes.max(initial=0.0)),
        "mismatch/canary_tokens": float(tokens),
    }


def compare_canaries(engine: str, canaries: CanaryScores, held: Sequence[np.ndarray]) -> np.ndarray:
    """Compare the engine's log-probabilities (``held``, shaped like `CanaryScores.logprobs`) with the trainer's.

    Returns trainer minus engine, in nats: float64 ``[tokens]``, over all sequences without their first tokens. The
    log-probability of a step of a picture may be thousands of nats; its difference is relative to it if it is above 1.
    Raises
    `WeightsDiffer` naming the engine, the version and the worst sequence if the mean absolute difference is above the
    tolerance or not finite, or if the engine did not score every token.
    """
    expected_lengths = [len(values) for values in canaries.token_ids]
    if [len(values) for values in held] != expected_lengths:
        raise WeightsDiffer(
            f"{engine}, version {canaries.version}: canary sequences of {expected_lengths} tokens came back as "
            f"{[len(values) for values in held]} log-probabilities"
        )
    differences = []
    unit_name = "nats per token" if canaries.steps is None else "of their size (nats below 1)"
    for own, theirs in zip(canaries.logprobs, held, strict=True):
        trained = own[1:].astype(np.float64)
        unit = 1.0 if canaries.steps is None else np.maximum(np.abs(trained), 1.0)
        differences.append((trained - theirs[1:].astype(np.float64)) / unit)
    everything = np.concatenate(differences)
    sizes = np.abs(everything)
    absolute_mean = float(sizes.sum()) / max(len(sizes), 1)
    # `not <=` is also true for NaN; an infinite difference makes the mean infinite.
    if not absolute_mean <= canaries.tolerance:
        means = [float(np.abs(values).mean()) if len(values) else 0.0 for values in differences]
        worst = int(np.argmax(np.nan_to_num(means, nan=np.inf)))
        place = 1 + int(np.argmax(np.nan_to_num(np.abs(differences[worst]), nan=np.inf)))
        ids = canaries.token_ids[worst].tolist()
        shown = f"{ids[:SHOWN_TOKENS]}{'...' if len(ids) > SHOWN_TOKENS else ''}"
        raise WeightsDiffer(
            f"{engine}, version {canaries.version}: its log-probabilities of the canary sequences differ from those of "
            f"the trainer by {absolute_mean:.3g} {unit_name} on average (at most {canaries.tolerance:g} "
            f"allowed, weight_update.canary_tolerance) and by {sizes.max():.3g} at most, over {len(sizes)} tokens. "
            f"The worst is sequence {worst} ({means[worst]:.3g} on average), token ids {shown}: at place {place} the "
            f"trainer has {canaries.logprobs[worst][place]:.6g}, the engine {held[worst][place]:.6g}. The bytes of the "
            "weights were checked before, so the engine computes something else with them: weights it does not use (a "
            "tied or fused tensor, an adapter, a cached copy), other settings of the model (position encoding, "
            "attention), or a lower precision than the tolerance allows for"
        )
    return everything

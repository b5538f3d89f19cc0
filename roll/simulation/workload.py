"""The groups of a simulated run: lengths of prompts and responses, latencies of rewards and environments.

Group number g of a seed is the same in every schedule, so that two schedules are compared on the same work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from roll.configs import derived
from roll.configs.run import AgenticConfig, PipelineConfig
from roll.simulation.inputs import Inputs, LatencyInputs, LengthInputs


@dataclass(frozen=True, slots=True)
class GroupWork:
    """Needs of the samples of a group."""

    prompt: float
    """Tokens."""
    responses: list[float]
    """Tokens of each sample, over all its turns."""
    latencies: list[list[float]]
    """Seconds that are waited for after each turn of each sample: its reward, or its environment."""
    kept: bool
    """False if the group filter is going to drop it."""


def response_lengths(
    settings: LengthInputs, longest: int, shape: tuple[int, int], random: np.random.Generator
) -> np.ndarray:
    """Draw lengths in tokens, float ``[groups, samples]``, at least 1 and at most ``longest``.

    Logarithms (with `quantiles`: normal scores) of a group share `correlation` of their variance.
    """
    common = random.standard_normal((shape[0], 1))
    own = random.standard_normal(shape)
    scores = math.sqrt(settings.correlation) * common + math.sqrt(1 - settings.correlation) * own
    if settings.quantiles:
        table = np.asarray(settings.quantiles, dtype=np.float64)
        ranks = 0.5 * (1 + np.vectorize(math.erf)(scores / math.sqrt(2)))
        drawn = np.interp(ranks, np.linspace(0, 1, len(table)), table)
    else:
        drawn = (longest / 4 if settings.median is None else settings.median) * np.exp(settings.sigma * scores)
    return np.clip(np.rint(drawn), 1, longest)


def latencies(settings: LatencyInputs, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    """Draw log-normal seconds of this shape."""
    return settings.seconds * np.exp(settings.sigma * random.standard_normal(shape))


def turns(config: PipelineConfig, inputs: Inputs) -> int:
    """Return the turns of a sample: 1 in RLVR."""
    if not isinstance(config, AgenticConfig):
        return 1
    if inputs.environments.turns is not None:
        return inputs.environments.turns
    longest = [environment.max_steps for environment in config.custom_envs.values()]
    return max(1, round(sum(longest) / len(longest) / 2)) if longest else 1


GROUPS_DRAWN = 64
"""Groups that are drawn together, for speed."""


def groups(config: PipelineConfig, inputs: Inputs, seed: int) -> Iterator[GroupWork]:
    """Yield the groups of a run, without end."""
    random = np.random.default_rng(seed)
    size, longest, played = derived.group_size(config), derived.max_new_tokens(config), turns(config, inputs)
    waits = inputs.environments if isinstance(config, AgenticConfig) else inputs.rewards
    prompt = config.prompt_length / 2 if inputs.lengths.prompt is None else inputs.lengths.prompt
    dropped = inputs.filtered_share if config.group_filter != "none" else 0.0
    while True:
        lengths = response_lengths(inputs.lengths, longest, (GROUPS_DRAWN, size), random).tolist()
        seconds = latencies(waits, (GROUPS_DRAWN, size, played), random).tolist()
        kept = (random.random(GROUPS_DRAWN) >= dropped).tolist()
        for row in zip(lengths, seconds, kept, strict=True):
            yield GroupWork(prompt, *row)

"""The workload of a simulated run: groups with lengths of prompts and responses, and latencies of rewards and
environments.

For a given seed, group number g is the same in every schedule, so that schedules are compared on the same work.
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
    """Lengths and latencies of a group of samples."""

    prompt: float
    """Length of the prompt, in tokens."""
    responses: list[float]
    """Response length of each sample in tokens, over all its turns."""
    latencies: list[list[float]]
    """Sample -> turn -> seconds of its reward or environment step."""
    kept: bool
    """False if the group filter will drop the group."""


def response_lengths(
    settings: LengthInputs, longest: int, shape: tuple[int, int], random: np.random.Generator
) -> np.ndarray:
    """Draw response lengths in tokens, float ``[groups, samples]``, between 1 and ``longest``.

    ``shape`` is (groups, samples). Within a group, the logarithms of lengths (with `quantiles`: their normal scores)
    have the correlation `settings.correlation`.
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
    """Draw log-normally distributed seconds, float of this shape."""
    return settings.seconds * np.exp(settings.sigma * random.standard_normal(shape))


def turns(config: PipelineConfig, inputs: Inputs) -> int:
    """Return the number of turns per sample; 1 for RLVR."""
    if not isinstance(config, AgenticConfig):
        return 1
    if inputs.environments.turns is not None:
        return inputs.environments.turns
    longest = [environment.max_steps for environment in config.custom_envs.values()]
    return max(1, round(sum(longest) / len(longest) / 2)) if longest else 1


GROUPS_DRAWN = 64
"""Number of groups that are drawn at once, for speed."""


def groups(config: PipelineConfig, inputs: Inputs, seed: int) -> Iterator[GroupWork]:
    """Yield an endless sequence of groups."""
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

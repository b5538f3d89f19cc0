"""The workload of a simulated run: groups with lengths of prompts and responses, and latencies of rewards and
environments.

For a given seed, group number g is the same in every schedule, so that schedules are compared on the same work.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

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
    seconds: float | None = None
    """Time of its rollout in a recorded run, from issue to verdict."""


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
    """Return the median number of turns per sample; 1 for RLVR."""
    if not isinstance(config, AgenticConfig):
        return 1
    if inputs.environments.turns is not None:
        return inputs.environments.turns
    longest = [environment.max_steps for environment in config.custom_envs.values()]
    return max(1, round(sum(longest) / len(longest) / 2)) if longest else 1


def _turns_of(lengths: np.ndarray, config: PipelineConfig, inputs: Inputs) -> np.ndarray:
    """Return the turns of samples with these response lengths, of the same shape: the longer, the more."""
    middle, sigma = turns(config, inputs), inputs.environments.turns_sigma
    if not (isinstance(config, AgenticConfig) and sigma):
        return np.full(lengths.shape, middle)
    ranks = np.empty(lengths.size)
    ranks[np.argsort(lengths, axis=None, kind="stable")] = np.arange(lengths.size)
    scores = [NormalDist().inv_cdf(share) for share in (ranks + 0.5) / lengths.size]
    most = max((environment.max_steps for environment in config.custom_envs.values()), default=middle)
    return np.clip(np.rint(middle * np.exp(sigma * np.reshape(scores, lengths.shape))), 1, most).astype(int)


GROUPS_DRAWN = 64
"""Number of groups that are drawn at once, for speed."""


def groups(config: PipelineConfig, inputs: Inputs, seed: int) -> Iterator[GroupWork]:
    """Yield an endless sequence of groups."""
    random = np.random.default_rng(seed)
    size, longest = derived.group_size(config), derived.longest_response(config)
    waits = inputs.environments if isinstance(config, AgenticConfig) else inputs.rewards
    prompt = config.prompt_length / 2 if inputs.lengths.prompt is None else inputs.lengths.prompt
    dropped = inputs.filtered_share if config.group_filter != "none" else 0.0
    while True:
        lengths = response_lengths(inputs.lengths, longest, (GROUPS_DRAWN, size), random)
        played = _turns_of(lengths, config, inputs)
        seconds = latencies(waits, (*lengths.shape, int(played.max())), random).tolist()
        kept = (random.random(GROUPS_DRAWN) >= dropped).tolist()
        for made, of_turns, numbers, stays in zip(lengths.tolist(), seconds, played.tolist(), kept, strict=True):
            own = [each[:number] for each, number in zip(of_turns, numbers, strict=True)]
            yield GroupWork(prompt, made, own, stays)

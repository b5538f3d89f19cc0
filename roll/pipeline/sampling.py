"""Conversion of the configured sampling to the engine's parameters."""

from __future__ import annotations

from roll.configs.schema import GeneratingArguments
from roll.strategies.infer.base import SamplingParams


def sampling_params(arguments: GeneratingArguments, response_length: int) -> SamplingParams:
    """Return the engine's parameters for the configured ones; the seed is set per request."""
    return SamplingParams(
        max_new_tokens=arguments.max_new_tokens or response_length,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        stop_strings=tuple(arguments.stop_strings),
        ignore_eos=arguments.ignore_eos,
    )

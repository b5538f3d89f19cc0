"""A request in SGLang's terms: the body of a call to ``/generate``.

The parameters decide which log-probability SGLang reports. Plain ones (``return_logprob``) are those after temperature
and before top-k and top-p. A truncated distribution's come with the sampling mask, and only for a top-k within
the server's limit. A request whose distribution SGLang would not report is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from roll.strategies.infer.base import GenerateRequest, SamplingParams
from roll.strategies.infer.response import is_greedy
from roll.strategies.infer.sglang_options import stream_interval

SMALLEST_TEMPERATURE = 1e-6
"""Temperature below which SGLang samples greedily."""


def needs_mask(sampling: SamplingParams) -> bool:
    """Return True if the sampling distribution is truncated."""
    return not is_greedy(sampling) and (sampling.top_k > 0 or sampling.top_p < 1)


def check_recordable(request: GenerateRequest, mask_limit: int) -> None:
    """Raise ``ValueError`` for parameters under which SGLang would not report the log-probabilities of the sampling
    distribution."""
    sampling, problem = request.sampling, None
    if 0 < sampling.temperature < SMALLEST_TEMPERATURE:
        problem = f"SGLang samples at {SMALLEST_TEMPERATURE} or more, or greedily at 0; its temperature is lower"
    elif needs_mask(sampling) and not 1 < sampling.top_k <= mask_limit:
        problem = (
            "SGLang tells the log-probabilities of a truncated distribution for 1 < top_k <= "
            f"{mask_limit} only; top_p is {sampling.top_p}, top_k {sampling.top_k}"
        )
    if problem is not None:
        raise ValueError(f"request {request.request_id!r} cannot run: {problem}")


def generate_body(
    request: GenerateRequest, engine_id: str, version: int, eos_token_ids: Sequence[int], max_length: int
) -> dict[str, Any]:
    """Return the body of a call to ``/generate``. A prompt's cache is shared only by requests that began with the same
    version."""
    sampling, prompt = request.sampling, request.prompt_token_ids
    mask = needs_mask(sampling)
    return {
        "rid": engine_id,
        "input_ids": prompt.tolist(),
        "stream": True,
        "return_logprob": not mask,
        "return_sampling_mask": mask,
        "cache_salt": f"version {version}",
        "sampling_params": {
            "max_new_tokens": min(sampling.max_new_tokens, max_length - len(prompt)),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            # Random numbers are drawn by seed and position, so a continued response continues with the same ones.
            "sampling_seed": sampling.seed,
            "ignore_eos": sampling.ignore_eos,
            "stop_token_ids": [] if sampling.ignore_eos else [*eos_token_ids, *sampling.stop_token_ids],
            "stream_interval": stream_interval(sampling.watches_text),
        },
    }


def score_body(tokens: np.ndarray, engine_id: str) -> dict[str, Any]:
    """Return the body of a call to ``/generate`` for the log-probabilities of given tokens. It uses nothing cached."""
    return {
        "rid": engine_id,
        "input_ids": tokens.tolist(),
        "return_logprob": True,
        "logprob_start_len": 0,
        "cache_salt": engine_id,
        "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
    }

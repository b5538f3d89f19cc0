"""A request in vLLM's terms: its sampling parameters, seed and cache key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from roll.data.seeds import derive_seed
from roll.strategies.infer.base import GenerateRequest
from roll.strategies.infer.vllm_options import stream_interval

if TYPE_CHECKING:
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.inputs.engine import TokensInput

_SMALLEST_TEMPERATURE = 0.01
"""vLLM raises smaller temperatures to this one."""


def sampling_params(request: GenerateRequest, eos_token_ids: Sequence[int]) -> VLLMSamplingParams:
    """Return vLLM's parameters of a request. Raises ``ValueError`` for a temperature that vLLM would change."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    if 0 < sampling.temperature < _SMALLEST_TEMPERATURE:
        raise ValueError(
            f"request {request.request_id!r} cannot run: vLLM samples at a temperature of {_SMALLEST_TEMPERATURE} "
            f"or more, or greedily at 0; it is {sampling.temperature}"
        )
    return VLLMSamplingParams(
        max_tokens=sampling.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=_seed(request),
        stop_token_ids=[] if sampling.ignore_eos else [*eos_token_ids, *sampling.stop_token_ids],
        ignore_eos=sampling.ignore_eos,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=stream_interval(sampling.watches_text),
    )


def prompt_input(request: GenerateRequest, version: int) -> TokensInput:
    """Return the prompt's tokens for vLLM. Their cache is shared only by requests that began with the same version."""
    from vllm.inputs.engine import tokens_input

    return tokens_input(request.prompt_token_ids.tolist(), cache_salt=f"version {version}")


def _seed(request: GenerateRequest) -> int:
    """Return the seed of vLLM's random stream. vLLM starts at the seed, so a continued response gets a stream of its
    own."""
    if not request.first_token_index:
        return request.sampling.seed
    return derive_seed(request.sampling.seed, "continued", request.first_token_index)

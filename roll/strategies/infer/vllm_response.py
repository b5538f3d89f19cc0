"""Messages of vLLM about a request, translated into the project's own terms."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, cast, get_args

from roll.strategies.infer.base import EngineFailed, FinishReason
from roll.strategies.infer.response import Response, VersionSpan

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


def take_output(response: Response, output: CompletionOutput, version: int) -> bool:
    """Add vLLM's message to the response; the engine holds ``version``. See `Response.take`.

    Raises `EngineFailed` if vLLM gave the request up.
    """
    reason = output.finish_reason
    return response.take(
        output.token_ids,
        _sampled_logprobs(output),
        version,
        [VersionSpan(int(span.version), span.start, span.end) for span in output.weight_versions or ()],
        None if reason is None else _finish_reason(reason, response.request.request_id),
    )


def _sampled_logprobs(output: CompletionOutput) -> list[float]:
    """Return the log-probability of each new token. Without alternatives, vLLM gives one number per position."""
    if not output.token_ids:
        return []
    logprobs = output.logprobs.logprobs if output.logprobs is not None else []
    if len(logprobs) != len(output.token_ids):
        raise EngineFailed(f"vLLM gave {len(logprobs)} log-probabilities for {len(output.token_ids)} tokens")
    if any(math.isnan(logprob) for logprob in logprobs):
        raise EngineFailed("vLLM's logits are NaN: there is no distribution to sample from")
    return logprobs


def _finish_reason(reason: str, request_id: str) -> FinishReason:
    if reason not in get_args(FinishReason):
        raise EngineFailed(f"vLLM ended request {request_id!r} with {reason!r}")
    return cast(FinishReason, reason)

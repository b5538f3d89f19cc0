"""Messages of SGLang's server about a request, translated into the project's own terms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from roll.strategies.infer.base import EngineFailed, FinishReason
from roll.strategies.infer.response import Response, VersionSpan, is_greedy
from roll.strategies.infer.sglang_requests import needs_mask

_NAN = "NaN happened"
"""Text that SGLang reports as matched if the logits are NaN."""


def take_message(response: Response, message: Mapping[str, Any]) -> bool:
    """Add a message of the stream to the response; see `Response.take`.

    Raises ``ValueError`` for a request that SGLang refuses or gives up, ``EngineFailed`` if tokens or log-probabilities
    are missing.
    """
    name = response.request.request_id
    if "error" in message:
        raise ValueError(f"request {name!r} cannot run: {message['error']['message']}")
    told = message["meta_info"]
    reason = _finish_reason(told["finish_reason"], name)
    token_ids = message["output_ids"]
    if told["completion_tokens"] != len(response.token_ids) + len(token_ids):
        raise EngineFailed(
            f"SGLang counts {told['completion_tokens']} tokens of request {name!r}; "
            f"{len(response.token_ids)} and now {len(token_ids)} arrived"
        )
    spans = [VersionSpan(int(span["version"]), span["start"], span["end"]) for span in told.get("weight_versions", ())]
    logprobs = _sampled_logprobs(response, told, len(token_ids))
    return response.take(token_ids, logprobs, int(told["weight_version"]), spans, reason)


def scores_of(reply: Mapping[str, Any], tokens: np.ndarray) -> np.ndarray:
    """Return the log-probability of each of these tokens, float32 ``[length]``, 0 at the first.

    Raises `EngineFailed` if the reply is about other tokens.
    """
    entries = reply["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != tokens.tolist():
        raise EngineFailed(f"SGLang scored {len(entries)} tokens, not the {len(tokens)} that it was sent")
    values = np.zeros(len(tokens), dtype=np.float32)
    values[1:] = _numbers([entry[0] for entry in entries[1:]])
    return values


def _sampled_logprobs(response: Response, told: Mapping[str, Any], count: int) -> list[float]:
    """Return log-probabilities of the sampling distribution, one for each of ``count`` new tokens."""
    sampling = response.request.sampling
    if needs_mask(sampling):
        logprobs = told.get("output_token_sampling_logprobs", [])
    else:
        logprobs = [entry[0] for entry in told.get("output_token_logprobs", [])]
    if len(logprobs) != count:
        raise EngineFailed(f"SGLang gave {len(logprobs)} log-probabilities for {count} tokens")
    return [0.0] * count if is_greedy(sampling) else _numbers(logprobs)


def _numbers(logprobs: list[float | None]) -> list[float]:
    """Return the numbers. Raise ``EngineFailed`` if one is NaN, which JSON does not know and which arrives as null."""
    numbers = [logprob for logprob in logprobs if logprob is not None and logprob == logprob]
    if len(numbers) != len(logprobs):
        raise EngineFailed("SGLang's logits are NaN: there is no distribution to sample from")
    return numbers


def _finish_reason(told: Mapping[str, Any] | None, request_id: str) -> FinishReason | None:
    if told is None:
        return None
    kind = told["type"]
    if kind == "abort":
        raise ValueError(f"request {request_id!r} was given up by SGLang: {told.get('message')}")
    if told.get("matched") == _NAN:
        raise EngineFailed("SGLang's logits are NaN: there is no distribution to sample from")
    if kind not in ("stop", "length"):
        raise EngineFailed(f"SGLang ended request {request_id!r} with {kind!r}")
    return kind

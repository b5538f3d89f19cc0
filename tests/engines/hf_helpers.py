"""Requests for the tiny models, and ways to run them to their end."""

from __future__ import annotations

import numpy as np

from roll.engines.base import Completion, GenerateRequest, ModelSpec, SamplingParams
from roll.engines.hf.engine import ActiveRequest, HFEngine
from roll.engines.hf.model import load_model
from roll.engines.hf.strategy import HFInferStrategy
from roll.engines.options import HFInferConfig

VOCABULARY = 40
EOS = 1


def make_strategy(path: str, max_length: int = 128, eos_token_ids=(EOS,), **strategy_config) -> HFInferStrategy:
    return HFInferStrategy(
        path,
        device="cpu",
        dtype="float32",
        attn_implementation="sdpa",
        max_length=max_length,
        eos_token_ids=eos_token_ids,
        strategy_config=strategy_config,
    )


def make_engine(path: str, max_length: int = 128, rows: int = 64, prefill: int = 1024, attention: str = "sdpa"):
    model = load_model(ModelSpec(path, "cpu", "float32", attention, max_length))
    return HFEngine(model, max_length, HFInferConfig(rows, prefill), (EOS,))


def make_request(name: str, prompt, max_new_tokens: int = 16, first_token_index: int = 0, **sampling):
    return GenerateRequest(
        request_id=name,
        prompt_token_ids=np.array(prompt, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
        first_token_index=first_token_index,
    )


def submit(engine, *requests: GenerateRequest) -> None:
    for request in requests:
        engine.submit(ActiveRequest(request))


def completed(engine) -> dict[str, Completion]:
    """What has ended since the last call, by request id."""
    return {event.request_id: event for _, event in engine.take_events() if isinstance(event, Completion)}


def run_engine(engine, limit: int = 2000) -> dict:
    """Step until nothing is left; completions by request id."""
    completions = {}
    for _ in range(limit):
        if not engine.running and not engine.waiting:
            return completions
        engine.step()
        completions |= completed(engine)
    raise AssertionError("the engine did not come to an end")


def run_requests(path: str, requests, **engine_sizes) -> dict:
    engine = make_engine(path, **engine_sizes)
    submit(engine, *requests)
    return run_engine(engine)


async def load(strategy: HFInferStrategy, buckets, version: int):
    """Both steps of a publication."""
    await strategy.prepare_weights(buckets, version)
    return await strategy.load_weights(version)

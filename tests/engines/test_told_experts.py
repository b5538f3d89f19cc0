"""The experts of tokens as vLLM and SGLang tell them.

SGLang's server is the stand-in. vLLM records experts on GPUs only: here its own classes for the way from its scheduler
to its output carry records that a model of transformers made.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from roll.algorithms.routing import RoutingRecorder, RoutingShape
from roll.engines.base import EngineFailed
from roll.engines.process_engine import Response
from roll.engines.sglang.strategy import generate_body, told_experts
from roll.engines.vllm.strategy import VLLMInferStrategy
from tests.engines.sglang_helpers import running_stand_in
from tests.engines.vllm_helpers import make_moe, request
from tests.tiers import need

SHAPE = RoutingShape(3, 8, 3)


def routed(name="a", tokens=10, **changes):
    return replace(request(name, tokens, **changes), with_routing=True)


def experts_of(token_ids):
    model = make_moe()
    recorder = RoutingRecorder(model)
    with torch.no_grad():
        model(torch.tensor([token_ids]), use_cache=False)
    return recorder.take()[:-1]


@pytest.mark.tier("all")
def test_sglang_tells_the_experts_of_requests_that_ask_for_them(moe_path):
    need("aiohttp")
    with running_stand_in(moe_path, records_routing=True, enable_deterministic_inference=True) as engine:
        done = engine.run(engine.strategy.generate, routed())
        np.testing.assert_array_equal(done.routed_experts, experts_of([5, 6, 7, *done.token_ids.tolist()]))
        assert engine.run(engine.strategy.generate, request("b", 10)).routed_experts is None
        with pytest.raises(ValueError, match="stop strings end it outside the engine"):
            engine.run(engine.strategy.generate, routed("c", stop_strings=("x",)))


def test_experts_in_a_message_of_sglang():
    for asked in (routed(), request("a")):
        assert generate_body(asked, "roll-1", 0, (), 40)["return_routed_experts"] is asked.with_routing
    told = np.arange(18, dtype=np.int32) % 8
    found = told_experts({"meta_info": {"routed_experts": b64encode(told.tobytes()).decode()}}, SHAPE)
    assert found.dtype == np.uint8 and np.array_equal(found, told.reshape(2, 3, 3))
    assert told_experts({"meta_info": {}}, SHAPE) is None
    assert told_experts({"error": {"message": "no"}}, SHAPE) is None


def test_an_engine_that_does_not_tell_the_experts_of_all_tokens_has_failed():
    response = Response(routed(tokens=3), "roll-1", None)
    response.take([4, 5, 6], [-1.0, -1.0, -1.0], 0, finish_reason="length")
    with pytest.raises(EngineFailed, match="the experts of 0 tokens out of 5"):
        response.completion()
    response.routed_experts = np.zeros((4, 3, 3), np.uint8)
    with pytest.raises(EngineFailed, match="the experts of 4 tokens out of 5"):
        response.completion()
    response.routed_experts = np.zeros((5, 3, 3), np.uint8)
    assert response.completion().routed_experts is response.routed_experts
    response.finish_reason = "abort"
    assert response.completion().routed_experts is None


class ToldByVLLM:
    """`AsyncLLM` as far as a request goes, with vLLM's own slices of the records of each step."""

    def __init__(self, prompt, sampled, per_step):
        self.prompt, self.sampled, self.per_step = prompt, sampled, per_step

    async def generate(self, prompt, params, request_id, lora_request=None):
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector, AuxRequestOutput
        from vllm.outputs import CompletionOutput

        records = experts_of([*self.prompt, *self.sampled]).astype(np.uint16)
        connector, chunks, start = AuxOutputSchedulerConnector(), [], 0
        for end in range(self.per_step, len(self.sampled) + self.per_step, self.per_step):
            count = len(self.prompt) + min(end, len(self.sampled))
            # A step computes one row more than is accepted if the next one runs ahead.
            output = {request_id: AuxRequestOutput(start, records[start:count])}
            chunks.append(connector.take_output(SimpleNamespace(request_id=request_id, num_tokens=count), output))
            start = count - 1
            last, new = end >= len(self.sampled), self.sampled[end - self.per_step : end]
            logprobs = SimpleNamespace(logprobs=[-1.0] * len(new))
            told = CompletionOutput(0, "", new, None, logprobs, finish_reason="length" if last else None)
            if last:
                told.routed_experts = np.concatenate(chunks)
            yield SimpleNamespace(outputs=[told])


@pytest.mark.tier("all")
@pytest.mark.parametrize("per_step", [1, 2])
def test_vllm_tells_the_experts_of_all_tokens_at_the_end(per_step):
    need("vllm")
    sampled = [11, 12, 13, 14]
    strategy = VLLMInferStrategy(
        "unused", device="cpu", dtype="float32", attn_implementation="sdpa", max_length=64, records_routing=True,
        strategy_config={},
    )  # fmt: skip
    strategy._engine, strategy._routing, strategy._end_tokens = ToldByVLLM([5, 6, 7], sampled, per_step), SHAPE, ()

    async def run():
        response = Response(routed(tokens=4), "roll-1", None)
        async for _ in strategy._updates(response):
            pass
        return response.completion()

    done = asyncio.run(run())
    assert done.token_ids.tolist() == sampled and done.routed_experts.dtype == np.uint8
    np.testing.assert_array_equal(done.routed_experts, experts_of([5, 6, 7, *sampled]))


@pytest.mark.tier("all")
def test_vllm_has_no_experts_to_tell_on_a_cpu(moe_path):
    """If this fails, `roll check` refuses router replay on CPUs without need."""
    need("vllm")
    from vllm import AsyncEngineArgs

    told = {"enable_return_routed_experts": True}
    arguments = AsyncEngineArgs(moe_path, skip_tokenizer_init=True, enforce_eager=True, max_model_len=64, **told)
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        arguments.create_engine_config()

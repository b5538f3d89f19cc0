"""What vLLM does in its own way, for real, on one shared engine; what it has in common with others is in
`test_engine_contract.py`."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from roll.strategies.weights import tensor_checksum
from tests.strategies.infer.engine_checks import logits_of
from tests.strategies.infer.vllm_helpers import assert_close, make_model, request


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(0.6, 0, 1.0), (1.7, 0, 1.0), (1.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 12, 0.8)]
)
def test_logprobs_are_those_of_the_processed_distribution(published, vllm_model, temperature, top_k, top_p):
    strategy = published.strategy
    sampling = dict(temperature=temperature, top_k=top_k, top_p=top_p, ignore_eos=True)

    async def scenario():
        return await asyncio.gather(*(strategy.generate(request(str(i), 40, seed=i, **sampling)) for i in range(8)))

    for completion in published.run(scenario):
        logits = logits_of(vllm_model, [5, 6, 7, *completion.token_ids.tolist()])[2:-1]
        processed = TemperatureLogitsWarper(temperature)(None, logits)
        processed = TopKLogitsWarper(top_k)(None, processed) if top_k else processed
        processed = TopPLogitsWarper(top_p)(None, processed) if top_p < 1 else processed
        expected = torch.log_softmax(processed, -1)[range(40), completion.token_ids.tolist()].numpy()
        assert_close(completion.logprobs, expected)


def test_held_checksums_come_from_the_engine_itself(published, vllm_model):
    """Ask for tensors that differ from those held: embeddings and norms are readable, and show what is really there."""
    other = make_model(4)
    shapes = {name: ("float32", tuple(tensor.shape)) for name, tensor in other.named_parameters()}
    (held,) = published.run(published.strategy._engine.collective_rpc, "roll_held_checksums", None, (shapes, 1))
    expected = {name: tensor_checksum(tensor) for name, tensor in vllm_model.named_parameters()}
    assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.self_attn.q_proj.bias"} <= held.keys()
    assert all(expected[name] == checksum for name, checksum in held.items())

"""vLLM with memory for fewer requests than it has places: it queues and preempts by itself, and an update comes."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from tests.strategies.infer.vllm_helpers import RunningEngine, assert_close, make_model, request

BLOCK_TOKENS = 128


def test_requests_that_vllm_itself_had_queued_see_nothing_that_old_weights_computed(vllm_path, vllm_model):
    """Samples of one prompt share its cached blocks. Those that begin after an update must not."""
    config = vllm_model.config
    head_size = config.hidden_size // config.num_attention_heads
    block = 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * 4 * BLOCK_TOKENS
    engine = RunningEngine(vllm_path, kv_cache_memory_bytes=10 * block)
    second = make_model(1)
    prompt = tuple(np.random.default_rng(0).integers(2, 90, 140).tolist())

    async def scenario():
        running = [
            asyncio.create_task(engine.strategy.generate(request(str(i), 30, prompt=prompt, seed=i, ignore_eos=True)))
            for i in range(24)
        ]
        while not any(len(each.token_ids) > 4 for each in engine.strategy._running.values()):
            await asyncio.sleep(0.002)
        assert not all(each.token_ids for each in engine.strategy._running.values())
        await engine.load(second, 1, "keep")
        return await asyncio.gather(*running)

    completions = engine.run(scenario)
    engine.close()
    late = [each for each in completions if set(each.versions) == {1}]
    assert len(late) > 3
    for completion in completions:
        assert len(completion.token_ids) == 30 and (np.diff(completion.versions) >= 0).all()
    for completion in late:
        tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = torch.log_softmax(second(tokens).logits[0, len(prompt) - 1 : -1].float(), -1)
        assert_close(completion.logprobs, logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy())

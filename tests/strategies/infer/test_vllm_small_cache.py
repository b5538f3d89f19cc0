"""vLLM with memory for fewer requests than it has places: it queues and preempts by itself, and an update comes."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from tests.strategies.infer.vllm_helpers import PLACES, RunningEngine, assert_close, buckets_of, make_model, request

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
        while not any(len(each.token_ids) > 4 for each in engine.strategy._requests.responses_inside()):
            await asyncio.sleep(0.002)
        queued = [name for name, each in engine.strategy._requests.inside.items() if not each.response.token_ids]
        await engine.strategy.prepare_weights(buckets_of(second), 1)
        await engine.strategy.pause("keep")
        await engine.strategy.load_weights(1)
        # They are to begin again; what is aborted now must not.
        await engine.strategy.abort(queued[-2:])
        await engine.strategy.resume()
        return queued, await asyncio.gather(*running)

    queued, completions = engine.run(scenario)
    assert engine.strategy._requests.gate._free == PLACES
    engine.close()
    aborted = [each for each in completions if each.request_id in queued[-2:]]
    assert [(each.finish_reason, len(each.token_ids)) for each in aborted] == [("abort", 0)] * 2
    completions = [each for each in completions if each.request_id not in queued[-2:]]
    late = [each for each in completions if set(each.versions) == {1}]
    assert len(late) > 3
    for completion in completions:
        assert len(completion.token_ids) == 30 and (np.diff(completion.versions) >= 0).all()
    for completion in late:
        tokens = torch.tensor([[*prompt, *completion.token_ids.tolist()]])
        with torch.no_grad():
            logprobs = torch.log_softmax(second(tokens).logits[0, len(prompt) - 1 : -1].float(), -1)
        assert_close(completion.logprobs, logprobs.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy())

"""A process that owns a vLLM engine with memory for fewer requests than it has places, so that vLLM queues and preempts
by itself. It updates the weights meanwhile, writes down what came of it, and waits to be killed.

python -m tests.engines.vllm_owner <model> <file>
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path

import numpy as np
import psutil
from transformers import AutoConfig

from roll.engines.base import Completion
from tests.engines.vllm_helpers import RunningEngine, buckets_of, engine_process, make_model, request

BLOCK_TOKENS = 128
PROMPT = tuple(np.random.default_rng(0).integers(2, 90, 140).tolist())
TOKENS = 30


async def update_while_vllm_itself_queues(engine: RunningEngine) -> tuple[list[str], list[Completion], int]:
    """Samples of one prompt share its cached blocks. Those that begin after an update must not. Gives the names of
    those aborted while they were to begin again, all responses, and the places that are free at the end."""
    strategy = engine.strategy
    running = [
        asyncio.create_task(strategy.generate(request(str(i), TOKENS, prompt=PROMPT, seed=i, ignore_eos=True)))
        for i in range(24)
    ]
    while not any(len(each.token_ids) > 4 for each in strategy._requests.inside.values()):
        await asyncio.sleep(0.002)
    queued = [name for name, each in strategy._requests.inside.items() if not each.token_ids]
    await strategy.prepare_weights(buckets_of(make_model(1)), 1)
    await strategy.pause("keep")
    await strategy.load_weights(1)
    await strategy.abort(queued[-2:])
    await strategy.resume()
    return queued[-2:], await asyncio.gather(*running), strategy._requests.gate._free


def main(model_path: str, results: str) -> None:
    sizes = AutoConfig.from_pretrained(model_path)
    head_size = sizes.hidden_size // sizes.num_attention_heads
    block = 2 * sizes.num_hidden_layers * sizes.num_key_value_heads * head_size * 4 * BLOCK_TOKENS
    engine = RunningEngine(model_path, kv_cache_memory_bytes=10 * block)
    Path(results).write_bytes(pickle.dumps(engine.run(update_while_vllm_itself_queues, engine)))
    print("engine", engine_process(psutil.Process()).pid, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])

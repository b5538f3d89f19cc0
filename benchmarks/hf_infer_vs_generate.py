"""Compare `hf_infer` with `model.generate`: the same random model, prompts, forced lengths, threads and batch limit.

There are two loads. In `equal`, all responses have the same length; both sides can keep their batch full, so the ratio
shows the cost of the engine's bookkeeping. In `long_tailed`, lengths are exponential, cut off at the maximum, with a
mean of a quarter of it; `generate` runs batches in order of arrival until the longest of each is done, while the engine
refills its rows. The figure is requested tokens per second. Prints one JSON line; ratios are medians over the
repetitions.

    python benchmarks/hf_infer_vs_generate.py [--repeats 3] [--threads 1] [--batch 256]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from roll.engines.base import GenerateRequest, SamplingParams
from roll.engines.hf.strategy import HFInferStrategy

VOCABULARY = 48
PROMPT_TOKENS = 12


def make_model(path: str) -> int:
    """Save a random Qwen2 model of 0.8 M parameters and return their number."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=2,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def long_tailed_lengths(count: int, longest: int, generator: np.random.Generator) -> np.ndarray:
    """Draw exponential lengths cut off at ``longest`` with mean ``longest / 4``."""
    lengths = np.ceil(generator.exponential(longest / 4 * 1.02, count)).clip(1, longest)
    return lengths.astype(int)


def time_generate(model: PreTrainedModel, prompts: np.ndarray, lengths: np.ndarray, batch: int) -> float:
    """Return the seconds for all batches; each runs until its longest response is done."""
    started = time.perf_counter()
    for start in range(0, len(prompts), batch):
        input_ids = torch.from_numpy(prompts[start : start + batch])
        longest = int(lengths[start : start + batch].max())
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            do_sample=True,
            top_k=0,
            max_new_tokens=longest,
        )
        assert output.shape[1] == prompts.shape[1] + longest
    return time.perf_counter() - started


async def time_engine(engine: HFInferStrategy, prompts: np.ndarray, lengths: np.ndarray, label: str) -> float:
    """Return the seconds for all requests, submitted at once."""
    requests = [
        GenerateRequest(f"{label}-{i}", prompt, SamplingParams(int(length), seed=i, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    started = time.perf_counter()
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    seconds = time.perf_counter() - started
    assert sum(len(completion.token_ids) for completion in completions) == lengths.sum()
    return seconds


async def measure(path: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Run both loads on both sides, alternating, ``repeats`` times."""
    generator = np.random.default_rng(0)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    engine = HFInferStrategy(
        path,
        device="cpu",
        dtype="float32",
        attn_implementation="sdpa",
        max_length=512,
        strategy_config={"max_running_requests": arguments.batch, "threads": arguments.threads},
    )
    await engine.start()
    loads = {
        "equal": np.full(arguments.requests, 64),
        "long_tailed": long_tailed_lengths(2 * arguments.requests, 256, generator),
    }
    figures: dict[str, object] = {}
    for name, lengths in loads.items():
        prompts = generator.integers(3, VOCABULARY, (len(lengths), PROMPT_TOKENS))
        time_generate(model, prompts[:8], np.full(8, 4), 8)
        await time_engine(engine, prompts[:8], np.full(8, 4), f"{name}-warm")
        pairs = []
        for repeat in range(arguments.repeats):
            theirs = time_generate(model, prompts, lengths, arguments.batch)
            ours = await time_engine(engine, prompts, lengths, f"{name}-{repeat}")
            pairs.append((theirs, ours))
        figures[name] = {
            "requests": len(lengths),
            "mean_length": round(float(lengths.mean()), 1),
            "longest": int(lengths.max()),
            "generate_tokens_per_second": round(float(lengths.sum()) / statistics.median(t for t, _ in pairs)),
            "hf_infer_tokens_per_second": round(float(lengths.sum()) / statistics.median(o for _, o in pairs)),
            "ratio": round(statistics.median(t / o for t, o in pairs), 3),
        }
    await engine.shutdown()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=256, help="batch of generate, and rows of the engine")
    parser.add_argument("--requests", type=int, default=256, help="of equal lengths; twice as many of long-tailed ones")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as path:
        parameters = make_model(path)
        figures = asyncio.run(measure(path, arguments))
    settings = {"parameters": parameters, "threads": arguments.threads, "batch": arguments.batch}
    print(json.dumps({"benchmark": "hf_infer_vs_generate", **settings, "repeats": arguments.repeats, **figures}))


if __name__ == "__main__":
    main()

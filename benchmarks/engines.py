"""Compare `vllm` with `hf_infer` on the same models, requests, lengths and computing threads.

The script makes random Qwen2 models of three sizes, and four kinds of requests: answers of a few tokens, equal middle
lengths, long-tailed lengths, and groups that share a long prompt. Each engine gets all requests at once and may run as
many of them as the other. The figure is finished requests per second. Sides alternate, and ratios are medians over the
repetitions. Prints one JSON line.

    python benchmarks/engines.py [--repeats 3] [--threads 1] [--rows 128]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from roll.configs.strategies import ENGINES, strategy_class
from roll.engines.base import GenerateRequest, InferStrategy, SamplingParams

VOCABULARY = 4096
MAX_LENGTH = 512
SIZES = {"small": (128, 4, 256), "middle": (384, 8, 96), "large": (768, 12, 32)}
"""Name -> (width, layers, requests)."""


@dataclass(frozen=True)
class Load:
    """Requests by their prompts and response lengths."""

    prompts: list[np.ndarray]
    lengths: np.ndarray


def make_model(path: Path, width: int, layers: int) -> int:
    """Save a random model and return its number of parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 64,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def loads(requests: int) -> dict[str, Load]:
    """Return the kinds of requests."""
    generator = np.random.default_rng(0)

    def prompts(count: int, length: int) -> list[np.ndarray]:
        return list(generator.integers(3, VOCABULARY, (count, length), dtype=np.int32))

    long_tailed = np.exp(generator.normal(np.log(32), 1.0, requests)).clip(4, 256).astype(int)
    shared = prompts(requests // 8, 192)
    return {
        "4 tokens": Load(prompts(requests, 16), np.full(requests, 4)),
        "64 tokens": Load(prompts(requests, 16), np.full(requests, 64)),
        "log-normal, median 32, up to 256": Load(prompts(requests, 16), long_tailed),
        "32 tokens, groups of 8 with a prompt of 192": Load(
            [p for p in shared for _ in range(8)], np.full(requests, 32)
        ),
    }


async def start(name: str, path: Path, rows: int, threads: int) -> InferStrategy:
    """Start an engine in this process (vLLM computes in a process of its own) with this many rows and threads."""
    options = {"max_running_requests": rows, "threads": threads} if name == "hf_infer" else {"max_num_seqs": rows}
    engine = strategy_class(ENGINES, name)(
        str(path),
        device="cpu",
        dtype="float32",
        attn_implementation="sdpa",
        max_length=MAX_LENGTH,
        eos_token_ids=(),
        strategy_config=options,
    )
    await engine.start()
    return engine


async def seconds_for(engine: InferStrategy, load: Load, label: str) -> float:
    """Return the seconds for all requests, submitted at once."""
    requests = [
        GenerateRequest(f"{label}-{i}", prompt, SamplingParams(int(length), seed=i, ignore_eos=True))
        for i, (prompt, length) in enumerate(zip(load.prompts, load.lengths, strict=True))
    ]
    started = time.perf_counter()
    completions = await asyncio.gather(*(engine.generate(request) for request in requests))
    seconds = time.perf_counter() - started
    assert [len(completion.token_ids) for completion in completions] == load.lengths.tolist()
    return seconds


async def compare(path: Path, arguments: argparse.Namespace, requests: int) -> dict[str, object]:
    """Run all kinds of requests on both engines, alternating. The engine that is not measured is idle."""
    engines = {name: await start(name, path, arguments.rows, arguments.threads) for name in ("hf_infer", "vllm")}
    figures: dict[str, object] = {}
    for kind, load in loads(requests).items():
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(arguments.repeats + 1):
            for name, engine in engines.items():
                seconds[name].append(await seconds_for(engine, load, f"{kind}-{repeat}"))
        # The first repetition warms up caches, allocators and compiled helpers.
        figures[kind] = summary(len(load.lengths), {name: times[1:] for name, times in seconds.items()})
    for engine in engines.values():
        await engine.shutdown()
    return figures


def summary(requests: int, seconds: dict[str, Sequence[float]]) -> dict[str, float]:
    """Return requests per second of each engine, and the ratio of vLLM to `hf_infer`."""
    rates = {f"{name}_per_second": round(requests / statistics.median(times), 1) for name, times in seconds.items()}
    pairs = zip(seconds["hf_infer"], seconds["vllm"], strict=True)
    return {**rates, "vllm_over_hf_infer": round(statistics.median(theirs / ours for theirs, ours in pairs), 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=128, help="requests that either engine runs at once")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    figures: dict[str, object] = {}
    for size in arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            width, layers, requests = SIZES[size]
            parameters = make_model(Path(folder), width, layers)
            name = f"{parameters / 1e6:.1f} M"
            figures[name] = asyncio.run(compare(Path(folder), arguments, requests))
            for kind, rates in figures[name].items():
                print(name, kind, rates, flush=True)
    settings = {"threads": arguments.threads, "rows": arguments.rows, "repeats": arguments.repeats}
    print(json.dumps({"benchmark": "engines", **settings, **figures}))


if __name__ == "__main__":
    main()

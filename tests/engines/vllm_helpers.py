"""A running engine for tests, vLLM unless told otherwise: one per session, on an event loop of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import psutil
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import Fuse
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from roll.engines.base import GenerateRequest, InferStrategy, SamplingParams
from roll.engines.vllm.strategy import VLLMInferStrategy
from roll.weights.buckets import pack_buckets
from roll.weights.checkpoint_names import CheckpointNames

VOCABULARY = 96
EOS = 95
MAX_LENGTH = 192
PLACES = 64
"""Requests that run at once; one place more is kept for scores."""
LETTERS = [chr(0x4E00 + token) for token in range(VOCABULARY)]
"""The text of each token."""
Result = TypeVar("Result")
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.1,
    bos_token_id=0,
    eos_token_id=EOS,
    pad_token_id=1,
)
"""vLLM's CPU attention needs heads of 32 or more."""


def make_model(seed: int = 0, **changes) -> Qwen2ForCausalLM:
    """A random model whose next token is far from certain and far from uniform."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**({**SIZES, "tie_word_embeddings": True} | changes))).eval()


def make_moe(seed: int = 0) -> Qwen3MoeForCausalLM:
    """A random mixture of experts, made like `make_model`; one layer is dense."""
    torch.manual_seed(seed)
    experts = dict(moe_intermediate_size=64, num_experts=8, num_experts_per_tok=3, norm_topk_prob=True)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **experts, mlp_only_layers=[1], head_dim=32)).eval()


class TooLate(Exception):
    """Requests had ended before a scenario, which needs them, came to look."""


def requests_of(strategy: InferStrategy) -> int:
    """Requests that run or wait."""
    stats = strategy.stats()
    return stats["running"] + stats["waiting"]


class RunningEngine:
    """An engine and the event loop it lives on."""

    def __init__(self, model_path: str, *, strategy: InferStrategy | None = None, **strategy_config) -> None:
        """``strategy`` defaults to vLLM on a CPU."""
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        torch.set_num_threads(1)
        self.strategy = strategy or VLLMInferStrategy(
            model_path,
            device="cpu",
            dtype="float32",
            attn_implementation="sdpa",
            max_length=MAX_LENGTH,
            strategy_config={"max_num_seqs": PLACES + 1, **strategy_config},
        )
        self.run(self.strategy.start, timeout=240)
        self.version = 0

    def run(self, function: Callable[..., Awaitable[Result]], *args, timeout: float = 120) -> Result:
        """Call a coroutine function on the engine's loop and wait. On a machine that stood still while the engine went
        on, it is called again."""
        for _ in range(9):
            try:
                return self._once(function, *args, timeout=timeout)
            except TooLate:
                self._once(self._end_all, timeout=timeout)
        return self._once(function, *args, timeout=timeout)

    def _once(self, function: Callable[..., Awaitable[Result]], *args, timeout: float) -> Result:
        return asyncio.run_coroutine_threadsafe(function(*args), self.loop).result(timeout)

    async def _end_all(self) -> None:
        await self.strategy.resume()
        while requests_of(self.strategy):
            await asyncio.sleep(0.005)

    def publish(self, model: torch.nn.Module, mode: str = "keep") -> None:
        """Load a model's weights as the next version."""
        self.version += 1
        self.run(self.load, model, self.version, mode)

    async def load(
        self, model: torch.nn.Module, version: int, mode: str = "keep", when_paused: Callable[[], None] = lambda: None
    ):
        await self.strategy.prepare_weights(buckets_of(model), version)
        await self.strategy.pause(mode)
        when_paused()
        receipt = await self.strategy.load_weights(version)
        await self.strategy.resume()
        return receipt

    def close(self) -> None:
        self.run(self.strategy.shutdown)
        self.loop.call_soon_threadsafe(self.loop.stop)


def engine_process(owner: psutil.Process) -> psutil.Process:
    """vLLM's engine process among the children."""
    (engine,) = [child for child in owner.children() if "VLLM" in child.name()]
    return engine


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One letter per token."""
    vocabulary = {letter: token for token, letter in enumerate(LETTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=LETTERS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=LETTERS[EOS])


def assert_close(recorded: np.ndarray, expected: np.ndarray) -> None:
    """Within the rounding of float32."""
    difference = np.abs(recorded - expected)
    assert difference.mean() < 1e-5 and difference.max() < 1e-3


def buckets_of(model: torch.nn.Module, bucket_bytes: int = 64 * 1024):
    return list(pack_buckets(CheckpointNames.like(model).of(model.named_parameters()), bucket_bytes))


def request(name: str, tokens: int = 16, prompt=(5, 6, 7), **sampling) -> GenerateRequest:
    index = sampling.pop("first_token_index", 0)
    return GenerateRequest(name, np.array(prompt, dtype=np.int32), SamplingParams(tokens, **sampling), index)

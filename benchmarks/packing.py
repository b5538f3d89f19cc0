"""Compare training on packed rows with padded ones: the same model, samples, loss, threads and token budget.

There are two loads. `spread` has exponential lengths, cut off at the longest, with a mean of 0.3 of it. In `equal` all
samples are as long as the mean, so there is no padding and the ratio shows the cost of packing. There are three sides:

- `padded`: samples in order of arrival, as many in each micro-batch as fit the budget at full length;
- `padded, sorted`: dynamic batching, which groups samples of similar length and fills the budget;
- `packed`: the same budget, without padding.

A pass is forward, loss and backward over all samples, and one optimizer step. The figure is real tokens per second.
Sides alternate. Prints one JSON line with medians and their ratios, by wall-clock time and by CPU time, which other
programs on the machine disturb less.

    python benchmarks/packing.py [--samples 64] [--longest 512] [--budget 4096] [--repeats 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import TrainingArguments, WorkerConfig
from roll.data.records import SampleBatch
from roll.trainers.base import TrainerSetup
from roll.trainers.model import HfForward, prepare_model
from roll.trainers.step import TrainingStep, plan_micro_batches
from roll.trainers.trainer import build_optimizer

PROMPT_TOKENS = 24
MEAN_SHARE = 0.3
"""Mean length divided by the longest."""


def make_model(path: str, arguments: argparse.Namespace) -> int:
    """Save a random Qwen2 model and return its number of parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=arguments.vocabulary,
        hidden_size=arguments.hidden,
        intermediate_size=3 * arguments.hidden,
        num_hidden_layers=arguments.layers,
        num_attention_heads=arguments.hidden // 64,
        num_key_value_heads=max(1, arguments.hidden // 128),
        max_position_embeddings=arguments.longest,
        tie_word_embeddings=True,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(path)
    return sum(parameter.numel() for parameter in model.parameters())


def spread_lengths(count: int, longest: int, generator: np.random.Generator) -> np.ndarray:
    """Draw a prompt and an exponential response, cut off at ``longest``, with mean ``MEAN_SHARE`` of it."""
    shape = np.sort(generator.exponential(1.0, count))
    low, high = 0.0, float(longest)
    for _ in range(60):
        scale = (low + high) / 2
        lengths = np.minimum(PROMPT_TOKENS + 1 + scale * shape, longest)
        low, high = (scale, high) if lengths.mean() < MEAN_SHARE * longest else (low, scale)
    lengths[-1] = longest
    return generator.permutation(lengths.astype(int))


def make_batch(lengths: np.ndarray, vocabulary: int, generator: np.random.Generator) -> SampleBatch:
    """Make random tokens; everything after the prompt is trained on."""
    total = int(lengths.sum())
    in_response = np.concatenate([np.arange(length) >= PROMPT_TOKENS for length in lengths])
    return SampleBatch(
        lengths.astype(np.int64),
        {
            "token_ids": generator.integers(0, vocabulary, total).astype(np.int32),
            "response_mask": in_response,
            "behaviour_logprobs": np.full(total, -np.log(vocabulary), dtype=np.float32),
            "versions": np.zeros(total, dtype=np.int32),
            "advantages": generator.normal(size=total).astype(np.float32),
        },
    )


@dataclass(frozen=True)
class Pass:
    """One pass over all samples."""

    seconds: float
    cpu_seconds: float
    computed_tokens: int
    """Tokens that the model computed on, including padding."""
    loss: float


@dataclass
class Side:
    """One way to make micro-batches, with a model of its own."""

    setup: TrainerSetup
    in_order: bool

    def __post_init__(self) -> None:
        self.model, head, self.packed = prepare_model(self.setup, gradient_checkpointing=False)
        self.setup = replace(self.setup, packed=self.packed)
        self.device = torch.device("cpu")
        self.forward = HfForward("policy", self.model, head, self.device)
        self.optimizer = build_optimizer(self.model.parameters(), self.setup.training_args)

    def rows(self, lengths: np.ndarray) -> list[list[int]]:
        """Return the micro-batches."""
        if not self.in_order:
            return plan_micro_batches(lengths, 1, self.setup.train_limits)[0]
        size = self.setup.train_limits.max_tokens // int(lengths.max())
        return [list(range(start, min(start + size, len(lengths)))) for start in range(0, len(lengths), size)]

    def one_pass(self, batch: SampleBatch, objective: PolicyObjective) -> Pass:
        """Train on the batch."""
        started, cpu_started, computed, total = time.perf_counter(), time.process_time(), 0, 0.0
        step = TrainingStep.of(batch, objective)
        for micro_batch in step.micro_batches(self.rows(batch.lengths), self.device, self.packed):
            loss, _ = step.loss(micro_batch, *self.forward.outputs(micro_batch, 1.0, step.needs_entropy_gradient))
            loss.backward()
            computed, total = computed + micro_batch.input_ids.numel(), total + loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return Pass(time.perf_counter() - started, time.process_time() - cpu_started, computed, total)


def make_sides(path: str, budget: int) -> dict[str, Side]:
    """Return the three sides, with the same weights."""

    def side(packed: bool = False, in_order: bool = False) -> Side:
        config = WorkerConfig(
            training_args=TrainingArguments(learning_rate=1e-5),
            max_tokens_per_microbatch_in_train=budget,
            use_sequence_packing=packed,
        )
        return Side(TrainerSetup(config, path, total_optimizer_steps=1000, seed=0), in_order)

    return {"padded": side(in_order=True), "padded, sorted": side(), "packed": side(packed=True)}


def measure(sides: dict[str, Side], batch: SampleBatch, repeats: int) -> dict[str, Any]:
    """Alternate passes of all sides over one load; the first pass of each side is not counted."""
    longest = int(batch.lengths.max())
    objective = PolicyObjective(longest, "tis", {}, "seq-mean-token-mean")
    runs = {name: [side.one_pass(batch, objective)] for name, side in sides.items()}
    for _ in range(repeats):
        for name, side in sides.items():
            runs[name].append(side.one_pass(batch, objective))
    seconds = {name: [each.seconds for each in passes[1:]] for name, passes in runs.items()}
    cpu_seconds = {name: [each.cpu_seconds for each in passes[1:]] for name, passes in runs.items()}
    tokens = int(batch.lengths.sum())
    return {
        "samples": len(batch),
        "tokens": tokens,
        "mean_over_longest": round(tokens / len(batch) / longest, 3),
        "loss_difference": float(f"{abs(runs['packed'][0].loss - runs['padded, sorted'][0].loss):.1e}"),
        "micro_batches": {name: len(side.rows(batch.lengths)) for name, side in sides.items()},
        "computed_tokens": {name: passes[0].computed_tokens for name, passes in runs.items()},
        **compare(tokens, seconds),
        "by_cpu_time": compare(tokens, cpu_seconds),
    }


def compare(tokens: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return rates by medians, and median ratios of the packed rate to the others' over passes run side by side."""
    return {
        "tokens_per_second": {name: round(tokens / statistics.median(times)) for name, times in seconds.items()},
        "ratio": {
            name: round(statistics.median(t / p for t, p in zip(times, seconds["packed"], strict=True)), 3)
            for name, times in seconds.items()
            if name != "packed"
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest sample")
    parser.add_argument("--budget", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    generator = np.random.default_rng(0)
    spread = spread_lengths(arguments.samples, arguments.longest, generator)
    loads = {"spread": spread, "equal": np.full_like(spread, round(spread.mean()))}
    with tempfile.TemporaryDirectory() as path:
        parameters = make_model(path, arguments)
        sides = make_sides(path, arguments.budget)
        figures = {
            name: measure(sides, make_batch(lengths, arguments.vocabulary, generator), arguments.repeats)
            for name, lengths in loads.items()
        }
    print(json.dumps({"benchmark": "packing", "parameters": parameters, **vars(arguments), **figures}))


if __name__ == "__main__":
    main()

"""Trainers that run on several processes and write down what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed import FileStore

from roll.algorithms.objective import PolicyObjective
from roll.configs.schema import TrainingArguments
from roll.data.ports import free_port
from roll.data.records import SampleBatch
from roll.strategies.train import build_train_strategy
from roll.strategies.train.base import TrainStrategy
from roll.strategies.train.export import save
from roll.strategies.train.microbatches import MicroBatchLimits
from tests.strategies.train import megatron_cpu_shim
from tests.strategies.train.megatron_models import VOCABULARY
from tests.strategies.train.trainers import trainer_setup

TRAINING = TrainingArguments(
    learning_rate=3e-3, weight_decay=0.1, warmup_steps=2, max_grad_norm=1.0, adam_epsilon=1e-3
)
"""With this epsilon a gradient that is nothing but rounding moves no weight."""
OBJECTIVE = PolicyObjective(8, "tis", {"upper": 5.0}, "seq-mean-token-mean", use_kl_loss=True, kl_loss_coef=0.1,
                            entropy_loss_coef=0.05)  # fmt: skip
LENGTHS = (9, 5, 12, 3, 7, 2, 1, 6)
LEFT_OUT = (0, 1, 3, 5, 7)
"""Samples that each step goes without: the number of micro-batches changes, and in the end there is but one sample."""


@dataclass(frozen=True)
class Run:
    """One trainer and what it is asked."""

    name: str
    model: str
    ranks: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    strategy: str = "megatron_train"
    trains: bool = True
    max_tokens: int = 25
    changes: dict[str, Any] = field(default_factory=dict)
    """Of the trainer's setup."""


def make_batch(seed: int, lengths: Sequence[int] = LENGTHS) -> SampleBatch:
    """Ragged samples with everything that the objective reads."""
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    fields = {
        name: generator.normal(-3 if name.endswith("logprobs") else 0, 1, total).astype(np.float32)
        for name in ("behaviour_logprobs", "reference_logprobs", "advantages")
    }
    tokens = {
        "token_ids": generator.integers(0, VOCABULARY, total).astype(np.int32),
        "response_mask": generator.random(total) < 0.6,
    }
    return SampleBatch(np.array(lengths, dtype=np.int64), tokens | fields)


def every_next_token(seed: int, length: int) -> SampleBatch:
    """Samples that begin alike and end in each token of the vocabulary: their log-probabilities are all there are."""
    prefix = np.random.default_rng(seed).integers(0, VOCABULARY, length)
    ids = np.concatenate([np.append(prefix, token) for token in range(VOCABULARY)])
    return SampleBatch(np.full(VOCABULARY, length + 1), {"token_ids": ids.astype(np.int32)})


def whole_distributions(trainer: TrainStrategy, temperature: float) -> np.ndarray:
    """``[prefixes, vocabulary]``."""
    rows = []
    for length in (1, 4, 11):
        batch = every_next_token(length, length)
        rows.append(trainer.log_probs(batch, temperature)[batch.offsets[1:] - 1])
    return np.stack(rows)


def run_all(runs: Sequence[Run], folder: Path) -> dict[str, list[dict[str, np.ndarray]]]:
    """Results by the run's name and by rank."""
    ranks = max(run.ranks for run in runs)
    board = folder / f"ports-{runs[0].name}"
    torch.multiprocessing.spawn(_rank, (list(runs), str(board), str(folder)), nprocs=ranks)
    return {
        run.name: [dict(np.load(folder / f"{run.name}-{rank}.npz")) for rank in range(run.ranks)] for run in runs
    }


def _rank(rank: int, runs: list[Run], board: str, folder: str) -> None:
    torch.set_num_threads(1)
    megatron_cpu_shim.install()
    # A port is looked for when it is needed: minutes earlier, somebody else might take it.
    ports = FileStore(board)
    for run in runs:
        if rank == 0:
            ports.set(run.name, str(free_port()))
        if rank < run.ranks:
            port = int(ports.get(run.name))
            np.savez(f"{folder}/{run.name}-{rank}.npz", **observe(run, rank, port, folder))


def observe(run: Run, rank: int, port: int, folder: str) -> dict[str, np.ndarray]:
    """Everything that must not depend on how the model is shared out."""
    changes = {"training_args": TRAINING, "infer_limits": MicroBatchLimits(150, 1)} | run.changes
    trainer = build_train_strategy(
        run.strategy,
        trainer_setup(
            f"{folder}/{run.model}", rank=rank, world_size=run.ranks, port=port, max_tokens=run.max_tokens,
            strategy_config={"process_group_timeout_seconds": 60, **run.options}, **changes,
        ),
    )  # fmt: skip
    trainer.initialize()
    results = {f"distribution/{t}": whole_distributions(trainer, t) for t in (1.0, 0.6)}
    initial = [(f"initial/{name}", weight.clone().numpy()) for name, weight in trainer.named_weights()]
    assert len(dict(initial)) == len(initial), "a tensor comes twice"
    results |= dict(initial)
    save(trainer, f"{folder}/{run.name}-initial")
    if run.trains:
        for step, left_out in enumerate(LEFT_OUT):
            metrics = trainer.train_step(make_batch(step, LENGTHS[left_out:]), OBJECTIVE, 0.9)
            results |= {f"metric/{step}/{name}": np.array(value) for name, value in metrics.items()}
        results |= {f"trained/{name}": weight.clone().numpy() for name, weight in trainer.named_weights()}
        save(trainer, f"{folder}/{run.name}-export")
        results["trained_distribution"] = whole_distributions(trainer, 1.0)
        trainer.load(f"{folder}/{run.model}")
        results["reloaded_distribution"] = whole_distributions(trainer, 1.0)
    trainer.shutdown()
    return results

"""Trainers that run on several processes and write down what they saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from roll.algorithms.objective import PolicyObjective
from roll.configs.roles import TrainingArguments
from roll.data.records import SampleBatch
from roll.trainers.model import save
from roll.trainers.trainer import TrainStrategy
from tests.trainers.megatron_models import VOCABULARY
from tests.trainers.ranks import Job

TRAINING = TrainingArguments(learning_rate=3e-3, weight_decay=0.1, warmup_steps=2, max_grad_norm=1.0, adam_epsilon=1e-3)
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

    def job(self, folder: Path) -> Job:
        setup = {
            "training_args": TRAINING,
            "infer_tokens": 150,
            "max_tokens": self.max_tokens,
            "strategy_config": {"process_group_timeout_seconds": 60, **self.options},
        }
        model = str(folder / self.model)
        return Job(observe, self.strategy, model, (str(folder), self), setup | self.changes, self.ranks)


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


def observe(trainer: TrainStrategy, argument: tuple[str, Run]) -> dict[str, np.ndarray]:
    """Everything that must not depend on how the model is shared out: work for `ranks.Job`."""
    folder, run = argument
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
    return results

"""A model and batches on which a trainer's step takes milliseconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from roll.algorithms.objective import PolicyObjective
from roll.data.records import SampleBatch
from roll.trainers.trainer import TrainStrategy

VOCABULARY = 23

OBJECTIVE = PolicyObjective(8, "tis", {"upper": 5.0}, "seq-mean-token-mean", use_kl_loss=True, kl_loss_coef=0.1,
                            entropy_loss_coef=0.05, monitored=True)  # fmt: skip


def write_model(path: Path, tied: bool = True, seed: int = 0, **changes: Any) -> str:
    """A random Qwen2, and a tokenizer's file beside it. ``changes``: other sizes."""
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    }  # fmt: skip
    config = Qwen2Config(tie_word_embeddings=tied, initializer_range=0.3, **sizes | changes)
    Qwen2ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text('{"made": "by the test"}')
    return str(path)


def make_batch(seed: int = 0, lengths: tuple[int, ...] = (9, 5, 12, 3, 7, 2, 1)) -> SampleBatch:
    """Ragged samples; what stands outside the response mask is NaN."""
    generator = np.random.default_rng(seed)
    total = sum(lengths)
    mask = generator.random(total) < 0.6

    def fill(values: np.ndarray) -> np.ndarray:
        return np.where(mask, values, np.nan).astype(np.float32)

    return SampleBatch(
        np.array(lengths, dtype=np.int64),
        {
            "token_ids": generator.integers(0, VOCABULARY, total).astype(np.int32),
            "response_mask": mask,
            "behaviour_logprobs": fill(-3 + generator.normal(size=total)),
            "reference_logprobs": fill(-3 + generator.normal(size=total)),
            "advantages": fill(generator.normal(size=total)),
            "versions": np.zeros(total, dtype=np.int32),
            "same_weights": generator.random(total) < 0.5,
        },
    )


def weights_of(trainer: TrainStrategy) -> dict[str, np.ndarray]:
    """Copies of all weights."""
    return {name: weight.clone().numpy() for name, weight in trainer.named_weights()}

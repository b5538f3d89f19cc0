"""A tiny task that a run takes seconds on: a character model, one-digit additions, and the YAML that trains it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, set_seed

CHARACTERS = "0123456789+="


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {"<pad>": 0, "<eos>": 1, **{character: index + 2 for index, character in enumerate(CHARACTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_task(folder: Path, seed: int = 0) -> None:
    """``folder/model``, ``folder/train.jsonl`` and ``folder/val.jsonl``."""
    set_seed(seed)
    config = Qwen2Config(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    rows = [
        {"prompt": f"{a}+{b}=", "ground_truth": str(a + b), "domain": "addition"} for a in range(10) for b in range(10)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::2]))
    (folder / "val.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[1::8]))


def tiny_config(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run that takes a few seconds. ``changes`` are dotted keys with ``__`` for the dots."""
    config: dict[str, Any] = {
        "exp_name": "tiny",
        "pretrain": str(folder / "model"),
        "seed": 7,
        "cluster": {"device": "cpu", "num_devices_per_node": 2, "cpu_threads_per_device": 1},
        "max_steps": 3,
        "rollout_batch_size": 8,
        "num_return_sequences_in_group": 4,
        "prompt_length": 4,
        "response_length": 4,
        "track_with": [],
        "actor_train": {
            "device_mapping": [0],
            "pg_variant": "ppo",
            "training_args": {"learning_rate": 1e-3},
            "data_args": {"file_name": str(folder / "train.jsonl")},
        },
        "actor_infer": {"device_mapping": [1]},
        "rewards": {"addition": {"verifier": "reward_functions:digit_reward"}},
        "stall_timeout_seconds": 120,
    }
    return changed(config, changes)


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The configuration with ``changes``, dotted keys with ``__`` for the dots."""
    for path, value in changes.items():
        *parents, last = path.split("__")
        section = config
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return config


def write_config(folder: Path, config: dict[str, Any], name: str = "run.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(config))
    return path

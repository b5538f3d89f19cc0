"""Tiny random sequence classifiers of characters."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from roll.configs.rewards import RewardModelConfig
from roll.configs.roles import ModelArguments
from roll.rewards.classifier import HFClassifier
from roll.rewards.model import ScorerSetup

CHARACTERS = "0123456789+=?"
END = len(CHARACTERS) + 1
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ '?' if message['role'] == 'assistant' else '' }}{{ message['content'] }}{% endfor %}<end>"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    words = ["<pad>", *CHARACTERS, "<end>"]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", chat_template=template
    ).save_pretrained(folder)


ENCODERS = {
    "bert": (BertConfig, BertForSequenceClassification),
    "roberta": (RobertaConfig, RobertaForSequenceClassification),
}


def write_classifier(folder: Path, labels: int = 1, pad: int | None = 0, encoder: str | None = None, **changes) -> str:
    """A model whose score depends on every token, in whatever place."""
    torch.manual_seed(0)
    sizes = dict(
        vocab_size=len(CHARACTERS) + 2,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=24,
        initializer_range=0.4,
        num_labels=labels,
        pad_token_id=pad,
    )
    if encoder is not None:
        config_class, model_class = ENCODERS[encoder]
        model = model_class(config_class(**sizes | changes))
    else:
        config = Qwen2Config(num_key_value_heads=1, bos_token_id=None, eos_token_id=END, **sizes | changes)
        model = Qwen2ForSequenceClassification(config)
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return str(folder)


def scorer(path: str, batch_size: int = 4, dtype: str = "float32", **settings) -> HFClassifier:
    return HFClassifier(
        ScorerSetup(path, ModelArguments(dtype=dtype), RewardModelConfig(**settings), batch_size, "cpu")
    )


def said(response: str, prompt: str = "1+2=") -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]

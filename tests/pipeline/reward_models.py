"""A reward model whose score is known: the last character of the response, by a table; and its workers with faults."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForSequenceClassification

from roll.rewards.classifier import HFClassifier
from roll.rewards.model_pool import ScoreWorker

LETTERS = "=+9876543210"
"""Not the policy's vocabulary: each character has another id, and there is a second kind of padding."""
SCORES = {letter: position / 4 for position, letter in enumerate(LETTERS)}
"""Score of a conversation that ends with the letter."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make_reward_model(folder: Path) -> Path:
    """A classifier of one label without anything between its embeddings and its head."""
    size = 32
    config = Qwen2Config(
        vocab_size=len(LETTERS) + 3,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        num_labels=1,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=2,
    )
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size)[: config.vocab_size])
        model.score.weight.zero_()
        for position, letter in enumerate(LETTERS):
            # The last norm makes a unit vector one of length sqrt(size).
            model.score.weight[0, position + 3] = SCORES[letter] / size**0.5
    model.save_pretrained(folder)
    vocabulary = {"<pad>": 0, "<unk>": 1, "<end>": 2, **{letter: index + 3 for index, letter in enumerate(LETTERS)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE
    ).save_pretrained(folder)
    return folder


class DoubledScores(HFClassifier):
    """Twice what the model says."""

    def score(self, conversations):
        return [replace(scored, score=2 * scored.score) for scored in super().score(conversations)]


class DiesOnce(ScoreWorker):
    """Is killed in its third call, once in a run."""

    async def start(self, *args):
        await super().start(*args)
        self._calls = 0

    async def score(self, conversations):
        self._calls += 1
        marker = Path(self.identity.log_dir) / "reward-model-killed"
        if self._calls == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return await super().score(conversations)

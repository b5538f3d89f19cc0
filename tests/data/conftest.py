"""A character tokenizer, made on the spot."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-=? abcdefghijklmnopqrstuvwxyz<>|:\n"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


@pytest.fixture
def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = (
        "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
        "{% if messages[-1].content == 'bad' %}{{ raise_exception('no bad messages') }}{% endif %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    return tokenizer

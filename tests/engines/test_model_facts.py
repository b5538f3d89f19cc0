"""End tokens are looked for where transformers would, and then in the tokenizer: alike for every engine."""

from __future__ import annotations

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, GenerationConfig, PreTrainedTokenizerFast, Qwen2Config

from roll.engines.base import ModelSpec, eos_token_ids, load_tokenizer


@pytest.mark.parametrize(
    ("generation", "model", "tokenizer", "expected"),
    [
        ([4, 5], 2, "c", (4, 5)),
        (4, 2, "c", (4,)),
        (None, 2, "c", (2,)),
        (None, [2, 1], None, (2, 1)),
        (None, None, "c", (3,)),
        (None, None, None, ()),
    ],
)
def test_end_tokens_come_from_the_first_place_that_names_some(tmp_path, generation, model, tokenizer, expected):
    Qwen2Config(vocab_size=8, eos_token_id=model, bos_token_id=None).save_pretrained(tmp_path)
    if generation is not None:
        GenerationConfig(eos_token_id=generation).save_pretrained(tmp_path)
    if tokenizer is not None:
        words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "c": 3}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token=tokenizer).save_pretrained(tmp_path)
    spec = ModelSpec(str(tmp_path), "cpu", "float32", "sdpa", 8)
    assert eos_token_ids(spec, AutoConfig.from_pretrained(tmp_path)) == expected


def test_responses_are_read_with_the_tokenizer_that_was_saved(tmp_path):
    """For a Qwen2 model `AutoTokenizer` takes a class of its own, which knows no line break of this vocabulary."""
    Qwen2Config(vocab_size=8).save_pretrained(tmp_path)
    letters = Tokenizer(models.WordLevel({"a": 0, "b": 1, "\n": 2}, unk_token="a"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=letters).save_pretrained(tmp_path)
    found = load_tokenizer(ModelSpec(str(tmp_path), "cpu", "float32", "sdpa", 8))
    assert found("ab\nb")["input_ids"] == [0, 1, 2, 1] and found.decode([1, 2, 0]) == "b\na"

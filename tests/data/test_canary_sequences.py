import numpy as np
import pytest

from roll.weights.verify import canary_sequences


def prompts(*token_lists):
    return [np.array(tokens, dtype=np.int32) for tokens in token_lists]


PROMPTS = prompts([1, 2, 3], [10, 11, 12, 13, 14, 15, 16, 17], [4], [20, 21])


def test_a_sequence_is_the_beginning_of_a_prompt_and_tokens_of_the_prompts():
    vocabulary = set(np.concatenate(PROMPTS).tolist())
    found = canary_sequences(PROMPTS, count=4, length=9, seed=1)
    assert all(len(tokens) == 9 and tokens.dtype == np.int32 for tokens in found)
    assert all(set(tokens.tolist()) <= vocabulary for tokens in found)
    heads = {tuple(prompt[:5].tolist()) for prompt in PROMPTS}
    assert all(any(tuple(tokens[: len(head)].tolist()) == head for head in heads) for tokens in found)
    assert len({tuple(tokens.tolist()) for tokens in found}) == 4


def test_equal_seeds_give_equal_sequences_and_others_do_not():
    one, same, other = (canary_sequences(PROMPTS, count=3, length=12, seed=seed) for seed in (1, 1, 2))
    assert all(np.array_equal(left, right) for left, right in zip(one, same, strict=True))
    assert not all(np.array_equal(left, right) for left, right in zip(one, other, strict=True))


@pytest.mark.parametrize("length", [2, 3, 64])
def test_few_prompts_are_used_again_with_other_tokens_behind_them(length):
    found = canary_sequences(prompts([1, 2, 3, 4]), count=6, length=length, seed=3)
    assert [len(tokens) for tokens in found] == [length] * 6
    assert all(tokens[0] == 1 for tokens in found)

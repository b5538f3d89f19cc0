"""Which publications are compared, and with what."""

import asyncio

import numpy as np
import pytest
from tiny import tiny_config

from roll.configs.loader import config_from_tree
from roll.pipeline.context import ParityCheck

PROMPTS = [np.arange(4, dtype=np.int32)]


class Trainer:
    """Says of each token its id, times the temperature."""

    async def log_probs(self, batch, temperature):
        return batch.tokens["token_ids"].astype(np.float32) * np.float32(temperature)


def check_of(folder, **changes) -> ParityCheck:
    return ParityCheck(config_from_tree(tiny_config(folder, **changes)), PROMPTS)


def versions_compared(folder, interval: int, publications: int) -> list[int]:
    canaries = check_of(folder, weight_update__canary_interval=interval)

    async def all_scores():
        return [await canaries.score(Trainer(), 5 * number) for number in range(publications)]

    return [scores.version for scores in asyncio.run(all_scores()) if scores is not None]


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [0, 5, 10, 15]), (2, [0, 10]), (3, [0, 15]), (100, [0]), (0, [])]
)
def test_the_first_publication_and_every_nth_are_compared_whatever_their_versions(tmp_path, interval, expected):
    assert versions_compared(tmp_path, interval, 4) == expected


def test_each_sequence_gets_its_own_scores_at_temperature_one(tmp_path):
    scores = asyncio.run(check_of(tmp_path).score(Trainer(), 3))
    assert scores.version == 3 and len(scores.token_ids) > 1
    assert [values.tolist() for values in scores.logprobs] == [tokens.tolist() for tokens in scores.token_ids]


@pytest.mark.parametrize(
    ("changes", "tolerance"),
    [
        ({}, 1e-3),
        ({"actor_infer__model_args__dtype": "bfloat16"}, 0.1),
        ({"actor_train__model_args__dtype": "bfloat16"}, 0.1),
        ({"weight_update__canary_tolerance": 0.02}, 0.02),
    ],
)
def test_the_configuration_sets_number_length_and_tolerance(tmp_path, changes, tolerance):
    scores = asyncio.run(check_of(tmp_path, **changes, weight_update__canary_prompts=5).score(Trainer(), 0))
    assert scores.tolerance == tolerance
    assert [len(tokens) for tokens in scores.token_ids] == [7] * 5, "prompt_length + response_length, less one"

"""Which publications are compared, and with what."""

import asyncio

import numpy as np
import pytest
from tiny import tiny_config

from roll.configs.loader import config_from_tree
from roll.pipeline.context import ParityCheck
from roll.weights.publisher import WeightsDiffer

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
        ({"actor_infer__model_args__dtype": "bfloat16"}, 0.5),
        ({"actor_train__model_args__dtype": "bfloat16"}, 0.5),
        ({"weight_update__canary_tolerance": 0.02}, 0.02),
    ],
)
def test_the_configuration_sets_number_length_and_tolerance(tmp_path, changes, tolerance):
    scores = asyncio.run(check_of(tmp_path, **changes, weight_update__canary_prompts=5).score(Trainer(), 0))
    assert scores.tolerance == tolerance
    assert [len(tokens) for tokens in scores.token_ids] == [7] * 5, "prompt_length + response_length, less one"


LOW = {"actor_infer__model_args__dtype": "bfloat16", "weight_update__canary_interval": 4}


def judged(check: ParityCheck, *differences: float) -> list[str | None]:
    """The judgements on updates, one after the other; the second of two replicas is this far away."""
    return [check.judge(version, [np.zeros(3), np.full(3, -each)]) for version, each in enumerate(differences)]


def test_in_low_precision_the_first_update_says_how_much_is_rounding(tmp_path):
    first, *others = judged(check_of(tmp_path, **LOW), 0.2, 0.39, 0.3, 0.39)
    assert "0.2 nats" in first and "Up to 0.4" in first and others == [None] * 3
    assert judged(check_of(tmp_path, **LOW), 0.02, 0.09, 0.0999) == [None] * 3
    assert "Up to 0.5" in judged(check_of(tmp_path, **LOW), 0.49)[0], "never more than what stops the run at once"


def test_one_difference_is_a_warning_and_two_in_a_row_stop_the_run(tmp_path):
    check = check_of(tmp_path, **LOW)
    found = judged(check, 0.01, 0.2, 0.05, 0.2)
    assert [each is not None for each in found] == [False, True, False, True]
    assert "version 3" in found[3] and "0.2 nats" in found[3] and "at most 0.1" in found[3]
    with pytest.raises(WeightsDiffer, match="version 4: .* as in the comparison before"):
        check.judge(4, [np.full(3, 0.11)])


def test_the_update_after_a_warning_is_checked(tmp_path):
    check = check_of(tmp_path, **LOW)
    assert judged(check, 0.01) == [None]

    async def compared(number: int) -> list[bool]:
        return [await check.score(Trainer(), version) is not None for version in range(number)]

    assert asyncio.run(compared(3)) == [True, False, False]
    check.judge(3, [np.full(3, 0.2)])
    assert asyncio.run(compared(1)) == [True]
    check.judge(4, [np.full(3, 0.01)])
    assert asyncio.run(compared(2)) == [True, False], "the fourth after the first"


@pytest.mark.parametrize("changes", [{}, {**LOW, "weight_update__canary_tolerance": 0.02}])
def test_a_tolerance_that_is_known_is_kept(tmp_path, changes):
    check = check_of(tmp_path, **changes)
    scores = asyncio.run(check.score(Trainer(), 0))
    assert judged(check, 0.9 * scores.tolerance, scores.tolerance) == [None, None]

"""What a configuration may name, and what there is, are the same: the former must not import the latter."""

import pytest

from roll.configs import roles as schema
from roll.engines.registry import INFER_STRATEGIES
from roll.rewards.model import SCORE_STRATEGIES
from roll.trainers.registry import FORWARD_STRATEGIES, TRAIN_STRATEGIES


@pytest.mark.parametrize(
    ("names", "registered"),
    [
        (schema.TRAIN_STRATEGIES, TRAIN_STRATEGIES),
        (schema.FORWARD_STRATEGIES, FORWARD_STRATEGIES),
        (schema.INFER_STRATEGIES, INFER_STRATEGIES),
        (schema.SCORE_STRATEGIES, SCORE_STRATEGIES),
    ],
)
def test_each_engine_that_may_be_named_is_there_and_the_other_way_round(names, registered):
    assert set(names) == set(registered)

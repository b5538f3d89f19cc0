"""The short version of `make soak`: each victim once."""

import pytest
from random_kills import VICTIMS, Kill, soak

PLAN = (
    Kill("driver", "in a checkpoint"),
    Kill("reward worker", "in a step"),
    Kill("engine", "in a step"),
    Kill("everything", "in a checkpoint"),
    Kill("trainer", "in a step"),
)


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "pictures",
    [
        pytest.param(False, marks=pytest.mark.tier("all")),
        pytest.param(True, marks=[pytest.mark.tier("soak"), pytest.mark.needs("diffusers")]),
    ],
    ids=["text", "pictures"],
)
def test_whoever_is_killed_every_prompt_is_trained_on_or_dropped_exactly_once(tmp_path, pictures):
    report = soak(tmp_path, PLAN, seed=3, compare=False, pictures=pictures)
    assert report.kills == dict.fromkeys(VICTIMS, 1)
    assert report.starts == 4
    assert report.ledger["dropped/failed"] > 0, "prompts that cannot be judged are dropped, and stay dropped"
    assert report.accuracy > report.first_accuracy

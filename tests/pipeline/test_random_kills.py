"""The short version of `make soak`: each victim once."""

import pytest
from random_kills import ENDS_THE_RUN, VICTIMS, Kill, random_plan, soak

PLAN = (
    Kill("driver", "in a checkpoint"),
    Kill("reward worker", "in a step"),
    Kill("engine", "in a step"),
    Kill("everything", "in a checkpoint"),
    Kill("trainer", "in a step"),
)


def test_a_plan_has_starts_only_where_a_run_starts():
    plan = random_plan(500, seed=1)
    before = [None, *(kill.victim for kill in plan)]
    starts = [victim for kill, victim in zip(plan, before, strict=False) if kill.moment == "at the start"]
    assert starts and set(starts) <= {None, *ENDS_THE_RUN}
    assert all(before.count(victim) == 100 for victim in VICTIMS)


@pytest.mark.timeout(500)
def test_whoever_is_killed_every_prompt_is_trained_on_or_dropped_exactly_once(tmp_path):
    report = soak(tmp_path, PLAN, seed=3, compare=False)
    assert report.kills == dict.fromkeys(VICTIMS, 1)
    assert report.starts == 4
    assert report.ledger["dropped/failed"] > 0, "prompts that cannot be judged are dropped, and stay dropped"
    assert report.accuracy > report.first_accuracy

"""`docs/algorithms.md` names every variant, knob and mode, and nothing that does not exist."""

import re
from dataclasses import fields
from pathlib import Path

from roll.algorithms.advantages import ADVANTAGE_ESTIMATORS
from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.kl import KL_ESTIMATORS
from roll.algorithms.policy_losses import POLICY_LOSSES

PAGE = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()


def first_column(heading: str) -> set[str]:
    section = PAGE.split(f"## {heading}")[1].split("\n## ")[0]
    return set(re.findall(r"^\| `([\w-]+)`", section, flags=re.MULTILINE))


def test_the_tables_list_exactly_what_is_registered() -> None:
    assert first_column("Policy losses") == set(POLICY_LOSSES.names())
    assert first_column("Advantages") == set(ADVANTAGE_ESTIMATORS.names())
    assert first_column("Aggregation") == set(LOSS_AGG_MODES)


def test_every_knob_and_kl_estimator_is_named() -> None:
    for registry in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        for name in registry.names():
            knobs = type(registry.build(name, {})[1])
            row = re.search(rf"^\| `{name}`.*$", PAGE, flags=re.MULTILINE).group()
            assert set(re.findall(r"`(\w+)` \(", row.split("|")[3])) == {knob.name for knob in fields(knobs)}
    assert all(f"`{name}`" in PAGE for name in KL_ESTIMATORS)

"""The pages under `docs/algorithms` name every variant, knob and mode, and nothing that does not exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from roll.algorithms.advantages.estimator import ADVANTAGE_ESTIMATORS
from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.kl import KL_ESTIMATORS
from roll.algorithms.losses.base import POLICY_LOSSES, make_policy_loss
from roll.check.reference import pages

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
INDEX = (FOLDER / "index.md").read_text()


def section(heading: str) -> str:
    return INDEX.split(f"## {heading}")[1].split("\n## ")[0]


def first_column(heading: str) -> set[str]:
    return set(re.findall(r"^\| `([\w-]+)`", section(heading), flags=re.MULTILINE))


@pytest.mark.parametrize("name", sorted(pages()))
def test_a_page_is_the_output_of_the_generator(name: str) -> None:
    assert (FOLDER / name).read_text() == pages()[name], "run `python -m roll.check.reference docs/algorithms`"


@pytest.mark.parametrize(("name", "registry"), [("policy_losses", POLICY_LOSSES), ("advantages", ADVANTAGE_ESTIMATORS)])
def test_a_page_has_formula_source_use_and_knobs_of_every_variant(name, registry) -> None:
    page = pages()[f"{name}.md"]
    assert set(re.findall(r"^## `(\w+)`", page, flags=re.MULTILINE)) == set(registry.names())
    for variant in map(registry.variant, registry.names()):
        part = page.split(f"## `{variant.name}`")[1].split("\n## ")[0]
        for text in (variant.formula, variant.source, variant.use):
            assert text and text in part
        assert re.findall(r"^\| `(\w+)`", part, flags=re.MULTILINE) == [item.name for item in fields(variant.knobs)]


def test_modes_and_estimators_are_listed() -> None:
    assert first_column("Aggregation") == set(LOSS_AGG_MODES)
    assert first_column("KL to the reference policy") == set(KL_ESTIMATORS)


def test_a_table_row_has_as_many_cells_as_its_head() -> None:
    for name, page in pages().items():
        for row in re.findall(r"^\|.*$", page, flags=re.MULTILINE):
            assert len(re.findall(r"(?<!\\)\|", row)) == 5, (name, row)


def test_the_loss_in_the_example_registers_and_runs() -> None:
    namespace: dict = {}
    code = re.search(r"```python\n(.*?)```", section("A loss of your own"), flags=re.DOTALL).group(1)
    try:
        exec(compile(code, "index.md", "exec"), namespace)
        assert make_policy_loss("tempered", {"power": 0.3}).knobs.power == 0.3
    finally:
        POLICY_LOSSES._variants.pop("tempered", None)

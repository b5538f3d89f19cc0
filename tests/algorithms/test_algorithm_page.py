"""The pages under `docs/algorithms` name every variant, knob and mode, and nothing that does not exist."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from roll.algorithms.advantages.base import ADVANTAGE_ESTIMATORS
from roll.algorithms.aggregation import LOSS_AGG_MODES
from roll.algorithms.kl import KL_ESTIMATORS
from roll.algorithms.losses.base import POLICY_LOSSES, make_policy_loss
from roll.algorithms.registry import about_of, settings_of
from roll.configs.plugins import help_text
from tests.algorithms.policy_loss_reference import random_inputs

FOLDER = Path(__file__).parents[2] / "docs" / "algorithms"
INDEX = (FOLDER / "index.md").read_text()


def section(heading: str) -> str:
    return INDEX.split(f"## {heading}")[1].split("\n## ")[0]


def first_column(heading: str) -> set[str]:
    return set(re.findall(r"^\| `([\w-]+)`", section(heading), flags=re.MULTILINE))


@pytest.mark.parametrize(("name", "kind"), [("policy_losses", POLICY_LOSSES), ("advantages", ADVANTAGE_ESTIMATORS)])
def test_a_page_has_formula_source_use_and_arguments_of_every_one(name, kind) -> None:
    page = (FOLDER / f"{name}.md").read_text()
    assert set(re.findall(r"^## `(\w+)`", page, flags=re.MULTILINE)) == set(kind.built_in)
    for each in kind.built_in:
        part = page.split(f"## `{each}`")[1].split("\n## ")[0]
        function = kind.load(each, each)
        about = about_of(function)
        for text in (about.formula, about.source, about.use):
            assert text and text in part
        assert re.findall(r"^\| `(\w+)`", part, flags=re.MULTILINE) == list(settings_of(function, each, each))
        assert all(help_text(each.annotation) for each in settings_of(function, each, each).values())


def test_modes_and_estimators_are_listed() -> None:
    assert first_column("Aggregation") == set(LOSS_AGG_MODES)
    assert first_column("KL to the reference policy") == set(KL_ESTIMATORS)


def test_a_table_row_has_as_many_cells_as_its_head() -> None:
    for name in ("policy_losses.md", "advantages.md", "correction.md"):
        for row in re.findall(r"^\|.*$", (FOLDER / name).read_text(), flags=re.MULTILINE):
            assert len(re.findall(r"(?<!\\)\|", row)) == 5, (name, row)


def test_the_loss_in_the_example_runs(tmp_path, monkeypatch) -> None:
    code = re.search(r"```python\n(.*?)```", section("A loss of your own"), flags=re.DOTALL).group(1)
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_losses", ModuleType("my_losses"))
    del sys.modules["my_losses"]  # put back as it was after the test: another page has a file of this name
    loss = make_policy_loss("my_losses:tempered", {"power": 0})
    inputs = random_inputs(1)
    assert loss(inputs)[0].equal(make_policy_loss("vanilla")(inputs)[0])

"""The seconds in the page on weights follow from the formulas and rates beside them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import roll

PAGE = (Path(roll.__file__).parents[1] / "docs" / "weights.md").read_text(encoding="utf-8")
SECTION = PAGE.partition("## Seconds on GPUs\n")[2].partition("\n## ")[0]
GIGABYTES = (15.2, 61.1)
RATES = {name: float(rate) for name, rate in re.findall(r"^\| `(\w+)` \| ([\d.]+)", SECTION, re.MULTILINE)}
ROWS = re.findall(r"^\| (.*) \| `([^`]*\bP\b[^`]*)` \| ([\d.]+) \| ([\d.]+) \|$", SECTION, re.MULTILINE)


def seconds(formula: str) -> list[float]:
    return [eval(formula, {"__builtins__": {}}, RATES | {"P": size}) for size in GIGABYTES]


@pytest.mark.parametrize(("stage", "formula", "small", "large"), ROWS)
def test_a_stage_takes_what_its_formula_says(stage, formula, small, large):
    assert [f"{value:.2f}" for value in seconds(formula)] == [small, large]


def test_the_sums_are_those_of_the_rows():
    sums, transport = {}, ""
    for stage, formula, *_ in ROWS:
        transport = (re.match(r"`(\w+)`", stage) or [None, transport])[1]
        sums[transport] = [a + b for a, b in zip(sums.get(transport, (0, 0)), seconds(formula), strict=True)]
    told = re.search(r"sums are ([\d.]+), ([\d.]+) and ([\d.]+) s for 7B, and ([\d.]+), ([\d.]+) and ([\d.]+)", SECTION)
    assert [*sums] == ["shared_memory", "nccl", "cuda_ipc"]
    assert list(told.groups()) == [f"{sums[name][size]:.1f}" for size in (0, 1) for name in sums]
    small, large = (RATES | {"P": size} for size in GIGABYTES)
    more = small["P"] / small["host"] - small["P"] / small["pinned"]
    assert f"{more:.1f} s more for *gather* and {4 * more:.1f} s for *load*, for 7B" in " ".join(SECTION.split())
    two_at_a_time = sums["shared_memory"][1] - 2 * large["P"] / large["pinned"]
    assert f"halve the *load* of `shared_memory`: {two_at_a_time:.1f} s for 30B-A3B" in SECTION


def test_sizes_are_two_bytes_a_number():
    billions = [float(number) for number in re.findall(r"\(([\d.]+) billion", SECTION)]
    assert [round(2 * number, 1) for number in billions] == list(GIGABYTES)


def test_delta_pays_below_the_rate_that_is_told():
    """Compared and applied at these rates, at 1 and at 6 % of the numbers changed."""
    rates = re.search(r"changed: ([\d.]+), ([\d.]+) and [\d.]+ GB/s\ncompared, ([\d.]+), ([\d.]+) and", PAGE)
    compared, applied = [float(rate) for rate in rates.groups()[:2]], [float(rate) for rate in rates.groups()[2:]]
    shares = [float(share) for share in re.findall(r"^\| 1e-[65] \| [\d.]+ % \| ([\d.]+) \|", PAGE, re.MULTILINE)]
    told = re.search(r"less than ([\d.]+) GB/s \(13 Gbit/s\). At 6 %\nit is ([\d.]+) GB/s", PAGE)
    found = [(1 - share) / (1 / one + 1 / other) for share, one, other in zip(shares, compared, applied, strict=True)]
    assert [f"{rate:.1f}" for rate in found] == list(told.groups())

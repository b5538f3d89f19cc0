"""The loaders of SGLang and vLLM take each element that is published, fill each parameter of their models, and let no
wrong name pass, for each family of models that they have and transformers can make tiny.

Those of vLLM run before each release (``make soak``), those of SGLang where its wheel was unpacked (``make contracts
SGLANG=<version>``).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests import tiers
from tests.contracts.loaders import CONFIGS
from tests.contracts.sources import VARIABLE, unpacked

FAMILIES = {"sglang": [family for family in CONFIGS if family != "flex_olmo"], "vllm": [*CONFIGS]}
TIERS = {"sglang": "all", "vllm": "soak"}
CASES = [
    pytest.param(library, family, marks=pytest.mark.tier(TIERS[library]))
    for library, families in FAMILIES.items()
    for family in families
]
pytestmark = pytest.mark.timeout(900)


@cache
def reports(library: str) -> dict[str, dict[str, list[str]]]:
    command = [sys.executable, "-m", "tests.contracts.loaders", library, *FAMILIES[library]]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-3000:]
    lines = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    return {family: report for line in lines for family, report in line.items()}


def report(library: str, family: str) -> dict[str, list[str]]:
    if library == "sglang" and unpacked(library) is None:
        pytest.skip("SGLang's sources are not here: make contracts SGLANG=<version>")
    if library == "vllm":
        tiers.need("vllm")
        if os.environ.get(VARIABLE):
            pytest.skip("another release is looked at, which is not installed")
    return reports(library)[family]


@pytest.mark.parametrize(("library", "family"), CASES)
def test_each_tensor_is_taken_each_parameter_filled_and_each_wrong_name_noticed(library, family):
    found = report(library, family)
    assert found["kinds"] and not any(found[what] for what in ("errors", "ignored", "unfilled", "unnoticed")), found


@pytest.mark.tier("all")
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe", "minimax_m2"])
def test_sglang_passes_over_experts_under_their_names_in_memory(family):
    ignored = report("sglang", family)["ignored_in_memory"]
    assert {name.rpartition(".")[2] for name in ignored} >= {"gate_up_proj", "down_proj"}

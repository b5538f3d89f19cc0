"""What the pages for users of other projects say agrees with what the loader answers to their keys."""

from __future__ import annotations

import re

import pytest

from roll.configs.dialects.roll import ADVICE
from roll.configs.errors import RENAMED, ConfigError
from roll.configs.fields import walk
from roll.configs.loader import config_from_tree
from roll.configs.run import AgenticConfig, RLVRConfig
from tests.docs.pages import page

OURS = {item.name for pipeline in (RLVRConfig, AgenticConfig) for _, item, _ in walk(pipeline)}
NO_KEYS = {"kl", "abs", "mse", "fsdp2_infer", "megatron_infer", "tensor_parallel_size"}
"""Values, and what goes to an engine as it is."""
_KEY = re.compile(r"`([a-z][a-z_0-9]+)(?::[^`]*)?`")


def keys_of_roll() -> set[str]:
    """Those of ROLL that have another name here, or none, by the first column of the tables and the closing lists."""
    text = page("docs/migration/roll.md").text
    renamed, _, rest = text.partition("## Same name, other meaning")
    cells = [line.split("|")[1] for line in renamed.splitlines() if line.startswith("| `")]
    missing = re.search(r"## What has no counterpart\n(.*?)\n## ", rest, re.DOTALL)[1]
    return set(_KEY.findall(" ".join([*cells, missing]))) - OURS - NO_KEYS


@pytest.mark.parametrize("key", sorted(keys_of_roll()))
def test_a_key_of_roll_that_the_page_names_gets_an_answer_and_no_guess(key):
    assert key in ADVICE or key in RENAMED


@pytest.mark.parametrize("key", sorted(ADVICE))
def test_a_key_with_advice_is_none_of_ours_and_its_advice_is_given(key):
    assert key not in OURS
    with pytest.raises(ConfigError) as refused:
        config_from_tree({key: 1})
    assert [problem.remedy for problem in refused.value.problems] == [ADVICE[key]]

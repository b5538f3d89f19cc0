from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.data.records import derive_seed

PARTS = st.lists(st.integers() | st.text(), max_size=4)


def test_a_seed_is_the_same_in_every_process_and_release():
    assert derive_seed(42, 7, 0, 1) == 5366646330062687592
    assert derive_seed(42, "epoch", "math", 0) == 5355318104141354427


@given(st.integers(), PARTS, PARTS)
def test_different_parts_give_different_seeds(run_seed, parts, others):
    seed = derive_seed(run_seed, *parts)
    assert 0 <= seed < 2**63
    assert (seed == derive_seed(run_seed, *others)) == (parts == others)


def test_numbers_and_their_texts_are_different_parts():
    assert derive_seed(1, 12, 3) != derive_seed(1, 1, 23)
    assert derive_seed(1, "2") != derive_seed(1, 2)
    assert derive_seed(1, "ab", "c") != derive_seed(1, "a", "bc")


@pytest.mark.parametrize("part", [1.0, True, None, b"x"])
def test_other_types_are_refused(part):
    with pytest.raises(TypeError, match="integers and texts"):
        derive_seed(1, part)

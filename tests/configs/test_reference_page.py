"""The page of all keys is what the code says."""

from __future__ import annotations

from pathlib import Path

from roll.configs.reference import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_the_output_of_the_generator():
    assert PAGE.read_text() == reference(), "run `python -m roll.configs.reference > docs/configuration.md`"


def test_keys_that_nothing_reads_are_left_out():
    page = reference()
    assert "### `actor_train.training_args`" in page
    assert "### `actor_infer.training_args`" not in page
    assert "### `rewards.<name>`" in page
    assert "### `validation.data_args.reasoning_gym[i]`" in page

"""The page of all keys is what the code says."""

from __future__ import annotations

from pathlib import Path

from roll.check.reference_page import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_the_output_of_the_generator():
    assert PAGE.read_text() == reference(), "run `python -m roll.check.reference_page > docs/configuration.md`"


def test_keys_that_nothing_reads_are_left_out():
    page = reference()
    assert "### `actor_train.training_args`" in page
    assert "### `actor_infer.training_args`" not in page
    assert "### `critic.training_args`" in page and "### `critic.generating_args`" not in page
    assert "### `rewards.<name>`" in page
    assert "### `validation.data_args.reasoning_gym[i]`" in page


def test_shared_keys_are_listed_once_and_each_pipeline_has_its_own():
    common, rlvr, agentic = reference().split("\n## ")[1:]
    assert "`max_steps` | a whole number, >= 1 | `100`" in common and "### `actor_train`" in common
    assert "### `rewards.<name>`" in rlvr and "### `actor_train`" not in rlvr
    assert "### `custom_envs.<name>`" in agentic and "### `train_env_manager`" in agentic
    assert "`env_type`" in agentic and "rewards" not in agentic

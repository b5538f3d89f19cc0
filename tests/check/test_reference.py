"""The reference pages are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from roll.check.reference import PAGES, keys, page

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_the_output_of_the_generator(name):
    assert (DOCS / name).read_text() == page(DOCS, name), "run `python -m roll.check.reference docs`"


def test_keys_that_nothing_reads_are_left_out():
    listed = keys()
    assert "### `actor_train.training_args`" in listed
    assert "### `actor_infer.training_args`" not in listed
    assert "### `critic.training_args`" in listed and "### `critic.generating_args`" not in listed
    assert "### `rewards.<name>`" in listed
    assert "### `validation.data_args.reasoning_gym[i]`" in listed


def test_shared_keys_are_listed_once_and_each_pipeline_has_its_own():
    common, rollouts, rlvr, agentic, image, sft = keys().split("\n## ")
    row = "`max_steps` | a whole number, >= 1 | `100`"
    assert row in common and "### `actor_train`" in common and row not in rollouts + rlvr + agentic + image + sft
    assert "### `actor_infer`" in rollouts and "`pg_variant`" in rollouts
    assert "`train_batch_size`" in sft and "`response`" in sft
    assert all(name not in sft for name in ("rewards", "actor_infer", "pg_variant", "reasoning_gym", "ground_truth"))
    assert "### `rewards.<name>`" in rlvr and "### `actor_train`" not in rlvr
    assert "### `custom_envs.<name>`" in agentic and "### `train_env_manager`" in agentic
    assert "### `sampling`" in image and "rewards" not in image and '"diffusers_infer"' in image
    assert "`env_type`" in agentic and "rewards" not in agentic

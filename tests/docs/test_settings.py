"""Settings within the sentences of the documentation can be set."""

from __future__ import annotations

import pytest

from tests.docs.pages import Page, pages
from tests.docs.settings import problems_of_settings, settings_of

WITH_SETTINGS = [page for page in pages() if any(settings_of(code) for _, code in page.inline)]


@pytest.mark.parametrize("page", WITH_SETTINGS, ids=lambda page: page.name)
def test_the_settings_of_a_page_exist_and_take_their_values(page):
    assert problems_of_settings(page) == []


@pytest.mark.parametrize(
    "code",
    [
        "actor_train.pg_variantt=tis",
        "weight_update.in_flight: kep",
        "kl_estimator: k9",
        "weight_update.interval_stepz: n2",
        "async_generation_ratio=many",
        "max_steps=3 actor_train.training_args.lr=1",
        "custom_envs.lake.env_tipe: frozen_lake",
    ],
)
def test_a_setting_that_cannot_be_set_is_found(code):
    assert len(problems_of_settings(Page("docs/a.md", f"Say `{code}`.\n"))) == 1


@pytest.mark.parametrize("code", ["data.train_files", "status: success", "critic/loss", "A=B", "reward_model: true"])
def test_other_code_is_left_alone(code):
    assert settings_of(code) == []

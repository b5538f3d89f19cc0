"""Every YAML block of the documentation is a configuration that can work, or a part of one."""

from __future__ import annotations

import json
import tomllib

import pytest

from roll.configs.loader import parse_yaml
from tests.docs.configurations import problems_of_configurations
from tests.docs.pages import Page, pages

PAGES = pages()
WITH_YAML = [page for page in PAGES if any(block.language == "yaml" for block in page.blocks)]


@pytest.mark.parametrize("page", WITH_YAML, ids=lambda page: page.name)
def test_every_configuration_can_work(page, sit_down):
    sit_down(page)
    assert problems_of_configurations(page) == []


def test_every_block_says_a_language_that_is_checked_or_none():
    known = {"", "bash", "json", "python", "text", "toml", "yaml"}
    assert [block.where for page in PAGES for block in page.blocks if block.language not in known] == []


def test_json_and_toml_can_be_read():
    for block in (block for page in PAGES for block in page.blocks):
        if block.language == "json":
            assert all(json.loads(line) for line in block.text.splitlines()), block.where
        elif block.language == "toml":
            assert tomllib.loads(block.text), block.where


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("docs/a.md", "max_stps: 3", "max_stps"),
        ("docs/a.md", "max_steps: many", "max_steps"),
        ("docs/a.md", "actor_train: {pg_variant: tiss}", "actor_train.pg_variant"),
        ("docs/a.md", "actor_train: {device_mapping: [99]}", "actor_train.device_mapping"),
        ("docs/a.md", "kl_loss_coef: 0.01", "kl_loss_coef"),
        ("docs/a.md", "custom_envs: {maze: {env_type: no_such_game}}", "custom_envs.maze.env_type"),
        ("docs/a.md", "rewards: {math: {verifier: 'my_missing_module:reward'}}", "rewards.math.verifier"),
        ("docs/a.md", "- a list", "a list"),
        ("docs/a.md", "seed: 1\nseed: 2", "seed"),
    ],
)
def test_a_block_that_cannot_work_is_found(name, text, problem, sit_down):
    page = Page(name, f"Words.\n\n```yaml\n{text}\n```\n")
    sit_down(page)
    [found] = problems_of_configurations(page)
    assert found.startswith(f"{name}:4: ") and problem in found


@pytest.mark.parametrize(("name", "blocks", "problems"), [("docs/a.md", 1, 1), ("docs/migration/verl.md", 2, 1)])
def test_configurations_of_other_projects_are_few_and_where_they_belong(name, blocks, problems, sit_down):
    page = Page(name, 'Theirs:\n\n```yaml title="verl"\ntrainer: {nnodes: 1}\n```\n\n' * blocks)
    assert len(problems_of_configurations(page)) == problems


def test_a_title_of_ones_own_excuses_nothing(sit_down):
    page = Page("docs/migration/verl.md", 'Ours:\n\n```yaml title="mine"\ntrainer: {nnodes: 1}\n```\n')
    assert len(problems_of_configurations(page)) == 1


def test_configurations_of_other_projects_are_yaml():
    for page in PAGES:
        for block in page.blocks:
            if block.language == "yaml" and block.title:
                assert isinstance(parse_yaml(block.text, block.where), dict)

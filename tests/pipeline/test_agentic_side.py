"""Which environments and seeds the groups of a run get, and what the preflight says about names that do not exist."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from tiny import make_task

from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.configs.run import EnvManagerConfig
from roll.pipeline.agentic import TRAINING, VALIDATION, episode_tasks
from roll.pipeline.algorithm import build_algorithms
from roll.pipeline.preflight import prepare
from roll.sandbox.sandbox import Sandbox


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("side")
    make_task(path)
    return path


def config(folder, **changes):
    tree = {
        "pipeline": "agentic",
        "pretrain": str(folder / "model"),
        "template": "raw",
        "cluster": {"num_devices_per_node": 2},
        "custom_envs": {"lake": {"env_type": "frozen_lake"}, "guess": {"env_type": "number_guessing"}},
        "actor_train": {"device_mapping": [0]},
        "actor_infer": {"device_mapping": [1]},
    }
    return config_from_tree(tree | changes)


def tasks(config, manager, split, number):
    return list(itertools.islice(episode_tasks(config, manager, split), number))


def test_training_and_validation_never_share_a_seed_and_a_run_can_be_made_again(folder):
    manager = EnvManagerConfig()
    train = tasks(config(folder), manager, TRAINING, 3000)
    validation = tasks(config(folder), manager, VALIDATION, 3000)
    assert not {task.seed for task in train} & {task.seed for task in validation}
    evens = [{task.seed % 2 == 0 for task in each} for each in (train, validation)]
    assert evens == [{True}, {False}], "environments of `verifiers` choose their data set by it"
    assert all(0 <= task.seed < 2**31 for task in (*train, *validation))
    assert len({task.seed for task in train}) == 3000
    assert train == tasks(config(folder), manager, TRAINING, 3000)
    other = tasks(config(folder, seed=7), manager, TRAINING, 3000)
    assert not {task.seed for task in train} & {task.seed for task in other}


@pytest.mark.parametrize(
    ("manager", "shares"),
    [
        (EnvManagerConfig(), {"lake": 1, "guess": 1}),
        (EnvManagerConfig(tags=["guess"]), {"guess": 1}),
        (EnvManagerConfig(num_groups_partition=[3, 1]), {"lake": 3, "guess": 1}),
        (EnvManagerConfig(tags=["guess", "lake"], num_groups_partition=[5, 2]), {"guess": 5, "lake": 2}),
        (EnvManagerConfig(num_groups_partition=[0, 2]), {"guess": 2}),
    ],
)
def test_each_tag_gets_its_share_of_successive_groups(folder, manager, shares):
    whole = sum(shares.values())
    found = tasks(config(folder), manager, TRAINING, 4 * whole)
    for start in range(0, 4 * whole, whole):
        assert Counter(task.tag for task in found[start : start + whole]) == shares


def problems_of(configuration):
    with pytest.raises(ConfigError) as caught:
        prepare(configuration)
    return {problem.path: problem.message for problem in caught.value.problems}


def test_names_that_do_not_exist_are_reported_together(folder):
    envs = {
        "lake": {"env_type": "frozen_lke", "env_manager_cls": "no.such:Manager"},
        "guess": {"env_type": "number_guessing", "env_config": {"lowest": 1}},
    }
    found = problems_of(config(folder, custom_envs=envs, adv_estimator="grppo"))
    assert set(found) == {
        "custom_envs.lake.env_type",
        "custom_envs.lake.env_manager_cls",
        "custom_envs.guess.env_config.lowest",
        "adv_estimator",
    }


def test_a_chat_template_must_be_there(folder):
    assert problems_of(config(folder, template="chat")) == {"template": "chat, but the tokenizer has no chat template"}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"adv_estimator": "remax"}, "adv_estimator", "greedy"),
        ({"episode_reward_weight": 0}, "episode_reward_weight", "nothing to learn"),
        ({"adv_estimator": "gigpo", "step_reward_weight": 0}, "episode_reward_weight", "nothing to learn"),
        ({"adv_estimator": "gigpo", "norm_mean_type": "tag"}, "norm_mean_type", "weight is 0"),
        ({"adv_estimator": "gigpo", "custom_envs": {"a": {"env_type": "agent"}}}, "adv_estimator", "no states"),
        ({"adv_estimator": "step_reinforce", "reward_clip": 1.0}, "reward_clip", "weight is 0"),
        ({"norm_mean_type": "tag"}, "norm_mean_type", "takes it out again"),
        ({"train_env_manager": {"group_size": 1}}, "train_env_manager.group_size", "compares"),
        (
            {"adv_estimator": "step_reinforce", "actor_train": {"device_mapping": [0], "pg_variant": "gmpo"}},
            "adv_estimator",
            "different advantages",
        ),
    ],
)
def test_combinations_that_cannot_be_meant_are_refused(folder, changes, path, words):
    with pytest.raises(ConfigError) as caught:
        build_algorithms(config(folder, **changes))
    found = {problem.path: problem.message for problem in caught.value.problems}
    assert words in found[path], found


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, (1.0, 0.0)),
        ({"adv_estimator": "gigpo"}, (0.0, 1.0)),
        ({"adv_estimator": "agentic_reinforce"}, (0.0, 1.0)),
        ({"adv_estimator": "step_reinforce", "episode_reward_weight": 0.5}, (0.5, 1.0)),
        ({"adv_estimator": "rloo", "step_reward_weight": 0.25}, (1.0, 0.25)),
        ({"adv_estimator": "reinforce", "norm_std_type": "tag"}, (1.0, 0.0)),
    ],
)
def test_rewards_stand_where_the_estimator_counts_them(folder, changes, weights):
    advantages = build_algorithms(config(folder, **changes)).advantages
    assert (advantages.episode_weight, advantages.turn_weight) == weights


def test_a_tool_that_cannot_run_here_is_said_before_anything_starts(folder, monkeypatch):
    monkeypatch.setattr("roll.agentic.tools.python.default_sandbox", lambda: Sandbox(levels=[]))
    envs = {"sums": {"env_type": "math_tools", "env_config": {"tools": ["python"], "tool_settings": {}}}}
    found = problems_of(config(folder, custom_envs=envs))
    assert "no sandbox for untrusted code here" in found["custom_envs.sums.env_config"]


def test_a_template_that_cannot_write_what_an_environment_says_is_refused(folder):
    """`template: raw` knows no tools."""
    envs = {"sums": {"env_type": "math_tools", "env_config": {"tools": ["calculator"]}, "env_manager_cls": "step"}}
    assert "tools" in problems_of(config(folder, custom_envs=envs))["custom_envs.sums"]

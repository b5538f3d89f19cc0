"""Agentic configurations that cannot work, or in which a setting would have no effect, and what is said of them."""

from __future__ import annotations

import copy

import pytest

from roll.check.config import check_config, config_warnings
from roll.check.plan import plan
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree


@pytest.fixture
def agentic(tree):
    for key in ("rewards", "num_return_sequences_in_group", "validation"):
        tree.pop(key, None)
    tree["actor_train"].pop("data_args", None)
    return tree | {
        "pipeline": "agentic",
        "rollout_batch_size": 8,
        "eval_steps": 5,
        "custom_envs": {
            "lake": {"env_type": "frozen_lake"},
            "games": {"env_type": "my.games:Chess", "env_manager_cls": "step", "history_length": 2},
        },
        "train_env_manager": {"group_size": 4},
        "val_env_manager": {"num_env_groups": 16, "tags": ["lake"]},
    }


def changed(tree, changes):
    tree = copy.deepcopy(tree)
    for path, value in changes.items():
        *parents, last = path.split(".")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        if value is None:
            section.pop(last, None)
        else:
            section[last] = value
    return tree


def problems_of(tree):
    with pytest.raises(ConfigError) as caught:
        check_config(config_from_tree(tree))
    return {problem.path: problem for problem in caught.value.problems}


def test_a_valid_configuration_passes_and_says_its_arithmetic(agentic):
    config = check_config(config_from_tree(agentic))
    assert config_warnings(config) == []
    text = plan(config)
    assert "8 seeds x 4 episodes = 32 episodes a step" in text
    assert "lake (frozen_lake, 1 of 2 groups, up to 10 turns), games (my.games:Chess, 1 of 2 groups" in text
    assert "16 seeds x 1 episode: lake (frozen_lake, 1 of 1 group" in text


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"custom_envs": {}}, "custom_envs", "there is no environment"),
        ({"custom_envs.lake.env_type": ""}, "custom_envs.lake.env_type", "no environment is named"),
        ({"custom_envs.a/b": {"env_type": "x"}}, "custom_envs.a/b", "file names"),
        ({"custom_envs.lake.env_manager_cls": "trajectories"}, "custom_envs.lake.env_manager_cls", "neither"),
        ({"custom_envs.lake.env_manager_cls": "agent"}, "custom_envs.lake.env_type", "does not fit an agent"),
        (
            {"custom_envs.lake": {"env_type": "verifiers", "env_manager_cls": "step"}},
            "custom_envs.lake.env_manager_cls",
            "`env_type: agent` and `env_type: verifiers` go with `env_manager_cls: agent`",
        ),
        (
            {"custom_envs.lake": {"env_type": "agent", "env_manager_cls": "agent", "history_length": 3}},
            "custom_envs.lake.history_length",
            "says what the policy reads",
        ),
        (
            {
                "custom_envs": {"a": {"env_type": "agent"}},
                "val_env_manager": None,
                "train_env_manager.format_penalty": -1,
            },
            "train_env_manager.format_penalty",
            "no actions",
        ),
        ({"custom_envs.lake.history_length": 3}, "custom_envs.lake.history_length", "no effect"),
        ({"custom_envs.lake.keep_first_observation": False}, "custom_envs.lake.keep_first_observation", "no effect"),
        ({"custom_envs.lake.max_tokens_per_step": 9999}, "custom_envs.lake.max_tokens_per_step", "room for"),
        ({"train_env_manager.tags": ["lak", "games"]}, "train_env_manager.tags[0]", "no key of `custom_envs`"),
        ({"train_env_manager.tags": ["games", "games"]}, "train_env_manager.tags", "2 times"),
        ({"train_env_manager.tags": ["lake"]}, "custom_envs.games", "no effect"),
        ({"train_env_manager.num_groups_partition": [1]}, "train_env_manager.num_groups_partition", "1 number"),
        ({"train_env_manager.num_groups_partition": [0, 0]}, "train_env_manager.num_groups_partition", "no groups"),
        (
            {"train_env_manager.num_groups_partition": [2, 2], "train_env_manager.num_env_groups": 8},
            "train_env_manager.num_groups_partition",
            "adds up to 4",
        ),
        ({"train_env_manager.max_traj_per_env": 2}, "train_env_manager.max_traj_per_env", "num_env_groups` is not set"),
        (
            {"train_env_manager.max_traj_per_env": 1, "train_env_manager.num_env_groups": 4},
            "train_env_manager.max_traj_per_env",
            "a step needs 8",
        ),
        ({"val_env_manager.max_traj_per_env": 1}, "val_env_manager.max_traj_per_env", "no effect"),
        ({"train_env_manager.format_penalty": 0.5}, "train_env_manager.format_penalty", "must be <= 0"),
        ({"env_workers.max_sessions": 3}, "train_env_manager.group_size", "only 3"),
        ({"val_env_manager": None}, "eval_steps", "no validation environments"),
        ({"eval_steps": 0}, "val_env_manager", "eval_steps is 0"),
        ({"val_env_manager.num_env_groups": None}, "val_env_manager.num_env_groups", "not given"),
        ({"val_env_manager": None, "eval_steps": 0, "validation.mode": "overlap"}, "validation.mode", "no effect"),
        ({"validation.generating_args.top_p": 0.5}, "validation.generating_args.top_p", "no effect"),
        ({"raw_turns.prompt_end": ">"}, "raw_turns.prompt_end", "no effect"),
        ({"actor_train.data_args.shuffle": False}, "actor_train.data_args.shuffle", "no effect"),
        (
            {"actor_train.training_args.gradient_accumulation_steps": 2},
            "actor_train.training_args.gradient_accumulation_steps",
            "no fixed number",
        ),
        ({"train_env_manager.group_size": 1, "group_filter": "zero_variance"}, "group_filter", "1 sample"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(agentic, changes, path, words):
    problems = problems_of(changed(agentic, changes))
    assert words in problems[path].message, problems
    assert problems[path].remedy


def test_keys_of_the_other_pipeline_are_unknown(agentic):
    with pytest.raises(ConfigError, match="num_return_sequences_in_group: unknown key"):
        config_from_tree(changed(agentic, {"num_return_sequences_in_group": 4}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train_env_manager.num_env_groups": 4}, "wait for a place"),
        ({"val_env_manager.group_size": 2}, "greedy sampling"),
    ],
)
def test_what_works_but_may_not_be_meant_is_a_warning(agentic, changes, words):
    warnings = config_warnings(check_config(config_from_tree(changed(agentic, changes))))
    assert len(warnings) == 1 and words in warnings[0]

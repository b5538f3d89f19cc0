"""What may differ when a run goes on."""

from fnmatch import fnmatchcase

import pytest

from roll.configs.fields import walk
from roll.configs.loader import config_from_tree
from roll.configs.run import AgenticConfig, RLVRConfig, SFTConfig
from roll.pipeline.resume import AFTER_THE_ROLLOUT, HARMLESS, IMPOSSIBLE, changes, rollout_settings


def config(**tree):
    return config_from_tree(tree)


def judged(before, after):
    return {change.path: change.judgement for change in changes(config(**before), config(**after))}


def test_equal_configurations_differ_in_nothing():
    assert changes(config(seed=1), config(seed=1)) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({"seed": 1}, {"seed": 2}, {"seed": "impossible"}),
        ({}, {"rollout_batch_size": 32}, {"rollout_batch_size": "impossible"}),
        (
            {"pipeline": "sft"},
            {"pipeline": "sft", "train_batch_size": 32, "sequence_length": 9, "eval_steps": 1},
            {"train_batch_size": "impossible", "sequence_length": "needs confirmation", "eval_steps": "harmless"},
        ),
        ({}, {"max_steps": 7, "logging_steps": 3}, {"logging_steps": "harmless", "max_steps": "harmless"}),
        ({}, {"actor_train": {"device_mapping": [0, 1]}}, {"actor_train.device_mapping": "harmless"}),
        ({}, {"actor_train": {"use_sequence_packing": True}}, {"actor_train.use_sequence_packing": "harmless"}),
        (
            {},
            {"actor_infer": {"strategy_args": {"strategy_name": "vllm"}}},
            {"actor_infer.strategy_args.strategy_name": "harmless"},
        ),
        *(
            (
                {},
                {role: {"strategy_args": {"strategy_cls": "my_package.own:Own"}}},
                {f"{role}.strategy_args.strategy_cls": "needs confirmation"},
            )
            for role in ("actor_train", "actor_infer")
        ),
        (
            {"actor_train": {"training_args": {"gradient_accumulation_steps": 4}, "device_mapping": [0]}},
            {"actor_train": {"training_args": {"gradient_accumulation_steps": 4}, "device_mapping": [0, 1]}},
            {
                "actor_train.device_mapping": "harmless",
                "(samples of an optimizer step of actor_train)": "needs confirmation",
            },
        ),
        (
            {"actor_train": {"model_args": {"lora_target": "q_proj"}}},
            {"actor_train": {"model_args": {"lora_target": "q_proj", "lora_rank": 4}}},
            {"actor_train.model_args.lora_rank": "impossible"},
        ),
        ({}, {"weight_update": {"interval_steps": 4}}, {"weight_update.interval_steps": "needs confirmation"}),
        (
            {"rewards": {"a": {"verifier_args": {"timeout_seconds": 9}}}},
            {"rewards": {"a": {"verifier_args": {"timeout_seconds": 1}}}},
            {"rewards.a.verifier_args.timeout_seconds": "needs confirmation"},
        ),
        ({}, {"async_generation_ratio": 1}, {"async_generation_ratio": "needs confirmation"}),
        (
            {},
            {"actor_train": {"training_args": {"learning_rate": 0.5}}},
            {"actor_train.training_args.learning_rate": "needs confirmation"},
        ),
    ],
)
def test_each_difference_is_judged(before, after, expected):
    assert judged(before, after) == expected


@pytest.mark.parametrize(
    ("training_args", "follows"),
    [
        ({}, False),
        ({"lr_scheduler_type": "cosine"}, True),
        ({"warmup_ratio": 0.1}, True),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, False),
    ],
)
def test_it_is_said_if_another_number_of_steps_changes_the_learning_rate(training_args, follows):
    role = {"actor_train": {"training_args": training_args}}
    (change,) = changes(config(**role), config(**role, max_steps=7))
    assert change.judgement == "harmless"
    assert ("the learning rates of the remaining steps follow it" in str(change)) == follows


def test_another_pipeline_is_impossible():
    assert judged({}, {"pipeline": "agentic"})["pipeline"] == "impossible"


def test_another_reward_needs_confirmation():
    found = judged({"rewards": {"a": {"verifier": "math"}}}, {"rewards": {"b": {"verifier": "math"}}})
    assert found["rewards.a.verifier"] == found["rewards.b.verifier"] == "needs confirmation"


def test_a_new_key_needs_confirmation_until_somebody_judged_it():
    assert judged({}, {"entropy_loss_coef": 0.1}) == {"entropy_loss_coef": "needs confirmation"}


def test_secrets_are_not_shown():
    before = {"rewards": {"a": {"verifier_args": {"api_key": "secret-one"}}}}
    after = {"rewards": {"a": {"verifier_args": {"api_key": "secret-two", "other": 1}}}}
    text = " ".join(map(str, changes(config(**before), config(**after))))
    assert "other" in text and "secret" not in text


def test_the_lists_name_keys_that_exist():
    paths = {path for cls in (RLVRConfig, AgenticConfig, SFTConfig) for path, _, _ in walk(cls)}
    assert IMPOSSIBLE.keys() <= paths
    for pattern in (*HARMLESS, *AFTER_THE_ROLLOUT):
        if not pattern.startswith("critic."):  # the role is not there by default
            assert any(fnmatchcase(path.replace("<name>", "x"), pattern) for path in paths), pattern


REWARD = {"verifier": "exact", "tag_included": ["a"]}


@pytest.mark.parametrize(
    "change",
    [
        {"actor_infer": {"generating_args": {"temperature": 0.5}}},
        {"actor_infer": {"generating_args": {"stop_strings": ["."]}}},
        {"num_return_sequences_in_group": 4},
        {"response_length": 7},
        {"group_filter": "zero_variance"},
        {"rewards": {"a": {**REWARD, "verifier_args": {"strict": True}}}},
        {"rewards": {"a": REWARD, "b": REWARD}},
        {"adv_estimator": "remax"},
        {"actor_train": {"router_replay": True}},
        {"pipeline": "agentic", "train_env_manager": {"group_size": 3}},
        {"pipeline": "agentic", "custom_envs": {"maze": {"env_type": "frozen_lake", "max_steps": 3}}},
    ],
)
def test_what_a_finished_group_is_depends_on_how_it_was_sampled_and_judged(change):
    pipeline = {"pipeline": change["pipeline"]} if "pipeline" in change else {"rewards": {"a": REWARD}}
    assert rollout_settings(config(**pipeline)) != rollout_settings(config(**{**pipeline, **change}))


@pytest.mark.parametrize(
    "change",
    [
        {"actor_train": {"training_args": {"learning_rate": 1.0}, "pg_variant": "tis"}},
        {"ppo_epochs": 2, "use_kl_loss": True, "kl_loss_coef": 1.0, "reward_clip": 1.0},
        {"max_steps": 7, "save_steps": 3, "async_generation_ratio": 2.0, "cluster": {"num_devices_per_node": 4}},
        {"rewards": {"a": {**REWARD, "num_workers": 9}}},
    ],
)
def test_it_is_the_same_whatever_is_done_with_it_later_and_wherever_it_was_made(change):
    before = rollout_settings(config(rewards={"a": REWARD}))
    assert rollout_settings(config(**{"rewards": {"a": REWARD}, **change})) == before

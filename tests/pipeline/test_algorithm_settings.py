"""Combinations of losses, old policies, corrections, estimators: what works is built, the rest refused."""

from __future__ import annotations

import pytest
from tiny import tiny_config

from roll.algorithms.advantages.base import ADVANTAGE_ESTIMATORS, make_advantage_estimator
from roll.algorithms.losses.base import POLICY_LOSSES
from roll.configs.errors import ConfigError
from roll.configs.loader import config_from_tree
from roll.pipeline.algorithm import build_algorithms

WEIGHT = {"weight": {"level": "token", "mode": "truncate", "upper": 2.0}}
PARTS = {"rewards__addition__weights": {"right": 1.0, "long": 0.1}, "num_return_sequences_in_group": 8}
SEVERAL_STEPS = {
    "actor_train__training_args__gradient_accumulation_steps": 8,
    "actor_train__training_args__per_device_train_batch_size": 1,
}


def build(tmp_path, **changes):
    return build_algorithms(config_from_tree(tiny_config(tmp_path, **changes)))


def problems(tmp_path, **changes):
    with pytest.raises(ConfigError) as caught:
        build(tmp_path, **changes)
    return {problem.path: f"{problem.message}; {problem.remedy}" for problem in caught.value.problems}


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES.names()) - {"vanilla", "decoupled_ppo"}))
def test_every_loss_that_corrects_runs_off_policy_on_the_recorded_logprobs(tmp_path, name):
    built = build(tmp_path, async_generation_ratio=1, actor_train__pg_variant=name)
    assert built.objective.old_policy == "behaviour"
    assert "proximal_logprobs" not in built.objective.token_fields
    assert built.objective.max_lag == 1 and "lags" in built.objective.token_fields


def test_a_loss_without_a_ratio_is_refused_off_policy(tmp_path):
    found = problems(tmp_path, async_generation_ratio=1, actor_train__pg_variant="vanilla")
    assert "as if fresh" in found["actor_train.pg_variant"]
    assert "allow_uncorrected_off_policy" in found["actor_train.pg_variant"]
    build(tmp_path, actor_train__pg_variant="vanilla")
    build(tmp_path, async_generation_ratio=1, actor_train__pg_variant="vanilla", allow_uncorrected_off_policy=True)
    build(tmp_path, async_generation_ratio=1, actor_train__pg_variant="vanilla", train_infer_correction=WEIGHT)


def test_rarely_published_weights_are_off_policy_too(tmp_path):
    changes = {"weight_update__interval_steps": 2, "actor_train__pg_variant": "vanilla"}
    assert "actor_train.pg_variant" in problems(tmp_path, **changes)


def test_recomputed_logprobs_hide_staleness_and_need_a_correction(tmp_path):
    off_policy = {"async_generation_ratio": 1, "old_logprobs": "recompute"}
    assert "recomputed log-probabilities" in problems(tmp_path, **off_policy)["old_logprobs"]
    built = build(tmp_path, **off_policy, train_infer_correction=WEIGHT)
    assert built.objective.old_policy == "proximal" and built.objective.corrected
    assert {"proximal_logprobs", "correction_weights"} <= set(built.objective.token_fields)
    rejection = {"reject": [{"level": "sequence", "upper": 4.0}]}
    assert "old_logprobs" in problems(tmp_path, **off_policy, train_infer_correction=rejection)
    build(tmp_path, **off_policy, allow_uncorrected_off_policy=True)


def test_a_bound_that_is_never_reached_is_no_staleness(tmp_path):
    assert build(tmp_path, max_staleness=3, actor_train__pg_variant="vanilla").objective.pg_variant == "vanilla"


def test_a_loss_without_a_ratio_takes_one_step_a_batch(tmp_path):
    found = problems(tmp_path, actor_train__pg_variant="vanilla", ppo_epochs=4)
    assert "4 optimizer steps" in found["actor_train.pg_variant"]
    found = problems(
        tmp_path,
        actor_train__pg_variant="vanilla",
        ppo_epochs=4,
        async_generation_ratio=1,
        train_infer_correction=WEIGHT,
    )
    assert "4 optimizer steps" in found["actor_train.pg_variant"]
    build(tmp_path, actor_train__pg_variant="vanilla", ppo_epochs=4, allow_uncorrected_off_policy=True)
    build(tmp_path, actor_train__pg_variant="ppo", ppo_epochs=4)


def test_decoupled_ppo_needs_recomputed_logprobs_and_carries_its_own_weight(tmp_path):
    decoupled = {"async_generation_ratio": 1, "actor_train__pg_variant": "decoupled_ppo"}
    assert "recompute" in problems(tmp_path, **decoupled)["old_logprobs"]
    built = build(tmp_path, **decoupled, old_logprobs="recompute")
    assert "proximal_logprobs" in built.objective.token_fields and not built.objective.corrected
    found = problems(tmp_path, **decoupled, old_logprobs="recompute", train_infer_correction=WEIGHT)
    assert "twice" in found["train_infer_correction.weight"]


def test_a_weight_on_top_of_a_behaviour_ratio_counts_twice_but_rejection_does_not(tmp_path):
    off_policy = {"async_generation_ratio": 1, "actor_train__pg_variant": "ppo"}
    assert "twice" in problems(tmp_path, **off_policy, train_infer_correction=WEIGHT)["train_infer_correction.weight"]
    built = build(tmp_path, **off_policy, train_infer_correction={"reject": [{"level": "token", "upper": 5.0}]})
    assert built.correction is not None and not built.objective.corrected
    build(tmp_path, async_generation_ratio=1, actor_train__pg_variant="kimi15", train_infer_correction=WEIGHT)


@pytest.mark.parametrize(
    "name", sorted(set(POLICY_LOSSES.names()) - {"vanilla", "decoupled_ppo", "clip_cov", "kl_cov"})
)
def test_a_ratio_that_is_always_one_is_an_error(tmp_path, name):
    changes = {"actor_train__pg_variant": name, "old_logprobs": "recompute"}
    assert "exactly 1" in problems(tmp_path, **changes)["old_logprobs"]
    assert "as if fresh" in problems(tmp_path, **changes, async_generation_ratio=1)["old_logprobs"]
    build(tmp_path, **changes, **SEVERAL_STEPS)


def test_selected_tokens_lose_their_gradient_at_a_ratio_of_one_but_a_penalty_has_none_there(tmp_path):
    recomputed = {"old_logprobs": "recompute"}
    build(tmp_path, **recomputed, actor_train__pg_variant="clip_cov")
    kl_cov = {"actor_train__pg_variant": "kl_cov"}
    for changes in ({}, recomputed):
        assert "follows rounding errors" in problems(tmp_path, **kl_cov, **changes)["actor_train.pg_variant"]
        build(tmp_path, **kl_cov, **changes, **SEVERAL_STEPS)
    build(tmp_path, **kl_cov, async_generation_ratio=1)


def test_a_trust_region_set_by_hand_must_have_something_to_bound(tmp_path):
    recompute = {"async_generation_ratio": 1, "old_logprobs": "recompute", "train_infer_correction": WEIGHT}
    build(tmp_path, **recompute)
    for changes in (
        {"actor_train__pg_variant_args": {"clip_high": 0.3}},
        {"actor_train__pg_variant": "kimi15", "actor_train__kimi15_tau": 5.0},
    ):
        assert "exactly 1" in problems(tmp_path, **recompute, **changes)["old_logprobs"]


def test_weights_of_tokens_need_a_loss_of_tokens(tmp_path):
    gmpo = {
        "async_generation_ratio": 1, "old_logprobs": "recompute", "actor_train__pg_variant": "gmpo", **SEVERAL_STEPS
    }  # fmt: skip
    assert (
        "as their mean"
        in problems(tmp_path, **gmpo, train_infer_correction=WEIGHT)["train_infer_correction.weight.level"]
    )
    build(tmp_path, **gmpo, train_infer_correction={"weight": {"level": "geometric"}})


def test_a_loss_of_responses_needs_one_advantage_each(tmp_path):
    gmpo = {"actor_train__pg_variant": "gmpo", "adv_estimator": "reinforce"}
    build(tmp_path, **gmpo)
    found = problems(tmp_path, **gmpo, adv_estimator_args={"gamma": 0.9})
    assert "different advantages" in found["adv_estimator"]


@pytest.mark.parametrize(
    ("estimator", "key", "values"),
    [
        ("grpo", "norm_mean_type", ("group", "batch", "running")),
        ("rloo", "norm_mean_type", ("group", "batch", "running")),
        ("reinforce_plus_plus", "norm_mean_type", ("batch", "running")),
        ("grpo", "norm_std_type", ("group", "batch", "running")),
        ("reinforce_plus_plus_baseline", "norm_std_type", ("batch", "running")),
    ],
)
def test_normalising_what_the_estimator_takes_out_is_an_error(tmp_path, estimator, key, values):
    for value in ("group", "batch", "running"):
        changes = {"adv_estimator": estimator, key: value}
        if value in values:
            assert "takes it out again" in problems(tmp_path, **changes)[key]
        else:
            build(tmp_path, **changes)
    build(tmp_path, adv_estimator="grpo", adv_estimator_args={"normalize_by_std": False}, norm_std_type="batch")


def test_recomputed_logprobs_that_nothing_reads_are_an_error(tmp_path):
    changes = {"actor_train__pg_variant": "vanilla", "old_logprobs": "recompute"}
    assert "has no ratio" in problems(tmp_path, **changes)["old_logprobs"]


def test_a_permission_that_permits_nothing_is_an_error(tmp_path):
    for changes in ({}, {"async_generation_ratio": 1}):
        found = problems(tmp_path, allow_uncorrected_off_policy=True, **changes)
        assert "no effect" in found["allow_uncorrected_off_policy"]


def test_names_known_from_roll_take_effect(tmp_path):
    tis = {"actor_train__pg_variant": "tis", "actor_train__tis_lower_bound": 0.5, "actor_train__tis_upper_bound": 3}
    arguments = build(tmp_path, **tis).objective.policy_loss.arguments
    assert (arguments["lower"], arguments["upper"]) == (0.5, 3.0)
    topr = {"actor_train__pg_variant": "topr", "actor_train__topr_positive_weight": 0.7,
            "actor_train__topr_negative_weight": 0.3}  # fmt: skip
    arguments = build(tmp_path, **topr).objective.policy_loss.arguments
    assert (arguments["positive_weight"], arguments["negative_weight"]) == (0.7, 0.3)
    cispo = {"actor_train__pg_variant": "cispo", "actor_train__cispo_epsilon_low": 0.1,
             "actor_train__cispo_epsilon_high": 0.4, "actor_train__cispo_use_unified_mask": True}  # fmt: skip
    arguments = build(tmp_path, **cispo).objective.policy_loss.arguments
    assert arguments == {"epsilon_low": 0.1, "epsilon_high": 0.4, "use_unified_mask": True}
    kimi = {"actor_train__pg_variant": "kimi15", "actor_train__kimi15_tau": 0.25}
    assert build(tmp_path, **kimi).objective.policy_loss.arguments["tau"] == 0.25


def test_a_wrong_value_is_reported_where_it_was_written(tmp_path):
    found = problems(tmp_path, actor_train__pg_variant="tis", actor_train__tis_upper_bound=-1)
    assert "actor_train.tis_upper_bound" in found
    found = problems(tmp_path, actor_train__pg_variant="tis", actor_train__pg_variant_args={"upper": -1, "tau": 0.1})
    assert "belongs to `kimi15`" in found["actor_train.pg_variant_args.tau"]
    assert "actor_train.pg_variant_args.upper" in found
    correction = {"weight": {"level": "word"}, "reject": [{"level": "token"}], "trunkate": 1}
    found = problems(tmp_path, async_generation_ratio=1, train_infer_correction=correction)
    assert {"train_infer_correction.trunkate", "train_infer_correction.weight.level"} <= set(found)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS.names())
def test_every_estimator_is_built_or_refused_with_its_reason(tmp_path, name):
    requirements = make_advantage_estimator(name).requirements
    if requirements.needs_values:
        assert "value model" in problems(tmp_path, adv_estimator=name)["adv_estimator"]
        built = build(tmp_path, adv_estimator=name, critic={"device_mapping": [0]}, value_clip=0.2)
        assert built.advantages.estimator.name == name and built.value_objective.clip == 0.2
    elif requirements.for_episodes:
        assert "several turns" in problems(tmp_path, adv_estimator=name)["adv_estimator"]
    else:
        if requirements.needs_parts:
            assert "by name" in problems(tmp_path, adv_estimator=name)["rewards.addition.weights"]
        assert build(tmp_path, adv_estimator=name, **PARTS).advantages.estimator.name == name
        refused = problems(tmp_path, adv_estimator=name, critic={"device_mapping": [0]}, **PARTS)
        assert "reads no values" in refused["critic"]


def test_estimators_refuse_what_would_leave_them_nothing_to_do(tmp_path):
    found = problems(tmp_path, num_return_sequences_in_group=1)
    assert "advantages would be 0" in found["num_return_sequences_in_group"]
    found = problems(tmp_path, adv_estimator="reinforce_plus_plus", whiten_advantages=True)
    assert "itself" in found["whiten_advantages"]
    found = problems(tmp_path, adv_estimator="pass_at_k", adv_estimator_args={"k": 4})
    assert "set at least 5" in found["num_return_sequences_in_group"]
    found = problems(tmp_path, adv_estimator="gdpo", whiten_advantages=True, reward_clip=1.0, **PARTS)
    assert "itself" in found["whiten_advantages"] and "reads the rewards by name" in found["reward_clip"]
    kl = {"add_token_level_kl": True, "reference": {"device_mapping": [0]}}
    assert "by name" in problems(tmp_path, adv_estimator="gdpo", **kl, **PARTS)["add_token_level_kl"]
    found = problems(tmp_path, adv_estimator="remax", norm_mean_type="batch")
    assert "one side" in found["norm_mean_type"]

"""Every policy loss and estimator trains through YAML alone, one step off policy; and what needs a whole run.

That each of them learns is seen in hours (`make soak`); that each trains, every time."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cluster import IN_THIS_PROCESS
from in_process import train_in_process
from reward_functions import digit_reward, two_rewards
from runs import run_pipeline
from tiny import tiny_config

from roll.algorithms.advantages.base import ADVANTAGE_ESTIMATORS, make_advantage_estimator
from roll.algorithms.losses.base import POLICY_LOSSES

tier = pytest.mark.tier

EXTRA = {
    "vanilla": {"allow_uncorrected_off_policy": True},
    "decoupled_ppo": {"old_logprobs": "recompute"},
    # Its bounds are made for responses of hundreds of tokens.
    "gspo": {"actor_train__pg_variant_args": {"clip_low": 0.2, "clip_high": 0.3}},
}
ESTIMATOR_EXTRA = {
    "gdpo": {"rewards__addition__weights": {"right": 1.0, "long": 0.1}},
    "pass_at_k": {"adv_estimator_args": {"k": 2}},
}
CORRECTIONS = {  # With bounds as narrow as one step off policy is here.
    "truncated": {"weight": {"level": "token", "mode": "truncate", "upper": 1.05}},
    "icepop": {"weight": {"level": "token", "mode": "mask", "lower": 0.9, "upper": 1.1}, "normalize": True},
    "masked": {"weight": {"level": "sequence", "mode": "mask", "upper": 2}},
    "opsm": {"reject": [{"level": "geometric", "divergence": "k1", "threshold": 0.1, "only_negative": True}]},
    "veto": {"reject": [{"level": "veto", "lower": 0.7}]},
    "segments": {"reject": [{"level": "segment", "divergence": "k3", "threshold": 0.01}]},
    "second moment": {"reject": [{"second_moment": 0.001}]},
}
ESTIMATORS = [
    name
    for name in ADVANTAGE_ESTIMATORS.names()
    if not ((needs := make_advantage_estimator(name).requirements).for_episodes or needs.needs_values)
]


def config_of(task, **changes):
    return tiny_config(
        task,
        **{
            "max_steps": 60,
            "rollout_batch_size": 16,
            "async_generation_ratio": 1,
            "actor_train__training_args__learning_rate": 5e-3,
        }
        | changes,
    )


def gain(steps):
    rewards = [step["reward/mean"] for step in steps]
    assert np.isfinite(rewards).all()
    return np.mean(rewards[-10:]) - np.mean(rewards[:5])


def losses_config(task, name, **changes):
    return config_of(task, actor_train__pg_variant=name, **EXTRA.get(name, {}), **changes)


def estimators_config(task, name, **changes):
    return config_of(task, adv_estimator=name, **ESTIMATOR_EXTRA.get(name, {}), **changes)


def assert_says_how_far_off_policy(steps):
    assert [step["lag/max"] for step in steps[:3]] == [0, 1, 1]
    assert {"ess", "k1", "kl", "chi2", "clip_fraction"} <= steps[-1].keys()
    assert any(name.startswith("lag_1/") for name in steps[-1])


def assert_trains(steps):
    for step in steps:
        assert np.isfinite([step["loss"], step["grad_norm"], step["reward/mean"]]).all() and step["moved"]


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_every_policy_loss_trains_off_policy_and_says_how_far(task, name):
    config = losses_config(task, name, max_steps=3, rollout_batch_size=8)
    steps = train_in_process(task, config, digit_reward)
    assert_says_how_far_off_policy(steps)
    assert_trains(steps)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_of_single_responses_trains(task, name):
    config = estimators_config(task, name, max_steps=2, rollout_batch_size=8)
    assert_trains(train_in_process(task, config, two_rewards if name == "gdpo" else digit_reward))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=tier("all" if name == "tis" else "soak")) for name in POLICY_LOSSES.names()]
)
def test_every_policy_loss_learns(task, name):
    steps = train_in_process(task, losses_config(task, name), digit_reward)
    assert gain(steps) > 0.25
    assert_says_how_far_off_policy(steps)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=tier("all" if name == "remax" else "soak")) for name in ESTIMATORS]
)
def test_every_estimator_of_single_responses_learns(task, name):
    reward = two_rewards if name == "gdpo" else digit_reward
    assert gain(train_in_process(task, estimators_config(task, name), reward)) > 0.25


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=tier("all" if name == "second moment" else "soak")) for name in CORRECTIONS]
)
def test_every_correction_acts_and_learns(task, name):
    correction = CORRECTIONS[name]
    loss, acts = ("ppo", "rejected_share") if "reject" in correction else ("vanilla", "clipped_share")
    config = config_of(task, actor_train__pg_variant=loss, train_infer_correction=correction)
    steps = train_in_process(task, config, digit_reward)
    assert gain(steps) > 0.25 and max(step[f"correction/{acts}"] for step in steps) > 0


@tier("all")
def test_a_whole_run_off_policy_says_how_far(task):
    """Remax: with the greedy responses of its own that a group needs."""
    run = run_pipeline(task, IN_THIS_PROCESS, config_of(task, adv_estimator="remax", max_steps=4))
    assert run.summary["lag/max"] == 1
    assert {"actor/ess", "actor/k1", "actor/kl", "actor/chi2", "actor/clip_fraction"} <= run.metrics[-1].keys()
    assert any(name.startswith("actor/lag_1/") for name in run.metrics[-1])


@tier("all")
def test_correction_rejection_shaping_and_adaptive_kl_work_together(task):
    changes = {
        "old_logprobs": "recompute",
        "train_infer_correction": {
            "weight": {"level": "sequence", "mode": "truncate", "upper": 2.0},
            "normalize": True,
            "reject": [{"level": "token", "lower": 0.2, "upper": 5.0}],
        },
        "reward_clip": 0.9,
        "adv_estimator": "reinforce",
        "norm_mean_type": "batch",
        "norm_std_type": "running",
        "length_penalty": {"kind": "overlong", "weight": 0.1, "buffer": 2},
        "max_len_mask": True,
        "advantage_clip": 3.0,
        "add_token_level_kl": True,
        "kl_controller": "adaptive",
        "kl_estimator": "k1",
        "reference": {"device_mapping": [0]},
    }
    run = run_pipeline(task, IN_THIS_PROCESS, config_of(task, max_steps=4, **changes))
    last = run.metrics[-1]
    assert {
        "correction/ess",
        "correction/clipped_share",
        "correction/rejected_share",
        "correction/lag_1/k3",
    } <= last.keys()
    assert {"reward/length_penalty", "reward/kept_share", "reward/running_mean", "kl_penalty/coef"} <= last.keys()
    assert last["actor/trained_share"] < 1
    coefficients = [step["kl_penalty/coef"] for step in run.metrics]
    assert coefficients[0] == 0.01 and coefficients[-1] != 0.01


def test_several_rewards_sample_weights_selection_and_masking_work_together(task):
    rejections = [
        {"level": "geometric", "divergence": "k1", "threshold": 0.02, "only_negative": True},
        {"level": "veto", "lower": 1e-4},
        {"second_moment": 0.04},
    ]
    changes = {
        "rewards__addition": {"verifier": "reward_functions:two_rewards", "weights": {"right": 1.0, "long": 0.1}},
        "adv_estimator": "gdpo",
        "sample_weight": "long",
        "actor_train__pg_variant": "kl_cov",
        "actor_train__pg_variant_args": {"share": 0.05},
        "train_infer_correction": {"reject": rejections},
    }
    run = run_pipeline(task, IN_THIS_PROCESS, config_of(task, max_steps=4, rollout_batch_size=8, **changes))
    for step in run.metrics:
        assert step["reward/mean"] == pytest.approx(step["reward/right"] + 0.1 * step["reward/long"], abs=1e-5)
        assert step["actor/clip_fraction"] == pytest.approx(0.05, abs=0.02) and np.isfinite(step["actor/loss"])
    assert {"correction/rejected_share", "correction/rejected_sequences_share"} <= run.metrics[-1].keys()


@tier("all")
def test_on_policy_the_trainer_agrees_with_the_engine(task):
    changes = {
        "async_generation_ratio": 0,
        "max_steps": 2,
        "old_logprobs": "recompute",
        "train_infer_correction": {"weight": {"level": "token"}},
    }
    for step in run_pipeline(task, IN_THIS_PROCESS, config_of(task, **changes)).metrics:
        assert step["correction/ess"] == pytest.approx(1, abs=1e-6)
        assert step["correction/k3"] == pytest.approx(0, abs=1e-6)
        assert step["correction/weight_mean"] == pytest.approx(1, abs=1e-4)
        assert step["actor/ratio_max"] == pytest.approx(1, abs=1e-4)


@tier("all")
def test_several_optimizer_steps_off_policy_report_every_lag(task):
    changes = {
        "async_generation_ratio": 0.5,
        "max_steps": 6,
        "actor_train__training_args__gradient_accumulation_steps": 4,
        "actor_train__training_args__per_device_train_batch_size": 1,
    }
    run = run_pipeline(task, IN_THIS_PROCESS, config_of(task, **changes))
    assert run.summary["steps"] == 6
    for step in run.metrics:
        shares = [value for name, value in step.items() if name.startswith("actor/lag_") and name.endswith("/share")]
        assert sum(shares) == pytest.approx(1.0)

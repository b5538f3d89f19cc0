"""The role that computes log-probabilities beside the trainer: the same numbers, of the same weights, sooner."""

from __future__ import annotations

import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from safetensors.torch import load_file
from tiny import tiny_config

ROLE = {"cluster__num_devices_per_node": 3, "actor_logp": {"device_mapping": [2]}}
SEVERAL = {
    "ppo_epochs": 2,
    "actor_train__use_dynamic_batching_in_train": False,
    "actor_train__training_args__per_device_train_batch_size": 4,
    "actor_train__training_args__gradient_accumulation_steps": 2,
}
RECOMPUTED = {"old_logprobs": "recompute"}
DECOUPLED = {**RECOMPUTED, "actor_train__pg_variant": "decoupled_ppo"}
VARIANTS = {
    "several optimizer steps": {**RECOMPUTED, **SEVERAL},
    "decoupled, one optimizer step, groups of a batch as they finish": {**DECOUPLED, "async_generation_ratio": 1},
    "decoupled, several epochs, packed": {
        **DECOUPLED,
        "ppo_epochs": 2,
        "loss_agg_mode": "seq-mean-token-mean",
        "actor_train__use_sequence_packing": True,
        "actor_train__max_tokens_per_microbatch_in_train": 32,
        "actor_logp__use_sequence_packing": True,
        "actor_logp__max_tokens_per_microbatch_in_infer": 40,
    },
    "a correction that rejects": {
        **DECOUPLED,
        **SEVERAL,
        "train_infer_correction": {"reject": [{"level": "token", "divergence": "abs", "threshold": 1e-3}]},
        "async_generation_ratio": 1,
    },
    "weights of a correction": {
        "actor_train__pg_variant": "vanilla",
        "train_infer_correction": {"weight": {"level": "sequence"}},
        "allow_uncorrected_off_policy": True,
        **SEVERAL,
    },
    "normalised weights": {
        "actor_train__pg_variant": "vanilla",
        "train_infer_correction": {"weight": {"level": "token"}, "normalize": True},
        "async_generation_ratio": 1,
    },
    "whole models on each device": {
        **RECOMPUTED,
        **SEVERAL,
        "actor_logp__strategy_args": {"strategy_name": "hf_infer"},
    },
    "adapters": {
        **RECOMPUTED,
        **SEVERAL,
        "actor_train__model_args": {"lora_target": "all-linear", "lora_rank": 4},
    },
    "only the critic learns at first": {
        **DECOUPLED,
        **SEVERAL,
        "adv_estimator": "gae",
        "cluster__num_devices_per_node": 4,
        "critic": {"device_mapping": [3], "training_args": {"learning_rate": 3e-3}},
        "critic_warmup": 1,
        "async_generation_ratio": 1,
    },
}
COMPARED = ("actor/", "advantage/", "critic/", "correction/", "reward/addition", "response/")


@pytest.mark.parametrize("name", VARIANTS)
def test_steps_are_those_of_a_run_without_the_role(task, name):
    assert_same_steps(task, IN_THIS_PROCESS, VARIANTS[name])


def assert_same_steps(task, address, changes):
    # In order, as which groups a step has may depend on time otherwise.
    fixed = {"consumption": "fifo"} if changes.get("async_generation_ratio") else {}
    own = {key: value for key, value in changes.items() if key.startswith("actor_logp")}
    changes = {
        "max_steps": 3,
        "rewards__addition__verifier": "reward_functions:late_reward",
        # Attention hardly feels key biases: their gradients are rounding, of which Adam alone would make whole steps.
        "actor_train__training_args__adam_epsilon": 1e-4,
        **fixed,
        **{key: value for key, value in changes.items() if key not in own},
    }
    plain = run_pipeline(task, address, tiny_config(task, **changes))
    role = {**ROLE, "actor_logp": dict(ROLE["actor_logp"])}
    role |= {"cluster__num_devices_per_node": max(3, changes.get("cluster__num_devices_per_node", 0))}
    beside = run_pipeline(task, address, tiny_config(task, **changes | role | own))
    assert len(beside.metrics) == 3
    for one, other in zip(plain.metrics, beside.metrics, strict=True):
        for key in sorted(key for key in one.keys() | other.keys() if key.startswith(COMPARED)):
            assert other[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6), key
        learned = "actor/loss" in one
        assert ("actor_logp/wait_seconds" in other) == learned == ("tokens_per_second/actor_logp" in other)
    path = "checkpoints/step-3/model.safetensors"
    first, second = load_file(plain.folder / path), load_file(beside.folder / path)
    for weight, value in first.items():
        assert torch.allclose(value, second[weight], rtol=0, atol=1e-5 * float(value.abs().max())), weight
    return beside

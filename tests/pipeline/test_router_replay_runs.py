"""Runs whose engine chooses other experts than their trainer would: with router replay both compute the same."""

from __future__ import annotations

import numpy as np
import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from safetensors.torch import load_file
from test_agentic_runs import agentic_config
from test_exact import difference_from_plain_loop, run_of
from tiny import CHARACTERS, make_task, make_tokenizer, tiny_config
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, set_seed

from roll.pipeline.checkpoints import checkpoint_folder
from tests.tiers import quick

__all__ = ["run_of"]
REPLAYED = {"actor_train__router_replay": True, "weight_update__canary_interval": 0}
OPPOSITE = {"actor_infer__worker_cls": "odd_engines:OppositeExperts"}
RECOMPUTED = {
    "old_logprobs": "recompute",
    "train_infer_correction": {"weight": {"level": "token", "upper": 2.0}},
    "use_kl_loss": True,
    "reference": {"device_mapping": [0]},
}
BESIDE = {"cluster__num_devices_per_node": 3, "actor_logp": {"device_mapping": [2]}}
VARIANTS = {
    "groups as they finish": {"actor_train__stream_groups": True},
    "log-probabilities beside the trainer, whole models, packed": {
        **RECOMPUTED,
        **BESIDE,
        "actor_logp__strategy_args": {"strategy_name": "hf_infer"},
        "actor_train__use_sequence_packing": True,
        "actor_train__max_tokens_per_microbatch_in_train": 40,
    },
    "one step off, with requests that are continued": {
        "async_generation_ratio": 1,
        "weight_update__in_flight": "resume",
        "actor_train__strategy_args": {"strategy_config": {"gradient_checkpointing": True}},
    },
}


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    """The tiny task, with a mixture in which the weight of a chosen expert is always 1."""
    folder = tmp_path_factory.mktemp("task")
    make_task(folder)
    set_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(CHARACTERS) + 2, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
        moe_intermediate_size=16, num_experts=4, num_experts_per_tok=1, norm_topk_prob=True, initializer_range=0.2,
        eos_token_id=1, pad_token_id=0, bos_token_id=None, tie_word_embeddings=True,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder / "model")
    make_tokenizer().save_pretrained(folder / "model")
    return folder


def column(run, name):
    return [record[name] for record in run.metrics]


def test_trainer_and_engine_agree_although_their_routers_do_not(task):
    replayed = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **REPLAYED, **OPPOSITE))
    assert max(column(replayed, "mismatch/abs_mean")) < 1e-5
    assert min(column(replayed, "actor/routing_mismatch")) > 0.5
    canaries = {"weight_update__canary_interval": 0}
    alone = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **canaries, **OPPOSITE))
    assert min(column(alone, "mismatch/abs_mean")) > 1e-2
    assert "actor/routing_mismatch" not in alone.metrics[0]


@pytest.mark.tier("all")
def test_with_routers_that_agree_nothing_changes(task):
    runs = [run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **changes)) for changes in (REPLAYED, {})]
    assert column(runs[0], "actor/routing_mismatch") == [0, 0, 0]
    for name in ("actor/loss", "actor/grad_norm", "reward/mean"):
        assert column(runs[0], name) == column(runs[1], name)


@pytest.mark.parametrize("name", quick(VARIANTS, "groups as they finish"))
def test_experts_reach_every_pass_of_the_policy(task, name):
    run = run_pipeline(task, IN_THIS_PROCESS, tiny_config(task, **REPLAYED, **OPPOSITE, **VARIANTS[name]))
    fresh = [record["mismatch/abs_mean"] for record in run.metrics if "mismatch/abs_mean" in record]
    assert fresh and max(fresh) < 1e-5
    assert all(record.get("correction/k3", 0) < 1e-5 for record in run.metrics)
    assert min(column(run, "actor/routing_mismatch")) > 0.5


def test_a_run_that_is_resumed_has_the_experts_of_the_groups_in_its_journal(task):
    config = tiny_config(task, **REPLAYED, **OPPOSITE, max_steps=4, save_steps=2, async_generation_ratio=1,
                         consumption="fifo")  # fmt: skip
    for _ in range(4):  # on a busy machine a group may be sampled by another version when it is made again
        run = run_pipeline(task, IN_THIS_PROCESS, config)
        file = checkpoint_folder(run.folder / "checkpoints", 4) / "model.safetensors"
        undisturbed, lags = load_file(file), column(run, "lag/mean")
        go_on_from(2, run, task, IN_THIS_PROCESS, config)
        if column(run, "lag/mean") == lags:
            break
    again = load_file(file)
    assert all((again[name] == weight).all() for name, weight in undisturbed.items())
    assert min(column(run, "actor/routing_mismatch")) > 0.5


@pytest.mark.parametrize("manager", quick(["trajectory", "step"], "trajectory"))
def test_turns_of_an_episode_have_the_experts_of_their_own_requests(task, manager):
    changes = {**REPLAYED, **OPPOSITE, "custom_envs__copy__env_manager_cls": manager}
    run = run_pipeline(task, IN_THIS_PROCESS, agentic_config(task, **changes))
    assert max(column(run, "mismatch/abs_mean")) < 1e-5
    assert min(column(run, "actor/routing_mismatch")) > 0.5


@pytest.mark.tier("all")
def test_a_run_is_a_plain_loop_with_the_experts_that_were_recorded(task, run_of):
    config, run = run_of(tiny_config(task, **REPLAYED, **RECOMPUTED))
    assert difference_from_plain_loop(config, run) is None
    assert np.load(run.root / "exact" / "step-1.npz")["routed_experts"].dtype == np.uint8


@pytest.mark.tier("all")
@pytest.mark.parametrize("first", [False, True])
def test_a_run_that_is_resumed_with_the_key_changed_makes_the_groups_of_its_journal_again(task, first):
    steps = dict(max_steps=4, save_steps=2, async_generation_ratio=1, consumption="fifo")
    config = tiny_config(task, **{**REPLAYED, "actor_train__router_replay": first}, **steps)
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    config["actor_train"]["router_replay"] = not first
    go_on_from(2, run, task, IN_THIS_PROCESS, {**config, "accept_config_changes": True})
    told = ["actor/routing_mismatch" in record for record in run.metrics]
    assert told == [first, first, not first, not first]

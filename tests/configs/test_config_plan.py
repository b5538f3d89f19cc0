"""The printed arithmetic is the arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roll.check.config import check_config
from roll.check.memory import estimate_memory
from roll.check.plan import needs, plan
from roll.configs import derived
from roll.configs.loader import config_from_tree
from roll.configs.run import RLVRConfig, WeightUpdateConfig


@pytest.fixture
def config(tree):
    tree |= {"rollout_batch_size": 64, "num_return_sequences_in_group": 8, "max_steps": 25, "eval_steps": 10}
    tree |= {"async_generation_ratio": 1.5, "ppo_epochs": 2, "cluster": {"num_devices_per_node": 6}}
    tree["validation"] = {"data_args": {"reasoning_gym": [{"dataset": "chain_sum", "domain": "math", "size": 50}]}}
    tree["actor_train"] |= {
        "device_mapping": "0-1",
        "training_args": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 8, "warmup_ratio": 0.1},
    }
    tree["actor_infer"] |= {"device_mapping": "2-5", "num_gpus_per_engine": 2}
    tree |= {"reference": {"device_mapping": "0-1"}, "use_kl_loss": True}
    config = config_from_tree(tree)
    check_config(config)
    return config


def test_the_numbers_of_a_run(config):
    actor = config.actor_train
    assert (derived.samples_per_step(config), derived.optimizer_batch_size(config, actor)) == (512, 128)
    assert derived.optimizer_steps_per_step(config, actor) == 8
    assert (derived.total_optimizer_steps(config, actor), derived.warmup_steps(config, actor)) == (200, 20)
    assert (derived.groups_ahead(config), derived.resolved_max_staleness(config)) == (96, 2)
    assert derived.validation_count(config) == len({0, 10, 20, 25})


def test_the_plan_is_told_in_units(config):
    text = plan(config)
    for words in (
        "64 prompts x 8 samples = 512 samples a step; 4 optimizer steps of 128, 2 epochs",
        "25 training steps x 8 = 200 optimizer steps, 20 of them warm-up",
        "hf_infer, 2 replicas on device 2-5 (of its own)",
        "2 ranks on device 0-1 (shared with reference)",
        "ratio 1.5 x 64 groups = up to 96 groups in flight beyond the batch being trained; ready_first",
        "no token older than 2 policy versions is trained on (ceil(1.5) + 1 - 1 = 2)",
        "4 times (before the first step, every 10 steps and after the last) on chain_sum (50 tasks, seed 0)",
    ):
        assert words in text


def test_adapters_and_the_reference_without_them_are_told(config):
    config.actor_train.model_args.lora_target = ["q_proj", "v_proj"]
    text = plan(config)
    assert "adapters of rank 8 on q_proj, v_proj" in text and "reference    actor_train without its adapters" in text
    assert "shared with reference" not in text and "(of its own), model" in text


def test_a_reference_of_whole_models_has_replicas(tree):
    reference = {"device_mapping": [0, 1], "strategy_args": {"strategy_name": "hf_infer"}}
    text = plan(config_from_tree(tree | {"reference": reference, "use_kl_loss": True}))
    assert "reference    hf_infer, 2 replicas on device 0-1 (shared with actor_train, actor_infer)" in text


def test_a_synchronous_run_says_so(tree):
    text = plan(config_from_tree(tree))
    assert "generation and training take turns" in text
    assert "no token older than 0 policy versions" in text
    assert "1 optimizer step of 64" in text


def test_warnings_are_printed(tree):
    tree["cluster"]["num_devices_per_node"] = 3
    assert "no role uses device 2" in plan(config_from_tree(tree))


def test_lengths_have_defaults():
    config = RLVRConfig(prompt_length=100, response_length=50)
    assert (derived.sequence_length(config), derived.max_new_tokens(config)) == (150, 50)
    config.sequence_length, config.actor_infer.generating_args.max_new_tokens = 120, 20
    assert (derived.sequence_length(config), derived.max_new_tokens(config)) == (120, 20)


@given(st.floats(0, 8), st.integers(1, 5), st.integers(1, 20))
def test_the_default_bound_is_the_largest_lag_that_admission_reaches(ratio, interval, batch):
    """Worst case by enumeration: the last group admitted at step s, started with the weights published last."""
    config = RLVRConfig(
        async_generation_ratio=ratio, rollout_batch_size=batch, weight_update=WeightUpdateConfig(interval)
    )
    lags = []
    for step in range(4 * interval):
        last_group = max(group for group in range((step + 10) * batch) if group < (step + 1 + ratio) * batch)
        lags.append(last_group // batch - step // interval * interval)
    bound = derived.resolved_max_staleness(config)
    assert max(lags) <= bound
    if ratio * batch >= 1 and ratio == int(ratio):
        assert max(lags) == bound


@given(st.integers(1, 200), st.integers(1, 200))
def test_validation_is_counted_as_it_is_listed(max_steps, eval_steps):
    config = RLVRConfig(max_steps=max_steps, eval_steps=eval_steps)
    listed = {0, *range(eval_steps, max_steps + 1, eval_steps), max_steps}
    assert derived.validation_count(config) == len(listed)


def test_consumption_follows_the_ratio():
    assert derived.resolved_consumption(RLVRConfig()) == "fifo"
    assert derived.resolved_consumption(RLVRConfig(async_generation_ratio=0.5)) == "ready_first"
    assert derived.resolved_consumption(RLVRConfig(async_generation_ratio=1, consumption="fifo")) == "fifo"


@pytest.mark.parametrize(
    ("settings", "devices", "kept"),
    [
        ({"mode": "pause"}, 8, 0),
        ({"mode": "overlap"}, 1, 0),
        ({"mode": "overlap"}, 2, 1),
        ({"mode": "overlap"}, 8, 2),
        ({"mode": "overlap", "replicas": 0.01}, 8, 1),
        ({"mode": "overlap", "replicas": 0.99}, 2, 1),
        ({"mode": "overlap", "replicas": 0.99}, 8, 7),
        ({"mode": "overlap", "replicas": 0}, 8, 0),
    ],
)
def test_the_replicas_that_validate_leave_some_to_the_training(tree, settings, devices, kept):
    tree |= {"eval_steps": 10, "cluster": {"num_devices_per_node": 9}}
    tree["validation"] = {"data_args": {"reasoning_gym": [{"dataset": "chain_sum", "domain": "math"}]}, **settings}
    tree["actor_infer"] |= {"device_mapping": list(range(1, devices + 1))}
    config = check_config(config_from_tree(tree))
    assert derived.pinned_replicas(config) == kept and derived.weight_buffers(config) == (3 if kept else 2)
    assert (f" of {devices} meanwhile" in plan(config)) == bool(kept)


def test_an_engine_that_shares_its_devices_keeps_no_version(tree):
    tree |= {"eval_steps": 10, "cluster": {"num_devices_per_node": 4}}
    tree["validation"] = {
        "data_args": {"reasoning_gym": [{"dataset": "chain_sum", "domain": "math"}]}, "mode": "overlap"
    }  # fmt: skip
    tree["actor_infer"] |= {"device_mapping": "0-3"}
    assert derived.pinned_replicas(check_config(config_from_tree(tree))) == 0


def test_what_kernels_and_compiled_layers_need_is_listed(tree, monkeypatch):
    def named(**changes):
        chosen = config_from_tree(tree | {"actor_train": tree["actor_train"] | changes})
        return {need.what: need for need in needs(chosen, estimate_memory(chosen))}

    assert not any("flash" in what or "compiler" in what for what in named())
    flash = named(model_args={"attn_implementation": "flash_attention_3"})
    assert "hopper" in flash["package flash_attn_interface"].state
    compiled = {"strategy_args": {"strategy_config": {"compile": True}}}
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing = named(**compiled)["C++ compiler no-such-compiler"]
    assert not missing.here and "set `compile`" in missing.state
    monkeypatch.setenv("CXX", "true")
    assert named(**compiled)["C++ compiler true"].here

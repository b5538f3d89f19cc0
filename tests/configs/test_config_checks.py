"""Each configuration that cannot work is refused with the path and a remedy, all reasons at once."""

from __future__ import annotations

import copy
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from roll.check.config import check_config, check_elsewhere, config_warnings
from roll.check.devices import sees_gpus
from roll.check.plan import plan
from roll.check.training import trainers_can_train
from roll.configs.derived import (
    adapter_rank,
    batch_wait_seconds,
    data_parallel_ranks,
    is_base,
    optimizer_batch_size,
    present_roles,
    resolved_max_staleness,
    reward_timeout,
    samples_per_step,
    shares_devices,
    synchronous,
    total_optimizer_steps,
    weight_transport,
)
from roll.configs.errors import ConfigError, ConfigProblem
from roll.configs.fields import walk
from roll.configs.loader import PIPELINES, config_from_tree, dump_config, parse_yaml
from roll.configs.roles import UNREAD_KEYS
from roll.engines.base import InferStrategy
from roll.pipeline.roles import engine_spec, trainer_setup


class Outside(InferStrategy):
    """An engine of one's own."""


GYM = {"dataset": "basic_arithmetic", "domain": "math"}


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The tree with dotted keys set; the value `remove` takes a key away."""
    tree = copy.deepcopy(tree)
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        if value == "remove":
            section.pop(last)
        else:
            section[last] = value
    return tree


def problems_of(tree: dict[str, Any]) -> dict[str, ConfigProblem]:
    with pytest.raises(ConfigError) as caught:
        check_config(config_from_tree(tree))
    assert all(problem.message and problem.remedy for problem in caught.value.problems)
    return {problem.path: problem for problem in caught.value.problems}


def validating(**settings: Any) -> dict[str, Any]:
    return {"eval_steps": 5, "validation": {"data_args": {"reasoning_gym": [GYM | {"seed": 1}]}, **settings}}


@pytest.fixture
def with_validation(tree: dict[str, Any]) -> dict[str, Any]:
    return tree | validating()


def test_a_saved_configuration_needs_its_secrets_again(tree):
    """What it has in their place would be sent as a key."""
    servers = [{"url": "http://here"}, {"url": "http://there", "api_key": "def456"}]
    secrets = {"api_key": "abc123", "servers": servers}
    options = {"rewards.math.verifier": "some.module:judge", "rewards.math.verifier_args": secrets}
    saved = parse_yaml(dump_config(config_from_tree(merged(tree, options))), "saved")
    config, at = config_from_tree(saved), "rewards.math.verifier_args"
    assert [problem.path for problem in check_elsewhere(config)] == [f"{at}.api_key", f"{at}.servers[1].api_key"]
    assert "oc.env" in problems_of(saved)[f"{at}.api_key"].remedy
    check_config(config_from_tree(saved, [f"{at}.api_key=abc123", f"{at}.servers[1].api_key=def456"]))


def test_a_valid_configuration_passes_without_warnings(tree):
    config = config_from_tree(tree)
    check_config(config)
    assert config_warnings(config) == []


def test_a_reward_model_and_a_judge_pass_beside_a_rule(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "value")
    changes = scored(timeout_seconds=5, infer_batch_size=8, reward_model={"label": 1, "overlong": "refuse"})
    judge = JUDGE | {"api_key_env": "JUDGE_KEY", "template": '{prompt} {response} {"score": 1}', "score_field": "score"}
    changes["rewards.essay"] = {"verifier": "judge", "judge": judge, "num_workers": 2}
    changes["rewards.rule"] = {"verifier": "exact"}
    config = config_from_tree(merged(tree, _filled(changes, tmp_path)))
    check_config(config)
    assert "api_key_env: JUDGE_KEY" in dump_config(config)
    where = f"1 replica on device 1 (shared with actor_infer), model {tmp_path / 'model'}"
    assert f"rewards.math  hf_infer, {where}" in plan(config)
    assert shares_devices(config, "actor_infer") and not shares_devices(config, "actor_train")
    assert [reward_timeout(config.rewards[name]) for name in ("math", "essay", "rule")] == [5, 600, 10]


def test_the_last_publication_and_the_process_of_a_reward_model_can_be_harmed(tree, tmp_path):
    events = [{"kind": "corrupt_bucket", "at_step": 101}, {"role": "rewards.math"}]
    changes = scored() | {"chaos": {"enabled": True, "events": events}, "max_steps": 101}
    changes["weight_update"] = {"interval_steps": 2}
    check_config(config_from_tree(merged(tree, _filled(changes, tmp_path))))


@pytest.mark.parametrize(("ratio", "wait", "expected"), [(0, None, 0), (1, None, 0.005), (0, 0.1, 0.1), (1, 0.0, 0)])
def test_a_reward_models_batches_do_not_depend_on_timing_at_ratio_0(tree, ratio, wait, expected):
    changes = scored(reward_model={"batch_wait_seconds": wait}) | {"async_generation_ratio": ratio}
    config = config_from_tree(merged(tree, changes))
    assert batch_wait_seconds(config, config.rewards["math"]) == expected


def test_validation_reference_and_asynchrony_pass_together(with_validation):
    with_validation |= {"reference": {"device_mapping": [0]}, "use_kl_loss": True, "async_generation_ratio": 1.5}
    with_validation |= {"max_staleness": 3, "weight_update": {"interval_steps": 2}, "staleness_policy": "drop"}
    check_config(config_from_tree(with_validation))


def test_what_a_run_falls_back_to_can_work(with_validation):
    ahead = {"async_generation_ratio": 1.5, "max_staleness": 3}
    ahead |= {"staleness_policy": "drop", "consumption": "ready_first"}
    restarts = {"max_in_a_row": 2, "synchronous_after": 2}
    ahead |= {"weight_update": {"interval_steps": 2}, "save_steps": 5, "restarts": restarts}
    config = check_config(config_from_tree(with_validation | ahead))
    fallback = check_config(synchronous(config))
    assert fallback.async_generation_ratio == 0 and resolved_max_staleness(fallback) == 1


JUDGE = {"base_url": "http://127.0.0.1:8000/v1", "model": "wise"}


def scored(reward_pretrain="{tmp}/model", **settings) -> dict[str, Any]:
    """The reward as a reward model."""
    math = {"verifier": "reward_model", "device_mapping": [1], **settings}
    return {"rewards.math": math, "reward_pretrain": reward_pretrain}


def asked(**settings) -> dict[str, Any]:
    """The reward as a judge, with these settings of the judge."""
    return asked_by(judge=JUDGE | settings)


def asked_by(**settings) -> dict[str, Any]:
    """The same, with these settings of the reward."""
    return {"rewards.math": {"verifier": "judge", "judge": JUDGE, **settings}}


RESTARTS = {"save_steps": 5, "restarts": {"max_in_a_row": 2}}

WRONG = [
    # Numbers.
    ({"max_steps": 0}, "max_steps", "0 must be >= 1", "100"),
    ({"async_generation_ratio": -1.0}, "async_generation_ratio", "-1.0 must be >= 0", "0.0"),
    ({"async_generation_ratio": float("nan")}, "async_generation_ratio", "beyond 1e+15", "0.0"),
    ({"async_generation_ratio": 1e300}, "async_generation_ratio", "beyond 1e+15", "0.0"),
    ({"max_steps": 10**400}, "max_steps", "beyond 1e+15", "100"),
    ({"actor_infer.generating_args.top_p": 0.0}, "actor_infer.generating_args.top_p", "> 0", "1.0"),
    ({"actor_infer.generating_args.top_k": -1}, "actor_infer.generating_args.top_k", ">= 0", "0"),
    ({"actor_infer.generating_args.temperature": -0.5}, "actor_infer.generating_args.temperature", ">= 0", "1.0"),
    ({"actor_infer.request_timeout_seconds": 0}, "actor_infer.request_timeout_seconds", "> 0", "600"),
    (
        {"weight_update.param_update_gather_bucket_size_mb": -1},
        "weight_update.param_update_gather_bucket_size_mb", "> 0", "256",
    ),
    (
        {"weight_update.param_update_load_bucket_size_mb": 0},
        "weight_update.param_update_load_bucket_size_mb", "> 0", "256",
    ),
    ({"actor_infer.silence_timeout_seconds": 0}, "actor_infer.silence_timeout_seconds", "> 0", "300"),
    ({"weight_update.canary_prompts": 0}, "weight_update.canary_prompts", ">= 1", "8"),
    ({"weight_update.canary_tolerance": 0.0}, "weight_update.canary_tolerance", "> 0", "null"),
    ({"mismatch_alarm": 0.0}, "mismatch_alarm", "> 0", "null"),
    (
        {"weight_update.transport": "nccl"},
        "weight_update.transport", "hf_infer on", "use vLLM on GPUs",
    ),
    (
        {
            "actor_infer.strategy_args.strategy_name": "vllm",
            "actor_infer.model_args.attn_implementation": "eager",
        },
        "actor_infer.model_args.attn_implementation", "has no effect", "`attention_backend`",
    ),
    (
        {
            "actor_infer.strategy_args.strategy_name": "sglang",
            "actor_infer.model_args.attn_implementation": "eager",
            "cluster.device": "cuda", "cluster.address": "auto",
        },
        "actor_infer.model_args.attn_implementation", "has no effect: sglang", "`attention_backend`",
    ),
    (
        {"actor_infer.strategy_args.strategy_name": "sglang"},
        "actor_infer.strategy_args.strategy_name", "sglang needs GPUs", "`cluster.device: cuda`",
    ),
    (
        {
            "actor_infer.strategy_args.strategy_name": "sglang", "actor_infer.generating_args.top_p": 0.9,
            "cluster.device": "cuda", "cluster.address": "auto",
        },
        "actor_infer.generating_args.top_p", "only together with a top-k", "set `top_k` to at most 4096",
    ),
    (
        {
            "actor_infer.strategy_args": {
                "strategy_name": "sglang", "strategy_config": {"sampling_mask_max_tokens": 100},
            },
            "actor_infer.generating_args.top_k": 101,
            "cluster.device": "cuda", "cluster.address": "auto",
        },
        "actor_infer.generating_args.top_k", "at most 100 tokens", "`sampling_mask_max_tokens`",
    ),
    # Trainer against engine.
    (
        {"mismatch_alarm": 0.1, "actor_infer.generating_args.top_p": 0.9},
        "mismatch_alarm", "unlike things", "top_p 1",
    ),
    ({"mismatch_alarm": 0.1, "actor_infer.generating_args.top_k": 9}, "mismatch_alarm", "truncated", "canaries"),
    ({"mismatch_action": "stop"}, "mismatch_action", "`mismatch_alarm` is not set", "set `mismatch_alarm`"),
    (
        {"weight_update.canary_interval": 0, "weight_update.canary_prompts": 4},
        "weight_update.canary_prompts", "`weight_update.canary_interval` is 0", "at least 1",
    ),
    (
        {"weight_update.canary_interval": 0, "weight_update.canary_tolerance": 0.1},
        "weight_update.canary_tolerance", "has no effect", "at least 1",
    ),
    (
        {"prompt_length": 1, "response_length": 1},
        "weight_update.canary_interval", "sequences of 2 tokens leave no token", "set 0",
    ),
    (
        {"actor_train.training_args.learning_rate": float("inf")},
        "actor_train.training_args.learning_rate", "beyond", "1e-06",
    ),
    ({"actor_train.training_args.adam_beta1": 1.0}, "actor_train.training_args.adam_beta1", "< 1", "0.9"),
    ({"rewards.math.num_workers": 0}, "rewards.math.num_workers", ">= 1", "1"),
    # Models and data.
    ({"pretrain": "remove"}, "pretrain", "no model", "folder"),
    ({"pretrain": "/nowhere/model"}, "pretrain", "no folder", "config.json"),
    ({"pretrain": "./nowhere"}, "pretrain", "no folder", "config.json"),
    ({"pretrain": "a/b/c"}, "pretrain", "no folder", "config.json"),
    ({"pretrain": "{tmp}"}, "pretrain", "without a config.json", "config.json"),
    ({"pretrain": "{tmp}/bare"}, "pretrain", "without a tokenizer", "tokenizer.json"),
    (
        {"actor_train.model_args": {"model_name_or_path": "{tmp}/bare"}, "actor_infer.model_args": {}},
        "actor_train.model_args.model_name_or_path", "without a tokenizer", "tokenizer.json",
    ),
    (
        {"actor_infer.model_args": {"model_name_or_path": "/nowhere"}},
        "actor_infer.model_args.model_name_or_path", "no folder", "config.json",
    ),
    ({"actor_train.data_args": {}}, "actor_train.data_args", "no training prompts", "file_name"),
    ({"actor_train.data_args.file_name": "no.jsonl"}, "actor_train.data_args.file_name", "no file", "JSONL"),
    ({"actor_train.data_args.file_name": ["{tmp}/empty"]}, "actor_train.data_args.file_name[0]", "is empty", "JSONL"),
    ({"actor_train.data_args.file_name": "{tmp}"}, "actor_train.data_args.file_name", "folder", "JSONL"),
    (
        {"actor_train.data_args.reasoning_gym": [{}]},
        "actor_train.data_args.reasoning_gym[0].dataset", "no dataset", "name",
    ),
    (
        {"actor_train.data_args.system_prompt": "hi"},
        "actor_train.data_args.system_prompt", "no effect", "template: chat",
    ),
    (
        {"actor_train.data_args.domain_interleave_probs": {"a": -1.0}},
        "actor_train.data_args.domain_interleave_probs.a", "no share", "at least 0",
    ),
    (
        {"actor_train.data_args.domain_interleave_probs": {"a": 0.0}},
        "actor_train.data_args.domain_interleave_probs", "adds up to 0", "above 0",
    ),
    (
        {"actor_train.data_args": {"reasoning_gym": [GYM], "domain_interleave_probs": {"maths": 1.0, "math": 1.0}}},
        "actor_train.data_args.domain_interleave_probs.maths", "no prompt", "`math`",
    ),
    # Devices.
    ({"actor_train.device_mapping": "remove"}, "actor_train.device_mapping", "no devices", "0 to 1"),
    ({"actor_infer.device_mapping": []}, "actor_infer.device_mapping", "empty", "0 to 1"),
    ({"actor_infer.device_mapping": [1, 1]}, "actor_infer.device_mapping", "more than once", "each once"),
    ({"actor_infer.device_mapping": [-1]}, "actor_infer.device_mapping", "negative", "0 to 1"),
    ({"actor_infer.device_mapping": "1-2"}, "actor_infer.device_mapping", "device 2, but there are 2", "num_devices"),
    ({"actor_infer.device_mapping": "__import__('os')"}, "actor_infer.device_mapping", "never evaluated", "0 to 1"),
    ({"reference": {}, "use_kl_loss": True}, "reference.device_mapping", "no devices", "0 to 1"),
    (
        {"cluster.num_devices_per_node": 4, "actor_train.device_mapping": "0-2", "actor_infer.device_mapping": "2-3"},
        "actor_infer.device_mapping", "overlap in part with actor_train", "separate",
    ),
    (
        {"cluster.num_devices_per_node": 4, "actor_infer.device_mapping": "1-3", "actor_infer.num_gpus_per_engine": 2},
        "actor_infer.num_gpus_per_engine", "do not divide the 3 devices", "1, 3",
    ),
    (
        {"cluster.device": "cuda", "cluster.address": "auto", "actor_infer.device_mapping": "0-1",
         "actor_infer.num_gpus_per_engine": 2},
        "actor_infer.num_gpus_per_engine", "one GPU", "write 1",
    ),
    ({"cluster.num_nodes": 2}, "cluster.num_nodes", "one node", "cluster.address"),
    ({"cluster.device_memory_gib": 80}, "cluster.device_memory_gib", "no effect", "cluster.device: cuda"),
    ({"cluster.num_devices_per_node": 10**12}, "cluster.num_devices_per_node", "at most 16384", "really has"),
    ({"cluster.address": "somewhere"}, "cluster.address", "no address", "host:port"),
    (
        {"actor_train.model_args": {"attn_implementation": "flash_attention_2"}},
        "actor_train.model_args.attn_implementation", "needs GPUs", "sdpa",
    ),
    (
        {"actor_train.model_args": {"attn_implementation": "flash_attention_3"}},
        "actor_train.model_args.attn_implementation", "flash_attention_3 needs GPUs", "sdpa",
    ),
    (
        {"cluster.device": "cuda", "cluster.address": "auto",
         "actor_train.model_args": {"attn_implementation": "flash_attention_3", "dtype": "float32"}},
        "actor_train.model_args.attn_implementation", "flash_attention_3 cannot compute in float32", "bfloat16",
    ),
    (
        {"actor_train.strategy_args": {"strategy_name": "tests.pipeline.custom_parts:OwnTrainer"},
         "actor_train.use_sequence_packing": True},
        "actor_train.use_sequence_packing", "padded rows only", "`deepspeed_train` or `megatron_train`",
    ),
    ({"actor_infer.use_sequence_packing": True}, "actor_infer.use_sequence_packing", "nothing reads", "actor_train"),
    # Names.
    (
        {"actor_train.strategy_args": {"strategy_name": "fsdp2"}},
        "actor_train.strategy_args.strategy_name", "there is no", "`fsdp2_train`",
    ),
    (
        {"actor_train.strategy_args": {"strategy_name": "hf_infer"}},
        "actor_train.strategy_args.strategy_name", "a role that learns needs an optimizer", "`fsdp2_train`",
    ),
    (
        {"adv_estimator": "gae", "critic": {"device_mapping": [0], "strategy_args": {"strategy_name": "hf_infer"}}},
        "critic.strategy_args.strategy_name", "a role that learns needs an optimizer", "`fsdp2_train`",
    ),
    (
        {"reference": {"device_mapping": [0], "strategy_args": {"strategy_name": "vllm"}}, "use_kl_loss": True},
        "reference.strategy_args.strategy_name", "there is no", "`hf_infer`",
    ),
    (
        {"actor_train.model_args": {"lora_target": "q_proj"}, "use_kl_loss": True,
         "reference": {"strategy_args": {"strategy_name": "hf_infer"}}},
        "reference.strategy_args.strategy_name", "no second model", "of its own",
    ),
    (
        {"actor_infer.strategy_args": {"strategy_name": "fsdp2_train"}},
        "actor_infer.strategy_args.strategy_name", "there is no", "`hf_infer`",
    ),
    ({"actor_train.worker_cls": "my worker"}, "actor_train.worker_cls", "no import path", "package.module:Class"),
    (
        {"actor_infer.strategy_args": {"strategy_name": "hf_infer", "strategy_cls": "MyEngine"}},
        "actor_infer.strategy_args.strategy_cls", "no import path", "package.module:Class",
    ),
    ({"track_with": ["tensorboard", "tensorboard"]}, "track_with", "twice", "once"),
    ({"exp_name": "a/b"}, "exp_name", "no folder name", "without slashes"),
    ({"output_dir": "{tmp}/train.jsonl"}, "output_dir", "is a file", "another folder"),
    ({"output_dir": "{tmp}/train.jsonl/run"}, "output_dir", "is a file", "another folder"),
    ({"output_dir": ""}, "output_dir", "no path", "folder"),
    ({"output_dir": "{tmp}/earlier"}, "output_dir", "holds a run already", "new folder"),
    # Rewards.
    ({"rewards": {}}, "rewards", "no reward", "verifier"),
    ({"rewards": {"math": {}}}, "rewards.math.verifier", "no verifier", "numeric"),
    ({"rewards.math.verifier": "maths"}, "rewards.math.verifier", "neither", "`math`"),
    ({"rewards.math.verifier": "my.module"}, "rewards.math.verifier", "neither", "known"),
    (
        {"rewards.other": {"verifier": "exact", "tag_included": ["math"]}},
        "rewards.other.tag_included", "judged by rewards.math already", "one reward",
    ),
    # Rewards that ask a model.
    ({"rewards.math.device_mapping": [1]}, "rewards.math.device_mapping", "no effect", "`verifier: reward_model`"),
    ({"rewards.math.model_args.dtype": "bfloat16"}, "rewards.math.model_args.dtype", "no effect", "reward_model"),
    ({"rewards.math.reward_model.label": 0}, "rewards.math.reward_model.label", "no effect", "reward_model"),
    ({"rewards.math.judge": JUDGE}, "rewards.math.judge", "no effect", "`verifier: judge`"),
    (scored(judge=JUDGE), "rewards.math.judge", '"reward_model" does not read', "`verifier: judge`"),
    (scored(num_workers=2), "rewards.math.num_workers", '"reward_model" does not read', "`device_mapping`"),
    (scored(verifier_args={"a": 1}), "rewards.math.verifier_args", "no effect", "docs/rewards.md"),
    (scored(device_mapping=None), "rewards.math.device_mapping", "null", "devices of this run"),
    (scored(device_mapping=[2]), "rewards.math.device_mapping", "device 2", "devices 0 to 1"),
    (scored(worker_cls="my worker"), "rewards.math.worker_cls", "no import path", "package.module:Class"),
    (
        scored(strategy_args={"strategy_name": "hf_infer", "strategy_cls": "my.scores"}),
        "rewards.math.strategy_args.strategy_cls", "no import path", "package.module:Class",
    ),
    (
        scored(model_args={"lora_target": "q_proj"}),
        "rewards.math.model_args.lora_target", "not trained", "merge adapters",
    ),
    (scored(model_args={"lora_rank": 4}), "rewards.math.model_args.lora_rank", "not trained", "remove"),
    (
        {"rewards.math.timeout_seconds": 5000, "stall_timeout_seconds": 30},
        "rewards.math.timeout_seconds", "5000 s for one verdict are more than the 30 s", "`stall_timeout_seconds`",
    ),
    (scored(infer_batch_size=0), "rewards.math.infer_batch_size", ">= 1", "16"),
    (
        scored(strategy_args={"strategy_name": "vllm"}),
        "rewards.math.strategy_args.strategy_name", "no engine of reward models", "hf_infer",
    ),
    (
        scored(model_args={"attn_implementation": "flash_attention_2"}),
        "rewards.math.model_args.attn_implementation", "needs GPUs", "sdpa",
    ),
    (
        scored(reward_pretrain=None),
        "rewards.math.model_args.model_name_or_path", "no reward model", "reward_pretrain",
    ),
    (scored(reward_pretrain="{tmp}/nowhere"), "reward_pretrain", "is no folder", "config.json"),
    (
        scored(reward_pretrain=None, model_args={"model_name_or_path": "{tmp}/nowhere"}),
        "rewards.math.model_args.model_name_or_path", "is no folder", "config.json",
    ),
    (
        scored(model_args={"model_name_or_path": "{tmp}/model"}),
        "reward_pretrain", "no reward loads this model", "model_name_or_path",
    ),
    ({"rewards.math.verifier": "judge"}, "rewards.math.judge", "an address and a model", "base_url"),
    (asked(base_url=""), "rewards.math.judge.base_url", "no address", "http://"),
    (asked(base_url="127.0.0.1:8000"), "rewards.math.judge.base_url", "is no address", "http://"),
    (asked(base_url="http://h:x/v1"), "rewards.math.judge.base_url", "is no address", "http://"),
    (asked(base_url="http://me:word@h/v1"), "rewards.math.judge.base_url", "a password", "`api_key_env`"),
    (asked(base_url="http://h/v1?key=1"), "rewards.math.judge.base_url", "after the path", "http://"),
    (asked(base_url="http://h/v1/chat/completions"), "rewards.math.judge.base_url", "one call", "it is added"),
    (asked(model=""), "rewards.math.judge.model", "no model", "name"),
    (asked(api_key_env="sk-123"), "rewards.math.judge.api_key_env", "no name", "not the key"),
    (asked(api_key_env="NOT_SET_IN_TESTS"), "rewards.math.judge.api_key_env", "of this name is set", "export"),
    (asked(extra_body={"n": 2}), "rewards.math.judge.extra_body.n", "fills this field", "leave it out"),
    (asked(extra_body={"max_tokens": 2}), "rewards.math.judge.extra_body.max_tokens", "fills this field", "own key"),
    (asked(template="Good?"), "rewards.math.judge.template", "not shown", "{response}"),
    (asked(template="{response} {promt}"), "rewards.math.judge.template", "`{promt}`", "`prompt`"),
    (asked(score_pattern="(x)"), "rewards.math.judge.template", "looked for elsewhere", "write a template"),
    (asked(template="{response}", score_pattern="("), "rewards.math.judge.score_pattern", "no regular", "correct"),
    (asked(template="{response}", score_pattern=r"\d"), "rewards.math.judge.score_pattern", "no group", "parentheses"),
    (
        asked(template="{response}", score_pattern="(x)", score_field="x"),
        "rewards.math.judge.score_field", "is set, too", "one of the two",
    ),
    (asked(score_min=10), "rewards.math.judge.score_max", "not above", "best score"),
    (asked(fallback_score=1.5), "rewards.math.judge.fallback_score", "<= 1", "null"),
    (asked(max_concurrency=0), "rewards.math.judge.max_concurrency", ">= 1", "64"),
    (
        asked(request_timeout_seconds=700),
        "rewards.math.judge.request_timeout_seconds", "more than the 600 s", "rewards.math.timeout_seconds",
    ),
    (asked_by(num_workers=0), "rewards.math.num_workers", ">= 1", "1"),
    (asked_by(verifier_args={"a": 1}), "rewards.math.verifier_args", '"judge" does not read', "docs/rewards.md"),
    (asked_by(device_mapping=[1]), "rewards.math.device_mapping", '"judge" does not read', "reward_model"),
    (
        {"actor_train.data_args.reasoning_gym": [{"dataset": "chain_sum"}]},
        "actor_train.data_args.reasoning_gym[0]", "no reward judges its domain `chain_sum`", "tag_included",
    ),
    # Validation.
    ({"eval_steps": 5}, "eval_steps", "no validation prompts", "validation.data_args"),
    ({"validation": {"data_args": {"reasoning_gym": [GYM]}}}, "validation", "eval_steps is 0", "eval_steps"),
    ({"validation": {}, "eval_steps": 5}, "validation.data_args", "no validation prompts", "file_name"),
    ({"val_batch_size": 7}, "val_batch_size", "no effect", "validation"),
    (
        {"actor_train.data_args.reasoning_gym": [GYM], "validation.data_args.reasoning_gym": [GYM], "eval_steps": 1},
        "validation.data_args.reasoning_gym[0].seed", "very tasks of training", "another seed",
    ),
    (
        {"validation": {"data_args": {"reasoning_gym": [GYM]}, "generating_args": {"top_k": 5}}, "eval_steps": 1},
        "validation.generating_args.top_k", "greedy", "temperature",
    ),
    (validating(replicas=0.5), "validation.replicas", "`validation.mode` is pause", "mode: overlap"),
    (validating(mode="overlap", replicas=0.5), "validation.replicas", "one replica", "remove"),
    (validating(mode="overlap", replicas=1.0), "validation.replicas", "< 1", "0.25"),
    (
        validating(mode="overlap", replicas=0.5) | {"actor_infer.device_mapping": [0, 1]},
        "validation.replicas", "shares its devices", "remove",
    ),
    # Weights.
    ({"weight_update.full_every": 5}, "weight_update.full_every", "content` is full", "content: delta"),
    ({"weight_update.full_every": -1, "weight_update.content": "delta"}, "weight_update.full_every", ">= 0", "100"),
    ({"weight_update.pull_after_seconds": 5.0}, "weight_update.pull_after_seconds", "mode` is push", "mode: pull"),
    (
        {"weight_update": {"mode": "pull", "pull_after_seconds": -1.0}},
        "weight_update.pull_after_seconds", ">= 0", "30",
    ),
    ({"weight_update": {"mode": "pull", "dual_buffer": False}}, "weight_update.mode", "single buffer", "dual_buffer"),
    (
        {"weight_update": {"mode": "pull"}, "actor_infer.device_mapping": [0]},
        "weight_update.mode", "shares its devices", "push",
    ),
    (
        {"cluster": {"num_nodes": 2, "num_devices_per_node": 1, "address": "auto"},
         "weight_update.transport": "shared_memory"},
        "weight_update.transport", "on nodes 0-1", "object_store",
    ),
    (
        {"weight_update.checkpoint_dir": "/shared"},
        "weight_update.checkpoint_dir", "no effect", "weight_update.transport: checkpoint",
    ),
    # Chaos.
    ({"chaos": {"events": [{}]}}, "chaos.events", "1 event would harm this run", "chaos.enabled: true"),
    ({"chaos": {"enabled": True}}, "chaos.enabled", "no effect", "chaos.events"),
    (
        {"chaos": {"enabled": True, "events": [{"at_step": 100}]}},
        "chaos.events[0].at_step", "100 never comes", "at most 99",
    ),
    (
        {"chaos": {"enabled": True, "events": [{"kind": "corrupt_bucket", "at_step": 3}]},
         "weight_update": {"interval_steps": 2}},
        "chaos.events[0].at_step", "version 3 is not published", "a multiple of 2",
    ),
    (
        {"chaos": {"enabled": True, "events": [{}, {"kind": "freeze", "role": "critic"}]}},
        "chaos.events[1].role", "no critic in this run", "`actor_train`",
    ),
    (
        {"chaos": {"enabled": True, "events": [{"rank": 1}]}},
        "chaos.events[0].rank", "1, but actor_train has 1", "at most 0",
    ),
    (
        {"chaos": {"enabled": True, "events": [{"seconds": 2}]}},
        "chaos.events[0].seconds", "no effect: kill takes no time", "remove",
    ),
    (
        {"chaos": {"enabled": True, "events": [{"kind": "delay_publication"}]}},
        "chaos.events[0].seconds", "delay_publication needs its length", "seconds",
    ),
    (
        {"chaos": {"enabled": True, "events": [{"kind": "corrupt_bucket", "role": "critic"}]}},
        "chaos.events[0].role", "no effect: corrupt_bucket happens to all engines", "remove",
    ),
    (
        {"chaos": {"enabled": True, "events": [{"kind": "corrupt_bucket", "rank": 3}]}},
        "chaos.events[0].rank", "no effect: corrupt_bucket happens to all engines", "remove",
    ),
    (
        {"chaos": {"enabled": True, "events": [{}, {"at_step": 2}, {}]}},
        "chaos.events[2]", "the same as chaos.events[0]", "another step",
    ),
    # Restarts.
    ({"restarts": {"max_in_a_row": 2}}, "restarts.max_in_a_row", "no checkpoints", "`save_steps`"),
    (RESTARTS | {"save_steps": 100}, "restarts.max_in_a_row", "no checkpoints", "below `max_steps`"),
    (
        RESTARTS | {"chaos": {"enabled": True, "events": [{"kind": "fill_disk", "role": "driver"}]}},
        "chaos.events[0]", "would last through its restarts", "restarts.max_in_a_row",
    ),
    ({"restarts": {"delay_seconds": 1}}, "restarts.delay_seconds", "no effect", "`restarts.max_in_a_row`"),
    ({"restarts": {"synchronous_after": 1}}, "restarts.synchronous_after", "no effect", "`restarts.max_in_a_row`"),
    ({"restarts": {"max_in_a_row": -1}}, "restarts.max_in_a_row", "-1 must be >= 0", "default"),
    (
        RESTARTS | {"restarts.synchronous_after": 3, "async_generation_ratio": 1},
        "restarts.synchronous_after", "no more than 2 failures", "at most 2",
    ),
    (RESTARTS | {"restarts.synchronous_after": 1}, "restarts.synchronous_after", "is synchronous", "above 0"),
    (
        {"chaos": {"enabled": True, "events": [{"kind": "corrupt_bucket", "at_step": 101}]}},
        "chaos.events[0].at_step", "101 never comes", "at most 100",
    ),
    (
        {"chaos": {"enabled": True, "events": [{"role": "rewards.math"}]}},
        "chaos.events[0].role", "no rewards.math in this run", "`actor_train`",
    ),
    (
        scored() | {"chaos": {"enabled": True, "events": [{"role": "rewards.math", "rank": 1}]}},
        "chaos.events[0].rank", "rewards.math has 1", "at most 0",
    ),
    # Arithmetic.
    ({"async_generation_ratio": 1.5, "max_staleness": 1}, "max_staleness", "ceil(1.5) = 2 steps ahead", "at least 2"),
    (
        {"async_generation_ratio": 1, "max_staleness": 2, "weight_update": {"interval_steps": 3}},
        "max_staleness", "1 + 2 = 3", "at least 3",
    ),
    (
        {"max_steps": 2, "weight_update": {"interval_steps": 3}},
        "weight_update.interval_steps", "published", "at most 2",
    ),
    ({"consumption": "ready_first"}, "consumption", "no effect", "async_generation_ratio"),
    ({"staleness_policy": "drop"}, "staleness_policy", "no effect", "async_generation_ratio"),
    (
        {"cluster.num_devices_per_node": 4, "actor_train.device_mapping": "0-3", "rollout_batch_size": 1,
         "num_return_sequences_in_group": 2},
        "rollout_batch_size", "fewer than the 4 ranks", "fewer devices",
    ),
    (
        {"actor_train.training_args": {"gradient_accumulation_steps": 5, "per_device_train_batch_size": 2}},
        "actor_train.training_args.gradient_accumulation_steps",
        "10 samples, which does not divide 16 x 4 = 64", "change",
    ),
    (
        {"actor_train.training_args": {"per_device_train_batch_size": 2}},
        "actor_train.training_args.per_device_train_batch_size", "no effect", "gradient_accumulation_steps",
    ),
    (
        {"actor_train.use_dynamic_batching_in_train": False, "actor_train.max_tokens_per_microbatch_in_train": 99},
        "actor_train.max_tokens_per_microbatch_in_train", "no effect", "use_dynamic_batching_in_train: true",
    ),
    ({"actor_train.infer_batch_size": 4}, "actor_train.infer_batch_size", "no effect", "use_dynamic_batching_in_infer"),
    (
        {"num_return_sequences_in_group": 1, "norm_mean_type": "group"},
        "norm_mean_type", "1 sample: nothing to compare", "batch",
    ),
    (
        {"difficulty_mask": True, "difficulty_low_threshold": 0.8, "difficulty_high_threshold": 0.2},
        "difficulty_low_threshold", "every group would be left out", "at most 0.2",
    ),
    (
        {"num_return_sequences_in_group": 1, "zero_variance_mask": True},
        "zero_variance_mask", "every group", "at least 2",
    ),
    (
        {"group_filter": "zero_variance", "zero_variance_mask": True},
        "zero_variance_mask", "before training", "keep one",
    ),
    ({"difficulty_mask": True}, "difficulty_mask", "keep every group", "0.95"),
    ({"rewards.math.weights": {"right": 0, "short": 0}}, "rewards.math.weights", "every score would be 0", "another"),
    ({"rewards.math.weights": {"right": math.inf}}, "rewards.math.weights.right", "no weight", "finite"),
    (
        {"num_return_sequences_in_group": 1, "length_penalty": {"kind": "relative"}},
        "length_penalty.kind", "1 sample", "overlong",
    ),
    (
        {"kl_estimator": "k3_straight_through", "add_token_level_kl": True, "reference": {"device_mapping": [0]}},
        "kl_estimator", "no gradient", "kl_estimator: k3",
    ),
    (
        {"init_kl_coef": 0, "kl_controller": "adaptive", "add_token_level_kl": True,
         "reference": {"device_mapping": [0]}},
        "init_kl_coef", "would stay 0", "above 0",
    ),
    ({"difficulty_low_threshold": 0.2}, "difficulty_low_threshold", "no effect", "difficulty_mask: true"),
    ({"length_penalty": {"buffer": 600}}, "length_penalty.buffer", "longest response of 512 tokens", "at most 512"),
    ({"length_penalty": {"correct_above": 0.5}}, "length_penalty.correct_above", "no effect", "kind: relative"),
    ({"length_penalty": {"kind": "relative", "buffer": 5}}, "length_penalty.buffer", "no effect", "kind: overlong"),
    ({"actor_train.tis_upper_bound": 2.0}, "actor_train.tis_upper_bound", "argument of `tis`", "pg_variant: tis"),
    (
        {"actor_train.pg_variant": "tis", "actor_train.tis_upper_bound": 2.0,
         "actor_train.pg_variant_args": {"upper": 3.0}},
        "actor_train.tis_upper_bound", "same argument", "keep one",
    ),
    ({"kl_controller": "adaptive"}, "kl_controller", "no effect", "add_token_level_kl: true"),
    ({"target_kl": 1.0}, "target_kl", "no effect", "kl_controller: adaptive"),
    (
        {"num_return_sequences_in_group": 1, "adv_estimator": "reinforce", "group_filter": "zero_variance"},
        "group_filter", "drop every group", "none",
    ),
    ({"use_kl_loss": True}, "use_kl_loss", "no `reference`", "add `reference"),
    ({"add_token_level_kl": True}, "add_token_level_kl", "no `reference`", "add `reference"),
    ({"reference": {"device_mapping": [0]}}, "reference", "no effect", "use_kl_loss"),
    ({"kl_loss_coef": 0.5}, "kl_loss_coef", "no effect", "use_kl_loss"),
    ({"init_kl_coef": 0.5}, "init_kl_coef", "no effect", "add_token_level_kl"),
    ({"kl_estimator": "k1"}, "kl_estimator", "no effect", "use_kl_loss"),
    (
        {"on_control_tokens": "refuse", "actor_train.data_args.template": "raw"},
        "on_control_tokens", "taken as they are", "template: chat",
    ),
    (
        {"actor_train.strategy_args.strategy_name": "megatron_train",
         "actor_train.model_args.attn_implementation": "eager"},
        "actor_train.model_args.attn_implementation", "chooses its attention itself", "remove",
    ),
    ({"critic_warmup": 2}, "critic_warmup", "`critic` is not set", "adv_estimator: gae"),
    ({"value_clip": 0.2}, "value_clip", "`critic` is not set", "adv_estimator: gae"),
    (
        {"critic": {"device_mapping": [0]}, "adv_estimator": "gae", "critic_warmup": 100},
        "critic_warmup", "would never learn", "at most 99",
    ),
    (
        {"critic": {"device_mapping": [0], "training_args": {"gradient_accumulation_steps": 7}},
         "adv_estimator": "gae"},
        "critic.training_args.gradient_accumulation_steps", "does not divide", "one optimizer step per batch",
    ),
    (
        {"critic": {"device_mapping": [0], "training_args": {"warmup_steps": 2, "warmup_ratio": 0.1}},
         "adv_estimator": "gae"},
        "critic.training_args.warmup_ratio", "no effect", "one of the two",
    ),
    (
        {"actor_train.model_args.dtype": "bfloat16", "actor_train.strategy_args.strategy_name": "deepspeed_train"},
        "actor_train.strategy_args.strategy_config.zero_optimization.stage", "adds bfloat16 gradients up", "write 1",
    ),
    ({"reward_pretrain": "gpt2"}, "reward_pretrain", "no effect", "remove"),
    ({"sequence_length": 512}, "sequence_length", "no token for the response", "at least 513"),
    ({"actor_infer.generating_args.max_new_tokens": 513}, "actor_infer.generating_args.max_new_tokens", "512", "raise"),
    ({"actor_infer.generating_args.temperature": 0}, "actor_infer.generating_args.temperature", "greedy", "above 0"),
    (
        {"actor_infer.generating_args.num_return_sequences": 4},
        "actor_infer.generating_args.num_return_sequences", "no effect", "num_return_sequences_in_group",
    ),
    (
        {"actor_train.training_args": {"warmup_steps": 5, "warmup_ratio": 0.1}},
        "actor_train.training_args.warmup_ratio", "no effect", "one of the two",
    ),
    # Adapters.
    ({"actor_train.model_args": {"lora_rank": 4}}, "actor_train.model_args.lora_rank", "no effect", "`lora_target`"),
    ({"actor_train.model_args": {"lora_alpha": 4}}, "actor_train.model_args.lora_alpha", "no effect", "`lora_target`"),
    ({"actor_train.model_args": {"lora_target": []}}, "actor_train.model_args.lora_target", "no layer", "all-linear"),
    ({"actor_train.model_args": {"lora_target": ""}}, "actor_train.model_args.lora_target", "no layer", "all-linear"),
    (
        {"actor_infer.model_args": {"lora_target": "q_proj"}},
        "actor_infer.model_args.lora_target", "only actor_train learns with adapters", "remove",
    ),
    (
        {"actor_train.model_args": {"lora_target": "q_proj"},
         "actor_train.strategy_args": {"strategy_name": "deepspeed_train"}},
        "actor_train.model_args.lora_target", "deepspeed_train trains no adapters", "`fsdp2_train`",
    ),
    (
        {"actor_train.model_args": {"lora_target": "q_proj"},
         "actor_train.strategy_args": {"strategy_name": "megatron_train"}},
        "actor_train.model_args.lora_target", "megatron_train trains no adapters", "`fsdp2_train`",
    ),
    (
        {"actor_train.model_args": {"lora_target": "q_proj"}, "use_kl_loss": True,
         "reference": {"model_args": {"dtype": "bfloat16"}}},
        "reference.model_args.dtype", "no effect: the reference is actor_train without", "of its own",
    ),
    (
        {"actor_train.model_args": {"lora_target": "q_proj"}, "use_kl_loss": True,
         "reference": {"device_mapping": "0", "use_dynamic_batching_in_infer": False}},
        "reference.use_dynamic_batching_in_infer", "no second model", "of its own",
    ),
    (
        {"actor_train.model_args": {"lora_target": "q_proj"}, "use_kl_loss": True,
         "reference": {"model_args": {"model_name_or_path": "owner/other"}}},
        "reference.device_mapping", "no devices", "0 to 1",
    ),
    # Keys in the wrong role.
    (
        {"actor_train.generating_args": {"temperature": 0.5}},
        "actor_train.generating_args.temperature", "nothing reads", "`actor_infer.generating_args.temperature`",
    ),
    (
        {"actor_infer.training_args": {"learning_rate": 1.0}},
        "actor_infer.training_args.learning_rate", "nothing reads", "`actor_train.training_args.learning_rate`",
    ),
    (
        {"actor_infer.infer_batch_size": 3},
        "actor_infer.infer_batch_size", "nothing reads",
        "`actor_train.infer_batch_size` or `actor_logp.infer_batch_size`",
    ),
    (
        {"reference": {"device_mapping": [0], "data_args": {"template": "chat"}}, "use_kl_loss": True},
        "reference.data_args.template", "nothing reads", "`actor_train.data_args.template`",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "path", "message", "remedy"), WRONG)
def test_a_configuration_that_cannot_work_is_refused_and_nothing_else_is_reported(
    tree, tmp_path, changes, path, message, remedy
):
    make_files(tmp_path)
    found = problems_of(merged(tree, _filled(changes, tmp_path)))
    assert message in found[path].message
    assert remedy in found[path].remedy
    assert len(found) == 1 or path == "actor_train.data_args.domain_interleave_probs.maths"


def make_files(folder: Path) -> None:
    """What the wrong configurations name."""
    (folder / "empty").touch()
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text("{}")
    (folder / "earlier").mkdir()
    (folder / "earlier" / "metrics.jsonl").touch()


def _filled(changes: dict[str, Any], folder: Path) -> dict[str, Any]:
    def fill(value: Any) -> Any:
        if isinstance(value, list):
            return [fill(item) for item in value]
        if isinstance(value, dict):
            return _filled(value, folder)
        return value.replace("{tmp}", str(folder)) if isinstance(value, str) else value

    return {key: fill(value) for key, value in changes.items()}


def test_all_problems_are_reported_at_once(tree):
    changes = {
        "pretrain": "/nowhere",
        "max_steps": -1,
        "actor_train.device_mapping": "zero",
        "rewards": {},
        "target_kl": 1.0,
        "use_kl_loss": True,
        "eval_steps": 5,
        "output_dir": "",
    }
    assert set(problems_of(merged(tree, changes))) == {
        "pretrain",
        "max_steps",
        "actor_train.device_mapping",
        "rewards",
        "target_kl",
        "use_kl_loss",
        "eval_steps",
        "output_dir",
    }


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, True),
        ({"actor_infer.model_args.dtype": "float32"}, False),
        ({"actor_train.model_args.lora_target": None}, False),
        ({"actor_infer.strategy_args.strategy_name": "vllm"}, True),
        ({"actor_infer.strategy_args.strategy_name": "vllm", "actor_train.model_args.lora_rank": 513}, False),
        ({"actor_infer.strategy_args.strategy_name": "sglang"}, False),
        ({"weight_update.transport": "cuda_ipc"}, False),
        ({"actor_logp": {"device_mapping": [2]}}, False),
        ({"weight_update.content": "adapter"}, False),
    ],
)
def test_adapters_that_rounding_eats_are_warned_of_where_they_could_travel_alone(tree, changes, warned):
    adapters = {"actor_train.model_args.lora_target": "all-linear", "actor_infer.model_args.dtype": "bfloat16"}
    config = config_from_tree(merged(tree, adapters | changes))
    assert any("write `weight_update.content: adapter`" in each for each in config_warnings(config)) == warned
    if not changes:
        assert adapter_rank(config) is None, "nothing is chosen in secret"


ADAPTERS = {"actor_train.model_args.lora_target": "all-linear", "weight_update.content": "adapter"}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"actor_train.model_args.lora_target": None}, "weight_update.content", "trains all weights"),
        (
            {"actor_infer.strategy_args.strategy_name": "sglang", "cluster.device": "cuda"},
            "weight_update.content",
            "sglang takes whole models",
        ),
        (
            {"actor_infer.strategy_args.strategy_name": "vllm", "actor_train.model_args.lora_rank": 513},
            "actor_train.model_args.lora_rank",
            "rank 512 or less",
        ),
        ({"weight_update.transport": "nccl"}, "weight_update.content", "transfers all weights"),
        ({"actor_logp": {"device_mapping": [2]}}, "weight_update.content", "takes whole models"),
        ({"actor_train.model_args.dtype": "bfloat16"}, "actor_train.model_args.dtype", "to a base in float32"),
        (
            {"actor_infer.model_args.model_name_or_path": "other/model"},
            "actor_infer.model_args.model_name_or_path",
            "alone belong to",
        ),
        (
            {"actor_infer.strategy_args": {"strategy_name": "vllm", "strategy_config": {"load_format": "dummy"}}},
            "actor_infer.strategy_args.strategy_config.load_format",
            "a base that the engine has loaded",
        ),
        (
            {"actor_infer.strategy_args.strategy_name": "vllm", "pretrain": "Qwen/Qwen3-30B-A3B"},
            "weight_update.content",
            "a model with experts",
        ),
    ],
)
def test_adapters_travel_alone_only_where_an_engine_adds_them_to_its_base(tree, changes, path, words):
    config = config_from_tree(merged(tree, ADAPTERS))
    check_config(config)
    assert "adapters alone" in plan(config)
    problem = problems_of(merged(tree, ADAPTERS | changes))[path]
    assert words in problem.message and "full" in problem.remedy


EXPERTS = {"pretrain": "Qwen/Qwen3-30B-A3B", "actor_train.router_replay": True}
OUTSIDE = "roll.trainers.fsdp2:Fsdp2TrainStrategy"
"""A trainer by its import path, of which nothing more is known."""
ON_GPUS = {"cluster.device": "cuda", "cluster.address": "head:6379"}


def engine_named(name: str, **changes: Any) -> dict[str, Any]:
    return {"actor_infer.strategy_args": {"strategy_name": name, **changes}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pretrain": "Qwen/Qwen3-8B"}, "the model has no experts"),
        (
            {"actor_train.strategy_args": {"strategy_name": OUTSIDE}},
            f"{OUTSIDE} (actor_train) chooses experts by itself",
        ),
        (
            {"actor_logp": {"device_mapping": [2], "strategy_args": {"strategy_name": OUTSIDE}}},
            f"{OUTSIDE} (actor_logp) chooses experts by itself",
        ),
        ({"actor_train.strategy_args.strategy_config": {"compile": True}}, "actor_train compiles its layers"),
        (
            {"actor_train.strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": {"compile": True}}},
            "actor_train compiles its layers",
        ),
        (engine_named("vllm"), "on GPUs only"),
        (
            ON_GPUS | engine_named("vllm") | {"actor_infer.generating_args.stop_strings": ["x"]},
            "vllm tells experts when it ends a request itself",
        ),
        (
            ON_GPUS | engine_named("sglang") | {"actor_infer.generating_args.stop_strings": ["x"]},
            "sglang tells experts when it ends a request itself",
        ),
        (
            ON_GPUS | engine_named("vllm", strategy_config={"enable_prefix_caching": False}),
            "keeps the experts of shared prompts with their caches",
        ),
        (
            engine_named("tests.configs.test_config_checks:Outside"),
            "tests.configs.test_config_checks:Outside does not tell the experts",
        ),
    ],
)
def test_experts_are_replayed_only_where_an_engine_tells_them_and_a_trainer_takes_them(tree, changes, words):
    for engine in ({}, ON_GPUS | engine_named("vllm"), ON_GPUS | engine_named("sglang")):
        check_config(config_from_tree(merged(tree, EXPERTS | engine)))
    for trainer in ("fsdp2_train", "deepspeed_train", "megatron_train"):
        check_config(config_from_tree(merged(tree, EXPERTS | {"actor_train.strategy_args.strategy_name": trainer})))
    split = {"strategy_args.strategy_config": {"context_parallel_size": 2}, "device_mapping": [0, 1]}
    check_config(
        config_from_tree(merged(tree, EXPERTS | {f"actor_train.{key}": value for key, value in split.items()}))
    )
    problem = problems_of(merged(tree, EXPERTS | changes))["actor_train.router_replay"]
    assert words in problem.message and "set it to false, or" in problem.remedy


def test_who_records_and_who_replays_experts(tree):
    tree = merged(tree, EXPERTS | {"actor_logp": {"device_mapping": [2]}, "reference": {"device_mapping": [3]}})
    for on in (True, False):
        config = config_from_tree(merged(tree, {"actor_train.router_replay": on, "cluster.num_devices_per_node": 4}))
        assert engine_spec(config, "object_store").records_routing is on
        replays = {role: trainer_setup(config, role).replays_routing for role in present_roles(config)}
        assert replays == dict.fromkeys(replays, False) | {"actor_train": on, "actor_logp": on}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weight_update.transport": "nccl"}, "past the host on which engines keep a base"),
        ({"weight_update.transport": "cuda_ipc"}, "past the host on which engines keep a base"),
        ({"weight_update.transport": "checkpoint"}, "writes whole weights to the disk"),
        ({"weight_update.dual_buffer": False}, "a single buffer is written over"),
    ],
)
def test_deltas_travel_only_where_the_weights_before_are_kept_and_whole_ones_cost_more(tree, changes, words):
    deltas = {"weight_update.content": "delta", "weight_update.full_every": 7}
    for transport in ("auto", "object_store", "shared_memory"):
        config = config_from_tree(merged(tree, deltas | {"weight_update.transport": transport}))
        check_config(config)
    assert "as deltas" in plan(config) and adapter_rank(config) is None
    problem = problems_of(merged(tree, deltas | changes))["weight_update.content"]
    assert words in problem.message and "full" in problem.remedy


def test_deltas_need_memory_that_other_processes_can_map(tree, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert (
        "needs Linux" in problems_of(merged(tree, {"weight_update.content": "delta"}))["weight_update.content"].message
    )


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
def test_experts_are_read_from_the_models_files_and_only_vllm_cannot_add_adapters_beside_them(tree, tmp_path, key):
    vllm = {"actor_infer.strategy_args.strategy_name": "vllm"}
    folder = tmp_path / "experts"
    shutil.copytree(tree["pretrain"], folder)
    facts = {"model_type": "some_moe", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    facts |= {"num_attention_heads": 2, "vocab_size": 9, key: 4}
    (folder / "config.json").write_text(json.dumps(facts))
    found = problems_of(merged(tree, ADAPTERS | vllm | {"pretrain": str(folder)}))
    assert str(folder) in found["weight_update.content"].message
    for changes in (vllm, {"pretrain": str(folder)}, vllm | {"pretrain": "owner/unknown-model"}):
        check_config(config_from_tree(merged(tree, ADAPTERS | changes)))


@pytest.mark.parametrize(
    ("transport", "engines", "words"), [("nccl", 0, "both roles have 0"), ("cuda_ipc", 1, "1 has no trainer")]
)
def test_a_push_goes_to_other_gpus_with_nccl_and_stays_on_them_with_ipc(tree, monkeypatch, transport, engines, words):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    changes = {
        "weight_update.transport": transport,
        "cluster.device": "cuda",
        "actor_infer.strategy_args.strategy_name": "vllm",
    }
    check_config(config_from_tree(merged(tree, changes | {"actor_infer.device_mapping": [1 - engines]})))
    found = problems_of(merged(tree, changes | {"actor_infer.device_mapping": [engines]}))
    assert list(found) == ["weight_update.transport"]
    assert words in found["weight_update.transport"].message
    found = problems_of(merged(tree, changes | {"weight_update.mode": "pull"}))
    assert "the trainer pushes into each engine" in found["weight_update.mode"].message


@pytest.mark.parametrize(
    ("role", "dtype", "zero", "key", "message", "remedy"),
    [
        ("actor_train", "bfloat16", {"stage": 1}, "stage", "stage 1 in bfloat16", "write stage 2"),
        ("actor_train", "float32", {"stage": 3}, "stage", "no states of torch's AdamW", "offload_optimizer: {dev"),
        ("actor_train", "bfloat16", {"stage": 3, "offload_optimizer": {"device": "none"}}, "stage", "AdamW", "stage 2"),
        (
            "actor_train", "float32",
            {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}},
            "offload_param", "where parameters are offloaded", "`offload: cpu`",
        ),
        ("reference", "float32", {"stage": 3}, "stage", "a role without an optimizer", "`hf_infer`"),
        ("actor_train", "float32", {"stage": 0}, None, "", ""),
        ("actor_train", "float32", {"stage": 1}, None, "", ""),
        ("actor_train", "bfloat16", {"stage": 2}, None, "", ""),
        ("actor_train", "float32", {"stage": 3, "offload_optimizer": {"device": "cpu"}}, None, "", ""),
        ("reference", "bfloat16", {"stage": 1}, None, "", ""),
    ],
)  # fmt: skip
def test_states_that_deepspeed_cannot_move_are_refused_where_devices_are_shared(
    tree, monkeypatch, role, dtype, zero, key, message, remedy
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    section = {
        "device_mapping": [1],
        "model_args": {"dtype": dtype},
        "strategy_args": {"strategy_name": "deepspeed_train", "strategy_config": {"zero_optimization": zero}},
    }
    changes = {f"{role}.{name}": value for name, value in section.items()} | {"cluster.device": "cuda"}
    if role == "reference":
        changes["use_kl_loss"] = True
    shared = merged(tree, changes)
    if key is None:
        check_config(config_from_tree(shared))
    else:
        path = f"{role}.strategy_args.strategy_config.zero_optimization.{key}"
        found = problems_of(shared)
        assert list(found) == [path]
        assert message in found[path].message and "make room on device 1 for actor_infer" in found[path].message
        assert remedy in found[path].remedy and f"give {role} devices of its own" in found[path].remedy
    # On devices of its own, or on a CPU, nothing has to move.
    apart = changes | {f"{role}.device_mapping": [2], "cluster.num_devices_per_node": 3}
    check_config(config_from_tree(merged(tree, apart)))
    check_config(config_from_tree(merged(tree, changes | {"cluster.device": "cpu"})))


def test_gpus_need_a_driver_unless_the_cluster_is_elsewhere(tree, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tree["cluster"]["device"] = "cuda"
    assert "cluster.device: cpu" in problems_of(tree)["cluster.device"].remedy
    check_config(config_from_tree(merged(tree, {"cluster.address": "auto"})))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    check_config(config_from_tree(tree))


@pytest.mark.parametrize(
    ("environment", "files", "seen"),
    [
        ({}, ["nvidia0", "nvidiactl"], True),
        ({}, ["dxg"], True),
        ({}, ["nvidiactl", "null"], False),
        ({}, [], False),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ["nvidia0"], False),
        ({"CUDA_VISIBLE_DEVICES": ""}, ["nvidia0"], False),
        ({"CUDA_VISIBLE_DEVICES": "GPU-1a2b"}, [], True),
    ],
)
def test_gpus_are_seen_by_the_environment_or_else_by_device_files(tmp_path, environment, files, seen):
    for name in files:
        (tmp_path / name).touch()
    assert sees_gpus(environment, tmp_path) == seen


def test_checking_leaves_the_configuration_as_it_was(tree):
    config = config_from_tree(merged(tree, {"max_steps": -1}))
    with pytest.raises(ConfigError):
        check_config(config)
    assert config.max_steps == -1


@pytest.mark.parametrize("mapping", [("0-3", "0-3"), ("0-1", "2-3"), ("0-3", "1-2"), ("1", "0-3"), (0, [1, 2])])
def test_roles_share_all_devices_or_none(tree, mapping):
    changes = {"cluster.num_devices_per_node": 4}
    changes |= {"actor_train.device_mapping": mapping[0], "actor_infer.device_mapping": mapping[1]}
    check_config(config_from_tree(merged(tree, changes)))


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen2.5-0.5B"])
def test_hub_names_are_not_taken_for_folders(tree, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_config(config_from_tree(merged(tree, {"pretrain": name})))


def test_a_missing_folder_below_one_that_exists_is_no_hub_name(tree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert "no folder" in problems_of(merged(tree, {"pretrain": "models/tiny"}))["pretrain"].message


def test_an_unwritable_output_folder_is_reported(tree, tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "permission" in problems_of(merged(tree, {"output_dir": str(tmp_path / "run")}))["output_dir"].message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actor_infer.generating_args.top_p": 0.9}, "truncated distribution"),
        ({"actor_infer.generating_args.top_k": 20}, "truncated distribution"),
        ({"actor_infer.request_timeout_seconds": 300.0}, "before it is replaced"),
        ({"cluster.num_devices_per_node": 4}, "no role uses device 2-3"),
        ({"sequence_length": 600}, "leaves 88 tokens"),
        ({"sequence_length": 2000}, "never reached"),
        ({"max_staleness": 3}, "never reached"),
        ({"actor_train.max_tokens_per_microbatch_in_train": 100}, "less than one sequence of 1024"),
        ({"actor_train.training_args": {"warmup_steps": 100}}, "never reaches its peak"),
        ({"actor_train.data_args.domain_interleave_probs": {"a": 3.0, "b": 1.0}}, "adds up to 4"),
        ({"actor_train.data_args.max_samples": 5}, "repeats"),
        ({"use_kl_loss": True, "kl_loss_coef": 0.0, "reference": {"device_mapping": 0}}, "weighs nothing"),
        ({"actor_infer.model_args": {"model_name_or_path": "gpt2"}}, "another model"),
        ({"adv_estimator": "remax", "group_filter": "zero_variance"}, "group_filter drops groups of equal scores"),
        ({"adv_estimator": "reinforce", "zero_variance_mask": True}, "zero_variance_mask drops groups of equal"),
    ],
)
def test_what_works_but_may_not_be_meant_is_a_warning(tree, changes, words):
    config = config_from_tree(merged(tree, changes))
    check_config(config)
    (warning,) = config_warnings(config)
    assert words in warning


def test_the_unread_keys_are_keys_of_their_roles(tree):
    config = config_from_tree(merged(tree, {"actor_logp": {}, "reference": {}, "teacher": {}, "critic": {}}))
    for role, keys in UNREAD_KEYS.items():
        assert set(keys) <= set(vars(vars(config)[role]))


@pytest.mark.parametrize("root", PIPELINES.values())
def test_what_a_key_needs_is_a_key_of_its_section(root):
    items = {path: item for path, item, _ in walk(root)}
    for path, item in items.items():
        needs = item.metadata["needs"]
        assert needs is None or path.removesuffix(item.name) + needs.partition(": ")[0] in items, path


@pytest.mark.parametrize(
    ("changes", "platform", "transport"),
    [
        ({}, "linux", "shared_memory"),
        ({}, "darwin", "object_store"),
        ({"weight_update": {"transport": "checkpoint"}}, "linux", "checkpoint"),
        ({"cluster": {"num_nodes": 2, "num_devices_per_node": 1, "address": "auto"}}, "linux", "object_store"),
        ({"cluster": {"num_nodes": 2, "num_devices_per_node": 2, "address": "auto"}}, "linux", "shared_memory"),
    ],
)
def test_weights_travel_through_shared_memory_where_it_reaches(tree, changes, platform, transport):
    assert weight_transport(config_from_tree({**tree, **changes}), platform) == transport


def test_the_old_name_of_the_bucket_size_leads_to_the_new_one(tree):
    with pytest.raises(ConfigError) as caught:
        config_from_tree({**tree, "weight_update": {"bucket_size_mb": 256}})
    (problem,) = caught.value.problems
    assert problem.path == "weight_update.bucket_size_mb"
    assert "`param_update_gather_bucket_size_mb`" in problem.remedy


def test_ranks_that_hold_one_copy_of_the_model_together_take_one_share_of_the_batch(tree):
    changes = {
        "cluster.num_devices_per_node": 9,
        "actor_train.device_mapping": list(range(8)),
        "actor_infer.device_mapping": [8],
        "actor_train.strategy_args": {
            "strategy_name": "megatron_train",
            "strategy_config": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        },
        "actor_train.training_args": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2},
    }
    config = config_from_tree(merged(tree, changes))
    assert data_parallel_ranks(config.actor_train) == 2 and optimizer_batch_size(config, config.actor_train) == 16
    changes["actor_train.strategy_args"]["strategy_config"]["context_parallel_size"] = 2
    assert data_parallel_ranks(config_from_tree(merged(tree, changes)).actor_train) == 1
    changes["actor_train.strategy_args"] = {"strategy_name": "fsdp2_train"}
    config = config_from_tree(merged(tree, changes))
    assert optimizer_batch_size(config, config.actor_train) == 64


@pytest.mark.parametrize(("device", "found"), [("cpu", 1), ("cuda", 0)])
def test_rows_that_megatron_splits_by_position_need_gpus(tree, device, found):
    strategy = {"strategy_name": "megatron_train", "strategy_config": {"context_parallel_size": 2}}
    changes = {
        "cluster": {"device": device, "num_devices_per_node": 3},
        "actor_train.device_mapping": [0, 1],
        "actor_infer.device_mapping": [2],
        "actor_train.strategy_args": strategy,
    }
    problems = list(trainers_can_train(config_from_tree(merged(tree, changes))))
    assert ["which runs on GPUs only" in each.message for each in problems] == [True] * found


def test_a_critic_cuts_a_batch_in_its_own_way(tree):
    changes = {
        "adv_estimator": "gae",
        "critic": {"device_mapping": [0], "training_args": {"gradient_accumulation_steps": 2}},
        "critic.training_args.per_device_train_batch_size": 8,
        "max_steps": 10,
        "critic_warmup": 4,
        "ppo_epochs": 2,
    }
    config = config_from_tree(merged(tree, changes))
    check_config(config)
    assert optimizer_batch_size(config, config.critic) == 16
    assert total_optimizer_steps(config, config.critic) == 10 * samples_per_step(config) // 16 * 2
    assert total_optimizer_steps(config, config.actor_train) == (10 - 4) * 2


@pytest.mark.parametrize(
    ("reference", "shared"),
    [
        ({}, True),
        ({"device_mapping": "0"}, True),
        ({"device_mapping": [1]}, False),
        ({"device_mapping": [0], "model_args": {"model_name_or_path": "owner/other"}}, False),
        ({"device_mapping": [0], "model_args": {"dtype": "bfloat16"}}, True),
    ],
)
def test_with_adapters_a_reference_of_the_same_model_without_devices_of_its_own_is_the_trainer(tree, reference, shared):
    tree |= {"use_kl_loss": True, "reference": reference}
    tree["actor_train"]["model_args"] = {"lora_target": "q_proj", "dtype": "bfloat16"}
    config = config_from_tree(tree)
    check_config(config)
    assert is_base(config, "reference") == shared == ("reference" not in present_roles(config))
    config.actor_train.model_args.lora_target = None
    assert not is_base(config, "reference")

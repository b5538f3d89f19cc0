"""`pipeline: rlvr` with pictures in its prompts: what is refused, and what a run computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from runs import go_on_from, run_pipeline
from tiny import tiny_config, write_config
from transformers import AutoConfig, Qwen2Config, Qwen2ForCausalLM

from roll.check.config import check_config
from roll.check.pictures import prompt_picture_problems
from roll.configs import derived
from roll.configs.errors import ConfigError
from roll.configs.loader import load_config
from roll.data.pictures import policy_class
from roll.pipeline.preflight import prepare
from tests.tiny_vision import draw, make_model, make_task, make_tokenizer

tier = pytest.mark.tier


@pytest.fixture(scope="module")
def task(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    make_model(folder / "model")
    make_task(folder)
    return folder


def config_of(task: Path, **changes: Any) -> dict[str, Any]:
    return tiny_config(
        task,
        **{
            "rewards": {"count": {"verifier": "exact"}},
            "prompt_length": 10,
            "response_length": 2,
            "actor_train__data_args__template": "chat",
            "actor_train__training_args__learning_rate": 2e-3,
        }
        | changes,
    )


def refused(folder: Path, config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare(check_config(load_config(str(write_config(folder, config)), [])))
    return str(caught.value)


def test_placeholders_count_in_the_length_of_a_prompt(task, tmp_path):
    plan = prepare(check_config(load_config(str(write_config(tmp_path, config_of(task))), []))).rollouts
    assert {len(prompt.token_ids) for prompt in plan.prompts} == {10}
    assert "10 tokens" in refused(tmp_path, config_of(task, prompt_length=9))


def test_pictures_are_refused_for_a_model_that_sees_none(task, tmp_path):
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1)
    ).save_pretrained(tmp_path / "blind")  # fmt: skip
    make_tokenizer().save_pretrained(tmp_path / "blind")
    message = refused(tmp_path, config_of(task, pretrain=str(tmp_path / "blind")))
    assert "48 prompts have pictures" in message and "(qwen2) cannot be given pictures" in message


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": "#?", "images": ["lost.png"]}, "cannot read the picture `lost.png`"),
        ({"prompt": "#?", "images": ["train.jsonl"]}, "a picture cannot be decoded"),
        ({"prompt": "#?", "images": ["https://pictures.example/1.png"]}, "would have to be downloaded"),
        ({"prompt": "#?<image><image>", "images": ["1.png"]}, "the texts have 2 times `<image>` for 1 pictures"),
        ({"prompt": "#?", "images": [7]}, "a picture is a path, a `data:` address or bytes, not a int"),
        ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, "not 'video'"),
    ],
)
def test_a_row_whose_picture_is_wrong_is_named(task, tmp_path, row, words):
    draw(np.ones((2, 2), bool)).save(tmp_path / "1.png")
    (tmp_path / "train.jsonl").write_text(json.dumps(row | {"domain": "count", "ground_truth": "1"}) + "\n")
    config = config_of(task, actor_train__data_args__file_name=str(tmp_path / "train.jsonl"))
    message = refused(tmp_path, config)
    assert "train.jsonl:1" in message and words in message


def test_what_cannot_be_given_pictures_is_refused(task, tmp_path):
    changes = {
        "actor_train.use_sequence_packing": {"actor_train__use_sequence_packing": True},
        "actor_train.model_args.lora_target": {"actor_train__model_args__lora_target": "all-linear"},
        "positions are not split": {
            "actor_train__strategy_args__strategy_config": {"context_parallel_size": 2},
        },
        "deepspeed_train cannot be given": {"actor_train__strategy_args__strategy_name": "deepspeed_train"},
        "megatron_train cannot be given": {"actor_train__strategy_args__strategy_name": "megatron_train"},
        "sglang cannot be given": {"actor_infer__strategy_args__strategy_name": "sglang"},
        "a teacher is not supported": {"teacher__device_mapping": [0]},
        "a critic is not supported": {"adv_estimator": "gae", "critic__device_mapping": [0]},
    }
    for words, change in changes.items():
        config = derived.prompted(load_config(str(write_config(tmp_path, config_of(task, **change))), []))
        (problem,) = prompt_picture_problems(config)
        assert words in str(problem)
    assert "packed rows" in refused(tmp_path, config_of(task, actor_train__use_sequence_packing=True))


def test_a_role_that_computes_log_probabilities_beside_the_trainer_sees_the_pictures(task):
    beside = {"cluster__num_devices_per_node": 3, "actor_logp": {"device_mapping": [2]}}
    decoupled = {"old_logprobs": "recompute", "actor_train__pg_variant": "decoupled_ppo"}
    run = run_pipeline(task, IN_THIS_PROCESS, config_of(task, max_steps=1, **beside, **decoupled))
    assert run.metrics[0]["mismatch/abs_mean"] < 1e-5 and run.metrics[0]["actor/clip_fraction"] == 0


@tier("all")
@pytest.mark.parametrize("changes", [{}, {"actor_train__stream_groups": True}])
def test_a_whole_run_agrees_with_its_engine_and_goes_on_from_its_checkpoint(task, changes):
    """With a reference, one step ahead, so groups with pictures are in the journal of the checkpoint."""
    config = config_of(
        task,
        max_steps=4,
        save_steps=2,
        max_ckpt_to_keep=0,
        async_generation_ratio=1,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        reference={"device_mapping": [2]},
        cluster__num_devices_per_node=3,
        rewards={"count": {"verifier": "picture_rewards:brightness"}},
        **changes,
    )
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    agreed = [step["mismatch/abs_mean"] for step in run.metrics if step["mismatch/tokens"]]
    assert agreed and max(agreed) < 1e-5
    assert all(step["reward/mean"] > 0 for step in run.metrics)
    assert abs(run.metrics[0]["actor/kl_loss"]) < 1e-5 < run.metrics[-1]["actor/kl_loss"]
    named = {name for sample in run.samples for name in sample["pictures"]}
    assert named and {path.name for path in (run.folder / "samples").iterdir()} == named
    before = run.metrics
    again = go_on_from(2, run, task, IN_THIS_PROCESS, config)
    assert [step["reward/mean"] for step in again.metrics] == [step["reward/mean"] for step in before]
    exported = policy_class(AutoConfig.from_pretrained(task / "model"))
    final = next((run.folder / "checkpoints").glob("step-4/**/preprocessor_config.json")).parent
    moved = dict(exported.from_pretrained(final).named_parameters())
    first = dict(exported.from_pretrained(task / "model").named_parameters())
    assert any("visual" in name and not torch.equal(weight, first[name]) for name, weight in moved.items())

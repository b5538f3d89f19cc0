"""Supervised fine-tuning, from its command line to its last checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_cluster import IN_THIS_PROCESS
from killed_runs import newest_checkpoint, recorded_steps
from runs import command, go_on_from, run_pipeline, start_command, start_process
from safetensors.torch import load_file
from tiny import changed, make_task, make_tokenizer, tiny_config, write_config
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, GenerationConfig, Qwen2ForCausalLM

import roll
from roll.data.encoding import tokenise
from roll.data.records import derive_seed
from roll.doctor.diagnosis import diagnose, gather_evidence
from roll.report.files import read_run
from roll.report.page import render_page
from roll.tracking.run_directory import RunDirectory
from tests.tiers import need

LEARNING_RATE = 3e-3
EPSILON = 1e-4
"""AdamW's. With a small one it would blow rounding up: the gradient of a key's bias is nothing but that."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def rows_of(task: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (task / name).read_text().splitlines()]


def supervised(task: Path, **changes: Any) -> dict[str, Any]:
    """A run of seconds. ``changes`` are dotted keys with ``__`` for the dots."""
    config: dict[str, Any] = {
        "pipeline": "sft",
        "exp_name": "tiny-sft",
        "pretrain": str(task / "model"),
        "seed": 7,
        "cluster": {"device": "cpu", "num_devices_per_node": 1, "cpu_threads_per_device": 1},
        "max_steps": 3,
        "train_batch_size": 8,
        "sequence_length": 12,
        "track_with": [],
        "actor_train": {
            "device_mapping": [0],
            "training_args": {"learning_rate": LEARNING_RATE, "adam_epsilon": EPSILON},
            "data_args": {"file_name": str(task / "copies.jsonl")},
        },
        "stall_timeout_seconds": 120,
    }
    return changed(config, changes)


def weights_of(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run_folder / "checkpoints" / f"step-{step}" / "model.safetensors")


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and prompts of one to five characters whose response is the first one, once or twice."""
    folder = tmp_path_factory.mktemp("sft")
    make_task(folder)
    rng = np.random.default_rng(0)
    digits = ["".join(map(str, rng.integers(0, 10, size=rng.integers(1, 6)))) for _ in range(40)]
    rows = [{"prompt": f"{text}=", "response": text[0] * (1 + len(text) % 2)} for text in digits]
    for name, part in (("copies.jsonl", rows[:30]), ("held_out.jsonl", rows[30:])):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder


def plain_example(row: dict[str, str]) -> tuple[list[int], list[int]]:
    """Token ids, and the labels of a plain loop: -100 where nothing is learned."""
    prompt, response = (ids.tolist() for ids in tokenise([row["prompt"], row["response"]], make_tokenizer()))
    response = [*response, 1]
    return prompt + response, [-100] * len(prompt) + response


def plain_loss(model: Qwen2ForCausalLM, rows: list[dict[str, str]]) -> torch.Tensor:
    """Mean cross-entropy over the trained tokens of these rows, each row by itself and without padding."""
    total, tokens = torch.zeros(()), 0
    for row in rows:
        ids, labels = plain_example(row)
        logits = model(torch.tensor([ids])).logits[0, :-1]
        total = total + cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum")
        tokens += sum(label != -100 for label in labels[1:])
    return total / tokens


def plain_loop(task: Path, steps: int, batch_size: int = 8) -> tuple[Qwen2ForCausalLM, list[float]]:
    """What the run of `supervised` should learn, and its losses."""
    model = Qwen2ForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0
    )
    rows = rows_of(task, "copies.jsonl")
    orders = [np.random.default_rng(derive_seed(7, "epoch", "default", e)).permutation(len(rows)) for e in range(9)]
    order, losses = np.concatenate(orders), []
    for step in range(steps):
        loss = plain_loss(model, [rows[index] for index in order[step * batch_size : (step + 1) * batch_size]])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return model, losses


def assert_equals_plain_loop(task: Path, run: Any, steps: int) -> None:
    model, losses = plain_loop(task, steps)
    assert [step["actor/loss"] for step in run.metrics] == pytest.approx(losses, abs=1e-5)
    learned, expected = weights_of(run.folder, steps), dict(model.named_parameters())
    before = load_file(task / "model" / "model.safetensors")
    assert learned.keys() == before.keys()
    for name, weight in learned.items():
        torch.testing.assert_close(weight, expected[name].detach(), atol=1e-5, rtol=0)
    assert any(not torch.equal(learned[name], before[name]) for name in before)


WAYS = {
    "padded": {},
    "packed": {"actor_train__use_sequence_packing": True},
    "packed micro-batches": {
        "actor_train__use_sequence_packing": True,
        "actor_train__max_tokens_per_microbatch_in_train": 16,
    },
    "micro-batches of two": {
        "actor_train__use_dynamic_batching_in_train": False,
        "actor_train__training_args__per_device_train_batch_size": 2,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_learns_what_a_plain_loop_learns(task, way):
    """Of four steps the last takes its examples from the next epoch: 32 of 30."""
    run = run_pipeline(task, IN_THIS_PROCESS, supervised(task, max_steps=4, **WAYS[way]))
    assert_equals_plain_loop(task, run, 4)


@pytest.mark.tier("all")
@pytest.mark.parametrize("way", ["padded", "packed"])
def test_two_ranks_learn_what_a_plain_loop_learns(task, ray_cluster, way):
    cluster = {"device": "cpu", "num_devices_per_node": 2, "cpu_threads_per_device": 1}
    config = supervised(task, cluster=cluster, actor_train__device_mapping=[0, 1], **WAYS[way])
    assert_equals_plain_loop(task, run_pipeline(task, ray_cluster, config), 3)


def test_a_run_learns_and_says_so(task):
    validation = {"data_args": {"file_name": str(task / "held_out.jsonl")}}
    run = run_pipeline(task, IN_THIS_PROCESS, supervised(task, max_steps=40, eval_steps=20, validation=validation))
    first, last = run.summary["val/loss/first"], run.summary["val/loss/last"]
    assert run.summary["status"] == "success"
    assert last < 0.8 * first
    model = Qwen2ForCausalLM.from_pretrained(run.folder / "checkpoints" / "step-40", dtype=torch.float32)
    with torch.no_grad():
        assert last == pytest.approx(float(plain_loss(model, rows_of(task, "held_out.jsonl"))), abs=1e-5)
    assert [step["step"] for step in run.metrics if "val/loss" in step] == [20, 40]
    assert run.metrics[-1]["data/epoch"] == pytest.approx(40 * 8 / 30)
    assert run.metrics[-1]["data/overlong"] == 0
    assert diagnose(gather_evidence(RunDirectory.existing(run.folder))).verdict == "ended"
    assert "Validation loss" in render_page(read_run(run.folder))


def test_loss_of_long_rows_that_are_left_out_is_not_learned_and_they_are_counted(task):
    rows = [*rows_of(task, "copies.jsonl"), {"prompt": "1" * 12 + "=", "response": "1"}]
    (task / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"file_name": str(task / "long.jsonl"), "overlong_prompts": "drop"}
    run = run_pipeline(task, IN_THIS_PROCESS, supervised(task, actor_train__data_args=data, epochs=1, max_steps=100))
    assert len(run.metrics) == 4, "30 examples in batches of 8"
    assert run.metrics[-1]["data/overlong"] == 1


def test_a_run_goes_on_to_the_bit(task):
    config = supervised(task, max_steps=4, save_steps=2, actor_train__training_args__lr_scheduler_type="linear")
    whole = run_pipeline(task, IN_THIS_PROCESS, config)
    expected = weights_of(whole.folder, 4)
    recorded = [(step["step"], step["actor/loss"]) for step in whole.metrics]
    again = go_on_from(2, whole, task, IN_THIS_PROCESS, config)
    assert [(step["step"], step["actor/loss"]) for step in again.metrics] == recorded
    for name, weight in weights_of(again.folder, 4).items():
        assert torch.equal(weight, expected[name]), name


@pytest.mark.tier("all")
def test_a_killed_run_goes_on_to_the_bit(task, warm):
    """Its process is killed between two checkpoints; the whole run has processes and a Ray of its own."""
    config = supervised(task, max_steps=60, save_steps=20)
    undisturbed = run_pipeline(task, IN_THIS_PROCESS, config)
    process, out = start_command(task, config)
    deadline = time.monotonic() + 240
    while not (newest_checkpoint(out) >= 20 and recorded_steps(out) % 20 > 2):
        assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert json.loads((out / "summary.json").read_text())["status"] == "running"
    path = write_config(task, {**config, "output_dir": str(out), "resume_from_checkpoint": True}, "killed.yaml")
    again = start_process(path)
    said, _ = again.communicate(timeout=240)
    assert again.returncode == 0, said
    assert json.loads((out / "summary.json").read_text())["resumed_at"][0] in (20, 40)
    for name, weight in weights_of(undisturbed.folder, 60).items():
        assert torch.equal(weights_of(out, 60)[name], weight), name


def test_other_examples_do_not_go_on(task, capsys):
    config = supervised(task, max_steps=2, save_steps=1)
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    other = supervised(task, max_steps=4, save_steps=1, actor_train__data_args__file_name=str(task / "held_out.jsonl"))
    path = write_config(task, {**other, "resume_from_checkpoint": str(run.folder), "accept_config_changes": True})
    assert command(IN_THIS_PROCESS, "--config", str(path)) == 2
    assert "counts other examples than these" in capsys.readouterr().err


def test_reinforcement_learning_starts_from_a_checkpoint(task):
    tuned = run_pipeline(task, IN_THIS_PROCESS, supervised(task)).folder / "checkpoints" / "step-3"
    config = tiny_config(task, pretrain=str(tuned), max_steps=1, rewards={"addition": {"verifier": "exact"}})
    run = run_pipeline(task, IN_THIS_PROCESS, config)
    assert run.summary["status"] == "success"
    assert run.metrics[0]["mismatch/abs_mean"] < 1e-4, "engine and trainer have the tuned weights"


def test_an_engine_stops_where_the_tuned_model_ends_its_turns(task):
    """The template ends a turn with another token than the one that the model's settings name."""
    model = task / "chat"
    shutil.copytree(task / "model", model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}{{ pad_token }}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(model)
    data = {"file_name": str(task / "copies.jsonl"), "template": "chat"}
    run = run_pipeline(task, IN_THIS_PROCESS, supervised(task, pretrain=str(model), actor_train__data_args=data))
    tuned = GenerationConfig.from_pretrained(run.folder / "checkpoints" / "step-3")
    assert tuned.eos_token_id == [tokenizer.eos_token_id, tokenizer.pad_token_id]


def test_adapters_learn_too_and_are_merged_into_the_model(task):
    adapters = {"lora_target": "all-linear", "lora_rank": 4}
    changes = {"actor_train__model_args": adapters, "max_steps": 8, "actor_train__training_args__learning_rate": 2e-2}
    run = run_pipeline(task, IN_THIS_PROCESS, supervised(task, **changes))
    losses = [step["actor/loss"] for step in run.metrics]
    assert losses[-1] < losses[0] - 0.1
    assert (run.folder / "checkpoints" / "step-8" / "model.safetensors").exists()


@pytest.mark.tier("all")
@pytest.mark.parametrize("strategy", ["deepspeed_train", "megatron_train"])
def test_other_trainers_learn_what_a_plain_loop_learns(task, ray_cluster, strategy):
    need({"deepspeed_train": "deepspeed", "megatron_train": "megatron.core"}[strategy])
    changes: dict[str, Any] = {"actor_train__strategy_args": {"strategy_name": strategy}}
    if strategy == "megatron_train":
        changes["actor_train__worker_cls"] = "tests.trainers.megatron_worker:CpuTrainWorker"
    assert_equals_plain_loop(task, run_pipeline(task, ray_cluster, supervised(task, **changes)), 3)


def test_from_python_a_dataclass_says_the_same(task):
    tree = supervised(task, train_batch_size=4)
    assert roll.load_config(roll.SFTConfig(pretrain="model", train_batch_size=4)).train_batch_size == 4
    checked = roll.check(tree)
    assert checked.ok and isinstance(checked.config, roll.SFTConfig), checked
    assert "4 examples a step" in dict(checked.plan)["batch"]
    assert "unknown key" in str(roll.check(tree, loss=print).problems[0])


WRONG = {
    "a reward": ({"rewards": {"addition": {"verifier": "exact"}}}, "rewards: ", "nothing in `pipeline: sft` reads it"),
    "an engine": ({"actor_infer": {"device_mapping": [0]}}, "actor_infer: ", "nothing in `pipeline: sft` reads it"),
    "a loss": ({"actor_train__pg_variant": "ppo"}, "actor_train.pg_variant: ", "nothing in `pipeline: sft` reads it"),
    "staleness": ({"async_generation_ratio": 1}, "async_generation_ratio: ", "nothing in `pipeline: sft` reads it"),
    "a batch of groups": ({"rollout_batch_size": 8}, "rollout_batch_size: ", "write `train_batch_size`"),
    "sampling": (
        {"actor_train__generating_args": {"top_p": 0.5}},
        "actor_train.generating_args.top_p: ",
        "nothing is generated",
    ),
    "epochs of unequal domains": (
        {"epochs": 1, "max_steps": 100, "actor_train__data_args__domain_interleave_probs": {"default": 1.0}},
        "epochs: ",
        "set `max_steps`",
    ),
    "passes of a validation": (
        {"actor_train__max_tokens_per_microbatch_in_infer": 64},
        "actor_train.max_tokens_per_microbatch_in_infer: ",
        "remove this key",
    ),
    "restarts that all begin anew": (
        {"epochs": 1, "max_steps": 100, "save_steps": 500, "restarts": {"max_in_a_row": 2}},
        "restarts.max_in_a_row: ",
        "set `save_steps` below `max_steps`",
    ),
    "accumulation": (
        {"actor_train__training_args__gradient_accumulation_steps": 2},
        "actor_train.training_args.gradient_accumulation_steps: ",
        "`train_batch_size`",
    ),
    "two lengths": ({"epochs": 1, "max_steps": 5}, "max_steps: ", "keep one of the two"),
    "a fallback": (
        {"restarts": {"max_in_a_row": 1, "synchronous_after": 1}, "save_steps": 1},
        "restarts.synchronous_after: ",
        "remove this key",
    ),
    "no file": (
        {"actor_train__data_args__file_name": "nowhere.jsonl"},
        "actor_train.data_args.file_name: ",
        "give a JSONL file with one example per line",
    ),
    "validation without examples": ({"eval_steps": 1}, "eval_steps: ", "add `validation.data_args`"),
    "validation never": (
        {"validation": {"data_args": {"file_name": "x.jsonl"}}},
        "validation: ",
        "set `eval_steps`",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_configuration_is_refused_with_path_and_remedy(task, capsys, case):
    changes, path, remedy = WRONG[case]
    file = write_config(task, supervised(task, **changes), "wrong.yaml")
    assert command(IN_THIS_PROCESS, "--config", str(file)) == 2
    said = capsys.readouterr().err
    assert path in said
    assert remedy in said


def test_a_row_without_a_response_is_refused_with_its_place(task, capsys):
    (task / "bad.jsonl").write_text('{"prompt": "1=", "response": "1"}\n{"prompt": "2=", "answer": "2"}\n')
    config = supervised(task, actor_train__data_args__file_name=str(task / "bad.jsonl"))
    assert command(IN_THIS_PROCESS, "--config", str(write_config(task, config))) == 2
    said = capsys.readouterr().err
    assert "bad.jsonl:2: no `response`; it has `prompt`" in said
    assert "columns" in said

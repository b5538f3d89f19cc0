"""The two configurations of ROLL's documentation train here as they are. What is set on the command line: the model,
the lengths, the devices with their engines, and what the files lack (environments; rewards and prompts)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import IN_THIS_PROCESS
from runs import FinishedRun, command
from tiny import make_tokenizer

from roll.data.tokenizer import load_tokenizer

pytestmark = pytest.mark.tier("all")  # 512 and 1,024 samples in micro-batches of 1 and 2, as the files say

FILES = Path(__file__).parents[1] / "configs" / "foreign"
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
DEVICES = (
    "cluster.device=cpu",
    "cluster.num_devices_per_node=2",
    "cluster.cpu_threads_per_device=1",
    "actor_train.device_mapping=[0]",
    "actor_infer.device_mapping=[1]",
    "actor_train.strategy_args.strategy_name=fsdp2_train",
    "actor_infer.strategy_args.strategy_name=hf_infer",
)


@pytest.fixture(scope="module")
def model(task):
    """The tiny model with a chat template, which ROLL's files expect."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(task / "model")
    assert load_tokenizer(str(task / "model")).chat_template == CHAT
    return task / "model"


def run_file(name: str, folder: Path, model: Path, *overrides: str) -> FinishedRun:
    out = folder / f"out-{name}"
    arguments = [f"pretrain={model}", f"reward_pretrain={model}", f"output_dir={out}", *DEVICES, *overrides]
    exit_code = command(IN_THIS_PROCESS, "train", str(FILES / f"{name}.yaml"), *arguments)
    return FinishedRun(out, exit_code)


def test_the_rlvr_file_trains(model, task, capsys):
    run = run_file(
        "roll_rlvr_async",
        task,
        model,
        *("prompt_length=4", "response_length=4", "max_steps=1"),
        f"actor_train.data_args.file_name=[{task / 'train.jsonl'}]",
        "rewards.addition.verifier=reward_functions:digit_reward",
    )
    told = capsys.readouterr()
    assert run.exit_code == 0, told.err
    assert run.summary["status"] == "success" and run.summary["ledger"]["consumed"] == 64
    assert told.out.count("is in ROLL's dialect") == 1
    for sentence in ('"bf16" is read as "bfloat16"', '"fp16" is read as "float16"', '"qwen2_5" is read as "chat"'):
        assert told.out.count(sentence) == 1
    assert "mem_fraction_static: 0.85 has no effect here: it is an option of the file's `sglang`" in told.out
    written = (run.folder / "config.yaml").read_text()
    assert "dtype: float16" in written and "bf16" not in written


def test_the_agentic_file_trains_on_as_many_trajectories_as_it_says(model, task, capsys):
    run = run_file(
        "roll_agentic_async",
        task,
        model,
        *("sequence_length=12", "actor_infer.generating_args.max_new_tokens=1", "max_steps=1"),
        "custom_envs.copy={env_type: copy_games:Copy, max_steps: 2}",
    )
    told = capsys.readouterr()
    assert run.exit_code == 0, told.err
    assert run.summary["status"] == "success" and run.summary["ledger"]["consumed"] == 128
    assert "1024 trajectories are 128 groups of 8" in told.out

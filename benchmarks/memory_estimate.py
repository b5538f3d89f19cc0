"""Compare the memory estimate of `roll check` with the memory that the processes of complete runs used.

A model of about 100 million parameters with random weights is trained for two steps at full lengths, once for each way
to use memory: as it is, with gradient checkpointing, on two ranks, with adapters alone, with DeepSpeed. The measurement
is the highest resident memory (`VmHWM`) of each worker process, less that of the same run with a tiny model, which
stands for libraries. The estimate is compared without its own share for libraries. Prints one JSON line; exit code 1 if
an estimate is more than 20 % off.

    python benchmarks/memory_estimate.py [--hidden 768] [--layers 8] [--vocabulary 32000] [--runs plain ...]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from roll.check.memory import estimate_memory
from roll.check.memory_parts import LIBRARIES
from roll.configs.loader import config_from_tree, dump_yaml

MIB = 2**20
ROOT = Path(__file__).resolve().parents[1]
PROMPT, RESPONSE = 128, 128
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RUNS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointed": {"strategy_args": {"strategy_config": {"gradient_checkpointing": True}}},
    "two_ranks": {"device_mapping": [0, 1]},
    "adapters": {"model_args": {"lora_target": LINEAR, "lora_rank": 16}},
    "deepspeed": {
        "device_mapping": [0, 1],
        "strategy_args": {
            "strategy_name": "deepspeed_train",
            "strategy_config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 5_000_000}},
        },
    },
}
"""Trainer settings of each run."""
MOST_OFF = 0.2
ROLES = ("actor_train", "actor_infer")


def make_model(folder: Path, hidden: int, layers: int, vocabulary: int) -> None:
    """Make a Qwen2 model with random weights, and a tokenizer whose first tokens are the digits."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    heads = max(2, hidden // 64)
    config = Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=1024, tie_word_embeddings=False,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    words = {str(index) if index < 10 else f"word{index}": index for index in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="word10", pad_token="word11")
    fast.save_pretrained(folder)


def make_data(path: Path) -> None:
    """Write prompts of full length."""
    digits = ["".join(str(row * place % 10) for place in range(PROMPT)) for row in range(1, 9)]
    lines = [json.dumps({"prompt": prompt, "ground_truth": "5", "domain": "digits"}) for prompt in digits]
    path.write_text("\n".join(lines) + "\n")


def run_tree(model: Path, data: Path, out: Path, trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run of two steps: full-length samples, two samples a micro-batch, four micro-batches a rank."""
    ranks = len(trainer.get("device_mapping", [0]))
    return {
        "exp_name": "memory",
        "output_dir": str(out),
        "pretrain": str(model),
        "cluster": {"device": "cpu", "num_devices_per_node": ranks + 1, "cpu_threads_per_device": 1},
        "max_steps": 2,
        "rollout_batch_size": 2 * ranks,
        "num_return_sequences_in_group": 4,
        "prompt_length": PROMPT,
        "response_length": RESPONSE,
        "track_with": [],
        "weight_update": {"canary_interval": 0},
        "actor_train": {
            "device_mapping": [0],
            "data_args": {"file_name": str(data)},
            "max_tokens_per_microbatch_in_train": 2 * (PROMPT + RESPONSE),
            **trainer,
        },
        "actor_infer": {"device_mapping": [ranks], "generating_args": {"ignore_eos": True}},
        "rewards": {"digits": {"verifier": "exact"}},
    }


def measured(tree: Mapping[str, Any], folder: Path) -> dict[str, float]:
    """Run to the end; return role -> highest resident memory of one of its processes, in bytes."""
    path = folder / f"{Path(tree['output_dir']).name}.yaml"
    path.write_text(dump_yaml(tree))
    command = [sys.executable, str(ROOT / "examples" / "start_pipeline.py"), "--config", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    highest: dict[str, float] = {}
    with open(folder / "output.txt", "w+b") as output:
        run = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        while run.poll() is None:
            for role, size in resident(Path(tree["output_dir"]) / "logs"):
                highest[role] = max(size, highest.get(role, 0.0))
            time.sleep(0.2)
        if run.returncode:
            output.seek(0)
            raise RuntimeError(output.read()[-4000:].decode(errors="replace"))
    return highest


def resident(logs: Path) -> Iterator[tuple[str, float]]:
    """Yield role and highest resident memory of each process that writes a log into this folder."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [os.readlink(link) for link in (process / "fd").iterdir()]
            status = (process / "status").read_text()
        except OSError:  # it has just ended, or belongs to another user
            continue
        names = [Path(file).name for file in files if Path(file).parent == logs]
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        for role in ROLES:
            if peak is not None and any(name.startswith(role) for name in names):
                yield role, float(peak[1]) * 1024


def estimated(tree: dict[str, Any]) -> dict[str, float]:
    """Return role -> estimated bytes of one process, without its share for libraries."""
    estimate = estimate_memory(config_from_tree(tree))
    return {role.role: role.peak + role.host_bytes - LIBRARIES for role in estimate.roles}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("--hidden", 768), ("--layers", 8), ("--vocabulary", 32_000)):
        parser.add_argument(name, type=int, default=default)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_data(folder / "data.jsonl")
        make_model(folder / "model", arguments.hidden, arguments.layers, arguments.vocabulary)
        make_model(folder / "nothing", 16, 1, 64)
        result = {}
        for run in arguments.runs:
            tree = run_tree(folder / "model", folder / "data.jsonl", folder / run, RUNS[run])
            empty = run_tree(folder / "nothing", folder / "data.jsonl", folder / f"{run}-empty", RUNS[run])
            libraries, peaks = measured(empty, folder), measured(tree, folder)
            guesses = estimated(tree)
            result[run] = {
                role: {
                    "libraries_mib": round(libraries[role] / MIB),
                    "measured_mib": round((peaks[role] - libraries[role]) / MIB),
                    "estimated_mib": round(guesses[role] / MIB),
                    "estimate_over_measured": round(guesses[role] / (peaks[role] - libraries[role]), 3),
                }
                for role in peaks
            }
        print(json.dumps(result))
    ratios = [role["estimate_over_measured"] for roles in result.values() for role in roles.values()]
    sys.exit(int(any(abs(ratio - 1) > MOST_OFF for ratio in ratios)))


if __name__ == "__main__":
    main()

"""Compare weight updates of all weights with those of adapters alone or of deltas, in short runs of the same training.

The quick start's task with a wider random model, one engine, processes as in any run; the model learns adapters (LoRA),
or for deltas all weights in float32. Prints JSON: of each side the medians over steps of the bytes of a publication,
its seconds (gather + send + fetch + load), the time for which the engine stands still, and the rate of sampling; and
the ratios of the sides. With adapters, what a merge in bfloat16 leaves of those that have learned little, before that.

    python benchmarks/weight_content.py [--engine vllm] [--dtype bfloat16] [--transport object_store]
    python benchmarks/weight_content.py --content delta --dtype bfloat16 --transport object_store --learning-rate 1e-6
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from _pipeline import QUICKSTART, PipelineRun, run_command, run_pipeline
from transformers import AutoConfig, AutoModelForCausalLM

WARM_UP = 3
"""Steps that are left out: the first publications touch their memory for the first time."""
MOVED = (5e-5, 5e-4, 5e-3, 5e-2)
"""How far each element of B has moved; Adam takes it by at most the learning rate a step."""
PARTS = ("gather", "send", "fetch", "load")


def widen(model: Path, hidden: int, layers: int) -> int:
    """Replace the quick start's model by a random one of other sizes. Return its number of parameters."""
    config = AutoConfig.from_pretrained(model)
    heads = hidden // 64
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": 64}
    config.update({**sizes, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 2)})
    if getattr(config, "layer_types", None):
        config.layer_types = ["full_attention"] * layers
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config)
    made.save_pretrained(model)
    return made.num_parameters()


def rounding(model: Path, rank: int, moved: float) -> dict[str, float]:
    """Return what a merge in bfloat16 leaves of adapters on all linear layers whose B has ``moved`` so far everywhere.

    ``unchanged``: share of the adapted weights that stay as they were; ``error``: norm of the difference of what was
    added from B A, over that of B A; the mean of the layers.
    """
    torch.manual_seed(0)
    unchanged, errors = [], []
    for name, module in AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        weight = module.weight.detach()
        down = torch.nn.Linear(module.in_features, rank).weight.detach()  # drawn as peft draws A
        added = 2 * moved * torch.randn(module.out_features, rank).sign() @ down
        merged = (weight.float() + added).bfloat16()
        unchanged.append(float((merged == weight).float().mean()))
        errors.append(float((merged.float() - weight.float() - added).norm() / added.norm()))
    return {"unchanged": statistics.fmean(unchanged), "error": statistics.fmean(errors)}


def figures(run: PipelineRun) -> dict[str, float]:
    """Return medians of the steps after the first ones."""

    def median(name: str) -> float:
        return statistics.median(run.column(name, WARM_UP))

    steps = run.metrics[WARM_UP:]
    seconds = [sum(step[f"weights/{part}_seconds"] for part in PARTS) for step in steps]
    # Of the time in which the engine computes.
    rates = [step["tokens_per_second/actor_infer"] / (1 - step["idle/actor_infer"]) for step in steps]
    return {
        "megabytes": median("weights/bytes") / 1e6,
        "update seconds": statistics.median(seconds),
        **{part: median(f"weights/{part}_seconds") for part in PARTS},
        "stall seconds": median("weights/stall_seconds"),
        "tokens per second": statistics.median(rates),
    }


def settings(arguments: argparse.Namespace, content: str) -> dict[str, Any]:
    adapters = {
        "actor_train.model_args.lora_target": "all-linear",
        "actor_train.model_args.lora_rank": arguments.rank,
        "actor_train.model_args.dtype": arguments.dtype,
    }
    return {
        "max_steps": arguments.steps,
        "save_steps": 0,
        "rollout_batch_size": 16,
        "response_length": 48,
        "async_generation_ratio": 0,
        "weight_update.content": content,
        "weight_update.transport": arguments.transport,
        "weight_update.canary_interval": 0,
        **(adapters if arguments.content == "adapter" else {}),
        "actor_train.training_args.learning_rate": arguments.learning_rate,
        "actor_infer.model_args.dtype": arguments.dtype,
        "actor_infer.strategy_args.strategy_name": arguments.engine,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--content", default="adapter", choices=("adapter", "delta"), help="compared with full")
    parser.add_argument("--engine", default="hf_infer", choices=("hf_infer", "vllm"))
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=512, help="0: the quick start's model as it is")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--warm-up", type=int, default=100, help="supervised steps of the quick start's model")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="roll-bench-") as folder:
        task = Path(folder)
        made = [sys.executable, str(QUICKSTART / "make_model.py"), "--out", folder]
        run_command([*made, "--steps", str(arguments.warm_up)], {})
        moved = MOVED if arguments.content == "adapter" else ()
        merges = {f"{each:g}": rounding(task / "model", 16, each) for each in moved}
        parameters = widen(task / "model", arguments.hidden, arguments.layers) if arguments.hidden else None
        sides = {
            content: figures(run_pipeline(task, task / content, settings(arguments, content)))
            for content in ("full", arguments.content)
        }
    ratios = {name: sides[arguments.content][name] / value for name, value in sides["full"].items() if value}
    report = {
        "merged in bfloat16": merges,
        "parameters": parameters,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    print(json.dumps({**vars(arguments), **report, "sides": sides, f"{arguments.content} / full": ratios}, indent=1))


if __name__ == "__main__":
    main()

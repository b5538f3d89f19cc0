"""Run every trainer on the quick start, on two ranks, one step off policy, and compare accuracies.

Prints greedy accuracy before and after as one JSON line per trainer. Exits with 1 if a trainer stays below the wanted
accuracy, or if losses and gradient norms of the first steps differ from those of `fsdp2_train` on one rank. Megatron
runs on a CPU with the shim of the tests.

    python benchmarks/every_trainer.py [--steps 60] [--wanted 0.95] [--trainers fsdp2 deepspeed-2 ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _pipeline import make_task, run_pipeline

TRAINERS: dict[str, tuple[str, str]] = {
    "fsdp2-1": ("fsdp2_train", "{}"),
    "fsdp2": ("fsdp2_train", "{}"),
    "deepspeed-0": ("deepspeed_train", "{zero_optimization: {stage: 0}}"),
    "deepspeed-1": ("deepspeed_train", "{zero_optimization: {stage: 1}}"),
    "deepspeed-2": ("deepspeed_train", "{zero_optimization: {stage: 2}}"),
    "deepspeed-3": ("deepspeed_train", "{zero_optimization: {stage: 3}}"),
    "megatron-tp2": ("megatron_train", "{tensor_model_parallel_size: 2}"),
    "megatron-pp2": ("megatron_train", "{pipeline_model_parallel_size: 2}"),
}
"""Strategy and its configuration, on two ranks; `fsdp2-1` runs on one rank and is the reference for the others."""
COMPARED_STEPS = 5
SMALL_LOSS = 0.1
CLOSE = 1e-4
"""Largest relative difference, at ratio 0, where each step depends on all steps before it."""


def settings_of(name: str) -> dict[str, Any]:
    """Return the keys that make the quick start a run of this trainer."""
    strategy, options = TRAINERS[name]
    settings: dict[str, Any] = {
        "cluster.num_devices_per_node": 3,
        "actor_train.device_mapping": "[0]" if name == "fsdp2-1" else "[0, 1]",
        "actor_infer.device_mapping": "[2]",
        "actor_train.strategy_args.strategy_name": strategy,
        "actor_train.strategy_args.strategy_config": options,
    }
    if strategy == "megatron_train":
        settings["actor_train.worker_cls"] = "tests.trainers.megatron_worker:CpuTrainWorker"
    return settings


def first_steps(task: Path, out: Path, name: str) -> list[tuple[float, float]]:
    """Return loss and gradient norm of the first steps on policy."""
    settings = {"max_steps": COMPARED_STEPS, "async_generation_ratio": 0}
    run = run_pipeline(task, out, settings | settings_of(name))
    return list(zip(run.column("actor/loss", 0), run.column("actor/grad_norm", 0), strict=True))


def largest_difference(found: list[tuple[float, float]], wanted: list[tuple[float, float]]) -> float:
    """Return the largest relative difference of loss and gradient norm at any step.

    On policy a loss is a mean of advantages of either sign, so it may be 0; below `SMALL_LOSS` it is compared
    with that.
    """
    return max(
        max(abs(loss - other_loss) / max(abs(other_loss), SMALL_LOSS), abs(norm - other_norm) / other_norm)
        for (loss, norm), (other_loss, other_norm) in zip(found, wanted, strict=True)
    )


def accuracy(task: Path, out: Path, name: str, steps: int) -> dict[str, Any]:
    """Run the quick start once with this trainer."""
    run_pipeline(task, out, {"max_steps": steps, "async_generation_ratio": 1} | settings_of(name), eval_steps=steps)
    summary = json.loads((out / "summary.json").read_text())
    return {
        "steps": summary["steps"],
        "seconds": round(summary["seconds"]),
        "accuracy_before": summary["val/first"]["addition"],
        "accuracy_after": summary["val/last"]["addition"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--wanted", type=float, default=0.95, help="accuracy that each trainer has to reach")
    parser.add_argument("--trainers", nargs="+", default=list(TRAINERS), choices=list(TRAINERS))
    arguments = parser.parse_args()
    fine = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        wanted = first_steps(folder, folder / "reference", "fsdp2-1")
        for trainer in arguments.trainers:
            found = first_steps(folder, folder / f"{trainer}-first", trainer)
            difference = largest_difference(found, wanted)
            figures = accuracy(folder, folder / trainer, trainer, arguments.steps)
            fine.append(difference <= CLOSE and figures["accuracy_after"] >= arguments.wanted)
            record = {"benchmark": "every_trainer", "trainer": trainer, "largest_difference": difference, **figures}
            print(json.dumps(record), flush=True)
    sys.exit(0 if all(fine) else 1)


if __name__ == "__main__":
    main()

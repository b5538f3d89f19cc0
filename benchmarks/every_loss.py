"""Run every policy loss on the quick start, one step off policy, through YAML keys alone, and compare accuracies.

Prints greedy accuracy before and after as one JSON line per loss. Exits with 1 if a loss stays below the wanted
accuracy.

    python benchmarks/every_loss.py [--steps 30] [--wanted 0.85] [--losses ppo tis ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _pipeline import make_task, run_pipeline

from roll.algorithms.losses.base import POLICY_LOSSES

SETTINGS: dict[str, dict[str, Any]] = {
    "vanilla": {"allow_uncorrected_off_policy": "true"},
    "decoupled_ppo": {"old_logprobs": "recompute"},
    "gmpo": {"loss_agg_mode": "seq-mean-token-mean"},
    # The default bounds are made for responses of hundreds of tokens; here a response has four.
    "gspo": {
        "loss_agg_mode": "seq-mean-token-mean",
        "actor_train.pg_variant_args": "{clip_low: 0.2, clip_high: 0.3}",
    },
}
"""Keys that a loss needs in addition to its name."""


def measure(name: str, task: Path, out: Path, steps: int) -> dict[str, Any]:
    """Run the quick start once with this loss."""
    settings = {"actor_train.pg_variant": name, "max_steps": steps, "async_generation_ratio": 1}
    run_pipeline(task, out, settings | SETTINGS.get(name, {}), eval_steps=steps)
    summary = json.loads((out / "summary.json").read_text())
    return {
        "loss": name,
        "steps": summary["steps"],
        "accuracy_before": summary["val/first"]["addition"],
        "accuracy_after": summary["val/last"]["addition"],
        "lag_max": summary["lag/max"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--wanted", type=float, default=0.85, help="accuracy that each loss has to reach")
    parser.add_argument("--losses", nargs="+", default=POLICY_LOSSES.names(), choices=POLICY_LOSSES.names())
    arguments = parser.parse_args()
    reached = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        for loss in arguments.losses:
            figures = measure(loss, folder, folder / loss, arguments.steps)
            reached.append(figures["accuracy_after"] >= arguments.wanted)
            print(json.dumps({"benchmark": "every_loss", **figures}), flush=True)
    sys.exit(0 if all(reached) else 1)


if __name__ == "__main__":
    main()

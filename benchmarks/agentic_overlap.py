"""Measure the gain of asynchrony in slow environments: ratio 0 and ratio 1 with the same seeds and waits.

Each step of the environment waits without computing: log-normal, 99th percentile 20 times the median. The number of
training passes over a batch makes training take about as long as the rollouts. This balance depends on the machine, so
groups, episodes and passes are options. The figures are those of `async_overlap.py`. Prints one JSON line.

    python benchmarks/agentic_overlap.py [--steps 20] [--groups 16] [--epochs 2]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from _pipeline import PipelineRun, make_task, run_file
from async_overlap import compare


def configuration(task: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the agentic configuration on the quick start's model."""
    tokens, turns = arguments.tokens, arguments.turns
    return {
        "pipeline": "agentic",
        "pretrain": str(task / "model"),
        "cluster": {"device": "cpu", "num_devices_per_node": 2, "cpu_threads_per_device": 1},
        "max_steps": arguments.warm_up + arguments.steps,
        "rollout_batch_size": arguments.groups,
        "prompt_length": 8,
        "response_length": turns * (tokens + 8),
        "template": "raw",
        "raw_turns": {"prompt_end": "=", "response_end": "+"},
        "custom_envs": {
            "game": {
                "env_type": "_waiting_game:WaitingGame",
                "env_config": {"median_seconds": arguments.median_seconds, "turns": turns},
                "max_steps": turns,
                "max_tokens_per_step": tokens,
            }
        },
        "train_env_manager": {"group_size": arguments.group_size},
        "ppo_epochs": arguments.epochs,
        "track_with": [],
        "logging_steps": 1000,
        "actor_train": {"device_mapping": [0], "training_args": {"learning_rate": 1e-5}},
        "actor_infer": {"device_mapping": [1], "generating_args": {"ignore_eos": True}},
    }


def run_at(ratio: float, config: Path, out: Path) -> PipelineRun:
    """Run once, without validation and therefore without pauses."""
    return run_file(config, out, {"output_dir": out, "async_generation_ratio": ratio})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each run")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--groups", type=int, default=16, help="groups per step")
    parser.add_argument("--group-size", type=int, default=8, help="episodes per group")
    parser.add_argument("--turns", type=int, default=4, help="turns of an episode")
    parser.add_argument("--tokens", type=int, default=4, help="tokens of every turn")
    parser.add_argument("--median-seconds", type=float, default=0.1, help="median time of a step of the environment")
    parser.add_argument("--epochs", type=int, default=4, help="passes of training over a batch")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        config = folder / "agentic.yaml"
        config.write_text(yaml.safe_dump(configuration(folder, arguments)))
        runs = [run_at(ratio, config, folder / f"run-{ratio}") for ratio in (0, 1)]
    print(json.dumps({"benchmark": "agentic_overlap", **vars(arguments), **compare(*runs, arguments.warm_up)}))


if __name__ == "__main__":
    main()

"""Measure what asynchrony and short windows of trained steps gain for pictures, each with both sides in one go.

``waiting``: engine, trainer and reward are those of the picture example, and wait beside it as if a device computed
(`_waiting_pictures.py`), so little depends on the machine. Rewards while the engine draws are compared with rewards
after it, for rewards that take about as long as drawing. Drawing one step ahead is compared with taking turns; the
bound is the gain of perfect overlap, (rollout + training) / max(rollout, training).

``window``: nothing waits. The example is trained with 10 denoising steps, at first on two of each picture, among the
first three (Flow-GRPO-Fast), then on all nine that can have noise. Compared are the seconds of training, and the share
of right pictures of held-out prompts in the end. Prints one JSON line for each part.

    python benchmarks/pictures.py [--parts waiting window] [--steps 6] [--updates 48] [--world FOLDER]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from _pipeline import ROOT, PipelineRun, run_command, run_file
from _waiting_pictures import JUDGE_SECONDS
from async_overlap import Summary, compare, summarise

EXAMPLE = ROOT / "examples" / "image-shapes-cpu"
PICTURES = 64
"""Of a training step that waits: 8 prompts with 8 pictures each, 8 pictures at a time."""
WINDOWS = {"fast": (2, 3), "full": (9, 9)}
"""Trained steps of a picture, and the first ones among which they lie."""


def run_example(world: Path, out: Path, overrides: dict[str, Any]) -> PipelineRun:
    """Run the example on the model and data in ``world``, at ratio 0 unless told otherwise."""
    settings = {
        "output_dir": out,
        "pretrain": world / "model",
        "actor_train.data_args.file_name": world / "data" / "train.jsonl",
        "validation.data_args.file_name": world / "data" / "validation.jsonl",
        "async_generation_ratio": 0,
        "cluster.cpu_threads_per_device": 1,
        "track_with": "[]",
        "logging_steps": 1000,
        **overrides,
    }
    return run_file(EXAMPLE / "image.yaml", out, settings)


def run_waiting(world: Path, out: Path, arguments: argparse.Namespace, overrides: dict[str, Any]) -> PipelineRun:
    """Run with an engine that waits, without validation."""
    settings = {
        "max_steps": arguments.warm_up + arguments.steps,
        "rollout_batch_size": PICTURES // 8,
        "validation": "null",
        "eval_steps": 0,
        "actor_infer.strategy_args.strategy_cls": "_waiting_pictures:WaitingSampler",
        "actor_infer.strategy_args.strategy_config.max_running_requests": 8,
        **overrides,
    }
    return run_example(world, out, settings)


def rollout_seconds(run: PipelineRun, warm_up: int) -> list[float]:
    """Return the seconds of each step without its training: those of drawing and judging."""
    steps, training = run.column("time/step", warm_up), run.column("time/train", warm_up)
    return [step - train for step, train in zip(steps, training, strict=True)]


def compare_rewards(after: PipelineRun, during: PipelineRun, warm_up: int) -> dict[str, Any]:
    """Return seconds of drawing and judging, and how many times as long they took with rewards after drawing."""
    one, other = (summarise(rollout_seconds(run, warm_up)) for run in (after, during))
    judging = PICTURES * JUDGE_SECONDS
    seconds = {"rewards_after": one, "rewards_during": other, "rewards_alone": round(judging, 3)}
    ratios = {
        name: {
            "rewards_over_drawing": round(judging / (one[name] - judging), 3),
            "ratio": round(one[name] / other[name], 3),
        }
        for name in one
    }
    return {"seconds": seconds, **ratios}


def compare_windows(runs: dict[str, PipelineRun]) -> dict[str, Any]:
    """Return training seconds of a step and accuracies of each window, and the ratio of the seconds."""
    seconds: dict[str, Summary] = {name: summarise(run.column("time/train", 3)) for name, run in runs.items()}
    accuracy = {name: [round(each.accuracy, 3) for each in run.evaluations("shapes")] for name, run in runs.items()}
    ratio = {name: round(seconds["full"][name] / seconds["fast"][name], 3) for name in seconds["full"]}
    return {"training_seconds": seconds, "accuracy": accuracy, "full_over_fast": ratio}


def waiting(world: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Run both comparisons of the part ``waiting``."""
    judged = {"rewards.shapes.verifier": "_waiting_pictures:brightness", "rewards.shapes.timeout_seconds": 120}
    together = {**judged, "rewards.shapes.verifier_args.together": PICTURES}
    after = run_waiting(world, folder / "after", arguments, together)
    during = run_waiting(world, folder / "during", arguments, judged)
    trained = {"actor_train.worker_cls": "_waiting_pictures:WaitingTrainer"}
    turns = run_waiting(world, folder / "turns", arguments, trained)
    ahead = run_waiting(world, folder / "ahead", arguments, {**trained, "async_generation_ratio": 1})
    return {
        "steps": arguments.steps,
        "rewards": compare_rewards(after, during, arguments.warm_up),
        "one_step_ahead": compare(turns, ahead, None, arguments.warm_up),
    }


def windows(world: Path, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train once with each of the `WINDOWS`."""
    runs = {}
    for name, (size, reach) in WINDOWS.items():
        sampling = {"num_inference_steps": 10, "window_size": size, "window_reach": reach}
        settings = {f"sampling.{key}": value for key, value in sampling.items()}
        runs[name] = run_example(world, folder / name, {**settings, "max_steps": arguments.updates})
    return {"updates": arguments.updates, **compare_windows(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=["waiting", "window"], default=["waiting", "window"])
    parser.add_argument("--steps", type=int, default=6, help="timed steps of each run that waits")
    parser.add_argument("--warm-up", type=int, default=2, help="steps before them")
    parser.add_argument("--updates", type=int, default=48, help="training steps with each window")
    parser.add_argument("--world", type=Path, help="folder of the example's model and data; default: they are made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        world = arguments.world or folder
        run_command([sys.executable, str(EXAMPLE / "make_model.py"), "--out", str(world)], {})
        for part in arguments.parts:
            figures = (waiting if part == "waiting" else windows)(world, folder, arguments)
            print(json.dumps({"benchmark": "pictures", "part": part, **figures}), flush=True)


if __name__ == "__main__":
    main()

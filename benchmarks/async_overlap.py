"""Measure the gain of asynchrony and of streaming with slow rewards, on the same prompts and waits.

Three runs: ratio 0, ratio 0 with groups trained on as they finish (`stream_groups`), and ratio 1.

Each sample's reward waits without computing: log-normal, median 50 ms, 99th percentile 1 s. Worked examples before each
problem make training take about as long as the rollouts, which only read them. This balance depends on the machine, so
prompts, their length, samples and passes are options; streaming takes one pass. Rollout and training seconds are those
of the ratio-0 run, in which nothing overlaps. The bound is the gain of perfect overlap: (rollout + training) /
max(rollout, training). Prints one JSON line.

    python benchmarks/async_overlap.py [--steps 12] [--prompts 192] [--prompt-tokens 40] [--epochs 1]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _pipeline import PipelineRun, make_task, run_pipeline

Summary = dict[str, float]


def lengthen_prompts(task: Path, tokens: int) -> None:
    """Put worked examples before each training problem, so that its prompt has ``tokens`` tokens or a few less.

    The tokenizer has a token for each character.
    """
    path = task / "data" / "train.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    examples = [f"{record['prompt']}{record['ground_truth']} " for record in records]
    for number, record in enumerate(records):
        for example in examples[number + 1 :] + examples[:number]:
            if len(record["prompt"]) + len(example) > tokens:
                break
            record["prompt"] = example + record["prompt"]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))


def run_at(ratio: float, task: Path, out: Path, arguments: argparse.Namespace, streams: bool = False) -> PipelineRun:
    """Run once, without validation and therefore without pauses."""
    overrides: dict[str, Any] = {
        "async_generation_ratio": ratio,
        "max_steps": arguments.warm_up + arguments.steps,
        "rollout_batch_size": arguments.prompts,
        "prompt_length": arguments.prompt_tokens,
        "num_return_sequences_in_group": arguments.group_size,
        "response_length": arguments.response_length,
        "ppo_epochs": arguments.epochs,
        "actor_infer.generating_args.ignore_eos": "true",
        "actor_infer.strategy_args.strategy_config.max_running_requests": arguments.running,
        "actor_train.stream_groups": str(streams).lower(),
        "rewards.addition.verifier": "_rewards:waiting_digit_share",
    }
    if arguments.max_staleness is not None and ratio > 0:
        overrides["max_staleness"] = arguments.max_staleness
    return run_pipeline(task, out, overrides)


def summarise(values: Sequence[float]) -> Summary:
    """Return median and mean, in seconds."""
    return {"median": round(statistics.median(values), 3), "mean": round(statistics.fmean(values), 3)}


def compare(
    synchronous: PipelineRun, asynchronous: PipelineRun, streamed: PipelineRun | None, warm_up: int
) -> dict[str, Any]:
    """Return step times, their ratios, and the share of the overlap bound that was reached; by medians and by means."""
    step_0 = synchronous.column("time/step", warm_up)
    training = synchronous.column("time/train", warm_up)
    rollout = [step - train for step, train in zip(step_0, training, strict=True)]
    seconds = {
        "step_at_ratio_0": summarise(step_0),
        "step_at_ratio_1": summarise(asynchronous.column("time/step", warm_up)),
        "rollout": summarise(rollout),
        "training": summarise(training),
        "training_at_ratio_1": summarise(asynchronous.column("time/train", warm_up)),
    }
    if streamed is not None:
        seconds["step_streamed"] = summarise(streamed.column("time/step", warm_up))
        seconds["training_streamed"] = summarise(streamed.column("time/train", warm_up))
    return {"steps": len(step_0), "seconds": seconds, **{each: _ratios(seconds, each) for each in ("median", "mean")}}


def _ratios(seconds: dict[str, Summary], statistic: str) -> Summary:
    rollout, training = seconds["rollout"][statistic], seconds["training"][statistic]
    ratio = seconds["step_at_ratio_0"][statistic] / seconds["step_at_ratio_1"][statistic]
    bound = (rollout + training) / max(rollout, training)
    ratios = {"ratio": ratio, "bound": bound, "share_of_bound": ratio / bound}
    if "step_streamed" in seconds:
        streamed = seconds["step_streamed"][statistic]
        ratios["streamed_over_ratio_0"] = seconds["step_at_ratio_0"][statistic] / streamed
        ratios["streamed_over_ratio_1"] = seconds["step_at_ratio_1"][statistic] / streamed
    return {name: round(value, 3) for name, value in ratios.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12, help="timed steps of each run")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--prompts", type=int, default=192, help="prompts per step")
    parser.add_argument("--prompt-tokens", type=int, default=40, help="longest prompt")
    parser.add_argument("--group-size", type=int, default=8, help="samples per prompt")
    parser.add_argument("--response-length", type=int, default=16, help="tokens of every response")
    parser.add_argument("--running", type=int, default=64, help="requests that the engine decodes at once")
    parser.add_argument("--epochs", type=int, default=1, help="passes of training over a batch")
    parser.add_argument("--max-staleness", type=int, help="bound of the ratio-1 run (default: 1)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        lengthen_prompts(folder, arguments.prompt_tokens)
        synchronous, asynchronous = (run_at(ratio, folder, folder / f"run-{ratio}", arguments) for ratio in (0, 1))
        streamed = run_at(0, folder, folder / "streamed", arguments, streams=True) if arguments.epochs == 1 else None
    settings = {key: value for key, value in vars(arguments).items() if value is not None}
    figures = compare(synchronous, asynchronous, streamed, arguments.warm_up)
    print(json.dumps({"benchmark": "async_overlap", **settings, **figures}))


if __name__ == "__main__":
    main()

"""The pipeline against TRL's `GRPOTrainer` on two CPU cores: samples a second, and time to learn the quick start.

Both sides have the same model, prompts, group size, lengths, loss and optimizer, and two computing threads in all. TRL
runs in each way that two cores allow: one process with one thread (small matrices gain little from a second), one with
two, and two data-parallel processes with one each. Sides take turns, each in processes of its own; start-up and the
first steps do not count. Prints one JSON line per part; ratios are against the fastest TRL of that part.

    python benchmarks/trl_comparison.py [--part throughput|learning|both] [--rounds 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from _pipeline import ROOT, Evaluation, PipelineRun, make_task, run_command, run_pipeline

GROUP_SIZE = 8
DOMAIN = "addition"
PROMPT_LENGTH = 8


@dataclass(frozen=True)
class TrlSide:
    """One way to give TRL two cores."""

    processes: int
    threads: int

    @property
    def name(self) -> str:
        return f"trl, {self.processes} process(es) x {self.threads} thread(s)"


TRL_SIDES = (TrlSide(1, 1), TrlSide(1, 2), TrlSide(2, 1))


@dataclass(frozen=True)
class Load:
    """What one training step is made of, on every side."""

    steps: int
    prompts: int
    response_length: int
    forced: bool
    """Whether every response has its full length."""
    eval_steps: int = 0
    bf16: bool = False
    """Training computes in bfloat16 on float32 weights; else all is float32."""

    @property
    def samples(self) -> int:
        return self.prompts * GROUP_SIZE


@dataclass(frozen=True)
class TrlRun:
    """What the TRL process wrote."""

    step_seconds: list[float]
    evaluations: list[Evaluation]


def run_trl(side: TrlSide, task: Path, out: Path, load: Load, seed: int, stop_at: float = 2.0) -> TrlRun:
    """One training with TRL. Its whole batch is one micro-batch, which is the fastest that fits easily."""
    options: dict[str, Any] = {
        "--task": task,
        "--out": out,
        "--steps": load.steps,
        "--prompts": load.prompts,
        "--group-size": GROUP_SIZE,
        "--response-length": load.response_length,
        "--micro-batch": load.samples // side.processes,
        "--eval-steps": load.eval_steps,
        "--stop-at": stop_at,
        "--seed": seed,
        "--threads": side.threads,
    }
    launcher = [sys.executable]
    if side.processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(side.processes)]
    command = [*launcher, str(ROOT / "benchmarks" / "_trl_grpo.py")]
    command += [str(part) for pair in options.items() for part in pair] + (["--forced"] if load.forced else [])
    command += ["--bf16"] if load.bf16 else []
    run_command(command, {"OMP_NUM_THREADS": str(side.threads)})
    written = json.loads(out.read_text())
    return TrlRun(written["step_seconds"], [Evaluation(*each) for each in written["evaluations"]])


def run_ours(task: Path, out: Path, load: Load, ratio: float, seed: int) -> PipelineRun:
    """One training with the pipeline. The other hyper-parameters are those of the quick start's YAML."""
    overrides: dict[str, Any] = {
        "seed": seed,
        "async_generation_ratio": ratio,
        "max_steps": load.steps,
        "rollout_batch_size": load.prompts,
        "num_return_sequences_in_group": GROUP_SIZE,
        "response_length": load.response_length,
        # One micro-batch for the whole batch, as on TRL's side.
        "actor_train.max_tokens_per_microbatch_in_train": load.samples * (PROMPT_LENGTH + load.response_length),
    }
    if load.bf16:
        # On both sides: the fused attention of CPUs is several times slower backwards in bfloat16 than the plain one.
        overrides |= {
            "actor_train.model_args.dtype": "bfloat16",
            "actor_train.model_args.attn_implementation": "eager",
        }
    if load.forced:
        overrides |= {
            "actor_infer.generating_args.ignore_eos": "true",
            f"rewards.{DOMAIN}.verifier": "_rewards:digit_share",
        }
    return run_pipeline(task, out, overrides, load.eval_steps)


def measure_throughput(folder: Path, rounds: int, steps: int, warm_up: int, bf16: bool) -> dict[str, Any]:
    """Samples a second of each side at 256 samples of 64 forced tokens, from the median step over all rounds."""
    load = Load(steps=steps + warm_up, prompts=32, response_length=64, forced=True, bf16=bf16)
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        for side in TRL_SIDES:
            trl = run_trl(side, folder, folder / f"trl-{number}.json", load, seed=number)
            seconds.setdefault(side.name, []).extend(trl.step_seconds[warm_up:])
        for ratio in (1, 0):
            ours = run_ours(folder, folder / f"run-{number}-{ratio}", load, ratio, seed=number)
            seconds.setdefault(f"roll, ratio {ratio}", []).extend(ours.column("time/step", warm_up))
    return throughput_figures(load.samples, seconds)


def throughput_figures(samples: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Step times by side as samples a second, and those of `roll` over TRL's best."""
    rates = {name: samples / statistics.median(values) for name, values in seconds.items()}
    best_trl = max(rate for name, rate in rates.items() if name.startswith("trl"))
    return {
        "samples_per_step": samples,
        "timed_steps": {name: len(values) for name, values in seconds.items()},
        "samples_per_second": {name: round(rate, 1) for name, rate in rates.items()},
        "over_best_trl": {name: round(rate / best_trl, 3) for name, rate in rates.items() if name.startswith("roll")},
    }


def measure_learning(
    folder: Path, rounds: int, target: float, longest: int, eval_steps: int, side: TrlSide
) -> dict[str, Any]:
    """Seconds of training until the first greedy evaluation of at least ``target``, one seed per round."""
    load = Load(steps=longest, prompts=64, response_length=4, forced=False, eval_steps=eval_steps)
    sides: dict[str, Callable[[int], list[Evaluation]]] = {
        side.name: lambda seed: run_trl(side, folder, folder / "trl.json", load, seed, target).evaluations,
        "roll, ratio 1": lambda seed: run_ours(folder, folder / f"learn-{seed}", load, 1, seed).evaluations(DOMAIN),
    }
    reached: dict[str, list[Evaluation | None]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in sides.items():
            reached[name].append(first_at_least(run(number), target))
    return learning_figures(target, reached)


def first_at_least(evaluations: Sequence[Evaluation], target: float) -> Evaluation | None:
    """The first evaluation that reaches the target, if one does."""
    return next((each for each in evaluations if each.accuracy >= target), None)


def learning_figures(target: float, reached: Mapping[str, Sequence[Evaluation | None]]) -> dict[str, Any]:
    """Seconds and steps of each seed (null: not reached), and the ratio of their medians where all seeds reached it."""
    figures: dict[str, Any] = {"target": target}
    medians: dict[str, float] = {}
    for name, ends in reached.items():
        figures[name] = {
            "seconds": [end and round(end.seconds, 1) for end in ends],
            "steps": [end and end.step for end in ends],
        }
        if all(ends):
            medians[name] = statistics.median(end.seconds for end in ends if end)
    ours = [name for name in medians if name.startswith("roll")]
    theirs = [name for name in medians if name.startswith("trl")]
    if ours and theirs:
        figures["roll_over_trl"] = round(medians[ours[0]] / medians[theirs[0]], 3)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["throughput", "learning", "both"], default="both")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each side")
    parser.add_argument("--steps", type=int, default=10, help="timed steps of a throughput run")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--bf16", action="store_true", help="mixed precision in the throughput part, on both sides")
    parser.add_argument("--target", type=float, default=0.85, help="accuracy to learn")
    parser.add_argument("--longest", type=int, default=60, help="most steps of a learning run")
    parser.add_argument("--eval-steps", type=int, default=1, help="steps between greedy evaluations")
    parser.add_argument("--trl-processes", type=int, default=1, help="of TRL in the learning part")
    parser.add_argument("--trl-threads", type=int, default=2, help="of each TRL process in the learning part")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_task(folder)
        if arguments.part != "learning":
            figures = measure_throughput(folder, arguments.rounds, arguments.steps, arguments.warm_up, arguments.bf16)
            print(json.dumps({"benchmark": "trl_comparison/throughput", "bf16": arguments.bf16, **figures}), flush=True)
        if arguments.part != "throughput":
            side = TrlSide(arguments.trl_processes, arguments.trl_threads)
            figures = measure_learning(
                folder, arguments.rounds, arguments.target, arguments.longest, arguments.eval_steps, side
            )
            print(json.dumps({"benchmark": "trl_comparison/learning", **figures}), flush=True)


if __name__ == "__main__":
    main()

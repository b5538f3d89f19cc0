"""Compare the pipeline with TRL's `GRPOTrainer` on two CPU cores: samples a second, and time to learn the quick start.

Both sides have the same model, prompts, group size, lengths, loss and optimizer, and the same two cores. TRL runs in
three ways: as one process with one thread (small matrices gain little from a second), as one with two, and as two
data-parallel processes with one each. A process trains on its whole batch at once, or on 64 samples, whose activations
fit a core's caches. The pipeline runs with one trainer rank or with two beside one engine, each a process of one
thread. Sides take turns, each in processes of its own; start-up and the first steps do not count. In the part `waiting`
each reward waits without computing (log-normal, median 50 ms, 99th percentile 1 s; drawn alike on both sides), on TRL's
side all of a batch at once. Prints one JSON line per part; ratios are against the fastest TRL of that part.

    python benchmarks/trl_comparison.py [--parts throughput waiting learning] [--rounds 2]
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
    micro_batch: int | None = None
    """Samples that a process trains on at once; None: its whole batch."""

    @property
    def name(self) -> str:
        at_once = "all samples" if self.micro_batch is None else f"{self.micro_batch} samples"
        return f"trl, {self.processes} process(es) x {self.threads} thread(s), {at_once} at once"


@dataclass(frozen=True)
class RollSide:
    """One way to give the pipeline two cores: trainer ranks and an engine, each with one thread."""

    ratio: float
    ranks: int
    streams: bool = False
    """True if groups are trained on as they finish."""

    @property
    def name(self) -> str:
        return f"roll, ratio {self.ratio}, {self.ranks} rank(s)" + (", streaming" if self.streams else "")


MICRO_BATCH = 64
TRL_SIDES = (
    TrlSide(1, 1, MICRO_BATCH),
    TrlSide(1, 2),
    TrlSide(1, 2, MICRO_BATCH),
    TrlSide(2, 1),
    TrlSide(2, 1, MICRO_BATCH),
)
STREAMING_SIDES = (RollSide(0, 1, True), RollSide(1, 1, True))
ROLL_SIDES = (RollSide(1, 1), RollSide(1, 2), RollSide(0, 1), *STREAMING_SIDES, RollSide(1, 2, True))
WAITING_SIDES = (RollSide(1, 1), RollSide(2, 1), RollSide(0, 1), *STREAMING_SIDES)
"""With waiting rewards the cores are idle, so groups in flight matter, not ranks."""


@dataclass(frozen=True)
class Load:
    """Content of one training step, on every side."""

    steps: int
    prompts: int
    response_length: int
    forced: bool
    """True if every response has its full length."""
    eval_steps: int = 0
    bf16: bool = False
    """True if training computes in bfloat16 on float32 weights; else all is float32."""
    waits: bool = False
    """True if rewards wait."""

    @property
    def samples(self) -> int:
        return self.prompts * GROUP_SIZE


@dataclass(frozen=True)
class TrlRun:
    """Results that the TRL process wrote."""

    step_seconds: list[float]
    evaluations: list[Evaluation]


def run_trl(side: TrlSide, task: Path, out: Path, load: Load, seed: int, stop_at: float = 2.0) -> TrlRun:
    """Run one training with TRL."""
    options: dict[str, Any] = {
        "--task": task,
        "--out": out,
        "--steps": load.steps,
        "--prompts": load.prompts,
        "--group-size": GROUP_SIZE,
        "--response-length": load.response_length,
        "--micro-batch": side.micro_batch or load.samples // side.processes,
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
    command += ["--waits"] if load.waits else []
    run_command(command, {"OMP_NUM_THREADS": str(side.threads)})
    written = json.loads(out.read_text())
    return TrlRun(written["step_seconds"], [Evaluation(*each) for each in written["evaluations"]])


def run_ours(side: RollSide, task: Path, out: Path, load: Load, seed: int) -> PipelineRun:
    """Run one training with the pipeline. The other hyper-parameters are those of the quick start's YAML."""
    overrides: dict[str, Any] = {
        "seed": seed,
        "async_generation_ratio": side.ratio,
        "max_steps": load.steps,
        "rollout_batch_size": load.prompts,
        "num_return_sequences_in_group": GROUP_SIZE,
        "response_length": load.response_length,
        "cluster.num_devices_per_node": side.ranks + 1,
        "actor_train.device_mapping": list(range(side.ranks)),
        "actor_infer.device_mapping": [side.ranks],
        "actor_train.stream_groups": str(side.streams).lower(),
        "actor_train.max_tokens_per_microbatch_in_train": MICRO_BATCH * (PROMPT_LENGTH + load.response_length),
    }
    if load.bf16:
        # On both sides: in bfloat16 the backward pass of a CPU's fused attention is several times slower than plain.
        overrides |= {
            "actor_train.model_args.dtype": "bfloat16",
            "actor_train.model_args.attn_implementation": "eager",
        }
    if load.forced:
        overrides |= {
            "actor_infer.generating_args.ignore_eos": "true",
            f"rewards.{DOMAIN}.verifier": "_rewards:waiting_digit_share" if load.waits else "_rewards:digit_share",
        }
    return run_pipeline(task, out, overrides, load.eval_steps)


def measure_throughput(folder: Path, rounds: int, warm_up: int, load: Load) -> dict[str, Any]:
    """Return samples a second of each side, from the median step over all rounds."""
    seconds: dict[str, list[float]] = {}
    for number in range(rounds):
        for side in TRL_SIDES:
            trl = run_trl(side, folder, folder / f"trl-{number}.json", load, seed=number)
            seconds.setdefault(side.name, []).extend(trl.step_seconds[warm_up:])
        for index, own in enumerate(WAITING_SIDES if load.waits else ROLL_SIDES):
            ours = run_ours(own, folder, folder / f"run-{number}-{index}-{load.waits}", load, seed=number)
            seconds.setdefault(own.name, []).extend(ours.column("time/step", warm_up))
    return throughput_figures(load.samples, seconds)


def throughput_figures(samples: int, seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Return step times by side as samples a second, and the ratio of `roll` to TRL's best."""
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
    """Return the seconds of training until the first greedy evaluation of at least ``target``, one seed per round."""
    load = Load(steps=longest, prompts=64, response_length=4, forced=False, eval_steps=eval_steps)
    sides: dict[str, Callable[[int], list[Evaluation]]] = {
        side.name: lambda seed: run_trl(side, folder, folder / "trl.json", load, seed, target).evaluations,
        "roll, ratio 1": lambda seed: run_ours(
            RollSide(1, 1), folder, folder / f"learn-{seed}", load, seed
        ).evaluations(DOMAIN),
    }
    reached: dict[str, list[Evaluation | None]] = {name: [] for name in sides}
    for number in range(rounds):
        for name, run in sides.items():
            reached[name].append(first_at_least(run(number), target))
    return learning_figures(target, reached)


def first_at_least(evaluations: Sequence[Evaluation], target: float) -> Evaluation | None:
    """Return the first evaluation that reaches the target, or None."""
    return next((each for each in evaluations if each.accuracy >= target), None)


def learning_figures(target: float, reached: Mapping[str, Sequence[Evaluation | None]]) -> dict[str, Any]:
    """Return seconds and steps of each seed (null: not reached), and the ratio of medians if all seeds reached it."""
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
    parts = ["throughput", "waiting", "learning"]
    parser.add_argument("--parts", nargs="*", choices=parts, default=parts)
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
        loads = {
            "throughput": Load(
                steps=arguments.steps + arguments.warm_up,
                prompts=32,
                response_length=64,
                forced=True,
                bf16=arguments.bf16,
            ),
            "waiting": Load(
                steps=arguments.steps + arguments.warm_up, prompts=32, response_length=16, forced=True, waits=True
            ),
        }
        for part, load in loads.items():
            if part in arguments.parts:
                figures = measure_throughput(folder, arguments.rounds, arguments.warm_up, load)
                line = {"benchmark": f"trl_comparison/{part}", "bf16": load.bf16, **figures}
                print(json.dumps(line), flush=True)
        if "learning" in arguments.parts:
            side = TrlSide(arguments.trl_processes, arguments.trl_threads)
            figures = measure_learning(
                folder, arguments.rounds, arguments.target, arguments.longest, arguments.eval_steps, side
            )
            print(json.dumps({"benchmark": "trl_comparison/learning", **figures}), flush=True)


if __name__ == "__main__":
    main()

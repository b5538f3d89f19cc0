"""Measure how stale samples affect learning, and how each policy loss handles them.

Part `exact`: bias and variance of every loss's gradient against lag, on a problem small enough to be summed exactly.
Part `training`: the quick start's model trained with samples of policies 0, 2 and 8 steps old, two seeds each. Finished
runs are kept in the output folder and not repeated, so you can stop and restart the script. Prints one JSON line per
part, and draws the figures with `--figures FOLDER`.

    python benchmarks/offpolicy_lab.py [--part exact|training|both] [--out output/offpolicy_lab]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from _exact_problem import GradientQuality, Method, gradient_table
from _lagged_training import LaggedResult, LaggedRun, train_lagged
from _pipeline import make_task

from roll.algorithms.correction import parse_correction
from roll.algorithms.losses.base import POLICY_LOSSES, make_policy_loss

EXACT_LAGS = (0, 1, 2, 4, 8, 16, 32)
UNCORRECTED = "ppo, recomputed"
METHODS: dict[str, tuple[str, str]] = {
    "vanilla": ("vanilla", "behaviour"),
    UNCORRECTED: ("ppo", "proximal"),
    "ppo": ("ppo", "behaviour"),
    "tis": ("tis", "behaviour"),
    "topr": ("topr", "behaviour"),
    "cispo": ("cispo", "behaviour"),
    "kimi15": ("kimi15", "behaviour"),
}
"""Name in tables -> policy loss and old policy, for the trained methods."""


def exact_methods() -> dict[str, Method]:
    """Return every registered loss with its own old policy, PPO on recomputed log-probabilities, weighted `vanilla`.

    Losses that select tokens of a batch are left out: their gradient has no expectation for a single response.
    """
    methods = {}
    for name in POLICY_LOSSES.names():
        loss = make_policy_loss(name)
        if loss.requirements.select is not None:
            continue
        methods[name] = Method(loss, "proximal" if loss.requirements.needs_proximal else "behaviour")
    methods[UNCORRECTED] = Method(make_policy_loss("ppo"), "proximal")
    for level in ("token", "sequence"):
        for name, upper in (("no bound", 1e30), ("at most 2", 2.0)):
            weight = {"weight": {"level": level, "mode": "truncate", "upper": upper}}
            methods[f"{level} weight, {name}"] = Method(
                make_policy_loss("vanilla"), correction=parse_correction(weight)
            )
    return methods


def training_runs(arguments: argparse.Namespace) -> Iterator[LaggedRun]:
    """Yield methods x lags x seeds, the seeds outermost, so that a stopped session leaves complete tables."""
    for seed in range(arguments.seeds):
        for lag in arguments.lags:
            for method, (variant, old_policy) in METHODS.items():
                yield LaggedRun(
                    method=method,
                    pg_variant=variant,
                    old_policy=old_policy,
                    lag=lag,
                    seed=seed,
                    steps=arguments.steps,
                    prompts=arguments.prompts,
                    group_size=8,
                    learning_rate=arguments.learning_rate,
                    updates_per_batch=arguments.updates_per_batch,
                    eval_steps=arguments.eval_steps,
                )


def do_training(runs: list[LaggedRun], out: Path, workers: int) -> dict[str, LaggedResult]:
    """Return results by name of the run; finished runs are read from the folder."""
    task = out / "task"
    if not (task / "data" / "val.jsonl").exists():
        task.mkdir(parents=True, exist_ok=True)
        make_task(task)
    missing = [run for run in runs if not _file(out, run).exists()]
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        waiting = {pool.submit(_one, run, task, out): run for run in missing}
        for done, future in enumerate(as_completed(waiting), 1):
            run, seconds = waiting[future], future.result()
            print(f"{done}/{len(missing)} {run.name}: {seconds:.0f} s", file=sys.stderr, flush=True)
    return {run.name: LaggedResult(**json.loads(_file(out, run).read_text())) for run in runs}


def _one(run: LaggedRun, task: Path, out: Path) -> float:
    """Do one run; its file appears complete or not at all."""
    started = time.monotonic()
    result = train_lagged(run, task / "model", task / "data")
    half_done = _file(out, run).with_suffix(".part")
    half_done.write_text(json.dumps(asdict(result)))
    half_done.replace(_file(out, run))
    return time.monotonic() - started


def _file(out: Path, run: LaggedRun) -> Path:
    return out / f"{run.name.replace(' ', '_')}.json"


def training_table(runs: list[LaggedRun], results: dict[str, LaggedResult]) -> dict[str, dict[int, dict[str, float]]]:
    """Return method -> lag -> means over the seeds: final accuracy, accuracy over all evaluations, worst final one."""
    table: dict[str, dict[int, dict[str, float]]] = {}
    for method in METHODS:
        for lag in sorted({run.lag for run in runs}):
            found = [results[run.name] for run in runs if (run.method, run.lag) == (method, lag)]
            ends = [result.accuracy[-1] for result in found]
            table.setdefault(method, {})[lag] = {
                "end": statistics.mean(ends),
                "worst_end": min(ends),
                "mean": statistics.mean(statistics.mean(result.accuracy[1:]) for result in found),
                "ess": statistics.mean(statistics.mean(result.ess) for result in found),
            }
    return table


def draw_exact(table: dict[str, dict[int, GradientQuality]], path: Path) -> None:
    """Draw bias and deviation against lag; lags stand at equal distances, biases above 3 are cut off."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(12, 4.8), sharex=True)
    colours = pyplot.get_cmap("tab20").colors
    for axis, measure in zip(axes, ("bias", "deviation"), strict=True):
        for number, (name, row) in enumerate(table.items()):
            values = [vars(each)[measure] for each in row.values()]
            axis.plot(range(len(row)), values, _style(number), color=colours[number], label=name, markersize=4)
        axis.set_xticks(range(len(row)), [str(lag) for lag in row])
        axis.set(xlabel="lag in steps of gradient ascent", title=f"{measure} / length of the true gradient")
    axes[0].set_ylim(0, 3)
    axes[1].legend(fontsize=7, ncols=2)
    _save(pyplot, figure, path)


def draw_training(table: dict[str, dict[int, dict[str, float]]], path: Path) -> None:
    """Draw accuracy against lag."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2), sharex=True)
    for axis, (measure, title) in zip(
        axes, (("end", "greedy accuracy at the end"), ("mean", "greedy accuracy, mean over the training")), strict=True
    ):
        for number, (name, row) in enumerate(table.items()):
            axis.plot(list(row), [each[measure] for each in row.values()], _style(number), label=name, markersize=5)
        axis.set(xlabel="lag in training steps", title=title, ylim=(0, 1))
    axes[0].legend(fontsize=8)
    _save(pyplot, figure, path)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "roll"
    from matplotlib import pyplot

    return pyplot


def _style(number: int) -> str:
    return ("o-", "s--", "^-.", "v:")[number % 4]


def _save(pyplot: Any, figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=["exact", "training", "both"], default="both")
    parser.add_argument("--out", type=Path, default=Path("output/offpolicy_lab"))
    parser.add_argument("--figures", type=Path, help="folder that gets the figures (needs matplotlib)")
    parser.add_argument("--step-size", type=float, default=3.0, help="of the exact gradient ascent")
    parser.add_argument("--problems", type=int, default=5, help="random problems of the exact part")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 2, 8])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60, help="training steps of a run")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step, 8 samples each")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--updates-per-batch", type=int, default=1)
    parser.add_argument("--eval-steps", type=int, default=5)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="runs at a time, one thread each")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.part != "training":
        exact = gradient_table(exact_methods(), EXACT_LAGS, arguments.step_size, arguments.problems)
        rows = {name: {lag: asdict(quality) for lag, quality in row.items()} for name, row in exact.items()}
        print(json.dumps({"benchmark": "offpolicy_lab/exact", "losses": rows}), flush=True)
        if arguments.figures:
            draw_exact(exact, arguments.figures / "off_policy_gradients.svg")
    if arguments.part != "exact":
        runs = list(training_runs(arguments))
        table = training_table(runs, do_training(runs, arguments.out, arguments.workers))
        print(json.dumps({"benchmark": "offpolicy_lab/training", "methods": table}), flush=True)
        if arguments.figures:
            draw_training(table, arguments.figures / "off_policy_training.svg")


if __name__ == "__main__":
    main()

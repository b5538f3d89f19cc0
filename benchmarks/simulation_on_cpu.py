"""Compare `roll simulate` with real CPU runs: quick start, long-tailed rewards, FrozenLake.

In each world, runs at ratio 0 and 1 calibrate. Predicted are other ratios, half of the batch, and streaming; a
prediction reads nothing of its own runs but their configuration. Measured is the median over the rounds of a run's mean
step (from the third step on). In a round each setting runs once, so that all share what else the machine does.
`predicted` draws lengths and latencies from the calibrated inputs (the mean of four draws); `replayed` takes those of
the groups that a run at ratio 1 recorded, and ends when these end. At ratio r nothing is generated during the last r
steps of a run: these are left out of the measured steps, but not of those that a replay, which has such steps too, is
compared with. The longest of long-tailed waits differ by chance between one dozen steps and another, so with these only
the replay shows whether schedule and speeds are right.

Bounded: no run is started after `--minutes`; the settings of which a round is missing are named. With `--keep`, runs
that ended before are taken, so that a comparison can be made in several sittings.

    OMP_NUM_THREADS=1 python benchmarks/simulation_on_cpu.py [--worlds quickstart,tail] [--engine vllm] [--keep RUNS]
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from _pipeline import QUICKSTART, ROOT, make_task, run_command, run_file

from roll.cli.simulate import ANEW, simulated_config
from roll.simulation.calibration import calibrated
from roll.simulation.inputs import Inputs
from roll.simulation.replay import recorded_groups, steps_of
from roll.simulation.run import simulate

WITHIN = 0.15
SIMULATED_STEPS, DRAWS = 32, 4
LAKE = ROOT / "examples" / "frozen_lake-tiny-cpu"
CALIBRATING = ("ratio 0", "ratio 1")
PREDICTED = ("ratio 0.5", "ratio 2", "half the batch", "streaming")


@dataclass(frozen=True)
class World:
    """A configuration that runs in seconds a step on two cores."""

    file: Path
    make: Callable[[Path], None]
    """Makes model and data in a folder."""
    settings: Callable[[Path], Mapping[str, Any]]
    """Keys to replace, given that folder."""
    batch: int
    """Groups of a step."""


def quick_start(folder: Path) -> dict[str, Any]:
    """Return the keys of the quick start without validation."""
    return {
        "pretrain": folder / "model",
        "actor_train.data_args.file_name": folder / "data" / "train.jsonl",
        "validation": "null",
    }


def long_tail(folder: Path) -> dict[str, Any]:
    """Return the keys of a quick start whose rewards wait: median 50 ms, 99th percentile 1 s."""
    return {**quick_start(folder), "rewards.addition.verifier": "_rewards:waiting_digit_share"}


def make_lake_player(folder: Path) -> None:
    """Make the model of the FrozenLake example."""
    run_command([sys.executable, str(LAKE / "make_model.py"), "--out", str(folder / "model")], {})


WORLDS = {
    "quickstart": World(QUICKSTART / "rlvr.yaml", make_task, quick_start, 64),
    "tail": World(QUICKSTART / "rlvr.yaml", make_task, long_tail, 64),
    "lake": World(
        LAKE / "agentic.yaml",
        make_lake_player,
        lambda folder: {"pretrain": folder / "model", "val_env_manager": "null"},
        16,
    ),
}


def settings_of(world: World, name: str) -> dict[str, Any]:
    """Return the keys of a setting."""
    kind, _, value = name.partition(" ")
    if kind == "ratio":
        return {"async_generation_ratio": value}
    if kind == "half":
        return {"async_generation_ratio": 1, "rollout_batch_size": world.batch // 2}
    return {"async_generation_ratio": 0, "actor_train.stream_groups": "true"}


def run(world: World, folder: Path, name: str, out: Path, arguments: argparse.Namespace) -> None:
    """Run a setting once, into the folder ``out``."""
    run_file(
        world.file,
        out,
        {
            **world.settings(folder),
            "output_dir": out,
            "max_steps": arguments.steps,
            "eval_steps": 0,
            "save_steps": 0,
            "track_with": "[]",
            "logging_steps": 1000,
            "cluster.cpu_threads_per_device": 1,
            "actor_infer.strategy_args.strategy_name": arguments.engine,
            **settings_of(world, name),
        },
    )


def ended_well(out: Path) -> bool:
    """Return true if there is a whole run in the folder."""
    summary = out / "summary.json"
    return summary.is_file() and json.loads(summary.read_text())["status"] == "success"


def mean_step(out: Path, left_out: int) -> float:
    """Return the mean step of a run from the third one on, in seconds, without the last ``left_out``."""
    steps = steps_of(out)
    return fmean(each["time/step"] for each in steps[: len(steps) - left_out])


def compare(name: str, runs: Mapping[str, list[Path]]) -> list[list[bool]]:
    """Print the rows of a world; return of each prediction whether it and its replay are within 15 %."""
    shown = "ratio 1"
    calibrating = [out for each in CALIBRATING for out in runs[each]]
    config = simulated_config(str(runs[shown][0] / "config.yaml"), ANEW)
    inputs, notes = calibrated(config, Inputs(), calibrating)
    known = (f"{origin} {', '.join(values)}" for origin, values in inputs.known().items())
    print(*notes, *known, sep="\n", file=sys.stderr, flush=True)
    groups = recorded_groups(runs[shown][-1])
    close = []
    for setting in (*CALIBRATING, *PREDICTED):
        if not runs.get(setting):
            continue
        own = simulated_config(str(runs[setting][0] / "config.yaml"), ANEW)
        ending = math.ceil(own.async_generation_ratio)
        steady, whole = ([mean_step(out, left_out) for out in runs[setting]] for left_out in (ending, 0))
        cells = [name, setting + (" (fitted)" if setting in CALIBRATING else "")]
        cells += [f"{median(steady):.3g}", f"{min(steady):.3g}-{max(steady):.3g}"]
        within = []
        drawn = [simulate(own, inputs, steps=SIMULATED_STEPS, seed=seed).step_seconds for seed in range(DRAWS)]
        for simulated, steps in (
            (fmean(drawn), steady),
            (simulate(own, inputs, replayed=groups).step_seconds, whole),
        ):
            off = simulated / median(steps) - 1
            cells.append(f"{simulated:.3g} ({off:+.0%})")
            within.append(abs(off) <= WITHIN)
        if setting not in CALIBRATING:
            close.append(within)
        print(f"| {' | '.join(cells)} |", flush=True)
    return close


def main() -> None:
    """Run all settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", default=",".join(WORLDS), help="some of quickstart, tail, lake")
    parser.add_argument("--engine", default="hf_infer", choices=["hf_infer", "vllm"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--minutes", type=float, default=60.0, help="no run is started after this time")
    parser.add_argument("--keep", type=Path, help="keep the runs in this folder, and take those that ended there")
    arguments = parser.parse_args()
    began, close, missing = time.monotonic(), [], []
    print("| world | setting | measured s (median) | range | predicted s | replayed s |\n|---|---|---|---|---|---|")
    for number, name in enumerate(arguments.worlds.split(","), 1):
        share = arguments.minutes * 60 * number / len(arguments.worlds.split(","))
        with nullcontext(arguments.keep) if arguments.keep else tempfile.TemporaryDirectory() as place:
            folder, world = Path(place) / name, WORLDS[name]
            folder.mkdir(parents=True, exist_ok=True)
            world.make(folder)
            runs: dict[str, list[Path]] = defaultdict(list)
            for round_number in range(arguments.rounds):
                for setting in (*CALIBRATING, *PREDICTED):
                    out = folder / f"{setting.replace(' ', '-')}-{round_number}"
                    in_time = time.monotonic() - began <= share or (round_number == 0 and setting in CALIBRATING)
                    if not ended_well(out) and in_time:
                        shutil.rmtree(out, ignore_errors=True)  # what a broken-off sitting left
                        run(world, folder, setting, out, arguments)
                    if ended_well(out):
                        runs[setting].append(out)
                    else:
                        missing.append(f"{name}, {setting}, round {round_number + 1}")
            close += compare(name, runs)
    for number, kind in enumerate(("predicted", "replayed")):
        print(f"{kind} within {WITHIN:.0%}: {sum(each[number] for each in close)} of {len(close)}")
    if missing:
        print(f"no time for: {'; '.join(missing)}")
    print(f"{(time.monotonic() - began) / 60:.0f} minutes")


if __name__ == "__main__":
    main()

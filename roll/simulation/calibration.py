"""Calibration: simulation inputs measured from the files of real runs, or fitted until a simulation matches them.

Reads `config.yaml`, `metrics.jsonl` and `groups.jsonl` (of earlier versions: `samples.jsonl`), which every run writes.
Lengths, latencies, times of weight updates and those of training steps are used as measured. Speeds of engine and
trainer, the driver's times and, on a CPU, the slowdown by other work are fitted (`fit.py`): busy times depend on how
many requests ran at once and on what else used the cores, so the run is simulated until its times match.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, starmap
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

import numpy as np

from roll.check.config import read_config
from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.plugins import problem
from roll.configs.run import ImageConfig, PipelineConfig, PromptConfig
from roll.pipeline.algorithm import build_algorithms
from roll.pipeline.streaming import least_groups
from roll.simulation.costs import Tokens, micro_batches, shape_of
from roll.simulation.fit import ROUNDS, Observed, fitted
from roll.simulation.inputs import LARGEST, Inputs, is_number, with_value
from roll.simulation.replay import all_numbers, lines_of, recorded_groups, validation_seconds
from roll.simulation.run import LEAST_STEPS, WARM_UP_STEPS
from roll.simulation.workload import GroupWork
from roll.tracking.run_directory import RunDirectory

QUANTILES = 129
"""Number of quantiles that represent a distribution of lengths."""
SLOW = 0.85
"""Speed of a replica over that of a usual one, below which it counts as slow if it is the slowest in most steps."""
LEAST_FIXED = 0.1
"""Share of the trainer's time that does not grow with tokens, below which it is not told apart."""
FEWEST_MICRO_BATCHES = 4
"""Micro-batches of a step, below which its fixed time is not counted as theirs."""
FITTED_STEPS = 32
"""Last steps of a run that are replayed to fit speeds."""
NEEDED = ("time/step", "idle/actor_infer", "idle/actor_train", "response/tokens", "tokens_per_second/actor_train")
"""Metrics that a step must have to be used."""
TOGETHER = 1.2
"""Time that verifiers took over that in which their workers worked, above which a worker judges several responses at
once."""
SLOW_WAIT = 0.9
"""Quantile of the waits of groups that, with their median, tells how much latencies vary."""
FORWARD_SHARE = 0.25
"""Assumed time of a log-probability pass over that of training, if a run has recorded none of its own."""
WORKER_TOTALS = tuple(f"env_workers/{name}" for name in ("steps", "restarts", "retired", "quarantined"))
"""Totals of the environment workers: turns, and what makes them start another process."""
PARTS_OF_TRAINER = ("forward", "forward_backward", "optimizer")
"""Parts of the trainer's time that a run records."""


def calibrated(
    config: PipelineConfig, inputs: Inputs, folders: Sequence[Path], rounds: int = ROUNDS
) -> tuple[Inputs, list[str]]:
    """Return inputs calibrated on the runs in ``folders``, and notes on the result as text.

    Lengths and weight-update times are measured on the last run; speeds are fitted to all runs. Inputs that the user
    gave are not changed. Raises `ConfigError` if a folder holds no run, or a run of another model or kind of device.
    """
    found = [_observed(folder) for folder in folders]
    notes = [
        note for folder, (run, _) in zip(folders, found, strict=True) for note in _compared(config, run.config, folder)
    ]
    observed, records = found[-1]
    given = [path for path, _ in inputs.told() if inputs.origin(path) == "given"]
    if config.cluster.device == "cpu" and (threads := list(filter(None, starmap(_engine_threads, found)))):
        # Where fewer others compute, an engine waits less for cores.
        inputs = with_value(inputs, "engine.threads", max(1.0, *threads), "measured")
    inputs, lines = fitted(
        _measured(observed.config, inputs, records, folders[-1]), [each for each, _ in found], rounds
    )
    if given:
        notes.append(f"given, and so not taken from a run: {', '.join(given)}")
    return inputs, [*notes, *lines]


def _compared(config: PipelineConfig, theirs: PipelineConfig, folder: Path) -> list[str]:
    """Return warnings about acceptable differences between the configuration and the run's.

    Raises `ConfigError` if the kind of device or the model's sizes differ."""
    if theirs.cluster.device != config.cluster.device:
        message = f"it computed on `{theirs.cluster.device}`, and this configuration has `{config.cluster.device}`"
        raise problem(str(folder), message, "calibrate on a run on the same kind of device")
    ours, trained = (replace(shape_of(each, each.actor_train), stored="") for each in (config, theirs))
    if ours != trained:
        models = [derived.model_path(each, each.actor_train) for each in (theirs, config)]
        message = f"it trained {models[0]}, whose sizes are not those of {models[1]}"
        raise problem(str(folder), message, "calibrate on a run of the same model")
    pairs = {
        "actor_infer.num_gpus_per_engine": (
            theirs.actor_infer.num_gpus_per_engine,
            config.actor_infer.num_gpus_per_engine,
        )
    }
    for role in ("actor_infer", "actor_train"):
        there, here = vars(theirs)[role], vars(config)[role]
        pairs[f"{role}.model_args.dtype"] = (there.model_args.dtype, here.model_args.dtype)
        pairs[f"{role}.strategy_args.strategy_name"] = (
            there.strategy_args.strategy_name,
            here.strategy_args.strategy_name,
        )
    return [
        f"{folder} had {path} {there}, not {here}: its speeds may not hold"
        for path, (there, here) in pairs.items()
        if there != here
    ]


def _observed(folder: Path) -> tuple[Observed, list[dict[str, Any]]]:
    run = RunDirectory(folder)
    if not run.metrics.is_file() or not run.config.is_file():
        raise problem(str(folder), "there is no run in this folder", "give one with config.yaml and metrics.jsonl")
    config = read_config(run.config)
    if not isinstance(config, PipelineConfig):
        raise problem(str(folder), f"a run of `{config.pipeline}` has no rollouts", "give a run of `rlvr` or `agentic`")
    if isinstance(config, ImageConfig):
        raise problem(str(folder), "pictures are not simulated yet", "give a run of `rlvr` or `agentic`")
    records = [each for each in lines_of(run.metrics) if is_number(each.get("step")) and each["step"] > WARM_UP_STEPS]
    whole = [each for each in records if all(is_number(each.get(name)) for name in NEEDED)]
    if len(whole) < LEAST_STEPS:
        message = f"it has {len(whole)} usable steps after the first {WARM_UP_STEPS}, and {LEAST_STEPS} are needed"
        lacking = [name for name in NEEDED if sum(is_number(each.get(name)) for each in records) < LEAST_STEPS]
        if len(records) >= LEAST_STEPS:
            message += f"; no number in the others: {', '.join(lacking or NEEDED)}"
        raise problem(str(folder), message, "let the run take more steps, or give another run")
    records, works = whole, recorded_groups(folder, FITTED_STEPS)
    sizes, needed = {len(work.responses) for work in works}, (WARM_UP_STEPS + LEAST_STEPS) * config.rollout_batch_size
    if sizes != {derived.group_size(config)} or sum(work.kept for work in works) < needed:
        works = []
    if works:
        whole = [each for each in whole if each["step"] > records[-1]["step"] - FITTED_STEPS + WARM_UP_STEPS]
    calm = [each for each in whole if not validation_seconds(each)]
    if len(calm) < len(whole):  # the rollouts of some groups waited for a validation, which is not simulated
        works = [replace(work, seconds=None) for work in works]
    usual = calm if len(calm) >= LEAST_STEPS else whole
    # If nearly all steps have a validation, its time is taken out of them.
    beside = [validation_seconds(each) for each in usual]
    steps = [each["time/step"] - seconds for each, seconds in zip(usual, beside, strict=True)]
    generating = [
        max(0.0, (1 - each["idle/actor_infer"]) * each["time/step"] - seconds)
        for each, seconds in zip(usual, beside, strict=True)
    ]
    training = [(1 - each["idle/actor_train"]) * each["time/step"] for each in usual]
    middle = fmean if works else median
    busy = {"actor_infer": middle(generating), "actor_train": middle(training)}
    return Observed(config, middle(steps), busy, works), records


def _engine_threads(run: Observed, records: Sequence[Mapping[str, Any]]) -> float:
    """Return the cores that a replica's processes occupied while it generated, for validations too; 0 if unrecorded."""
    known = [each for each in records if is_number(each.get("cpu_seconds/actor_infer"))]
    busy = sum((1 - each["idle/actor_infer"]) * each["time/step"] for each in known)
    used = sum(each["cpu_seconds/actor_infer"] for each in known)
    return used / busy / derived.engine_replicas(run.config) if busy else 0.0


def _measured(config: PipelineConfig, inputs: Inputs, records: list[dict[str, Any]], folder: Path) -> Inputs:
    """Return the inputs with the values that a run's files contain directly."""
    samples = derived.samples_per_step(config)
    response = fmean(all_numbers(records, "response/tokens")) / samples
    # The trainer's metric counts every token of its batches, once per epoch.
    trained = [each["tokens_per_second/actor_train"] * each["time/step"] / config.ppo_epochs for each in records]
    prompt = max(0.0, fmean(trained) / samples - response)
    inputs = with_value(inputs, "lengths.prompt", prompt, "measured")
    groups = recorded_groups(folder)
    made = [work.responses for work in groups] or [[length] for length in _logged_lengths(folder)]
    inputs = with_value(inputs, "lengths.quantiles", _quantiles(made, response, scaled=not groups), "measured")
    if (correlation := _correlation(made)) is not None:
        inputs = with_value(inputs, "lengths.correlation", correlation, "measured")
    if groups and config.group_filter != "none":
        dropped = sum(not work.kept for work in groups) / len(groups)
        inputs = with_value(inputs, "filtered_share", min(dropped, LARGEST["filtered_share"]), "measured")
    replicas = derived.engine_replicas(config)
    for name, share in (("gather", 1), ("send", 1), ("fetch", replicas), ("load", replicas)):
        if seconds := all_numbers(records, f"weights/{name}_seconds"):
            inputs = with_value(inputs, f"weight_update.{name}_seconds", median(seconds) / share, "measured")
    inputs = _with_calls_of_update(config, inputs, records)
    if seconds := [each for each in map(validation_seconds, records) if each]:
        inputs = with_value(inputs, "validation.seconds", median(seconds), "measured")
    if (slow := slow_replica(records)) is not None:
        inputs = with_value(inputs, "engine.slowest", 1 / slow[1], "measured")
    inputs = _trainer_measured(config, inputs, records, trained)
    stages = [all_numbers(records, f"time/{stage}") for stage in ("rollout", "advantage")]
    # Where a batch comes in parts, these times are sums over its parts.
    comes_whole = least_groups(config, build_algorithms(config).streams) == config.rollout_batch_size
    of_batch = sum(map(median, stages)) if all(stages) and comes_whole else 0.0
    if of_batch:
        inputs = with_value(inputs, "driver.part_seconds", of_batch, "measured")
    if seconds := all_numbers(records, "cpu_seconds/driver"):
        # These stages compute in threads of the driver's process.
        of_samples = max(0.0, fmean(seconds) - of_batch)
        inputs = with_value(inputs, "driver.sample_seconds", of_samples / samples, "measured")
    if isinstance(config, PromptConfig):
        return _rewards_measured(config, inputs, records, groups)
    return _environments_measured(config, inputs, records, folder)


def _rewards_measured(
    config: PromptConfig, inputs: Inputs, records: Sequence[Mapping[str, Any]], groups: Sequence[GroupWork]
) -> Inputs:
    """Return the inputs with the latencies of rewards.

    If verifiers took clearly more time than that in which their workers worked, a worker judges several responses at
    once, and the latency of a response follows from those of groups, each of which waits for the last of its responses:
    quantile q of a group is quantile q^(1/n) of its n responses. Otherwise a worker judges one after another.
    """
    samples = derived.samples_per_step(config)
    judged = [name for name in config.rewards if all_numbers(records, f"idle/rewards.{name}")]
    if not judged:
        return inputs

    def working(steps: Sequence[Mapping[str, Any]]) -> float:
        return sum(
            config.rewards[name].num_workers
            * fmean(
                (1 - each[f"idle/rewards.{name}"]) * each["time/step"]
                for each in steps
                if is_number(each.get(f"idle/rewards.{name}"))
            )
            for name in judged
        )

    taken, known = 0.0, []
    for before, now in pairwise(records):
        gains = [
            float(now.get(name, 0.0)) - float(before.get(name, 0.0))
            for name in (f"rewards/{each}/seconds" for each in judged)
        ]
        told = all(is_number(now.get(f"idle/rewards.{name}")) for name in judged)
        if told and min(gains) >= 0:  # the totals of a resumed run begin again
            taken += sum(gains)
            known.append(now)
    waits = [work.latencies[0][0] for work in groups if work.latencies[0][0] > 0]
    if known and taken > TOGETHER * len(known) * working(known) and waits:
        middle, high = np.log(np.quantile(waits, (0.5, SLOW_WAIT)))
        scores = [NormalDist().inv_cdf(share ** (1 / derived.group_size(config))) for share in (0.5, SLOW_WAIT)]
        sigma = float(high - middle) / (scores[1] - scores[0])
        inputs = with_value(inputs, "rewards.seconds", math.exp(middle - sigma * scores[0]), "measured")
        return with_value(inputs, "rewards.sigma", sigma, "measured")
    workers = sum(config.rewards[name].num_workers for name in judged)
    for name, number in (("seconds", working(records) / samples), ("sigma", 0.0), ("workers", workers)):
        inputs = with_value(inputs, f"rewards.{name}", number, "measured")
    return inputs


def _environments_measured(
    config: PipelineConfig, inputs: Inputs, records: Sequence[Mapping[str, Any]], folder: Path
) -> Inputs:
    """Return the inputs with turns and latencies of environments, if the run recorded its groups, and with the
    processor time of a turn."""
    used = turns = 0.0
    # At ratio r the environments have nothing to do in the last r steps, while their last turns are counted before.
    for before, now in pairwise(records[: len(records) - math.ceil(config.async_generation_ratio)]):
        if not all(is_number(each.get(name)) for each in (before, now) for name in WORKER_TOTALS):
            continue
        played, *started = (now[name] - before[name] for name in WORKER_TOTALS)
        goes_on = now["step"] == before["step"] + 1 and played > 0 and not any(started)
        if goes_on and is_number(now.get("cpu_seconds/environments")):
            used, turns = used + now["cpu_seconds/environments"], turns + played
    if turns:
        inputs = with_value(inputs, "environments.cpu_seconds", used / turns, "measured")
    episodes = [each for work in recorded_groups(folder) for each in work.latencies]
    logs = [math.log(each[0]) for each in episodes if each[0] > 0]  # the turns of an episode share its wait
    if not logs:
        return inputs
    played = np.log([len(each) for each in episodes])
    measured = {
        "turns": round(math.exp(played.mean())),
        "turns_sigma": float(played.std()),
        "seconds": math.exp(median(logs)),
        "sigma": float(np.std(logs)),
    }
    for name, value in measured.items():
        inputs = with_value(inputs, f"environments.{name}", value, "measured")
    return inputs


def _with_calls_of_update(config: PipelineConfig, inputs: Inputs, records: Sequence[Mapping[str, Any]]) -> Inputs:
    """Return the inputs with the time that a weight update takes beyond its measured phases, as a part of sending."""
    update = inputs.weight_update
    times = [each["time/param_update"] for each in records if is_number(each.get("time/param_update"))
             and not any(name.startswith("val/") for name in each)]  # fmt: skip
    if not times or config.weight_update.in_flight == "drain" or derived.shares_devices(config, "actor_infer"):
        return inputs
    replicas = derived.engine_replicas(config)
    turns = math.ceil(replicas / max(1, int(replicas * config.weight_update.max_unavailable)))
    phases = turns * (update.fetch_seconds + (update.load_seconds or 0.0))
    sent = update.send_seconds or 0.0
    return with_value(inputs, "weight_update.send_seconds", max(sent, median(times) - phases), "measured")


def _trainer_measured(
    config: PipelineConfig, inputs: Inputs, records: Sequence[Mapping[str, Any]], trained: Sequence[float]
) -> Inputs:
    """Return the inputs with the trainer's times per token, and its fixed ones. ``trained``: tokens of each step."""
    ranks = len(parse_device_mapping(config.actor_train.device_mapping)) ** inputs.trainer.exponent
    gather = inputs.weight_update.gather_seconds or 0.0
    each_busy = [(1 - each["idle/actor_train"]) * each["time/step"] - gather for each in records]
    parts = {part: all_numbers(records, f"seconds/actor_train/{part}") for part in PARTS_OF_TRAINER}
    told = len(parts["forward_backward"]) == len(records)  # earlier versions did not record them
    each_pass = parts["forward_backward"] if told else each_busy
    tokens, of_step = fmean(trained) * config.ppo_epochs, 0
    if not config.actor_train.use_dynamic_batching_in_train:
        samples = derived.samples_per_step(config)
        of_step = micro_batches(config.actor_train, Tokens([fmean(trained) / samples] * samples)) * config.ppo_epochs
    if of_step >= FEWEST_MICRO_BATCHES and (fixed := _fixed_seconds(trained, each_pass)):
        inputs = with_value(inputs, "trainer.micro_batch_seconds", fixed / of_step, "fitted")
    token = max(1e-12, fmean(each_pass) - inputs.trainer.micro_batch_seconds * of_step) / tokens * ranks
    forward, fixed_times = token * FORWARD_SHARE, {"step_seconds": 0.0, "optimizer_seconds": 0.0}
    if told:
        passes = parts["forward"]
        forward = fmean(passes) / fmean(trained) * ranks if passes else forward
        updates = derived.optimizer_steps_per_step(config, config.actor_train)
        fixed_times["optimizer_seconds"] = fmean(parts["optimizer"] or [0.0]) / updates
        beside = fmean(each_busy) - sum(map(fmean, filter(None, parts.values())))
        if build_algorithms(config).streams:  # a part has at least one micro-batch
            beside /= max(1.0, fmean(all_numbers(records, "micro_batches/actor_train") or [1.0]))
        fixed_times |= dict.fromkeys(("step_seconds", "part_seconds"), max(0.0, beside))
    elif config.old_logprobs == "recompute" or config.train_infer_correction:
        token -= forward
    before, inputs = inputs, with_value(inputs, "trainer.token_seconds", token, "measured")
    if inputs is not before:  # without recorded times, the time per token includes the fixed ones
        for name, value in {"forward_token_seconds": forward, **fixed_times}.items():
            inputs = with_value(inputs, f"trainer.{name}", value, "measured" if told else "fitted")
    return inputs


def _fixed_seconds(tokens: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the part of the seconds of a step that does not grow with its tokens; 0 if it cannot be told apart."""
    if len(tokens) <= LEAST_STEPS or np.std(tokens) <= 1e-6 * fmean(tokens):
        return 0.0
    columns = np.stack([np.ones(len(tokens)), np.asarray(tokens)], axis=1)
    (fixed, growth), *_ = np.linalg.lstsq(columns, np.asarray(seconds), rcond=None)
    left = np.asarray(seconds) - columns @ [fixed, growth]
    error = math.sqrt(left @ left / (len(tokens) - 2) * np.linalg.inv(columns.T @ columns)[0, 0])
    sure = growth > 0 and fixed > max(2 * error, LEAST_FIXED * fmean(seconds))
    return float(min(fixed, fmean(seconds))) if sure else 0.0


def slow_replica(records: Sequence[Mapping[str, Any]]) -> tuple[int, float] | None:
    """Return the number of a replica that is slower than the others in most steps, and its speed over theirs.

    None if there is none, or the run has not recorded it.
    """
    numbers = [int(number) for number in all_numbers(records, "engine/slowest")]
    if not numbers:
        return None
    number, often = Counter(numbers).most_common(1)[0]
    speeds = [each["engine/slowest_speed"] for each in records if each.get("engine/slowest") == number]
    speed = median(all_numbers([{"speed": each} for each in speeds], "speed") or [1.0])
    return (number, speed) if often > len(numbers) / 2 and 0 < speed < SLOW else None


def _logged_lengths(folder: Path) -> list[float]:
    """Return the response lengths of the logged samples."""
    lengths: list[float] = []
    path = RunDirectory(folder).samples
    if path.is_file():
        for sample in lines_of(path):
            if sample.get("split") == "train" and "tokens" in sample:
                tokens = sample["tokens"]
                sampled = sum(number for number, version in tokens["versions"] if version is not None)
                lengths.append(float(sampled + tokens["left_out"]))
    return lengths


def _quantiles(groups: Sequence[Sequence[float]], mean: float, *, scaled: bool) -> list[float]:
    """Return response lengths at equally spaced quantiles. ``scaled``: with this mean."""
    lengths = [length for group in groups for length in group]
    if len(lengths) < 2 or max(lengths) == 0:
        return [mean, mean]
    drawn = np.quantile(lengths, np.linspace(0, 1, QUANTILES))
    return [float(f"{length:.6g}") for length in drawn * (mean / fmean(lengths) if scaled else 1.0)]


def _correlation(groups: Sequence[Sequence[float]]) -> float | None:
    """Return the correlation of the logarithms of lengths within groups (the intraclass correlation of a one-way
    analysis of variance), between 0 and 1; None if groups are too few, too small, of several sizes or all alike."""
    sizes = {len(each) for each in groups}
    if len(groups) < 2 or len(sizes) > 1 or (size := sizes.pop()) < 2:
        return None
    lengths = np.log(np.maximum(np.asarray(groups), 1))
    within = lengths.var(axis=1, ddof=1).mean()
    between = size * lengths.mean(axis=1).var(ddof=1)
    total = between + (size - 1) * within
    return float(np.clip((between - within) / total, 0, 1)) if total > 0 else None

"""Findings on the causes that slow a run down: idle roles, what they waited for, and other losses of time and samples.

Each finding is based on recorded numbers and names them. They are sorted by the share of time or samples that is lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Any

from roll.algorithms.registry import COMPARE_SCORES
from roll.report.files import RunFiles

LARGE_IDLE = 0.2
SMALL = 0.05
STEPS_OF_WARMING_UP = 1
"""Number of first steps that are left out of means if enough others remain, because they compile and fill caches."""


@dataclass(frozen=True)
class Finding:
    """A finding, with a remedy and its evidence."""

    share: float
    """Lost share of the time or of the samples, 0 to 1."""
    text: str
    remedy: str = ""
    evidence: str = ""


def findings(run: RunFiles) -> list[Finding]:
    """Return all findings, the most costly first."""
    checks = (_waiting, _validation, _publication, _beside_training, _start, _drops, _repairs, _truncated, _no_variance)
    found = [finding for check in checks for finding in check(run)]
    return sorted(found, key=lambda finding: -finding.share)


def settled(run: RunFiles) -> list[dict[str, Any]]:
    """Return the training steps to take means over: all without the first ones, if there are enough."""
    steps = run.training_steps
    return steps[STEPS_OF_WARMING_UP:] if len(steps) > 3 * STEPS_OF_WARMING_UP else steps


def mean_over_time(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a metric, weighted by the time of each step; None if it was never recorded."""
    pairs = [
        (record[name], record["time/step"])
        for record in records
        if record.get(name) is not None and record.get("time/step")
    ]
    seconds = sum(time for _, time in pairs)
    return sum(value * time for value, time in pairs) / seconds if seconds else None


def idle_shares(run: RunFiles) -> dict[str, float]:
    """Return role -> mean idle share."""
    records = settled(run)
    names = dict.fromkeys(name for record in records for name in record if name.startswith("idle/"))
    shares = {name.removeprefix("idle/"): mean_over_time(records, name) for name in names}
    return {role: share for role, share in shares.items() if share is not None}


def _waiting(run: RunFiles) -> Iterator[Finding]:
    idle = idle_shares(run)
    if {"actor_infer", "actor_train"} <= idle.keys():
        share, text, remedy, lane = _who_waits(run, idle["actor_infer"], idle["actor_train"])
        numbers = ", ".join(f"{role} {_percent(share)}" for role, share in idle.items())
        evidence = f"idle/*, steps {_steps(run)}{lane}"
        yield Finding(share, f"{text}; idle on average: {numbers} of a step.", remedy, evidence)


def _who_waits(run: RunFiles, engine: float, trainer: float) -> tuple[float, str, str, str]:
    """Return the lost share, the text, the remedy and further evidence for the idle shares of engine and trainer."""
    larger, smaller = max(engine, trainer), min(engine, trainer)
    if larger < LARGE_IDLE:
        return larger, "Generation and training keep each other busy", "", ""
    if _share_devices(run):
        text = "Engine and trainer share their devices and take turns, so each is idle while the other works"
        remedy = (
            "Give them devices of their own (`device_mapping`) and let generation run ahead (`async_generation_ratio`)."
        )
        return larger, text, remedy, ""
    if smaller < LARGE_IDLE and engine > trainer:
        batches = (
            "larger micro-batches (`per_device_train_batch_size`)"
            if _draws(run)
            else "fewer, larger micro-batches (`max_tokens_per_microbatch_in_train`, where a step has several)"
        )
        remedy = (
            f"Give the trainer more devices (`actor_train.device_mapping`) or {batches}. "
            f"What the engine has to spare can go into more samples per prompt.{_too_far_ahead(run)}"
        )
        return engine, "The engine waits for the trainer: training is the slower side", remedy, ""
    if smaller < LARGE_IDLE:
        shorter = "take fewer denoising steps (`sampling.num_inference_steps`)" if _draws(run) else "shorten responses"
        remedy = (
            "Give the engine more devices or replicas, let generation run further ahead (`async_generation_ratio`), or "
            f"{shorter}."
        )
        return trainer, "The trainer waits for rollouts: generation is the slower side", remedy, ""
    if run.config.get("async_generation_ratio") == 0:
        text = "Engine and trainer take turns, because nothing is generated ahead (ratio 0)"
        remedy = "`async_generation_ratio: 1` lets them work at the same time, with tokens at most one version old."
        return smaller, text, remedy, ""
    judge, busy = _busiest_judge(run)
    if busy > max(LARGE_IDLE, 1 - engine):
        text = f"Engine and trainer both wait, while {judge} worked {_percent(busy)} of the time, more than the engine"
        return smaller, text, "Give it more workers, or make it faster.", f"; timeline, lane {judge}"
    text = "Both wait at times, for something that is neither generation nor training"
    remedy = "Look at the lanes: validation, weight publication, or a driver without a core of its own."
    return smaller, text, remedy, ""


def _draws(run: RunFiles) -> bool:
    return run.config.get("pipeline") == "image"


def _too_far_ahead(run: RunFiles) -> str:
    ratio = run.config.get("async_generation_ratio")
    if not isinstance(ratio, int | float) or ratio <= 1:
        return ""
    return f" Generating {ratio:g} steps ahead only makes tokens older here: `async_generation_ratio: 1` is enough."


def _busiest_judge(run: RunFiles) -> tuple[str, float]:
    """Return the name of the busiest reward or environment lane, and its busy share of the training time."""
    window = run.trace.training_window
    judges = [lane for lane in run.trace.lanes if lane.name.startswith(("rewards.", "environments/"))]
    return max(((lane.label, lane.busy_share(window)) for lane in judges), key=itemgetter(1), default=("", 0.0))


def _validation(run: RunFiles) -> Iterator[Finding]:
    lane = run.trace.lane("validation")
    share = 0.0 if lane is None else lane.busy_share(run.trace.training_window)
    if share > SMALL:
        pause = _settings(run, "validation").get("mode") == "pause"
        effect = "no training group starts meanwhile (`validation.mode: pause`)" if pause else "beside the training"
        yield Finding(
            share if pause else share / 2,
            f"Validation runs for {_percent(share)} of the training time; {effect}.",
            "Validate less often (`eval_steps`), on fewer prompts, or with `validation.mode: overlap`.",
            "timeline, lane validation",
        )


def _publication(run: RunFiles) -> Iterator[Finding]:
    share = _share_of_time(run, "weights/stall_seconds")
    if share > SMALL:
        yield Finding(
            share,
            f"Engines stand still for new weights {_percent(share)} of the time.",
            "Publish less often (`weight_update.interval_steps`), or over a faster transport.",
            f"weights/stall_seconds, steps {_steps(run)}",
        )


def _beside_training(run: RunFiles) -> Iterator[Finding]:
    for stage in ("reference", "teacher", "value", "advantage", "critic"):
        share = _share_of_time(run, f"time/{stage}")
        if share > LARGE_IDLE:
            yield Finding(
                share / 2,
                f"The stage {stage} works for {_percent(share)} of a step's time.",
                "Give its role more devices, or larger micro-batches; stages overlap as long as they share no devices.",
                f"time/{stage}, steps {_steps(run)}",
            )
    share = _share_of_time(run, "actor_logp/wait_seconds")
    if share > LARGE_IDLE:
        yield Finding(
            share / 2,
            f"The trainer waits for log-probabilities of `actor_logp` {_percent(share)} of the time.",
            "Give `actor_logp` more devices or larger micro-batches, or remove it: the trainer then computes them.",
            f"actor_logp/wait_seconds, steps {_steps(run)}",
        )


def _share_of_time(run: RunFiles, name: str) -> float:
    """Return the sum of a metric in seconds, as a share of the training time."""
    records = settled(run)
    seconds = sum(record.get("time/step") or 0.0 for record in records)
    return sum(record.get(name) or 0.0 for record in records) / seconds if seconds else 0.0


def _start(run: RunFiles) -> Iterator[Finding]:
    first, seconds = run.summary.get("first_step_seconds"), run.summary.get("seconds")
    if first and seconds and first / seconds > LARGE_IDLE:
        yield Finding(
            first / seconds / 2,
            f"{_percent(first / seconds)} of the run passed before its first step was done ({first:.0f} s).",
            "That is the start of processes, engines and models; it weighs less in a longer run.",
            "summary.json, first_step_seconds",
        )


def _drops(run: RunFiles) -> Iterator[Finding]:
    ledger = ledger_of(run)
    issued = ledger.get("issued") or 0
    dropped = {name.removeprefix("dropped/"): count for name, count in ledger.items() if name.startswith("dropped/")}
    share = sum(dropped.values()) / issued if issued else 0.0
    if share > SMALL:
        reasons = ", ".join(f"{reason} {count:g}" for reason, count in dropped.items() if count)
        yield Finding(
            share,
            f"{_percent(share)} of the groups were generated for nothing: {reasons}.",
            "`filtered`: easier or harder prompts, so that scores differ. `failed`: see the log. `stale`: the policy "
            "`staleness_policy: wait` drops none.",
            "the ledger",
        )


def _repairs(run: RunFiles) -> Iterator[Finding]:
    restarts = _total(run, "engine/restarts")
    if restarts:
        reissued = _total(run, "engine/reissued")
        yield Finding(
            SMALL,
            f"Engine processes were started again {restarts:g} times; {reissued:g} requests went on elsewhere.",
            "The log says why they died.",
            "engine/restarts",
        )


def _total(run: RunFiles, name: str) -> float:
    """Return the last value of a count that begins again when the run is resumed, with those before each resume."""
    counts = [record.get(name) or 0.0 for record in run.training_steps]
    return sum(before for before, after in pairwise([*counts, 0.0]) if after < before)


def _truncated(run: RunFiles) -> Iterator[Finding]:
    share = mean_over_time(settled(run), "response/truncated_share")
    if share is not None and share > LARGE_IDLE:
        yield Finding(
            share / 2,
            f"{_percent(share)} of the responses met the length limit.",
            "They cost the most and often score nothing: raise `response_length`, or reward brevity.",
            f"response/truncated_share, steps {_steps(run)}",
        )


def _no_variance(run: RunFiles) -> Iterator[Finding]:
    if run.config.get("adv_estimator", "grpo") not in COMPARE_SCORES or run.config.get("distillation"):
        return
    share = mean_over_time(settled(run)[-20:], "reward/zero_variance_groups")
    if share is not None and share > 0.5:
        yield Finding(
            share / 2,
            f"Lately {_percent(share)} of the groups have samples that all score the same; they teach nothing.",
            "Harder (or easier) prompts, more samples per prompt, or `group_filter: zero_variance`.",
            "reward/zero_variance_groups, last steps",
        )


def ledger_of(run: RunFiles) -> dict[str, float]:
    """Return the newest ledger: that of the summary, else that of the last step."""
    if run.summary.get("ledger"):
        return dict(run.summary["ledger"])
    last = run.training_steps[-1] if run.training_steps else {}
    return {name.removeprefix("ledger/"): value for name, value in last.items() if name.startswith("ledger/")}


def _share_devices(run: RunFiles) -> bool:
    mappings = (_settings(run, role).get("device_mapping") for role in ("actor_train", "actor_infer"))
    train, infer = (set(mapping) if isinstance(mapping, list) else set() for mapping in mappings)
    return bool(train & infer)


def _settings(run: RunFiles, name: str) -> Mapping[str, Any]:
    settings = run.config.get(name)
    return settings if isinstance(settings, dict) else {}


def _steps(run: RunFiles) -> str:
    records = settled(run)
    return f"{records[0]['step']} to {records[-1]['step']}" if records else "none"


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"

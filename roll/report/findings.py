"""Findings on what slows a run down: who was idle, what they waited for, and where else time and samples went.

Each finding rests on recorded numbers and names them. Findings are ordered by the share of time or work at stake, so
the first one is the one to look at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from roll.report.files import RunFiles

LARGE_IDLE = 0.2
SMALL = 0.05
STEPS_OF_WARMING_UP = 1
"""Number of first steps left out of means if enough steps remain: they compile and fill caches."""


@dataclass(frozen=True)
class Finding:
    """A finding in one sentence or two, and what could be done."""

    share: float
    """Lost share of the time, or of the samples: 0 to 1."""
    text: str
    remedy: str = ""
    evidence: str = ""


def findings(run: RunFiles) -> list[Finding]:
    """Return all findings, the most costly first."""
    checks = (_waiting, _validation, _publication, _beside_training, _start, _drops, _repairs, _truncated, _no_variance)
    found = [finding for check in checks for finding in check(run)]
    return sorted(found, key=lambda finding: -finding.share)


def settled(run: RunFiles) -> list[dict[str, Any]]:
    """Return the training steps that means are taken over."""
    steps = run.training_steps
    return steps[STEPS_OF_WARMING_UP:] if len(steps) > 3 * STEPS_OF_WARMING_UP else steps


def mean_over_time(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the mean of a share, each step weighted by its time; None if it was never recorded."""
    pairs = [
        (record[name], record["time/step"])
        for record in records
        if record.get(name) is not None and record.get("time/step")
    ]
    seconds = sum(time for _, time in pairs)
    return sum(value * time for value, time in pairs) / seconds if seconds else None


def idle_shares(run: RunFiles) -> dict[str, float]:
    """Return the mean idle share by role."""
    records = settled(run)
    names = dict.fromkeys(name for record in records for name in record if name.startswith("idle/"))
    shares = {name.removeprefix("idle/"): mean_over_time(records, name) for name in names}
    return {role: share for role, share in shares.items() if share is not None}


def _waiting(run: RunFiles) -> Iterator[Finding]:
    """Yield the finding on which role waits for which."""
    idle = idle_shares(run)
    if "actor_infer" not in idle or "actor_train" not in idle:
        return
    engine, trainer = idle["actor_infer"], idle["actor_train"]
    numbers = f"idle on average: {_list(f'{role} {_percent(share)}' for role, share in idle.items())} of a step"
    evidence = f"idle/*, steps {_steps(run)}"
    if max(engine, trainer) < LARGE_IDLE:
        yield Finding(max(engine, trainer), f"Generation and training keep each other busy; {numbers}.", "", evidence)
    elif _share_devices(run):
        yield Finding(
            max(engine, trainer),
            f"Engine and trainer share their devices and take turns, so each is idle while the other works; {numbers}.",
            "Give them devices of their own (`device_mapping`) and let generation run ahead "
            "(`async_generation_ratio`).",
            evidence,
        )
    elif engine >= LARGE_IDLE and trainer >= LARGE_IDLE:
        yield _both_wait(run, numbers, evidence, engine, trainer)
    elif engine > trainer:
        yield Finding(
            engine,
            f"The engine waits for the trainer: training is the slower side; {numbers}.",
            "Give the trainer more devices (`actor_train.device_mapping`) or the engine fewer, larger micro-batches "
            "(`max_tokens_per_microbatch_in_train`, where a step has several) or packed ones (`use_sequence_packing`). "
            f"What the engine has to spare can go into more samples per prompt.{_too_far_ahead(run)}",
            evidence,
        )
    else:
        yield Finding(
            trainer,
            f"The trainer waits for rollouts: generation is the slower side; {numbers}.",
            "Give the engine more devices or replicas, let generation run further ahead (`async_generation_ratio`), or "
            "shorten responses.",
            evidence,
        )


def _too_far_ahead(run: RunFiles) -> str:
    """Return the advice for an engine that waits although generation runs far ahead."""
    ratio = run.config.get("async_generation_ratio")
    if not isinstance(ratio, int | float) or ratio <= 1:
        return ""
    return f" Generating {ratio:g} steps ahead only makes tokens older here: `async_generation_ratio: 1` is enough."


def _both_wait(run: RunFiles, numbers: str, evidence: str, engine: float, trainer: float) -> Finding:
    share = min(engine, trainer)
    if run.config.get("async_generation_ratio") == 0:
        return Finding(
            share,
            f"Engine and trainer take turns, because nothing is generated ahead (ratio 0); {numbers}.",
            "`async_generation_ratio: 1` lets them work at the same time, with tokens at most one version old.",
            evidence,
        )
    judge, busy = _busiest_judge(run)
    if busy > max(LARGE_IDLE, 1 - engine):
        return Finding(
            share,
            f"Engine and trainer both wait, while {judge} worked {_percent(busy)} of the time, more than the engine; "
            f"{numbers}.",
            "Give it more workers, or make it faster.",
            f"{evidence}; timeline, lane {judge}",
        )
    return Finding(
        share,
        f"Both wait at times, for something that is neither generation nor training; {numbers}.",
        "Look at the lanes: validation, weight publication, or a driver without a core of its own.",
        evidence,
    )


def _busiest_judge(run: RunFiles) -> tuple[str, float]:
    """Return the reward, or the environments, that worked most, and the share of the training time."""
    if run.trace is None:
        return "", 0.0
    window = run.trace.training_window
    judges = [lane for lane in run.trace.lanes if lane.name.startswith(("rewards.", "environments/"))]
    shares = [(lane.busy_share(window), lane.label) for lane in judges]
    share, label = max(shares, default=(0.0, ""))
    return label, share


def _validation(run: RunFiles) -> Iterator[Finding]:
    share = _lane_share(run, "validation", "running")
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
    records = settled(run)
    seconds = sum(record.get("time/step") or 0.0 for record in records)
    stalled = sum(record.get("weights/stall_seconds") or 0.0 for record in records)
    if seconds and stalled / seconds > SMALL:
        yield Finding(
            stalled / seconds,
            f"Engines stand still for new weights {_percent(stalled / seconds)} of the time.",
            "Publish less often (`weight_update.interval_steps`), or over a faster transport.",
            f"weights/stall_seconds, steps {_steps(run)}",
        )


def _beside_training(run: RunFiles) -> Iterator[Finding]:
    """Yield findings on the stages of a step other than rollouts and the policy's training."""
    records = settled(run)
    seconds = sum(record.get("time/step") or 0.0 for record in records)
    for stage in ("reference", "value", "advantage", "critic"):
        worked = sum(record.get(f"time/{stage}") or 0.0 for record in records)
        if seconds and worked / seconds > LARGE_IDLE:
            yield Finding(
                worked / seconds / 2,
                f"The stage {stage} works for {_percent(worked / seconds)} of a step's time.",
                "Give its role more devices, or larger micro-batches; stages overlap as long as they share no devices.",
                f"time/{stage}, steps {_steps(run)}",
            )


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
        reasons = _list(f"{reason} {count:g}" for reason, count in dropped.items() if count)
        yield Finding(
            share,
            f"{_percent(share)} of the groups were generated for nothing: {reasons}.",
            "`filtered`: easier or harder prompts, so that scores differ. `failed`: see the log. `stale`: the policy "
            "`staleness_policy: wait` drops none.",
            "the ledger",
        )


def _repairs(run: RunFiles) -> Iterator[Finding]:
    last = run.training_steps[-1] if run.training_steps else {}
    restarts = last.get("engine/restarts") or 0
    if restarts:
        reissued = last.get("engine/reissued") or 0
        yield Finding(
            SMALL,
            f"Engine processes were started again {restarts:g} times; {reissued:g} requests went on elsewhere.",
            "The log says why they died.",
            "engine/restarts",
        )


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
    share = mean_over_time(settled(run)[-20:], "reward/zero_variance_groups")
    if share is not None and share > 0.5:
        yield Finding(
            share / 2,
            f"Lately {_percent(share)} of the groups have samples that all score the same; they teach nothing.",
            "Harder (or easier) prompts, more samples per prompt, or `group_filter: zero_variance`.",
            "reward/zero_variance_groups, last steps",
        )


def ledger_of(run: RunFiles) -> dict[str, float]:
    """Return the newest ledger: that of the summary, else of the last step."""
    if run.summary.get("ledger"):
        return dict(run.summary["ledger"])
    last = run.training_steps[-1] if run.training_steps else {}
    return {name.removeprefix("ledger/"): value for name, value in last.items() if name.startswith("ledger/")}


def _lane_share(run: RunFiles, name: str, state: str) -> float:
    lane = run.trace.lane(name) if run.trace is not None else None
    if lane is None or run.trace is None:
        return 0.0
    start, end = run.trace.training_window
    return lane.seconds((start, end)).get(state, 0.0) / ((end - start) / 1e6) if end > start else 0.0


def _share_devices(run: RunFiles) -> bool:
    """Return True if trainer and engine have a device in common."""
    mappings = [_settings(run, role).get("device_mapping") for role in ("actor_train", "actor_infer")]
    train, infer = (set(mapping) if isinstance(mapping, list) else set() for mapping in mappings)
    return bool(train & infer)


def _settings(run: RunFiles, name: str) -> Mapping[str, Any]:
    settings = run.config.get(name)
    return settings if isinstance(settings, dict) else {}


def _steps(run: RunFiles) -> str:
    records = settled(run)
    return f"{records[0]['step']} to {records[-1]['step']}" if records else "none"


def _list(items: Iterator[str]) -> str:
    return ", ".join(items)


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.1%}"

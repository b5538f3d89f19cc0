"""How well the devices are used: metrics of a training step, from what its processes tell.

Pure functions; `RunRecorder` collects what they are made of. Means over an engine's steps are differences of totals, so
nobody has to look at an engine more often than once in a training step.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any

from roll.check.hardware import peak_flops
from roll.configs.devices import parse_device_mapping
from roll.configs.roles import WorkerConfig
from roll.runtime.usage import Usage


def trainer_usage(role: str, ranks: Sequence[Usage], tflops: float | None) -> dict[str, float]:
    """Return utilisation, memory and times of a trainer, those as means over its ranks. ``tflops``: peak of one of its
    devices; None: by the GPU's name.

    Utilisation (MFU, arXiv 2204.02311) is the model's operations in the time for which the ranks computed, as a share
    of their peak. It is left out if peak or operations are unknown.
    """
    metrics = _memory(role, [rank.memory for rank in ranks])
    if (computed := fmean(rank.seconds for rank in ranks)) > 0:
        forward, optimizer = (
            fmean(vars(rank)[f"{name}_seconds"] for rank in ranks) for name in ("forward", "optimizer")
        )
        trained = computed - forward - optimizer
        parts = {"forward": forward, "forward_backward": trained, "optimizer": optimizer}
        metrics |= {f"seconds/{role}/{name}": seconds for name, seconds in parts.items() if seconds > 0}
    if micro_batches := max(rank.micro_batches for rank in ranks):
        metrics[f"micro_batches/{role}"] = float(micro_batches)
    peak = tflops * 1e12 if tflops is not None else peak_flops(ranks[0].device)
    available = 0.0 if peak is None else peak * sum(rank.seconds for rank in ranks)
    if available and ranks[0].operations:
        metrics[f"mfu/{role}"] = ranks[0].operations / available
    return metrics


def engine_memory(role: str, engines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the memory of the replica that has most, for those that tell."""
    return _memory(role, [engine.get("memory", {}) for engine in engines])


def _memory(role: str, processes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for process in processes for name in process)
    return {f"memory/{role}/{name}": max(process.get(name, 0.0) for process in processes) for name in names}


class CpuSeconds:
    """Turns the processor times of a run's processes (`roll.runtime.usage.cpu_seconds`) into metrics since the last
    call."""

    def __init__(self) -> None:
        self._before: dict[str, dict[Hashable, float]] = {}

    def metrics(self, totals: Mapping[str, Mapping[Hashable, float]]) -> dict[str, float]:
        """Return the processor seconds of each role since the last call. ``totals``: role -> process -> total.

        A new process counts from its start; of one that died, the time after its last report is unknown. A role that is
        new is left out.
        """
        metrics = {}
        for role, now in totals.items():
            if (before := self._before.get(role)) is not None:
                gained = (max(0.0, total - before.get(process, 0.0)) for process, total in now.items())
                metrics[f"cpu_seconds/{role}"] = sum(gained)
            self._before.setdefault(role, {}).update(now)
        return metrics


class EngineLoads:
    """Turns the replicas' cumulative loads (`roll.engines.base.EngineLoad`) into metrics since the last call."""

    def __init__(self) -> None:
        self._before: dict[str, Mapping[str, float]] = {}

    def metrics(self, engines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return means over the steps that the replicas have taken since the last call, and what was counted in them.

        What an engine does not tell is left out. A replica that is new begins at 0.
        """
        gained: dict[str, float] = {}
        for engine in engines:
            load: Mapping[str, float] = engine.get("load", {})
            before = self._before.get(engine["name"], {})
            if any(load.get(name, 0) < total for name, total in before.items()):
                before = {}  # another process has taken its place
            for name, total in load.items():
                gained[name] = gained.get(name, 0.0) + total - before.get(name, 0)
            self._before[engine["name"]] = load
        metrics: dict[str, float] = {}
        if gained.get("steps"):
            means = {"running": "running", "waiting": "waiting", "kv_cache_use": "cache_use"}
            metrics = {
                f"engine/{name}": gained[total] / gained["steps"] for name, total in means.items() if total in gained
            }
        if gained.get("prompt_tokens"):
            metrics["engine/prefix_hit_share"] = gained["shared_tokens"] / gained["prompt_tokens"]
        if "preemptions" in gained:
            metrics["engine/preemptions"] = gained["preemptions"]
        return metrics


def rates_per_device(rates: Mapping[str, float], roles: Mapping[str, WorkerConfig]) -> dict[str, float]:
    """Return the token rates of roles (``tokens_per_second/<role>``) divided by their devices."""
    per_device = {}
    for name, rate in rates.items():
        family, _, role = name.partition("/")
        mapping = roles[role].device_mapping if role in roles else None
        if family == "tokens_per_second" and mapping is not None:
            per_device[f"tokens_per_second_per_device/{role}"] = rate / len(parse_device_mapping(mapping))
    return per_device

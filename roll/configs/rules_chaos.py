"""Rules about fault injection: never by accident, and only events that can happen."""

from __future__ import annotations

from collections.abc import Iterator

from roll.configs.derived import present_roles, reward_models, validation_settings, weight_transport
from roll.configs.errors import ConfigProblem
from roll.configs.rules_devices import readable_mappings
from roll.configs.rules_keys import differs_from_default
from roll.configs.schema import (
    PUBLICATION_CHAOS,
    ActorInferConfig,
    ChaosEvent,
    PipelineConfig,
    RewardConfig,
    WorkerConfig,
)
from roll.configs.wording import choose_among, count, shown

TIMED = ("freeze", "delay_publication")


def chaos_is_wanted(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject chaos events unless `chaos.enabled` is true."""
    chaos = config.chaos
    if chaos.events and not chaos.enabled:
        message = f"{count(len(chaos.events), 'event')} would harm this run: it is for tests of recovery only"
        yield ConfigProblem("chaos.events", message, "remove them, or say `chaos.enabled: true`")
    if chaos.enabled and not chaos.events:
        yield ConfigProblem("chaos.enabled", "true has no effect: there are no events", "add `chaos.events`")


def chaos_can_happen(config: PipelineConfig) -> Iterator[ConfigProblem]:
    """Reject events that name no process of the run or no step that comes, and events given twice."""
    for index, event in enumerate(config.chaos.events):
        path = f"chaos.events[{index}]"
        if event in config.chaos.events[:index]:
            twin = config.chaos.events.index(event)
            message = f"the same as chaos.events[{twin}]: a run that goes on could not tell which has happened"
            yield ConfigProblem(path, message, "remove it, or give it another step")
        yield from _right_keys(event, path)
        yield from _right_moment(config, event, path)
        if event.kind not in PUBLICATION_CHAOS:
            yield from _right_process(config, event, path)
        elif event.kind == "corrupt_bucket" and weight_transport(config) in ("nccl", "cuda_ipc"):
            message = f"{shown(weight_transport(config))} has no buckets on this side of the engine's library"
            yield ConfigProblem(f"{path}.kind", message, "use another `weight_update.transport`")


def _right_keys(event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    if event.kind == "delay_publication" and event.seconds is None:
        yield ConfigProblem(f"{path}.seconds", f"{event.kind} needs its length", "give the seconds")
    if event.kind not in TIMED and event.seconds is not None:
        yield ConfigProblem(f"{path}.seconds", f"{event.seconds:g} has no effect on {event.kind}", "remove it")
    if event.kind in PUBLICATION_CHAOS:
        for key in ("role", "rank"):
            if differs_from_default(event, key):
                message = f"{shown(vars(event)[key])} has no effect on {event.kind}, which happens to all engines"
                yield ConfigProblem(f"{path}.{key}", message, "remove it")


def _right_moment(config: PipelineConfig, event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    end = config.max_steps
    last = end if event.kind in PUBLICATION_CHAOS else end - 1  # processes stop with the last step
    if event.at_step > last:
        message = f"{event.at_step} never comes: the run ends with step {end}"
        yield ConfigProblem(f"{path}.at_step", message, f"at most {last}")
        return
    interval = config.weight_update.interval_steps
    validated = validation_settings(config) is not None and config.eval_steps and event.at_step % config.eval_steps == 0
    published = event.at_step == end or not event.at_step % interval or validated
    if event.kind in PUBLICATION_CHAOS and not published:
        message = f"version {event.at_step} is not published (weight_update.interval_steps: {interval})"
        yield ConfigProblem(f"{path}.at_step", message, f"a multiple of {interval}")


def _right_process(config: PipelineConfig, event: ChaosEvent, path: str) -> Iterator[ConfigProblem]:
    roles: dict[str, WorkerConfig | RewardConfig] = {**present_roles(config), **reward_models(config)}
    if event.role == "driver":
        processes = 1
    elif event.role not in roles:
        remedy = choose_among(event.role, ["driver", *roles])
        yield ConfigProblem(f"{path}.role", f"there is no {event.role} in this run", remedy)
        return
    else:
        role = roles[event.role]
        devices = len(readable_mappings(config).get(event.role, []))
        processes = devices // role.num_gpus_per_engine if isinstance(role, ActorInferConfig) else devices
    if event.rank >= processes:
        message = f"{event.rank}, but {event.role} has {processes}"
        yield ConfigProblem(f"{path}.rank", message, f"at most {max(processes - 1, 0)}")

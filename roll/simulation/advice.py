"""Advice: what holds a run up, and which changes would help, each found by simulating the run without or with it.

A cause is what would save most if it took no time. A change is advised if it gains more than a little, and does so in
most draws of the uncertain inputs; all simulations share a seed, so they compare the same work. A configuration that
`roll check` refuses, or that would not fit into memory, is never advised.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from roll.check.memory import estimate_memory
from roll.check.memory_parts import GIB
from roll.configs import derived
from roll.configs.devices import compact, parse_device_mapping
from roll.configs.errors import ConfigError, count
from roll.configs.run import AgenticConfig, PipelineConfig, PromptConfig
from roll.pipeline.algorithm import build_algorithms
from roll.simulation.inputs import DriverInputs, Inputs, LatencyInputs, ValidationInputs, overridden
from roll.simulation.prediction import Prediction, aligned, origins, predict
from roll.simulation.workload import response_lengths

Target = Literal["throughput", "gpu_hours"]
RATIOS = (0.0, 0.5, 1.0, 2.0)
LEAST_GAIN = 0.02
"""Smaller gains are not advised."""
SURE = 0.8
"""Share of the draws in which an advised change gains."""
SHOWN = 8
"""Changes that are simulated again with draws, and shown at most."""
LEAST_CAUSE = 0.05
"""Share of a step below which nothing alone holds it up."""
CUT = 0.95
"""Quantile of the lengths at which longer responses would be cut."""
TINY = 1e-4
"""Factor of what takes no time."""

SPECIFIC = {"the longest responses": "generation", "a slow replica": "generation", "micro-batches": "training"}
"""Cause -> the larger one that it is a part of. It is named in place of that if it is at least half of it."""
SENTENCES = {
    "generation": "the engine is the slow side",
    "the longest responses": "steps wait for their longest responses, while engines run few requests (a long tail)",
    "a slow replica": "one replica of the engine is slow, and what it generates is waited for",
    "training": "the trainer is the slow side",
    "micro-batches": "the trainer's fixed time for each micro-batch dominates: they are small",
    "weight updates": "weight updates are waited for",
    "moving states": "roles that share devices wait while states move between device and host",
    "rewards": "responses wait for their reward: too few workers, or slow ones",
    "environments": "episodes wait for their environments: too few workers, or slow ones",
    "messages": "turns of episodes wait for messages between processes",
    "validations": "validations hold up the training",
    "the driver": "the driver, which handles one sample after another, is the slow part",
}


@dataclass(frozen=True)
class Change:
    """A change of a configuration."""

    name: str
    overrides: tuple[str, ...]
    """Written as on the command line."""
    inputs: tuple[str, ...] = ()
    """Inputs that change with it."""
    remark: str = ""
    teaches_other: bool = False
    """True if it changes what is learned from."""


@dataclass(frozen=True)
class Row:
    """A change with its simulation."""

    change: Change
    prediction: Prediction
    gain: float
    """Of the objective: 0.25 if 1.25 times as much is done."""
    sure: bool = False


@dataclass
class Trials:
    """Simulations of a configuration with changes.

    ``configure`` returns the configuration with overrides, and raises `ConfigError` if it cannot work.
    """

    configure: Callable[[Sequence[str]], PipelineConfig]
    inputs: Inputs
    target: Target = "throughput"
    max_lag: int | None = None
    draws: int = 8
    seed: int = 0
    seconds: float = 120.0
    """Time after which nothing more is simulated."""
    clock: Callable[[], float] = time.monotonic
    progress: Callable[[str], None] = lambda text: None
    refused: dict[str, str] = field(default_factory=dict)
    """Name of a change -> why it is not possible."""
    unsimulated: list[str] = field(default_factory=list)
    """Changes for which there was no time."""
    simulated: int = 0
    """Settings that were simulated, the draws of one counted once."""

    def __post_init__(self) -> None:
        self._began = self.clock()
        self.config = self.configure(())
        self._fitted = not self._misfits(self.config, self.inputs)
        self.base = self.predict("as it is", self.config, self.inputs, self.draws)

    @property
    def took(self) -> float:
        """Return the seconds so far."""
        return self.clock() - self._began

    def predict(self, name: str, config: PipelineConfig, inputs: Inputs, draws: int = 0) -> Prediction:
        """Simulate a configuration. ``name``: for who waits."""
        self.simulated += 1

        def progress(text: str) -> None:
            self.progress(f"{name}: {text}")

        return predict(config, inputs, draws=draws, seed=self.seed, progress=progress)

    def attempt(self, change: Change, draws: int = 0) -> Row | None:
        """Simulate a change. None if it is refused, or there is no time left; both are noted."""
        if self.took > self.seconds:
            self.unsimulated.append(change.name)
            return None
        try:
            config = self.configure(change.overrides)
            inputs = overridden(self.inputs, change.inputs)
            if derived.optimizer_steps_per_step(config, config.actor_train) != derived.optimizer_steps_per_step(
                self.config, self.config.actor_train
            ):
                return self._refuse(change, "it would change the number of optimizer steps")
            if self._fitted and (misfits := self._misfits(config, inputs)):
                return self._refuse(change, f"it would not fit: {misfits[0]}")
            made = self.predict(change.name, config, inputs, draws)
        except ConfigError as error:
            first = error.problems[0]
            return self._refuse(change, f"{first.path}: {first.message}")
        if self.max_lag is not None and (lag := max(made.outcome.lags, default=0)) > self.max_lag:
            return self._refuse(change, f"tokens reach lag {lag}")
        gain = self._cost(self.base, self.base.outcome.step_seconds) / self._cost(made, made.outcome.step_seconds) - 1
        pairs = zip(self.base.drawn, made.drawn, strict=False)
        better = [self._cost(self.base, before) > self._cost(made, after) for before, after in pairs]
        return Row(change, made, gain, gain >= LEAST_GAIN and fmean(better or [1.0]) >= SURE)

    def again(self, row: Row) -> Row:
        """Simulate a change again, with draws, if there is time."""
        enough = self.base.draws and self.took <= self.seconds
        return (self.attempt(row.change, self.draws) or row) if enough else row

    def first(self, changes: Sequence[Change]) -> Row | None:
        """Return the first of several that is possible."""
        return next((row for change in changes if (row := self.attempt(change)) is not None), None)

    def _refuse(self, change: Change, reason: str) -> Row | None:
        """Note why a change is not possible. Returns no row."""
        self.refused[change.name] = reason
        return None

    def _cost(self, prediction: Prediction, step_seconds: float) -> float:
        """Return seconds or device seconds of a sample."""
        devices = prediction.devices if self.target == "gpu_hours" else 1
        return step_seconds * devices / prediction.outcome.samples

    def _misfits(self, config: PipelineConfig, inputs: Inputs) -> list[str]:
        cluster = config.cluster
        size = cluster.device_memory_gib or inputs.hardware(cluster.device).memory / GIB
        return estimate_memory(replace(config, cluster=replace(cluster, device_memory_gib=size))).misfits


# What holds a run up


def causes(trials: Trials) -> dict[str, float]:
    """Return the share of a step that each part would save if it took no time, the largest first."""
    now = trials.base.outcome.step_seconds
    saved: dict[str, float] = {}
    for name, inputs in _without(trials.config, trials.inputs):
        if trials.took > trials.seconds:
            break
        saved[name] = 1 - trials.predict(f"without {name}", trials.config, inputs).outcome.step_seconds / now
    return dict(sorted(saved.items(), key=lambda item: -item[1]))


def _without(config: PipelineConfig, inputs: Inputs) -> Iterator[tuple[str, Inputs]]:
    """Yield the inputs in which one part takes no time, or no longer than the usual."""
    yield "generation", replace(inputs, engine=replace(inputs.engine, scale=TINY * inputs.engine.scale))
    none = dict.fromkeys(("step_seconds", "part_seconds", "optimizer_seconds", "micro_batch_seconds"), 0.0)
    scale = TINY * inputs.trainer.scale
    yield "training", replace(inputs, trainer=replace(inputs.trainer, scale=scale, **none))
    longest, size = derived.longest_response(config), derived.group_size(config)
    mean = float(response_lengths(inputs.lengths, longest, (512, size), np.random.default_rng(0)).mean())
    alike = replace(inputs.lengths, median=None, quantiles=[mean, mean])
    yield "the longest responses", replace(inputs, lengths=alike)
    if inputs.engine.slowest > 1:
        yield "a slow replica", replace(inputs, engine=replace(inputs.engine, slowest=1.0))
    if inputs.trainer.micro_batch_seconds:
        yield "micro-batches", replace(inputs, trainer=replace(inputs.trainer, micro_batch_seconds=0.0))
    free = dict.fromkeys(("gather_seconds", "send_seconds", "fetch_seconds", "load_seconds"), 0.0)
    yield "weight updates", replace(inputs, weight_update=replace(inputs.weight_update, **free))
    if derived.shares_devices(config, "actor_infer"):
        yield "moving states", replace(inputs, weight_update=replace(inputs.weight_update, exchange_seconds=0.0))
    if isinstance(config, AgenticConfig):
        yield "environments", replace(inputs, environments=replace(inputs.environments, seconds=0.0, cpu_seconds=0.0))
    else:
        yield "rewards", replace(inputs, rewards=LatencyInputs(seconds=0.0))
    if inputs.validation.seconds and config.eval_steps:
        yield "validations", replace(inputs, validation=ValidationInputs())
    messages = inputs.driver.turn_seconds
    if messages:
        yield "messages", replace(inputs, driver=replace(inputs.driver, turn_seconds=0.0))
    yield "the driver", replace(inputs, driver=DriverInputs(sample_seconds=0.0, turn_seconds=messages))


def main_cause(saved: dict[str, float]) -> str | None:
    """Return the cause to be named; None if nothing alone would save much."""
    first = next(iter(saved), None)
    if first is None or saved[first] < LEAST_CAUSE:
        return None
    parts = [name for name, whole in SPECIFIC.items() if whole == first and saved.get(name, 0) >= saved[first] / 2]
    return max(parts, key=saved.__getitem__) if parts else first


# What could be changed


def changes(config: PipelineConfig, inputs: Inputs, slow: int | None = None) -> Iterator[list[Change]]:
    """Yield changes to try, each with what takes its place if it is refused. ``slow``: number of a slow replica."""
    for ratio in RATIOS:
        if ratio != config.async_generation_ratio:
            yield [ahead(config, ratio)]
    if config.actor_train.stream_groups is not True and not build_algorithms(config).streams:
        yield [Change("streaming", ("actor_train.stream_groups=true",))]
    splits = all_splits(config)
    now = derived.engine_replicas(config) * config.actor_infer.num_gpus_per_engine
    if derived.shares_devices(config, "actor_infer"):
        middle = sorted(splits, key=lambda number: abs(2 * number - now))
        yield [replace(splits[number], overrides=(*splits[number].overrides, *ahead(config, 1).overrides))
               for number in middle]  # fmt: skip
    else:
        yield [splits[number] for number in sorted(splits) if number > now]
        yield [splits[number] for number in sorted(splits, reverse=True) if number < now]
        yield from ([each] for each in _more_devices(config))
    if isinstance(config, PromptConfig) and inputs.rewards.workers is not None:
        workers = {name: each.num_workers for name, each in config.rewards.items() if each.verifier != "reward_model"}
        for times in (2, 4):
            yield [Change(f"{times} times as many reward workers",
                          tuple(f"rewards.{name}.num_workers={times * number}" for name, number in workers.items()),
                          (f"rewards.workers={times * inputs.rewards.workers}",))]  # fmt: skip
    at_once = inputs.environments.workers
    if isinstance(config, AgenticConfig) and (at_once is not None or inputs.environments.cpu_seconds):
        written = f"env_workers.num_workers={2 * config.env_workers.num_workers}"
        numbers = () if at_once is None else (f"environments.workers={2 * at_once}",)
        yield [Change("twice as many environment workers", (written,), numbers)]
    if inputs.trainer.micro_batch_seconds:
        yield [_larger_micro_batches(config, times) for times in (8, 4, 2)]
    if inputs.validation.seconds and config.eval_steps:
        yield [Change("validation a quarter as often", (f"eval_steps={4 * config.eval_steps}",))]
        yield [Change("validation beside the training", ("validation.mode=overlap",))]
    if inputs.engine.slowest > 1 and slow is not None:
        yield from ([each] for each in _slow_replica(config, slow))
    yield from _shorter(config, inputs)


def ahead(config: PipelineConfig, ratio: float) -> Change:
    """Return the change to another ratio; a bound that was written gives way to the one that follows from it."""
    bound = () if config.max_staleness is None else ("max_staleness=null",)
    return Change(f"ratio {ratio:g}", (f"async_generation_ratio={ratio:g}", *bound))


def all_splits(config: PipelineConfig) -> dict[int, Change]:
    """Return the ways to divide the devices of trainer and engine, by the engine's number of devices."""
    each = config.actor_infer.num_gpus_per_engine
    train, infer = _mapping(config, "actor_train"), _mapping(config, "actor_infer")
    devices = sorted({*train, *infer})
    return {
        number: Change(
            f"{count(number // each, 'engine replica')}, {count(len(devices) - number, 'trainer rank')}",
            _mapped(config, devices[:-number], devices[-number:]),
        )
        for number in range(each, len(devices), each)
    }


def _mapping(config: PipelineConfig, role: str) -> list[int]:
    return parse_device_mapping(derived.device_mappings(config)[role])


def _mapped(config: PipelineConfig, train: Sequence[int], infer: Sequence[int]) -> tuple[str, ...]:
    """Return the overrides that give trainer and engine these devices, and with them the roles that share theirs."""
    before_train, before_infer = set(_mapping(config, "actor_train")), set(_mapping(config, "actor_infer"))
    found = []
    for role in derived.device_mappings(config):
        own = set(_mapping(config, role))
        devices = infer if role == "actor_infer" or own == before_infer != before_train else train
        if own in (before_train, before_infer):
            found.append(f"{role}.device_mapping={compact(devices).replace(' ', '')}")
    return tuple(found)


def _more_devices(config: PipelineConfig) -> Iterator[Change]:
    """Yield two more devices (or as many as a replica needs; or another node) for the engine, and for the trainer."""
    train, infer, cluster = _mapping(config, "actor_train"), _mapping(config, "actor_infer"), config.cluster
    each = config.actor_infer.num_gpus_per_engine
    total = derived.total_devices(config)
    number = cluster.num_devices_per_node if cluster.num_nodes > 1 else each * -(-2 // each)
    key = f"num_nodes={cluster.num_nodes + 1}" if cluster.num_nodes > 1 else f"num_devices_per_node={total + number}"
    new = list(range(total, total + number))
    for role, mapping in (("engine", (train, [*infer, *new])), ("trainer", ([*train, *new], infer))):
        yield Change(f"{number} more devices for the {role}", (f"cluster.{key}", *_mapped(config, *mapping)))


def _larger_micro_batches(config: PipelineConfig, times: int) -> Change:
    role, arguments = config.actor_train, config.actor_train.training_args
    if role.use_dynamic_batching_in_train:
        written = [f"max_tokens_per_microbatch_in_train={times * role.max_tokens_per_microbatch_in_train}"]
    else:
        written = [f"training_args.per_device_train_batch_size={times * arguments.per_device_train_batch_size}"]
        if (steps := arguments.gradient_accumulation_steps) is not None:
            written.append(f"training_args.gradient_accumulation_steps={max(1, steps // times)}")
    return Change(f"micro-batches {times} times as large", tuple(f"actor_train.{each}" for each in written))


def _slow_replica(config: PipelineConfig, slow: int) -> Iterator[Change]:
    each, devices = config.actor_infer.num_gpus_per_engine, _mapping(config, "actor_infer")
    own = devices[slow * each : (slow + 1) * each]
    alike = ("engine.slowest=1.0",)
    yield Change(f"replica {slow} as fast as the others", (), alike, f"look at device {compact(own)}")
    rest = [device for device in devices if device not in own]
    if rest and not derived.shares_devices(config, "actor_infer"):
        yield Change(
            f"without replica {slow}", (f"actor_infer.device_mapping={compact(rest).replace(' ', '')}",), alike
        )


def _shorter(config: PipelineConfig, inputs: Inputs) -> Iterator[list[Change]]:
    """Yield responses that are cut, if some are much longer than most."""
    longest, size = derived.longest_response(config), derived.group_size(config)
    drawn = response_lengths(inputs.lengths, longest, (512, size), np.random.default_rng(0))
    limit = int(np.quantile(drawn, CUT))
    if not isinstance(config, AgenticConfig) and 1 <= limit < 0.9 * drawn.max():
        own = config.actor_infer.generating_args.max_new_tokens is not None
        key = "actor_infer.generating_args.max_new_tokens" if own else "response_length"
        cut = f"cuts {1 - CUT:.0%} of the responses, which changes what is learned"
        yield [Change(f"responses of at most {limit} tokens", (f"{key}={limit}",), (), cut, True)]


# What is said


def advise(trials: Trials, slow: int | None = None) -> list[Row]:
    """Return the changes that were tried, the best first; `sure` are those that are advised."""
    tried = [trials.first(each) for each in changes(trials.config, trials.inputs, slow)]
    rows = sorted((row for row in tried if row is not None), key=lambda row: -row.gain)
    promising = [row for row in rows if row.gain >= LEAST_GAIN][:SHOWN]
    found = [trials.again(row) for row in promising]
    found += [row for row in rows if row not in promising]
    return sorted(found, key=lambda row: (not row.sure, row.change.teaches_other, *_rank(row)))


def _rank(row: Row) -> tuple[float, ...]:
    """Return what rows are sorted by: the gain, and among equal ones the freshest tokens first."""
    return -round(row.gain / LEAST_GAIN), mean_lag(row.prediction), -row.gain


def search(trials: Trials) -> list[Row]:
    """Return the settings of ratio, split and streaming that gain most, the best first; none if none does.

    A coarse grid, then neighbours of the best one until none is better.
    """
    config, rows = trials.config, dict[tuple[float, int | None, bool], Row | None]()
    splits = all_splits(config)
    numbers = sorted(splits)
    coarse = {numbers[round(place * (len(numbers) - 1))] for place in (0.15, 0.4, 0.6, 0.85)} if numbers else set[int]()

    def attempt(ratio: float, split: int | None, streams: bool) -> None:
        if (ratio, split, streams) in rows:
            return
        parts = [ahead(config, ratio), *([] if split is None else [splits[split]])]
        parts += [Change("streaming", ("actor_train.stream_groups=true",))] if streams else []
        name = ", ".join(part.name for part in parts)
        written = tuple(each for part in parts for each in part.overrides)
        rows[ratio, split, streams] = trials.attempt(Change(name, written))

    def best() -> tuple[float, int | None, bool] | None:
        made = {point: row.gain for point, row in rows.items() if row is not None}
        return max(made, key=made.__getitem__) if made else None

    for split in (None, *sorted(coarse)):
        for ratio in RATIOS:
            attempt(ratio, split, False)
    before, now = None, best()
    while now is not None and now != before and trials.took <= trials.seconds:
        ratio, split, streams = before = now
        place = numbers.index(split) if split is not None else None
        near = [] if place is None else [numbers[each] for each in (place - 1, place + 1) if 0 <= each < len(numbers)]
        for other in near:
            attempt(ratio, other, streams)
        for step in (-0.25, 0.25):
            attempt(max(0.0, ratio + step), split, streams)
        if not streams:
            attempt(ratio, split, True)
        now = best()
    made = sorted((row for row in rows.values() if row is not None and row.gain >= LEAST_GAIN), key=_rank)
    return [trials.again(row) for row in made[: SHOWN // 2]]


def mean_lag(prediction: Prediction) -> float:
    """Return the mean lag of a token in versions."""
    return sum(lag * share for lag, share in prediction.outcome.lags.items())


def cause_text(trials: Trials, saved: dict[str, float], slow: int | None = None) -> str:
    """Return in words what holds a run up."""
    idle = trials.base.outcome.idle
    busy = ", ".join(f"{role} works {1 - share:.0%} of the time" for role, share in idle.items())
    name = main_cause(saved)
    told = "nothing alone holds the run up" if name is None else SENTENCES[name]
    if name == "a slow replica" and slow is not None:
        told = f"replica {slow} is slow ({1 / trials.inputs.engine.slowest:.0%} of the others' speed)"
    if name in ("generation", "training") and trials.config.async_generation_ratio == 0:
        told += "; nothing is generated ahead (ratio 0), so engine and trainer take turns"
    shares = ", ".join(f"{part} {max(0.0, share):.0%}" for part, share in saved.items())
    return f"bottleneck  {told}\nbusy        {busy}\nsaved       of a step, if it took no time: {shares}"


def table_text(trials: Trials, rows: Sequence[Row], price: float | None = None) -> str:
    """Return the changes as a table, after the present settings. ``price``: of a device and hour."""
    present = Row(Change("as it is", ()), trials.base, 0.0)
    lines = [["", "step s", "interval", "gain", "samples/s", "lag mean", "max", "device hours"]]
    lines[0] += ["cost"] * (price is not None) + ["write"]
    for row in (present, *rows):
        made, outcome, change = row.prediction, row.prediction.outcome, row.change
        written = " ".join(change.overrides) + (f" ({change.remark})" if change.remark else "")
        lines.append(
            [
                change.name,
                f"{outcome.step_seconds:.3g}",
                f"{made.low:.3g}-{made.high:.3g}" if made.draws else "",
                f"{row.gain:+.0%}" if change.name != present.change.name else "",
                f"{outcome.samples / outcome.step_seconds:.3g}",
                f"{mean_lag(made):.2f}",
                f"{max(outcome.lags, default=0)}",
                f"{made.hours * made.devices:.3g}",
                *([] if price is None else [made.cost(price)]),
                written.strip(),
            ]
        )
    width = max(len(line[-1]) for line in lines)
    return aligned([[*line[:-1], f"{line[-1]:<{width}}"] for line in lines])


def ending_text(trials: Trials, rejected: Sequence[Row], unknown: Sequence[str] = ()) -> str:
    """Return what was tried in vain, refused, not known, and where the inputs come from."""
    lines = []
    if rejected:
        lines.append("no help     " + ", ".join(f"{row.change.name} ({row.gain:+.0%})" for row in rejected))
    by_reason: dict[str, list[str]] = {}
    for name, reason in trials.refused.items():
        by_reason.setdefault(reason, []).append(name)
    lines += [f"impossible  {'; '.join(names)}: {reason}" for reason, names in by_reason.items()]
    lines += [f"not known   {each}" for each in unknown]
    if trials.unsimulated:
        lines.append(f"no time     {', '.join(trials.unsimulated)} (`--seconds`)")
    lines.append(f"simulated   {count(trials.simulated, 'setting')} in {trials.took:.3g} s, all with the same seed")
    return "\n".join([*lines, *origins(trials.inputs)])


def unknown_of(config: PipelineConfig, inputs: Inputs, records: Sequence[dict[str, Any]]) -> list[str]:
    """Return what the records of a run do not tell, and its advice does not have."""
    found = []
    if derived.engine_replicas(config) > 1 and not any("engine/slowest" in each for each in records):
        found.append("if one replica is slow: the run has not recorded `engine/slowest`")
    if config.actor_train.use_dynamic_batching_in_train and inputs.origin("trainer.micro_batch_seconds") == "default":
        reason = "it cannot be told from the tokens' where micro-batches have a budget of tokens"
        found.append(f"the fixed time of a micro-batch: {reason} (`simulation.trainer.micro_batch_seconds`)")
    if isinstance(config, AgenticConfig) and inputs.origin("environments.seconds") == "default":
        found.append("the latency of environments (`simulation.environments.seconds` and `.workers`)")
    return found

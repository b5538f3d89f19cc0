"""A simulated run: the real scheduler, admission, buffer, ledger, router, stages, locks and weight buffers, in virtual
time. Only computation is replaced by its estimated duration.

The stages mirror those of `roll.pipeline.stages`, without tensors. As in a real run, each batch is checked against the
staleness bound and the ledger; a violation raises an error. Results are deterministic: the same seed gives the same
events on every machine.
"""

from __future__ import annotations

import asyncio
import gc
import math
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapreplace
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from roll.configs import derived
from roll.configs.errors import ConfigError, ConfigProblem, count
from roll.configs.plugins import problem
from roll.configs.roles import COMPARED_ROLES
from roll.configs.run import AgenticConfig, PipelineConfig
from roll.pipeline.algorithm import build_algorithms
from roll.pipeline.roles import role_locks
from roll.pipeline.rollouts import EngineGate
from roll.pipeline.stage import Channel, Stage, StageGraph, StepCounter
from roll.pipeline.stages import compared_is_next, publication_due, room_for_weights, validation_due
from roll.pipeline.streaming import PARTS_PER_BATCH, least_groups
from roll.rollout.buffer import FinishedGroup
from roll.rollout.clock import VirtualTimeLoop, run_virtual
from roll.rollout.scheduler import GroupRequest, RolloutScheduler, SchedulePlan
from roll.simulation.costs import Costs, Tokens, costs_of
from roll.simulation.engines import Engines, Host, Request
from roll.simulation.inputs import Inputs
from roll.simulation.workload import GroupWork, groups
from roll.tracking.timeline import Timeline

MEASURED_STEPS = 8
"""Steps that are averaged by default."""
LONGEST_PERIOD = 16
"""Most steps from one simulated validation to the next."""
WARM_UP_STEPS = 2
"""Number of first steps of a real run, or of its replay, to ignore, because they take longer than later ones."""
LEAST_STEPS = 3
"""Minimum number of steps after the warm-up for a calibration or a replay."""


def groups_of_warm_up(config: PipelineConfig) -> int:
    """Return the number of groups that are issued before the warm-up is over: at ratio r those of r more steps."""
    return (WARM_UP_STEPS + math.ceil(config.async_generation_ratio)) * config.rollout_batch_size


@dataclass(frozen=True)
class Outcome:
    """Result of a simulated run, over the measured steps."""

    step_ends: tuple[float, ...]
    """Virtual seconds at which each step ended, from the first one on."""
    measured: tuple[int, int]
    """Indices into `step_ends` between which times are averaged. Start-up before and drain after are excluded."""
    samples: int
    """Samples per step."""
    tokens: float
    """Trained response tokens per second."""
    generated: float
    """Generated tokens per second."""
    idle: dict[str, float]
    """Role -> share of the time in which it did not compute."""
    lags: dict[int, float]
    """Lag in versions -> share of the trained tokens."""
    wasted: float
    """Share of the generated tokens that are never trained on, because their group was dropped or aborted."""
    recomputed: float
    """Number of tokens whose KV cache was recomputed, divided by the number of generated tokens."""
    ledger: dict[str, int]
    """Final counts of the ledger."""
    group_seconds: float
    """Mean time of a group's rollout, from issue to verdict, of those issued after the warm-up; 0 if there is none."""

    @property
    def step_seconds(self) -> float:
        """Mean seconds per step."""
        first, last = self.measured
        return (self.step_ends[last] - self.step_ends[first]) / (last - first)


@dataclass(frozen=True)
class RolledOut:
    """Result of a finished group."""

    tokens: Tokens
    spans: dict[int, float]
    """Version -> number of tokens sampled with it."""
    kept: bool
    """False if the group filter drops the group."""


@dataclass(frozen=True)
class Batch:
    """Token counts of the groups of a step, or of a part of them."""

    step: int
    tokens: Tokens
    complete: bool
    gathered: bool = False

    def note_time(self, name: str, seconds: float) -> None:
        """Ignore the times that stages report."""


async def _joined(parts: list[Batch]) -> Batch:
    return replace(parts[-1], tokens=Tokens.joined(each.tokens for each in parts))


class Unchecked(AssertionError):
    """A simulated batch contained a token older than the staleness bound."""


class _NoTimeline(Timeline):
    """A timeline that records nothing."""

    def transition(self, actor: str, state: str, at: float | None = None, **details: Any) -> None:
        """Ignore a change of state."""

    def busy(self, role: str, start: float, end: float, worker: str | int = 0) -> None:
        """Ignore an interval."""


class _Workers:
    """A first-come, first-served pool of workers."""

    def __init__(self, number: int | None) -> None:
        self._free_at = None if number is None else [0.0] * number

    def end_of(self, now: float, seconds: float) -> float:
        """Queue a job of this many seconds, and return the time at which it ends."""
        if self._free_at is None:
            return now + seconds
        end = max(now, self._free_at[0]) + seconds
        heapreplace(self._free_at, end)
        return end


class _Driver:
    """The driver's event loop: in each of its turns it does all that has come meanwhile, and then passes it on."""

    def __init__(self, host: Host) -> None:
        self._host, self._loop = host, asyncio.get_running_loop()
        self._due: list[tuple[float, asyncio.Future[None]]] = []
        self._doing: list[asyncio.Future[None]] = []
        self._works = False

    async def work(self, seconds: float) -> None:
        """Wait for the end of the turn that does this many seconds of work."""
        if seconds <= 0:
            return
        ended = self._loop.create_future()
        self._due.append((seconds, ended))
        if not self._works:
            self._works = True
            self._host.compute(1)
            self._loop.call_soon(self._turn)
        await ended

    def _turn(self, when: float | None = None) -> None:
        for ended in self._doing:
            if not ended.done():
                ended.set_result(None)
        due, self._due = [each for each in self._due if not each[1].done()], []  # cancelled work is left out
        self._doing = [ended for _, ended in due]
        if due:
            self._host.at((self._host.now() if when is None else when) + sum(seconds for seconds, _ in due), self._turn)
        else:
            self._works = False
            self._host.compute(-1)


class _States:
    """Offloadable states of a role; moving them takes time only."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    async def load_states(self) -> None:
        """Wait for as long as moving the states takes."""
        await asyncio.sleep(self._seconds)

    offload_states = load_states


@dataclass(eq=False)
class _Run:
    """State and stages of one simulated run."""

    config: PipelineConfig
    inputs: Inputs
    costs: Costs
    streams: bool
    needs_proximal: bool
    source: Iterator[GroupWork]
    workers: int | None
    """Workers for rewards or environments at a time; None: any number."""
    step_done: Callable[[int, int], None]
    validation_seconds: float
    """Of a validation on all replicas; 0: there is none."""
    trace: Path | None = None
    """File for the timeline."""
    steps: StepCounter = field(default_factory=StepCounter)
    published: StepCounter = field(default_factory=StepCounter)
    spans: dict[int, float] = field(default_factory=dict)
    """Lag -> number of trained tokens in the measured steps."""
    busy: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    """Role -> (start, end) of each span in which it computed."""
    ends: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    """Per step: the time at which it ended, and the engines' cumulative counters at that time."""
    so_far: Tokens = field(default_factory=Tokens)
    """Tokens of the parts of the current batch that have reached the `advantage` stage."""
    dropped_tokens: float = 0.0
    rolled: list[float] = field(default_factory=list)
    """Seconds of the rollout of each group that was issued after the warm-up."""
    _beside: asyncio.Task[None] | None = None
    """Validation on replicas that keep its version."""

    async def main(self, measured: tuple[int, int]) -> Outcome:
        """Simulate the run to its last step, and return the outcome of the ``measured`` steps."""
        config, self._loop = self.config, cast(VirtualTimeLoop, asyncio.get_running_loop())
        host = self.inputs.host
        self.host = Host(self.inputs.cores(config.cluster.device), self._loop, host.slowdown)
        self.pool = Engines(config, self.costs, self.host)
        self.timeline = Timeline(self.trace, self._loop.time) if self.trace is not None else _NoTimeline()
        for replica in self.pool.replicas.values():
            replica.computed = partial(self.timeline.busy, "actor_infer", worker=replica.name.rpartition("/")[2])
        self._judges = _Workers(self.workers)
        self._drive = _Driver(self.host).work
        processes = config.env_workers.num_workers if isinstance(config, AgenticConfig) else 0
        self._env_workers = cycle([asyncio.Lock() for _ in range(processes)])
        self.locks = role_locks(config)
        for role in derived.present_roles(config):
            resident = self.pool if role == "actor_infer" else _States(self.costs.exchange[role])
            self.locks[role].register(role, resident)
        gate = EngineGate(cast(Any, self.pool), self.locks["actor_infer"], "actor_infer")
        self.gate = cast(Any, gate)
        self.bound, self.measured = derived.resolved_max_staleness(config), measured
        plan = SchedulePlan(
            batch_size=config.rollout_batch_size,
            max_steps=config.max_steps,
            ratio=config.async_generation_ratio,
            max_staleness=self.bound,
            order=derived.resolved_consumption(config),
            staleness_policy=config.staleness_policy,
            max_consecutive_refunds=config.max_consecutive_refunds,
        )
        self.scheduler: RolloutScheduler[GroupWork, RolledOut] = RolloutScheduler(
            plan, self.source, self.rollout, group_filter=self._kept
        )
        await self.pool.buffers.acquire(0)
        self.pool.buffers.publishing(0)
        self.pool.buffers.published(0)
        await StageGraph(self.stages()).run({"scheduler": self.scheduler.run, "gate": gate.run})
        self.scheduler.ledger.check()
        if self._beside is not None:
            await self._beside
        self.timeline.close()
        return self.outcome()

    def _kept(self, made: RolledOut) -> bool:
        if not made.kept:
            self.dropped_tokens += sum(made.spans.values())
        return made.kept

    # The rollout side

    async def rollout(self, asked: GroupRequest[GroupWork]) -> RolledOut:
        """Simulate the rollout of a group, and measure its time."""
        issued = self._loop.time()
        made = await self._rolled_out(asked)
        if asked.group_id >= groups_of_warm_up(self.config):
            self.rolled.append(self._loop.time() - issued)
        return made

    async def _rolled_out(self, asked: GroupRequest[GroupWork]) -> RolledOut:
        """Simulate generation, then rewards or environment steps."""
        work, config = asked.item, self.config
        spans: dict[int, float] = {}
        if isinstance(config, AgenticConfig):
            async with asyncio.TaskGroup() as episodes:
                for sample, tokens in enumerate(work.responses):
                    episodes.create_task(self._play(asked, sample, tokens, spans))
        else:
            seconds = len(work.responses) * self.inputs.driver.sample_seconds
            await self._drive(seconds / 2)
            made = [Request(tokens, work.prompt, work.prompt, asked.group_id) for tokens in work.responses]
            expand = derived.prompted(config).is_num_return_sequences_expand
            key = None if expand else f"group-{asked.group_id}"
            await self.gate.generate(made, sticky_key=key, min_version=asked.start_version)
            if key is not None:
                self.pool.forget(key)
            for request in made:
                _add(spans, request.spans)
            now = self._loop.time()  # the responses of a group are judged when all have ended
            await asyncio.sleep(max(self._judges.end_of(now, each[0]) for each in work.latencies) - now)
            await self._drive(seconds / 2)
        return RolledOut(Tokens([work.prompt + tokens for tokens in work.responses]), spans, work.kept)

    async def _play(self, asked: GroupRequest[GroupWork], sample: int, tokens: float, spans: dict[int, float]) -> None:
        """Simulate one episode of a group, turn by turn."""
        work, key, driver = asked.item, f"{asked.group_id}-{asked.attempt}-{sample}", self.inputs.driver
        worker, handling = next(self._env_workers), self.inputs.environments.cpu_seconds
        own = max(1.0, tokens / len(work.latencies[sample]))
        for turn, seconds in enumerate(work.latencies[sample]):
            # In later turns, the tokens before the turn are in the replica's prefix cache.
            prefill = own if turn else work.prompt
            prompt = hash((asked.group_id, turn, sample)) if turn else asked.group_id
            request = Request(own, work.prompt + own * turn, prefill, prompt)
            await self._drive(driver.sample_seconds / len(work.latencies[sample]))
            await self.gate.generate([request], sticky_key=key, min_version=asked.start_version)
            _add(spans, request.spans)
            async with worker:
                began = self._loop.time()
                await self.host.work(handling, 1)
            now = self._loop.time()
            await asyncio.sleep(self._judges.end_of(now, max(0.0, seconds - (now - began))) - now + driver.turn_seconds)
        self.pool.forget(key)

    # The stages, as in `roll.pipeline.stages`

    def stages(self) -> list[Stage]:
        """Build the chain of stages."""
        config = self.config
        compared = [role for role in COMPARED_ROLES if role in derived.role_sections(config)]
        # Parts of a batch are passed on separately only if a later stage can use them, as in `build_stages`.
        chain: list[tuple[str, Callable[[Any], Any], str | None, bool]] = [
            ("rollout", self._rollout_stage, None, True),
            *((role, partial(self._compare, role), role, True) for role in compared),
            ("advantage", self._advantage, None, self.streams),
            ("train", self._train, "actor_train", False),
            ("param_update", self._param_update, None, False),
        ]
        stages: list[Stage] = []
        source: AsyncIterator[Any] = self._groups_of_steps()
        for name, work, role, passes_parts in chain:
            last = name == "param_update"
            outbox = None if last else Channel(f"after {name}", PARTS_PER_BATCH)
            hold, before = None, None
            if role is not None:
                holder = self.holder(role)
                hold = partial(self.locks[holder].hold, holder)
                waits = room_for_weights if role == "actor_train" else partial(compared_is_next, role=role)
                before = partial(waits, cast(Any, self))
            finish = self._record if last else None
            stages.append(
                Stage(name, work, source, self.timeline, outbox, before=before, hold=hold, finish=finish,
                      join=None if role is None else _joined, passes_parts=passes_parts)
            )  # fmt: skip
            if outbox is not None:
                source = outbox
        return stages

    def holder(self, role: str) -> str:
        """Return the role on whose devices ``role`` computes."""
        return "actor_train" if derived.is_trainer(self.config, role) else role

    async def _groups_of_steps(self) -> AsyncIterator[tuple[int, list[FinishedGroup[GroupWork, RolledOut]], bool]]:
        least = least_groups(self.config, self.streams)
        for step in range(self.config.max_steps):
            complete = False
            while not complete:
                part = await self.scheduler.next_groups(least)
                complete = part.completes
                yield step, part.groups, complete

    async def _rollout_stage(self, part: tuple[int, list[FinishedGroup[GroupWork, RolledOut]], bool]) -> Batch:
        step, finished, complete = part
        self.scheduler.ledger.check()
        for group in finished:
            oldest = min(group.result.spans, default=step)
            if step - oldest > self.bound:
                raise Unchecked(f"step {step} holds a token of version {oldest}, and the bound is {self.bound}")
            if self.measured[0] < step <= self.measured[1]:
                _add(self.spans, ((step - version, number) for version, number in group.result.spans.items()))
        await self._drive(self.inputs.driver.part_seconds)
        return Batch(step, Tokens.joined(group.result.tokens for group in finished), complete)

    async def _compare(self, role: str, batch: Batch) -> Batch:
        with self._computing(role):
            seconds = self.costs.forward[self.holder(role)](batch.tokens)
            await self.host.work(seconds, self.costs.train_threads)
        return batch

    async def _advantage(self, batch: Batch) -> Batch:
        if self.streams:
            return batch
        self.so_far = Tokens.joined((self.so_far, batch.tokens))
        tokens, self.so_far = self.so_far, Tokens() if batch.complete else self.so_far
        return replace(batch, tokens=tokens)

    async def _train(self, batch: Batch) -> Batch:
        costs, version = self.costs, batch.step + 1
        seconds = costs.train(batch.tokens)
        if self.needs_proximal and not self.streams:
            seconds += costs.forward["actor_train"](batch.tokens)
        seconds += costs.train_step if batch.complete else costs.train_part
        with self._computing("actor_train"):
            await self.host.work(seconds, costs.train_threads)
        if not batch.complete:
            return batch
        gathered = publication_due(self.config, version)
        if gathered:
            await self.pool.buffers.acquire(version)
            with self._computing("actor_train"):
                await self.host.work(costs.gather, costs.train_threads)
        self.scheduler.training_step_done(version, publishes=gathered)
        self.steps.advance(version)
        return replace(batch, gathered=gathered)

    async def _param_update(self, batch: Batch) -> Batch:
        version = batch.step + 1
        if batch.gathered:
            await asyncio.sleep(self.costs.send)
            async with self.locks["actor_infer"].hold("actor_infer"):
                await self.pool.publish(version)
        self.published.advance(version)
        await self._drive(self.inputs.driver.step_seconds)
        if batch.gathered and self.validation_seconds and validation_due(self.config, version):
            await self._validate(version)
        elif batch.gathered:
            self.scheduler.weights_published(version)
        return batch

    async def _validate(self, version: int) -> None:
        """Wait for a validation, or let some replicas begin it, as `roll.pipeline.stages.announce` has it."""
        settings, kept = derived.validation_settings(self.config), derived.pinned_replicas(self.config)
        assert settings is not None
        if kept:
            self.scheduler.weights_published(version)
            if self._beside is not None:
                await self._beside
            self._beside = asyncio.create_task(self.pool.keep(kept, self.validation_seconds))
        elif settings.mode == "pause":
            self.scheduler.pause_admission()
            await self._validation()
            self.scheduler.weights_published(version)
            self.scheduler.resume_admission()
        else:
            self.scheduler.weights_published(version)
            await self._validation()

    async def _validation(self) -> None:
        self.timeline.transition("validation", "running")
        await asyncio.sleep(self.validation_seconds)
        self.timeline.transition("validation", "idle")

    async def _record(self, batch: Batch) -> None:
        replicas = self.pool.replicas.values()
        for replica in replicas:
            replica.advance()
        counted = {
            "busy": sum(replica.busy_seconds for replica in replicas),
            "generated": sum(replica.generated for replica in replicas),
            "recomputed": sum(replica.recomputed for replica in replicas),
            "dropped": self.dropped_tokens + self.pool.wasted,
        }
        self.ends.append((self._loop.time(), counted))
        self.step_done(len(self.ends), self.config.max_steps)

    @contextmanager
    def _computing(self, role: str) -> Iterator[None]:
        began = self._loop.time()
        yield
        self.busy.setdefault(role, []).append((began, self._loop.time()))
        self.timeline.busy(role, began, self._loop.time())

    def outcome(self) -> Outcome:
        """Summarise the measured steps."""
        first, last = self.measured
        (start, before), (end, after) = self.ends[first], self.ends[last]
        seconds = max(end - start, 1e-12)
        gained = {name: after[name] - before[name] for name in after}
        idle = {"actor_infer": 1 - gained["busy"] / seconds / len(self.pool.replicas)}
        for role, spans in self.busy.items():
            busy = sum(max(0.0, min(until, end) - max(since, start)) for since, until in spans)
            idle[role] = 1 - busy / seconds
        generated, trained = gained["generated"], sum(self.spans.values())
        return Outcome(
            step_ends=tuple(at for at, _ in self.ends),
            measured=self.measured,
            samples=derived.samples_per_step(self.config),
            tokens=trained / seconds,
            generated=generated / seconds,
            idle={role: max(0.0, share) for role, share in sorted(idle.items())},
            lags={lag: tokens / trained for lag, tokens in sorted(self.spans.items())},
            wasted=gained["dropped"] / max(generated, 1e-12),
            recomputed=gained["recomputed"] / max(generated, 1e-12),
            ledger=self.scheduler.ledger.counts(),
            group_seconds=fmean(self.rolled) if self.rolled else 0.0,
        )


def _cut(replayed: Sequence[GroupWork], longest: int) -> Iterator[GroupWork]:
    """Yield recorded groups, over and over, with no response longer than the limit."""
    for work in cycle(replayed):
        yield replace(work, responses=[min(max(1.0, tokens), longest) for tokens in work.responses])


def _add(counts: dict[int, float], more: Iterable[tuple[int, float]]) -> None:
    for key, number in more:
        counts[key] = counts.get(key, 0.0) + number


NOT_SIMULATED = {
    "critic": "a critic",
    "actor_logp": "a role that computes log-probabilities beside the trainer",
    "stages": "stages of your own",
}


def check_simulated(config: PipelineConfig) -> None:
    """Raise `ConfigError` for parts of a configuration that are not simulated."""
    found = [
        ConfigProblem(key, f"{what} is not simulated yet", f"leave `{key}` out, or set it to null")
        for key, what in NOT_SIMULATED.items()
        if vars(config)[key]
    ]
    if config.weight_update.mode == "pull":
        remedy = "set `weight_update.mode=push` on the command line: the times differ little"
        found.append(ConfigProblem("weight_update.mode", "replicas that pull are not simulated yet", remedy))
    if found:
        raise ConfigError(found)


def _validations(config: PipelineConfig, inputs: Inputs, longest: float) -> tuple[int, float]:
    """Return the steps from one simulated validation to the next (0: none; at most ``longest``), and the seconds of
    one."""
    seconds, every = inputs.validation.seconds, config.eval_steps
    if not seconds or not every or derived.validation_settings(config) is None:
        return 0, 0.0
    period = int(min(every, longest))
    return period, seconds * period / every


def _workers(config: PipelineConfig, inputs: Inputs) -> int | None:
    if isinstance(config, AgenticConfig):
        return inputs.environments.workers or config.env_workers.max_sessions
    return inputs.rewards.workers


def replayed_steps(config: PipelineConfig, replayed: Sequence[GroupWork]) -> int:
    """Return the number of steps for which a configuration has recorded groups. Raises `ConfigError` if it has none
    for enough steps, or needs groups of another size."""
    size, made = derived.group_size(config), {len(work.responses) for work in replayed}
    if made != {size}:
        sizes = ", ".join(map(str, sorted(made)))
        raise problem(
            "--replay", f"the run recorded groups of {sizes} samples, not {size}", "leave their size as it is"
        )
    kept, batch = sum(work.kept for work in replayed), config.rollout_batch_size
    if kept // batch < WARM_UP_STEPS + LEAST_STEPS:
        message = f"{kept} recorded groups are {count(kept // batch, 'step')} of {batch}"
        raise problem("--replay", message, f"give a longer run: {WARM_UP_STEPS + LEAST_STEPS} steps are needed")
    return kept // batch


def simulate(
    config: PipelineConfig,
    inputs: Inputs,
    *,
    seed: int = 0,
    steps: int = MEASURED_STEPS,
    algorithms: Any = None,
    step_done: Callable[[int, int], None] = lambda step, last: None,
    replayed: Sequence[GroupWork] = (),
    trace: Path | None = None,
) -> Outcome:
    """Simulate a run until ``steps`` steps beyond the start have ended. Checkpoints are left out, and validations
    unless their time is known; then the steps are as many as a whole number of periods from one to the next has.

    ``algorithms``: the result of `build_algorithms` for the configuration, to save computing it again. ``step_done`` is
    called with the number of finished steps and the total. ``replayed``: recorded groups in place of random ones, for
    as many steps as they last. A schedule that needs more of them, because it drops some as stale, begins again with
    the first. ``trace``: a file for the timeline, like that of a real run. Raises `ConfigError`.
    """
    check_simulated(config)
    algorithms = algorithms or build_algorithms(config)
    every, validation = _validations(config, inputs, math.inf if replayed else LONGEST_PERIOD)
    if replayed:
        last = replayed_steps(config, replayed)
        measured, whole = (WARM_UP_STEPS - 1, last - 1), last
        source: Iterator[GroupWork] = _cut(replayed, derived.longest_response(config))
        workers = None
    else:
        ahead = math.ceil(config.async_generation_ratio) + config.weight_update.interval_steps
        steps = max(1, round(steps / every)) * every if every else steps
        measured, whole = (ahead, ahead + steps), 2 * ahead + steps + 1
        source, workers = groups(config, inputs, seed), _workers(config, inputs)
    config = replace(config, max_steps=whole, eval_steps=every)
    needs_proximal = algorithms.correction is not None or "proximal_logprobs" in algorithms.objective.token_fields
    costs = costs_of(config, inputs)
    run = _Run(config, inputs, costs, algorithms.streams, needs_proximal, source, workers, step_done, validation, trace)
    collects = gc.isenabled()
    gc.disable()  # collections would repeatedly scan all imported modules
    try:
        return run_virtual(run.main(measured))
    finally:
        if collects:
            gc.enable()

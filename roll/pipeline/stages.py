"""The stages of a training step, in the order in which a batch passes through them.

    rollout -> reference -> teacher -> value -> advantage -> train -> param_update
                                                          -> critic

A stage is a coroutine function that takes the run and a batch, and returns the batch. It delegates the work to the
scheduler, the workers and the algorithms. Log-probabilities from before the update are computed in `train`, or by the
role `actor_logp` (`logp.py`). The first stage receives the scheduler's groups. The last one publishes the new weights,
which lets the scheduler start more groups. A user's own stage replaces one of these, or is inserted before or after it.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from roll.algorithms.metrics import mean_over_updates
from roll.configs import derived
from roll.configs.errors import Problems, choose_among
from roll.configs.plugins import Kind, PlugIn, problem
from roll.configs.roles import COMPARED_ROLES
from roll.configs.run import InsertedStage, PipelineConfig
from roll.data.records import Group
from roll.pipeline.algorithm import (
    TrainingBatch,
    add_advantages,
    add_correction,
    check_mismatch,
    select_tokens,
    with_own_advantages,
)
from roll.pipeline.context import RunContext
from roll.pipeline.distillation import on_samples, seen_by_teacher
from roll.pipeline.logp import LogProbRole
from roll.pipeline.streaming import StreamedStep, by_group, in_order
from roll.rollout.buffer import FinishedGroup
from roll.tracking.waits import LOGP, waiting
from roll.trainers.step import REFERENCE_MEANS
from roll.trainers.worker import TrainPlan, optimizer_batches
from roll.weights.verify import CanaryScores, canary_metrics

SAMPLES_FREED_A_TURN = 512
"""Number of samples of a finished step that are freed in one turn of the event loop, in whole groups."""
SORTING_BYTES = 2**16
"""Size of an allocation for which glibc sorts all freed pieces of memory by size. Without one in each turn, the next
large allocation, wherever it is, would sort those of the whole step: 0.1 s."""


@dataclass(frozen=True)
class StepGroups:
    """Finished groups of one training step (counted from 0): all of them, or a part."""

    step: int
    groups: list[FinishedGroup[Any, Group]]
    """`rollout` empties it, so that nothing but the batch keeps the groups."""
    complete: bool = True
    """False if more groups of this step follow."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the step, shared by its parts."""


async def groups_of_steps(run: RunContext) -> AsyncIterator[StepGroups]:
    """Yield the scheduler's groups step by step; in parts, if the stages can process parts."""
    for step in range(run.first_step, run.config.max_steps):
        metrics: dict[str, float] = {}
        complete = False
        while not complete:
            with waiting("scheduler", f"the batch of step {step + 1}"):
                part = await run.scheduler.next_groups(run.least_groups)
            complete, consumed = part.completes, time.time()
            for group in part.groups:
                group.result.times["consumed"] = consumed
            yield StepGroups(step, part.groups, complete, metrics)


async def rollout(run: RunContext, finished: StepGroups) -> TrainingBatch:
    """Build a batch from finished groups, and check the staleness bound and the ledger."""
    run.scheduler.ledger.check()

    def make() -> TrainingBatch:
        groups = [group.result for group in finished.groups]
        batch = TrainingBatch.from_groups(finished.step, groups, run.routing)
        batch.complete, batch.metrics = finished.complete, finished.metrics
        batch.check_staleness(run.max_staleness)
        if not takes_parts(run):
            batch.describe_rollouts(run.side.sample_metrics, derived.is_scored(run.config))
        return batch

    # In a thread: a large batch takes seconds.
    batch = await asyncio.to_thread(make)
    finished.groups.clear()
    batch.metrics.update(run.side.metrics())
    is_part = len(batch.groups) < run.config.rollout_batch_size
    if run.logp is not None and is_part and batch.step >= run.config.critic_warmup:
        run.logp.begin(batch)
    return batch


def takes_parts(run: RunContext) -> bool:
    """Return True if batches may pass through the stages in parts."""
    return run.least_groups < run.config.rollout_batch_size


async def reference(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Add the log-probabilities under the frozen reference policy, for a KL penalty or KL loss.

    For pictures these are the means of their denoising steps under the reference.
    """
    if derived.picture_sampling(run.config) is not None:
        with run.recorder.busy("reference"):
            batch.data.per_sample[REFERENCE_MEANS] = await run.compared["reference"].step_means(batch.data)
        run.recorder.count_tokens("reference", int(batch.data.lengths.sum()))
        return batch
    return await _compared(run, batch, "reference")


async def teacher(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Add the log-probabilities under the teacher, for distillation."""
    return await _compared(run, batch, "teacher")


async def _compared(run: RunContext, batch: TrainingBatch, role: str) -> TrainingBatch:
    """Add the log-probabilities under a forward-only role (reference or teacher)."""
    data = batch.data
    seen = data if role != "teacher" else await asyncio.to_thread(seen_by_teacher, batch, run.teacher_prompts)
    with run.recorder.busy(role):
        # These are other models, which choose their own experts.
        logprobs = await run.compared[role].log_probs(seen.unrouted(), run.train_temperature)
    data.tokens[f"{role}_logprobs"] = on_samples(data, logprobs, seen)
    run.recorder.count_tokens(role, int(seen.lengths.sum()))
    return batch


async def value(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Add the critic's values, for the advantage estimation."""
    with run.recorder.busy("critic"):
        batch.data.tokens["values"] = await run.require_critic().values(batch.data.unrouted())
    return batch


async def advantage(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Collect the parts of a batch, and compute advantages from rewards (and the KL penalty, if any).

    When streaming, each part is passed on with its own advantages, the last one as `TrainingBatch.untrained` of the
    batch.
    """
    # In threads, so that rollouts continue: long responses take a good part of a second.
    part, whole = batch, await asyncio.to_thread(run.parts.add, batch)
    if run.streams and whole is not batch:
        part = await asyncio.to_thread(with_own_advantages, batch, run.advantages)
    if whole is None:
        return part
    if takes_parts(run):
        await asyncio.to_thread(whole.describe_rollouts, run.side.sample_metrics, derived.is_scored(run.config))
    whole.metrics.update(await asyncio.to_thread(add_advantages, whole, run.advantages))
    whole.advantage_state = run.advantages.state_dict()
    if part is not batch:
        whole.untrained = part
    return whole


async def critic(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Take the critic's optimizer steps on the returns of this batch, in parallel to the policy's steps."""
    with run.recorder.busy("critic"):
        plan = train_plan(run.config, "critic", batch)
        metrics = await run.require_critic().train(batch.data.unrouted(), run.value_objective, plan)
        if run.checkpoints.due(batch.step + 1):
            await run.checkpoints.copy_state(batch.step + 1, "critic")
    batch.metrics.update({f"critic/{name}": value for name, value in metrics.items()})
    run.recorder.count_tokens("critic", int(batch.data.lengths.sum()) * run.config.ppo_epochs)
    return batch


async def train(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Take the optimizer steps of one training step, then copy the new weights into a weight buffer.

    A part of a batch only accumulates gradients.
    """
    config, version = run.config, batch.step + 1
    metrics: dict[str, float] = {}
    if version > config.critic_warmup and run.logp is not None:
        metrics = await _learn_in_pieces(run, batch, run.logp)
    elif version > config.critic_warmup:
        with run.recorder.busy("actor_train"):
            metrics = await _learn(run, batch)
    if not batch.complete:
        return batch
    if publication_due(config, version):
        batch.canaries = await gather(run, version)
        batch.gathered = True
    run.scheduler.training_step_done(version, publishes=batch.gathered)
    if run.checkpoints.due(version):
        with run.recorder.busy("actor_train"):
            await run.checkpoints.take(version, run.scheduler.progress(), batch.advantage_state)
    run.steps.advance(version)
    batch.metrics.update(
        {name if name.startswith("mismatch/") else f"actor/{name}": value for name, value in metrics.items()}
    )
    check_mismatch(config, version, batch.metrics)
    return batch


async def _learn(run: RunContext, batch: TrainingBatch) -> dict[str, float]:
    """Train on a batch or a part of one. Returns the metrics of the optimizer steps, empty if none was taken."""
    plan = train_plan(run.config, "actor_train", batch)
    if not run.streams:
        if run.needs_proximal:
            # Only at this point does the trainer have exactly the weights of this step.
            batch.data.tokens["proximal_logprobs"] = await run.trainer.log_probs(batch.data, run.train_temperature)
            await _correct(run, batch)
        await asyncio.to_thread(select_tokens, batch, run.objective, run.config.seed)
        metrics = await run.trainer.train(batch.data, run.objective, plan)
        run.recorder.count_tokens("actor_train", int(batch.data.lengths.sum()) * run.config.ppo_epochs)
        return metrics
    part = batch.untrained or batch
    run.streamed.note_advantages(part)
    if batch.complete:
        run.streamed.check(batch, run.advantages.estimator)
    metrics, logprobs = await run.trainer.train_part(part.data, run.objective, plan, completes=batch.complete)
    run.recorder.count_tokens("actor_train", int(part.data.lengths.sum()))
    if logprobs is not None:
        run.streamed.proximal |= by_group(part, logprobs)
    if batch.complete:
        step, run.streamed = run.streamed, StreamedStep()
        metrics = {**metrics, "streamed_share": 1 - float(part.data.lengths.sum() / batch.data.lengths.sum())}
        if run.needs_proximal:
            batch.data.tokens["proximal_logprobs"] = in_order(batch, step.proximal)
            await _correct(run, batch)
    return metrics


async def _learn_in_pieces(run: RunContext, batch: TrainingBatch, logp: LogProbRole) -> dict[str, float]:
    """Train on each piece of a batch as soon as its log-probabilities are computed. Returns the mean optimizer metrics.

    The optimizer steps are those of `_learn`, on the same rows in the same order.
    """
    plan, data, loop = train_plan(run.config, "actor_train", batch), batch.data, asyncio.get_running_loop()
    updates = optimizer_batches(len(data), plan, run.config.seed)
    first = [logp.pieces(rows, len(updates) // plan.epochs) for rows in updates[: len(updates) // plan.epochs]]
    known = logp.in_turn(batch, [piece for pieces in first for piece in pieces])
    done: list[dict[str, float]] = []
    waited = 0.0

    async def update(rows: np.ndarray, *, corrected: bool, of: int = 1, completes: bool = True) -> dict[str, float]:
        part = replace(batch, groups=[], data=await asyncio.to_thread(data.select, rows))
        if not corrected:
            await _weigh(run, part)
        with run.recorder.busy("actor_train"):
            if of == 1:
                own = replace(plan, epochs=1, optimizer_batch_size=len(rows))
                return await run.trainer.train(part.data, run.objective, own)
            metrics, _ = await run.trainer.train_part(part.data, run.objective, plan, completes=completes)
        return metrics

    correction = run.correction
    needs_batch = correction is not None and (
        correction.needs_batch or bool(correction.reject and run.objective.by_episode)
    )
    if run.objective.requirements.select is not None or needs_batch:
        began = loop.time()
        async for _ in known:
            pass
        waited = loop.time() - began
        await _correct(run, batch)
        await asyncio.to_thread(select_tokens, batch, run.objective, run.config.seed)
        done = [await update(rows, corrected=True) for rows in updates]
    else:
        for pieces in first:
            for number in range(len(pieces)):
                began = loop.time()
                rows = await anext(known)
                waited += loop.time() - began
                completes = number + 1 == len(pieces)
                metrics = await update(rows, corrected=False, of=len(pieces), completes=completes)
            done.append(metrics)
        await _correct(run, batch)
        done += [await update(rows, corrected=True) for rows in updates[len(first) :]]
    run.recorder.count_tokens("actor_train", int(data.lengths.sum()) * plan.epochs)
    batch.metrics[f"{LOGP}/wait_seconds"] = waited
    return mean_over_updates(done)


async def _correct(run: RunContext, batch: TrainingBatch) -> None:
    """Apply the off-policy correction (ratio of proximal to behaviour policy), and record its metrics."""
    metrics = await _weigh(run, batch)
    batch.metrics.update({f"correction/{name}": value for name, value in metrics.items()})


async def _weigh(run: RunContext, batch: TrainingBatch) -> dict[str, float]:
    if run.correction is None:
        return {}
    return await asyncio.to_thread(add_correction, batch, run.correction, run.objective)


async def param_update(run: RunContext, batch: TrainingBatch) -> TrainingBatch:
    """Send the weights, load them into all replicas, and validate if due."""
    version = batch.step + 1
    if batch.gathered:
        batch.metrics.update(await publish(run, version, batch.canaries))
    else:
        run.pool.buffers.published(version)  # frees the buffer, if a custom stage replaced `train` and gathered nothing
    run.published.advance(version)
    if batch.gathered:
        batch.metrics.update(await announce(run, version))
    return batch


async def critic_learned(run: RunContext, batch: TrainingBatch) -> None:
    """Count a training step of the critic."""
    run.critic_steps.advance(batch.step + 1)


async def record(run: RunContext, batch: TrainingBatch) -> None:
    """Record a step that has passed all stages, and free it bit by bit: at once, freeing tens of thousands of samples
    holds up the event loop. After the last step, wait for all records and checkpoints."""
    step = batch.step + 1
    if run.critic is not None:
        await run.critic_steps.reached(step)
    trainers = {"actor_train": run.trainer} | ({"critic": run.critic} if run.critic is not None else {})
    await run.recorder.step(batch, run.scheduler, run.pool, run.side.workers, trainers)
    run.records.put(step, batch.metrics)
    if step == run.config.max_steps:
        await run.records.written()
    arrays, groups = _pieces(batch)
    a_turn = math.ceil(len(groups) * SAMPLES_FREED_A_TURN / max(1, len(batch.data)))
    del batch
    while arrays or groups:
        del arrays[-1:], groups[-a_turn:]
        bytes(SORTING_BYTES)
        await asyncio.sleep(0)


def _pieces(batch: TrainingBatch) -> tuple[list[np.ndarray], list[Group]]:
    """Return the arrays and the groups of a batch, and of what it has of its own for a streamed step."""
    parts = [batch] if batch.untrained is None else [batch, batch.untrained]
    fields = [values for part in parts for values in (part.data.tokens, part.data.per_sample)]
    return [array for values in fields for array in values.values()], [each for part in parts for each in part.groups]


def train_plan(config: PipelineConfig, role: str, batch: TrainingBatch) -> TrainPlan:
    """Return the `TrainPlan` of a trained role: how it splits a batch into optimizer steps."""
    size = derived.optimizer_batch_size(config, derived.trained_roles(config)[role], len(batch.data))
    return TrainPlan(batch.step, config.ppo_epochs, size, config.actor_infer.generating_args.temperature)


def validation_due(config: PipelineConfig, version: int) -> bool:
    """Return True if this version is validated: every `eval_steps` versions, and the first and the last one.

    Always False with `eval_steps: 0`.
    """
    steps = config.eval_steps
    return steps > 0 and (version % steps == 0 or version == config.max_steps)


def publication_due(config: PipelineConfig, version: int) -> bool:
    """Return True if this version is published: every `interval_steps`, the last one, and all validated ones."""
    interval = config.weight_update.interval_steps
    return version % interval == 0 or version == config.max_steps or validation_due(config, version)


async def gather(run: RunContext, version: int) -> CanaryScores | None:
    """Wait for a free weight buffer, and copy the trainer's weights into it. The trainer is idle until then.

    Returns the trainer's log-probabilities of the canary sequences, if this weight update is checked.
    """
    buffer = await run.pool.buffers.acquire(version)
    with run.recorder.busy("actor_train"):
        await run.trainer.gather(version, buffer, run.pool.dtype, derived.gather_bucket_bytes(run.config))
        if run.logp is not None:
            run.logp.gathered(version)
        return await run.parity_check.score(run.trainer, version)


async def publish(run: RunContext, version: int, canaries: CanaryScores | None) -> dict[str, float]:
    """Send the gathered weights, and load them into all replicas.

    Returns the durations and, if checked, the log-probability differences of the canary sequences.
    """
    if run.logp is None:
        await run.chaos.publication(version)
    run.pool.expect_weights()
    publication = await (run.trainer.send(version) if run.logp is None else run.logp.publication(version))
    run.pool.announce(publication, canaries)
    async with run.locks["actor_infer"].hold("actor_infer"):
        loaded = await run.pool.publish(publication, canaries)
    seconds = {**publication.seconds, **loaded.seconds}
    metrics = {f"weights/{name}_seconds": value for name, value in seconds.items()}
    metrics["weights/bytes"] = float(publication.total_bytes)
    if publication.delta is not None:
        metrics["weights/healed"] = float(loaded.healed)
    if not loaded.canaries:
        return metrics
    warning = run.parity_check.judge(version, loaded.canaries)
    if warning is not None:
        run.recorder.event(warning)
    return {**metrics, **canary_metrics(loaded.canaries)}


async def announce(run: RunContext, version: int) -> dict[str, float]:
    """Report a published version to the scheduler, and validate it if due. Returns the metrics of the validation.

    The validation runs here or, in parallel to the stages, on pinned replicas; then its metrics are recorded later.
    With `validation.mode: pause`, no training group starts until it has finished.
    """
    due = run.validator is not None and validation_due(run.config, version)
    # After the last step all replicas are free to validate.
    beside = run.pool.can_pin and version < run.config.max_steps
    if run.validator is None or not due or beside:
        reached_engines(run, version)
        if due:
            with run.pool.buffers.kept(version):
                await run.records.validated()
                run.records.validate(version)
        return {}
    settings = derived.validation_settings(run.config)
    pause = settings is not None and settings.mode == "pause"
    if pause:
        run.scheduler.pause_admission()
    else:
        reached_engines(run, version)
    # A replica that restarts meanwhile must be able to load this version, the only one to be measured.
    with run.pool.buffers.kept(version):
        await run.records.validated()
        with run.recorder.validating(version):
            await run.pool.ready_to_validate()
            result = await run.validator.run(version)
    if pause:
        reached_engines(run, version)
        run.scheduler.resume_admission()
    await run.recorder.validation(result)
    return result.metrics


def reached_engines(run: RunContext, version: int) -> None:
    """Report to the scheduler that all engines have a version. If replicas pull weights, the engine pool does so."""
    if not run.pool.pulls:
        run.scheduler.weights_published(version)


async def critic_is_next(run: RunContext, batch: TrainingBatch) -> None:
    """Wait until the critic has learned from all earlier batches, and then for roles on the same devices."""
    await run.critic_steps.reached(batch.step)
    await shared_devices_free(run, "critic", batch)


async def shared_devices_free(run: RunContext, role: str, batch: TrainingBatch) -> None:
    """Wait for the roles that still process the previous batch on the devices of ``role``.

    A stage that did not wait would take the devices from these roles, which would then take them back.
    """
    lock = run.locks[run.holder(role)]
    if lock is run.locks["actor_train"]:
        await run.steps.reached(batch.step)
    if lock is run.locks["actor_infer"]:
        await run.published.reached(batch.step)


async def compared_is_next(run: RunContext, batch: TrainingBatch, role: str) -> None:
    """Wait until a reference or teacher stage may take its devices.

    If ``role`` shares them with the trainer, that is when all earlier batches are trained on and, if the engines share
    them too, when the engines have their weights. Else return at once.
    """
    if run.locks[run.holder(role)] is run.locks["actor_train"]:
        await shared_devices_free(run, role, batch)


async def room_for_weights(run: RunContext, batch: TrainingBatch) -> None:
    """On shared devices, wait for a free weight buffer before taking the devices.

    The role that frees a buffer may need these devices first: the engine to load newer weights, or a reward model to
    finish a validation that blocks a weight update. On its own devices the trainer need not wait here, since `gather`
    does.
    """
    version = batch.step + 1
    if len(run.locks["actor_train"].roles) > 1 and publication_due(run.config, version):
        await run.pool.buffers.acquire(version)


StageFunction = Callable[[RunContext, Any], Awaitable[Any]]


@dataclass(frozen=True)
class ChainedStage:
    """A stage and its place in the chain."""

    name: str
    function: StageFunction
    role: str | None = None
    """The role whose devices the stage holds. Without this role the stage is omitted. None: no role."""
    before: Callable[[RunContext, Any], Awaitable[None]] | None = None
    """Called before taking the devices, to wait for events that other roles on these devices must bring about first."""
    finish: Callable[[RunContext, Any], Awaitable[None]] | None = None
    """Called with each batch. If set, the stage runs in parallel to the stages that follow."""
    passes_parts: bool = False
    """True to pass on parts of a batch to the next stage."""


BUILT_IN = (
    ChainedStage("rollout", rollout, passes_parts=True),
    *(
        ChainedStage(role, function, role, before=partial(compared_is_next, role=role), passes_parts=True)
        for role, function in zip(COMPARED_ROLES, (reference, teacher), strict=True)
    ),
    ChainedStage("value", value, "critic", before=critic_is_next, passes_parts=True),
    ChainedStage("advantage", advantage),
    ChainedStage("critic", critic, "critic", finish=critic_learned),
    ChainedStage("train", train, "actor_train", before=room_for_weights),
    ChainedStage("param_update", param_update),
)
"""The built-in stages, in order."""
STAGES = Kind("stage", "roll.stages", {each.name: PlugIn(f"{__name__}:{each.name}") for each in BUILT_IN}, PlugIn)


def stage_chain(chosen: Mapping[str, str | InsertedStage]) -> list[ChainedStage]:
    """Return the stages of a run, including the user's own (`stages` in the configuration).

    Raises `ConfigError` for functions that cannot be found or are not stages, and for positions that do not exist.
    """
    chain = list(BUILT_IN)
    problems = Problems()
    for name, stage in chosen.items():
        problems.attempt(_insert if isinstance(stage, InsertedStage) else _replace, chain, name, stage)
    problems.raise_any()
    return chain


def _replace(chain: list[ChainedStage], name: str, chosen: str) -> None:
    path = f"stages.{name}"
    if name not in STAGES.built_in:
        remedy = f"choose from {', '.join(STAGES.built_in)}, or write `{{after: <stage>, use: {chosen}}}` to insert one"
        raise problem(path, f"there is no stage `{name}` to replace", remedy)
    index = [each.name for each in chain].index(name)
    chain[index] = replace(chain[index], function=_function(chosen, path))


def _insert(chain: list[ChainedStage], name: str, stage: InsertedStage) -> None:
    path, names = f"stages.{name}", [each.name for each in chain]
    if name in names:
        remedy = f"give the inserted stage another name, or replace the built-in one: `stages: {{{name}: {stage.use}}}`"
        raise problem(path, f"the stage `{name}` is built in", remedy)
    if not stage.use:
        raise problem(f"{path}.use", "it needs a function", "set `use` to an import path `package.module:function`")
    places = {key: place for key, place in (("before", stage.before), ("after", stage.after)) if place is not None}
    if len(places) != 1:
        raise problem(path, "it needs a place", "set `after` or `before`, and not both")
    ((where, neighbour),) = places.items()
    if neighbour not in names:
        raise problem(f"{path}.{where}", f"there is no stage `{neighbour}`", choose_among(neighbour, names))
    if where == "before" and neighbour == names[0]:
        raise problem(f"{path}.{where}", f"there is no batch before `{neighbour}`", f"set `after: {neighbour}`")
    index = names.index(neighbour) + (where == "after")
    # Inserted stages have no role, so they are never omitted.
    chain.insert(index, ChainedStage(name, _function(stage.use, f"{path}.use")))


def _function(chosen: str, path: str) -> StageFunction:
    found = STAGES.load(chosen, path)
    if not inspect.iscoroutinefunction(found):
        message = f"`{chosen}` is no coroutine function"
        raise problem(path, message, "write a stage as `async def name(run, batch)` that returns the batch")
    return found

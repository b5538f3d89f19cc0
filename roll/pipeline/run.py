"""A run, top to bottom: start the roles, wire the stages, let them run.

Synchronous, one-step-off and fully asynchronous runs are this same code; they differ in how far the scheduler may run
ahead. Colocated and split runs differ in which roles share a device lock. RLVR and agentic runs differ in their rollout
side.
"""

from __future__ import annotations

import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

from roll.configs import derived
from roll.configs.changes import rollout_settings
from roll.configs.device_mapping import parse_device_mapping
from roll.configs.loader import dump_config
from roll.configs.schema import ChaosEvent, PipelineConfig
from roll.configs.wording import count
from roll.data.records import Group
from roll.distributed.group import WorkerHandle
from roll.distributed.placement import Placement
from roll.distributed.trainers import BaseOfTrainer
from roll.pipeline.advantages import AdvantageSettings
from roll.pipeline.canaries import build_canaries
from roll.pipeline.channel import Channel
from roll.pipeline.chaos import Chaos, events_to_come, spoiled_versions
from roll.pipeline.checkpoints import Checkpointer
from roll.pipeline.context import RunContext
from roll.pipeline.device_lock import DeviceLock, build_device_locks
from roll.pipeline.engine_gate import EngineGate
from roll.pipeline.journal_keeper import JournalKeeper, finished_again, other_settings
from roll.pipeline.mismatch import build_alarm
from roll.pipeline.preflight import Prepared
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.resume import ResumePoint
from roll.pipeline.roles import Roles
from roll.pipeline.rollout_function import has_score_variance
from roll.pipeline.rollout_side import RolloutSide, RunDevices
from roll.pipeline.stage import Stage, StageGraph
from roll.pipeline.stages import NEEDED_ROLES, STAGE_ORDER, announce, gather, publish
from roll.pipeline.stall import watch_for_stall
from roll.pipeline.status import StatusKeeper
from roll.pipeline.step_counter import StepCounter
from roll.rollout.journal import read_journal, recover
from roll.rollout.schedule import SchedulePlan, Ticket
from roll.rollout.scheduler import RolloutScheduler
from roll.tracking.files import write_atomically
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import StatusFile
from roll.tracking.waits import ENGINE, GROUP, SCHEDULER, START, WaitBoard, acting

MOST_KEYS_NAMED = 5

StageMaker = Callable[[RunContext, Channel[Any] | None, Channel[Any] | None], Stage]
"""Signature with which a stage is built. Custom stages subclass the built-in ones, so it holds for them, too."""


async def run_pipeline(
    prepared: Prepared, recorder: RunRecorder, status_file: StatusFile, point: ResumePoint | None = None
) -> None:
    """Run to the last step, from the first one or from ``point``.

    Raises the first failure, which names its cause.
    """
    config = prepared.config
    placement = Placement(config.cluster)
    await placement.reserve()
    locks = build_device_locks(_devices_of_roles(config))
    side = prepared.rollouts.build(prepared, recorder.run, recorder.event, RunDevices(placement, locks))
    states = point.role if point is not None else lambda role: None
    harm = events_to_come(config, recorder.run)
    spoiled = spoiled_versions(harm)
    roles = Roles(prepared, placement, locks, side.workers, recorder.run, recorder.event, states, spoiled)
    if config.save_steps and (point is None or point.checkpoint is None):
        made_of = f"{prepared.source} {derived.model_path(config, config.actor_train)}"
        forget_other_rollouts(recorder.run, made_of)
    status = StatusKeeper(config, recorder, partial(model_processes, roles, side))
    with journal_of(config, recorder.run) as journal:
        try:
            async with status.kept(status_file):
                with acting(START, recorder.waits):
                    await roles.start()
                recorder.run.write_config(dump_config(config))
                gate = EngineGate(roles.pool, locks["actor_infer"], "actor_infer")
                context = build_context(prepared, side, roles, locks, gate, recorder, journal, point, harm)
                graph = StageGraph(build_stages(prepared, context), recorder.waits)
                status.running(context, graph.stages)
                try:
                    background = background_tasks(context, roles, gate, status)
                    await graph.run(background=background, first=lambda: publish_initial(context))
                finally:
                    recorder.ledger = context.scheduler.ledger.counts()
        finally:
            await roles.shutdown()


def model_processes(roles: Roles, side: RolloutSide) -> list[WorkerHandle]:
    """Return the current processes of the run that have a model."""
    return [*roles.handles(), *side.handles()]


@contextmanager
def journal_of(config: PipelineConfig, run: RunDirectory) -> Iterator[JournalKeeper | None]:
    """Yield the journal of finished groups, in runs that have checkpoints to resume from; None in other runs."""
    if not config.save_steps and not run.journal.exists():
        yield None
        return
    journal = JournalKeeper(run.journal)
    try:
        yield journal
    except BaseException as failure:
        try:
            journal.close()
        except Exception as unwritten:
            if not _is_part_of(unwritten, failure):
                raise unwritten from failure
        raise
    journal.close()


def _is_part_of(error: BaseException, failure: BaseException) -> bool:
    """Return True if the journal's own failure ended the run."""
    if isinstance(failure, BaseExceptionGroup):
        return any(_is_part_of(error, inner) for inner in failure.exceptions)
    return failure is error or (failure.__cause__ is not None and _is_part_of(error, failure.__cause__))


def forget_other_rollouts(run: RunDirectory, made_of: str) -> None:
    """Delete the journal of a run that begins at step 0, unless it can use the journal's groups.

    Groups of step 0 are kept if an earlier process made them with the same model and prompts (or environments).
    """
    note = run.journal / "made_of.txt"
    if note.exists() and note.read_text() == made_of:
        return
    shutil.rmtree(run.journal, ignore_errors=True)
    run.journal.mkdir()
    write_atomically(note, made_of)


async def publish_initial(context: RunContext) -> None:
    """Bring the first version to the engine and validate it before anything is generated.

    A resumed run does not validate it again, since that is on record.
    """
    version = context.first_step
    async with context.locks["actor_train"].hold("actor_train"):
        canaries = await gather(context, version)
    metrics = await publish(context, version, canaries)
    if version == 0:
        context.recorder.before_training({**metrics, **await announce(context, 0)})
    else:
        context.scheduler.weights_published(version)
    context.recorder.start_clock()
    context.scheduler.resume_admission()


def build_context(
    prepared: Prepared,
    side: RolloutSide,
    roles: Roles,
    locks: dict[str, DeviceLock],
    gate: EngineGate,
    recorder: RunRecorder,
    journal: JournalKeeper | None,
    point: ResumePoint | None,
    harm: Sequence[ChaosEvent],
) -> RunContext:
    """Wire services and settings. Admission starts paused, until the first version is published."""
    config = prepared.config
    steps = StepCounter(0 if point is None else point.step)
    rollout = observed(side.rollout(gate), recorder.waits)
    scheduler = build_scheduler(config, side, rollout, journal if config.save_steps else None)
    scheduler.pause_admission()
    if point is not None:
        go_on(point, scheduler, prepared.advantages, journal, rollout_settings(config), recorder.event)
    if journal is not None:
        journal.made_with(rollout_settings(config))
    return RunContext(
        config=config,
        scheduler=scheduler,
        trainer=roles.trainer,
        reference=BaseOfTrainer(roles.trainer) if derived.reference_is_base(config) else roles.reference,
        critic=roles.critic,
        pool=roles.pool,
        side=side,
        validator=side.validator(gate),
        locks=locks,
        recorder=recorder,
        objective=prepared.objective,
        value_objective=prepared.value_objective,
        steps=steps,
        advantages=prepared.advantages,
        correction=prepared.correction,
        canaries=build_canaries(config, side.canary_prompts()),
        mismatch_alarm=build_alarm(config),
        max_staleness=derived.resolved_max_staleness(config),
        train_temperature=config.actor_infer.generating_args.temperature,
        checkpoints=Checkpointer(
            recorder.run.checkpoints,
            roles.trained(),
            save_steps=config.save_steps,
            max_steps=config.max_steps,
            keep=config.max_ckpt_to_keep,
            source=prepared.source,
            on_oldest=lambda oldest: journal.prune(oldest) if journal is not None else None,
        ),
        chaos=Chaos(harm, recorder.run, partial(model_processes, roles, side), steps, recorder.event),
        first_step=0 if point is None else point.step,
    )


def go_on(
    point: ResumePoint,
    scheduler: RolloutScheduler[Any, Group],
    advantages: AdvantageSettings,
    journal: JournalKeeper | None,
    settings: Mapping[str, Any],
    on_event: Callable[[str], None],
) -> None:
    """Take over the state of an earlier process, except for the trainer's.

    Groups that were made with other ``settings`` (`rollout_settings`) are generated again, as are those in flight.
    """
    recovered = recover(read_journal(point.run.journal), point.progress)
    ended = len(recovered.finished) + len(recovered.dropped)
    changed = other_settings(point.run.journal, settings) if ended else []
    if changed:
        keys = ", ".join(changed[:MOST_KEYS_NAMED]) + (", ..." if len(changed) > MOST_KEYS_NAMED else "")
        on_event(f"{count(ended, 'group')} of after step {point.step} are made again, for these have changed: {keys}")
        recovered = recover((), point.progress)
    scheduler.resume(point.progress, recovered, finished_again)
    advantages.recall(point.memory)
    if journal is not None:
        journal.went_back(point.step)


def observed(
    rollout: Callable[[Ticket[Any]], Awaitable[Group]], waits: WaitBoard
) -> Callable[[Ticket[Any]], Awaitable[Group]]:
    """Return the rollout with its waits recorded as those of its group."""

    async def run_group(ticket: Ticket[Any]) -> Group:
        with acting(f"{GROUP}{ticket.group_id}", waits):
            return await rollout(ticket)

    return run_group


def build_scheduler(
    config: PipelineConfig,
    side: RolloutSide,
    rollout: Callable[[Ticket[Any]], Awaitable[Group]],
    journal: JournalKeeper | None = None,
) -> RolloutScheduler[Any, Group]:
    """Build the scheduler over the items of the rollout side."""
    plan = SchedulePlan(
        batch_size=config.rollout_batch_size,
        max_steps=config.max_steps,
        ratio=config.async_generation_ratio,
        max_staleness=derived.resolved_max_staleness(config),
        order=derived.resolved_consumption(config),
        staleness_policy=config.staleness_policy,
        max_group_retries=config.max_group_retries,
        max_consecutive_refunds=config.max_consecutive_refunds,
    )
    group_filter = has_score_variance if config.group_filter == "zero_variance" else None
    return RolloutScheduler(
        plan, side.source(), rollout, group_filter=group_filter, observer=journal
    )


def build_stages(prepared: Prepared, context: RunContext) -> list[Stage]:
    """Build the stages, joined by channels of one batch each. Stages of absent roles are left out."""
    present = derived.present_roles(context.config).keys() | ({"reference"} if context.reference is not None else set())
    names = [name for name in STAGE_ORDER if NEEDED_ROLES.get(name, "actor_train") in present]
    stages: list[Stage] = []
    inbox: Channel[Any] | None = None
    for name in names:
        outbox: Channel[Any] | None = Channel(f"after {name}") if name != names[-1] else None
        make = cast(StageMaker, prepared.stage_classes[name])
        stages.append(make(context, inbox, outbox))
        inbox = outbox
    return stages


def background_tasks(
    context: RunContext, roles: Roles, gate: EngineGate, status: StatusKeeper
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """Return the tasks that run beside the stages: the scheduler, the engine and its gate, checkpoints and watches."""
    tasks: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        (SCHEDULER, context.scheduler.run),
        (ENGINE, roles.pool.run),
        ("gate", gate.run),
        ("watch/actor_train", roles.trainer.watch),
        ("stall", lambda: watch_for_stall(status, context.config.stall_timeout_seconds)),
        ("checkpoints", context.checkpoints.run),
        ("chaos", context.chaos.run),
    ]
    tasks += [
        (f"watch/{role}", group.watch)
        for role, group in (("reference", roles.reference), ("critic", roles.critic))
        if group is not None
    ]
    return tasks


def _devices_of_roles(config: PipelineConfig) -> dict[str, list[int]]:
    return {name: parse_device_mapping(mapping) for name, mapping in derived.device_mappings(config).items()}

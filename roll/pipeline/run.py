"""A run, top to bottom: start the roles, wire the stages, let them run.

The synchronous, the one-step-off and the fully asynchronous run are this code; they differ in how far the scheduler may
run ahead. Colocated and split runs are this code; they differ in which roles share a device lock. RLVR and agentic runs
are this code; they differ in their rollout side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from roll.configs import derived
from roll.configs.device_mapping import parse_device_mapping
from roll.configs.schema import PipelineConfig
from roll.data.records import Group
from roll.distributed.placement import Placement
from roll.pipeline.canaries import build_canaries
from roll.pipeline.channel import Channel
from roll.pipeline.context import RunContext
from roll.pipeline.device_lock import DeviceLock, build_device_locks
from roll.pipeline.engine_gate import EngineGate
from roll.pipeline.mismatch import build_alarm
from roll.pipeline.preflight import Prepared
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.roles import Roles
from roll.pipeline.rollout_function import has_score_variance
from roll.pipeline.rollout_side import RolloutSide
from roll.pipeline.stage import Stage, StageGraph
from roll.pipeline.stages import STAGE_ORDER, announce, gather, publish
from roll.pipeline.stall import watch_for_stall
from roll.rollout.scheduler import RolloutScheduler, SchedulePlan


async def run_pipeline(prepared: Prepared, recorder: RunRecorder) -> None:
    """Run to the last step. Raises the first failure, which names its cause."""
    config = prepared.config
    placement = Placement(config.cluster)
    await placement.reserve()
    locks = build_device_locks(_devices_of_roles(config))
    side = prepared.rollouts.build(prepared, recorder.run, recorder.event)
    roles = Roles(prepared, placement, locks, side.workers, recorder.run, recorder.event)
    try:
        await roles.start()
        gate = EngineGate(roles.pool, locks["actor_infer"], "actor_infer")
        context = build_context(prepared, side, roles, locks, gate, recorder)
        graph = StageGraph(build_stages(prepared, context))
        try:
            background = background_tasks(context, roles, gate)
            await graph.run(background=background, first=lambda: publish_initial(context))
        finally:
            recorder.ledger = context.scheduler.ledger.counts()
    finally:
        await roles.shutdown()


async def publish_initial(context: RunContext) -> None:
    """Version 0: the engine gets the trainer's weights and is validated before anything is generated."""
    async with context.locks["actor_train"].hold("actor_train"):
        canaries = await gather(context, 0)
    metrics = await publish(context, 0, canaries)
    context.recorder.before_training({**metrics, **await announce(context, 0)})
    context.recorder.start_clock()
    context.scheduler.resume_admission()


def build_context(
    prepared: Prepared,
    side: RolloutSide,
    roles: Roles,
    locks: dict[str, DeviceLock],
    gate: EngineGate,
    recorder: RunRecorder,
) -> RunContext:
    """Wire services and settings. Admission starts paused, until version 0 is published."""
    config = prepared.config
    scheduler = build_scheduler(config, side, gate)
    scheduler.pause_admission()
    return RunContext(
        config=config,
        scheduler=scheduler,
        trainer=roles.trainer,
        reference=roles.reference,
        pool=roles.pool,
        side=side,
        validator=side.validator(gate),
        locks=locks,
        recorder=recorder,
        objective=prepared.objective,
        advantages=prepared.advantages,
        correction=prepared.correction,
        canaries=build_canaries(config, side.canary_prompts()),
        mismatch_alarm=build_alarm(config),
        max_staleness=derived.resolved_max_staleness(config),
        train_temperature=config.actor_infer.generating_args.temperature,
        checkpoint_dir=recorder.run.checkpoints,
    )


def build_scheduler(config: PipelineConfig, side: RolloutSide, gate: EngineGate) -> RolloutScheduler[Any, Group]:
    """The scheduler over what the groups of the run start from."""
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
    return RolloutScheduler(plan, side.source(), side.rollout(gate), group_filter=group_filter)


def build_stages(prepared: Prepared, context: RunContext) -> list[Stage]:
    """The stages joined by channels of one batch each; the reference stage only where a reference is used."""
    names = [name for name in STAGE_ORDER if name != "reference" or context.reference is not None]
    stages: list[Stage] = []
    inbox: Channel | None = None
    for name in names:
        outbox = Channel(f"after {name}") if name != names[-1] else None
        stages.append(prepared.stage_classes[name](context, inbox, outbox))
        inbox = outbox
    return stages


def background_tasks(
    context: RunContext, roles: Roles, gate: EngineGate
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """What runs beside the stages: the scheduler, the engine and its gate, and whoever watches for trouble."""
    tasks: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("scheduler", context.scheduler.run),
        ("engine", roles.pool.run),
        ("gate", gate.run),
        ("watch/actor_train", roles.trainer.watch),
        ("stall", lambda: watch_for_stall(context)),
    ]
    if roles.reference is not None:
        tasks.append(("watch/reference", roles.reference.watch))
    return tasks


def _devices_of_roles(config: PipelineConfig) -> dict[str, list[int]]:
    return {name: parse_device_mapping(role.device_mapping) for name, role in derived.present_roles(config).items()}

"""The main program of a run: start the roles, connect the stages, and run them to the last step.

Synchronous, one-step-off and fully asynchronous runs use this same code; they differ in how far the scheduler may run
ahead. Colocated and split runs differ in which roles share a device lock. RLVR and agentic runs differ in their rollout
side.

Two loops run concurrently and meet at the scheduler. The scheduler starts groups as far ahead as the staleness bound
allows, and buffers the finished ones. The chain of stages takes the groups of one step, adds reference
log-probabilities, values and advantages, trains, and publishes the weights. The new version lets the scheduler start
more groups.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from roll.configs import derived
from roll.configs.loader import dump_config
from roll.pipeline.chaos import Chaos
from roll.pipeline.context import RunContext
from roll.pipeline.journal import forget_other_rollouts, journal_of
from roll.pipeline.preflight import Prepared
from roll.pipeline.rebuild import TrainerRestarts
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.resume import Restarts, ResumePoint
from roll.pipeline.roles import Roles, build_side, role_locks
from roll.pipeline.stage import Channel, Stage, StageGraph
from roll.pipeline.stages import (
    ChainedStage,
    advantage,
    announce,
    gather,
    groups_of_steps,
    publish,
    reached_engines,
    record,
    takes_parts,
)
from roll.pipeline.status import StatusKeeper, watch_for_stall
from roll.pipeline.streaming import PARTS_PER_BATCH, join
from roll.runtime.placement import Placement
from roll.runtime.process import collect_rarely
from roll.runtime.workers import WorkerHandle
from roll.tracking.status import StatusFile
from roll.tracking.waits import ENGINE, LOGP, SCHEDULER, START, VALIDATION, acting
from roll.trainers.worker import TrainerGroup


async def run_pipeline(
    prepared: Prepared,
    recorder: RunRecorder,
    status_file: StatusFile,
    point: ResumePoint | None = None,
    restarts: Restarts | None = None,
) -> None:
    """Train until the last step, starting at step 0 or resuming at ``point``.

    ``restarts`` limits how often failed trainers are restarted in place. Raises the first failure that a restart does
    not cure.
    """
    config = prepared.config
    placement = Placement(config.cluster)
    await placement.reserve()
    locks = role_locks(config)
    side = build_side(prepared, placement, locks, recorder.run, recorder.event)
    checkpoint = None if point is None else point.checkpoint
    chaos = Chaos(config.chaos, recorder.run, recorder.event)
    roles = Roles(
        prepared, placement, locks, side.workers, recorder.run, recorder.event, checkpoint, chaos.corrupted_versions()
    )
    if config.save_steps and checkpoint is None:
        made_of = f"{prepared.source} {derived.model_path(config, config.actor_train)}"
        forget_other_rollouts(recorder.run, made_of)

    def processes() -> list[WorkerHandle]:
        return [*roles.handles(), *side.handles()]

    status = StatusKeeper(config, recorder, processes)
    with journal_of(config, recorder.run) as journal:
        try:
            async with status.kept(status_file):
                with acting(START, recorder.waits):
                    await roles.start()
                recorder.run.write_config(dump_config(config))
                trainers = TrainerRestarts(prepared, recorder, roles, journal, status, chaos, restarts or Restarts())
                async with trainers.engines_supervised():
                    while True:
                        context = RunContext(prepared, side, roles, recorder, journal, point, chaos)
                        graph = StageGraph(build_stages(prepared.stages, context), recorder.waits)
                        status.running(context, graph.stages)
                        background = background_tasks(context, status)
                        background |= {"chaos": partial(chaos.run, context.steps, processes), ENGINE: trainers.engines}
                        try:
                            failure = await graph.failure(background, first=partial(publish_initial, context))
                        finally:
                            recorder.ledger = context.scheduler.ledger.counts()
                        if failure is None:
                            break
                        point = await trainers.after(failure, graph.stages)
                        del failure, graph, context, background  # they reference the groups of the failed attempt
        finally:
            await roles.shutdown()


async def publish_initial(context: RunContext) -> None:
    """Load the initial weights into the engines and validate them. With `pause`, nothing is generated until then.

    A resumed run skips this validation, because its result is already recorded.
    """
    version = context.first_step
    async with context.locks["actor_train"].hold("actor_train"):
        canaries = await gather(context, version)
    metrics = await publish(context, version, canaries)
    if version == 0:
        metrics |= await announce(context, 0)
        context.recorder.show(metrics, 0)
        context.records.put(0, metrics)
    else:
        reached_engines(context, version)
    context.recorder.start_clock()
    context.scheduler.resume_admission()


def build_stages(chain: list[ChainedStage], run: RunContext) -> list[Stage]:
    """Build the stages, connected by channels of one batch or its parts. Stages whose role is absent are omitted.

    The critic's training runs in parallel to the later stages, on the batches that the preceding stage also sends to
    it.
    """
    present = derived.present_roles(run.config).keys() | run.compared.keys()
    chain = [each for each in chain if each.role is None or each.role in present]
    stages: list[Stage] = []
    source: Any = groups_of_steps(run)
    for each in chain:
        beside, last = each.finish is not None, each is chain[-1]
        outbox = None if beside or last else Channel(f"after {each.name}", PARTS_PER_BATCH if takes_parts(run) else 1)
        inbox = source
        if beside:
            inbox = stages[-1].side = Channel(f"to {each.name}")
        stages.append(
            Stage(
                each.name,
                partial(each.function, run),
                inbox,
                run.recorder.timeline,
                outbox=outbox,
                before=None if each.before is None else partial(each.before, run),
                hold=None if each.role is None else run.hold(each.role),
                finish=partial(each.finish or record, run) if beside or last else None,
                join=None if each.role is None else join,
                passes_parts=each.passes_parts or (each.function is advantage and run.streams),
            )
        )
        source = source if beside else outbox
    return stages


def background_tasks(context: RunContext, status: StatusKeeper) -> dict[str, Callable[[], Awaitable[None]]]:
    """Return the tasks that run beside the stages: scheduler, engine gate, `actor_logp`, validations and records,
    checkpoints, garbage collection, and watchers."""
    tasks: dict[str, Callable[[], Awaitable[None]]] = {
        SCHEDULER: context.scheduler.run,
        "gate": context.gate.run,
        "stall": partial(watch_for_stall, status, context.config.stall_timeout_seconds),
        "checkpoints": context.checkpoints.run,
        "garbage": collect_rarely,
        VALIDATION: context.records.run,
    }
    trainers: dict[str, object] = {**context.compared, "actor_train": context.trainer, "critic": context.critic}
    if context.logp is not None:
        tasks[LOGP] = context.logp.run
        trainers[LOGP] = context.logp.group
    present = derived.present_roles(context.config)
    watched = {role: group for role, group in trainers.items() if role in present and isinstance(group, TrainerGroup)}
    return tasks | {f"watch/{role}": group.watch for role, group in watched.items()}

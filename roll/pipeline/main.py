"""A run, top to bottom: start the roles, wire the stages, let them run.

Synchronous, one-step-off and fully asynchronous runs are this same code; they differ in how far the scheduler may run
ahead. Colocated and split runs differ in which roles share a device lock. RLVR and agentic runs differ in their rollout
side.

The worker processes start at once because each spends seconds on imports, and the slowest one decides when the first
step can begin. Roles that share devices load their models in turn, and each leaves the devices before the next one
comes: an engine that sizes its caches by the free memory must not find a trainer there. `shutdown` leaves no process
behind, whatever happens during start or run.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.errors import count
from roll.configs.loader import dump_config
from roll.configs.roles import WorkerConfig
from roll.configs.run import ChaosEvent, PipelineConfig
from roll.data.records import Group
from roll.engines.pool import InferencePool, PoolSettings
from roll.engines.worker import EngineSpec, InferWorker
from roll.pipeline.algorithm import AdvantageSettings
from roll.pipeline.canaries import build_alarm, build_canaries
from roll.pipeline.checkpoints import Checkpointer
from roll.pipeline.context import RunContext
from roll.pipeline.faults import Chaos, events_to_come, spoiled_versions
from roll.pipeline.gate import EngineGate
from roll.pipeline.journal import JournalKeeper, finished_again, other_settings
from roll.pipeline.preflight import Prepared
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.resume import ResumePoint, rollout_settings
from roll.pipeline.rollout_function import has_score_variance
from roll.pipeline.rollout_side import RolloutSide, RunDevices, WorkerProcesses
from roll.pipeline.stage import Channel, Stage, StageGraph, StepCounter
from roll.pipeline.stages import NEEDED_ROLES, STAGE_ORDER, announce, gather, publish
from roll.pipeline.status import StatusKeeper, watch_for_stall
from roll.rollout.journal import read_journal, recover
from roll.rollout.scheduler import RolloutScheduler, SchedulePlan, Ticket
from roll.runtime.actors import Worker, WorkerGroup, WorkerHandle, split_devices, start_group, start_worker
from roll.runtime.locks import DeviceLock, build_device_locks
from roll.runtime.placement import Placement
from roll.tracking.files import write_atomically
from roll.tracking.run_directory import RunDirectory
from roll.tracking.status import StatusFile
from roll.tracking.waits import ENGINE, GROUP, SCHEDULER, START, WaitBoard, acting, part
from roll.trainers.group import BaseOfTrainer, TrainerGroup
from roll.trainers.worker import TrainerSpec, TrainWorker
from roll.weights.transports import TransportSpec, claim_weight_folder, clear_weight_folder

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 120.0
"""Longest wait for the processes of the rollout side to end."""


class Roles:
    """All worker processes of a run."""

    def __init__(
        self,
        prepared: Prepared,
        placement: Placement,
        locks: Mapping[str, DeviceLock],
        workers: WorkerProcesses,
        run: RunDirectory,
        on_event: Callable[[str], None],
        states: Callable[[str], Path | None] = lambda role: None,
        spoiled_versions: frozenset[int] = frozenset(),
    ) -> None:
        """Build the engine pool and claim the folder of published weights; start nothing yet.

        ``states`` returns the training state from which a role resumes, or None if it starts anew.
        ``spoiled_versions``: see `TransportSpec`.
        """
        self._states = states
        self._prepared = prepared
        self._config: PipelineConfig = prepared.config
        self._placement = placement
        self._locks = locks
        self._run = run
        self._log_dir = str(run.logs.absolute())
        self._transport = transport_spec(self._config, run, spoiled_versions)
        self._groups: list[WorkerGroup] = []
        self.pool = self._build_pool(on_event)
        self._workers = workers
        self.trainer: TrainerGroup
        self.reference: TrainerGroup | None = None
        self.critic: TrainerGroup | None = None

    def trained(self) -> dict[str, TrainerGroup]:
        """Return the roles that learn, the policy first."""
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"actor_train": self.trainer, **critic}

    async def start(self) -> None:
        """Start every process and load every model. The last loaded of the roles that share devices stays there."""
        config = self._config
        async with asyncio.TaskGroup() as tasks:
            trainers = {
                role: tasks.create_task(self._start_trainer(role, section))
                for role, section in derived.present_roles(config).items()
                if role != "actor_infer"
            }
            tasks.create_task(self._start_pool())
            tasks.create_task(self._workers.start())
        started = {role: task.result() for role, task in trainers.items()}
        self.trainer = started["actor_train"]
        self.pool.buffers.on_free = self.trainer.release
        self.pool.weight_source = self.trainer
        self.reference, self.critic = started.get("reference"), started.get("critic")

    def handles(self) -> list[WorkerHandle]:
        """Return the current processes that have models."""
        return [worker for group in self._groups for worker in group.workers] + self.pool.handles()

    async def shutdown(self) -> None:
        """End every process. Errors are only logged, so they do not hide why the run ends.

        Processes that cannot be ended here end with Ray.
        """
        try:
            self.pool.kill()
            for group in self._groups:
                group.kill()
            async with asyncio.timeout(SHUTDOWN_SECONDS):
                await self._workers.shutdown()
        except TimeoutError:
            logger.error("processes of rollouts did not end within %g s; they end with Ray", SHUTDOWN_SECONDS)
        except Exception as failure:
            logger.error("processes could not be ended in order; they end with Ray", exc_info=failure)
        finally:
            self._placement.release()
            # The trainer was killed and could not delete the weights that it published last.
            clear_weight_folder(self._run)

    def _build_pool(self, on_event: Callable[[str], None]) -> InferencePool:
        config, role = self._config, self._config.actor_infer
        engines = split_devices(parse_device_mapping(role.device_mapping), role.num_gpus_per_engine)
        worker_class = self._prepared.worker_classes.get("actor_infer", InferWorker)

        def start(index: int) -> WorkerHandle:
            return self._start_worker(worker_class, "actor_infer", index, len(engines), engines[index])

        spec = EngineSpec(
            strategy_name=role.strategy_args.strategy_name,
            strategy_config=role.strategy_args.strategy_config,
            model_path=derived.model_path(config, role),
            dtype=role.model_args.dtype,
            attn_implementation=role.model_args.attn_implementation,
            trust_remote_code=role.model_args.trust_remote_code,
            max_length=derived.sequence_length(config),
            devices_per_engine=role.num_gpus_per_engine,
            shares_devices=derived.shares_devices(config, "actor_infer"),
            transport=self._transport.name,
            strategy_cls=role.strategy_args.strategy_cls,
        )
        settings = PoolSettings(
            transport=self._transport.name,
            in_flight=config.weight_update.in_flight,
            max_restarts=role.max_replica_restarts,
            start_timeout_seconds=config.cluster.worker_start_timeout_seconds,
            request_timeout_seconds=role.request_timeout_seconds,
            publish_timeout_seconds=config.weight_update.timeout_seconds,
            load_bucket_bytes=derived.load_bucket_bytes(config),
            dual_buffer=config.weight_update.dual_buffer,
            silence_timeout_seconds=role.silence_timeout_seconds,
        )
        return InferencePool("actor_infer", len(engines), start, spec, settings, on_event)

    async def _start_pool(self) -> None:
        with part("actor_infer"):
            await self._start_pool_here()

    async def _start_pool_here(self) -> None:
        async with self._locks["actor_infer"].hold("actor_infer"):
            await self.pool.start()
            self._locks["actor_infer"].register("actor_infer", self.pool)

    async def _start_trainer(self, role: str, config: WorkerConfig) -> TrainerGroup:
        with part(role):
            return await self._start_trainer_here(role, config)

    async def _start_trainer_here(self, role: str, config: WorkerConfig) -> TrainerGroup:
        forward_only = role == "reference"
        devices = parse_device_mapping(config.device_mapping)
        worker_class = self._prepared.worker_classes.get(role, TrainWorker)
        timeout = self._config.cluster.worker_start_timeout_seconds
        group = await start_group(
            lambda rank: self._start_worker(worker_class, role, rank, len(devices), [devices[rank]]),
            len(devices),
            timeout,
        )
        self._groups.append(group)
        trainer = TrainerGroup(
            group, start_timeout_seconds=timeout, call_timeout_seconds=self._config.stall_timeout_seconds
        )
        spec = TrainerSpec(
            config=config,
            model_path=derived.model_path(self._config, config),
            total_optimizer_steps=derived.total_optimizer_steps(self._config, config),
            kind="value" if role == "critic" else "policy",
            forward_only=forward_only,
            seed=self._config.seed,
            transport=self._transport,
            restore_from=None if forward_only else self._states(role),
        )
        async with self._locks[role].hold(role):
            await trainer.start(spec)
            self._locks[role].register(role, trainer)
        return trainer

    def _start_worker(
        self, worker_class: type[Worker], role: str, rank: int, world_size: int, devices: list[int]
    ) -> WorkerHandle:
        return start_worker(
            worker_class,
            self._placement,
            role=role,
            rank=rank,
            world_size=world_size,
            devices=devices,
            log_dir=self._log_dir,
        )


def transport_spec(
    config: PipelineConfig, run: RunDirectory, spoiled_versions: frozenset[int] = frozenset()
) -> TransportSpec:
    """Return how weights travel in this run, for the process that holds it; delete weights of earlier processes."""
    update = config.weight_update
    return TransportSpec(
        name=derived.weight_transport(config),
        halves=2 if update.dual_buffer else 1,
        directory=claim_weight_folder(run, update.checkpoint_dir, config.exp_name),
        bucket_bytes=derived.load_bucket_bytes(config),
        timeout_seconds=update.timeout_seconds,
        spoiled_versions=spoiled_versions,
    )


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
    return RolloutScheduler(plan, side.source(), rollout, group_filter=group_filter, observer=journal)


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

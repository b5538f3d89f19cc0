"""All worker processes of a run: how they start, load their models, and end.

All processes start concurrently, because each spends seconds on imports and the slowest one delays the first step.
Roles that share devices load their models one after the other, and each leaves the devices before the next one: an
engine that sizes its caches by free memory must not find a trainer there. `shutdown` leaves no process behind, even if
the start or the run failed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from roll.configs import derived
from roll.configs.devices import parse_device_mapping
from roll.configs.roles import COMPARED_ROLES, FORWARD_ROLES
from roll.configs.run import PipelineConfig, RunConfig
from roll.configs.strategies import Trainer, strategy_of
from roll.engines.pool import InferencePool, PoolSettings
from roll.engines.worker import EngineSpec, InferWorker
from roll.pipeline.agentic import AgenticSide
from roll.pipeline.agentic_plan import AgenticPlan
from roll.pipeline.checkpoints import Checkpoint
from roll.pipeline.image import ImageSide
from roll.pipeline.preflight import Prepared
from roll.pipeline.rlvr import RLVRSide, build_rewards
from roll.pipeline.rollouts import RolloutSide, WorkerProcesses
from roll.runtime.locks import DeviceLock, build_device_locks
from roll.runtime.placement import Placement
from roll.runtime.workers import Worker, WorkerGroup, WorkerHandle, split_devices, start_group, start_worker
from roll.tracking.run_directory import RunDirectory
from roll.tracking.waits import part
from roll.trainers.base import TrainerSetup
from roll.trainers.worker import TrainerGroup, TrainerSpec, TrainWorker
from roll.weights.transports import TransportSpec, claim_weight_folder, clear_weight_folder

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 120.0
"""Longest wait for the rollout side's processes to end."""


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
        checkpoint: Checkpoint | None = None,
        corrupted_versions: frozenset[int] = frozenset(),
    ) -> None:
        """Build the engine pool and choose the folder for published weights. Starts no process.

        Trained roles resume from ``checkpoint``. ``corrupted_versions``: see `TransportSpec`.
        """
        self.locks = locks
        self._checkpoint = checkpoint
        self._prepared = prepared
        self._config = prepared.config
        self._placement = placement
        self._run = run
        self._transport = self._claim_transport(corrupted_versions)
        self._groups: list[WorkerGroup] = []
        self._workers = workers
        self.pool = self._build_pool(on_event)
        self.trainer: TrainerGroup
        self.compared: dict[str, TrainerGroup] = {}
        self.logp: TrainerGroup | None = None
        self.critic: TrainerGroup | None = None

    def trained(self) -> dict[str, TrainerGroup]:
        """Return the trained roles, the policy first."""
        critic = {} if self.critic is None else {"critic": self.critic}
        return {"actor_train": self.trainer, **critic}

    async def start(self) -> None:
        """Start all processes and load all models. Among roles that share devices, the last one to load stays there."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._start_pool())
            tasks.create_task(self._workers.start())
            await self._start_trainers()

    def trainer_roles(self) -> list[str]:
        """Return the trained and the forward-only roles: all except the engines and reward models."""
        return [role for role in derived.present_roles(self._config) if role != "actor_infer"]

    async def end_trainers(self) -> None:
        """End the processes of `trainer_roles`. The engines must have dropped the weights that these published."""
        ended, self._groups = self._groups, []
        await asyncio.gather(*(worker.end() for group in ended for worker in group.workers))
        for role in self.trainer_roles():
            self.locks[role].forget(role)

    async def start_trainers(self, checkpoint: Checkpoint | None, corrupted_versions: frozenset[int]) -> None:
        """Start new processes in place of those that `end_trainers` has ended. They resume from ``checkpoint``."""
        self._checkpoint, self._transport = checkpoint, self._claim_transport(corrupted_versions)
        await self._start_trainers()

    async def _start_trainers(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            trainers = {role: tasks.create_task(self._start_trainer(role)) for role in self.trainer_roles()}
        started = {role: task.result() for role, task in trainers.items()}
        self.trainer = started["actor_train"]
        self.pool.buffers.on_free = self.trainer.release
        self.pool.weight_source = self.trainer
        self.compared = {role: group for role, group in started.items() if role in COMPARED_ROLES}
        self.critic, self.logp = started.get("critic"), started.get("actor_logp")

    def handles(self) -> list[WorkerHandle]:
        """Return the current processes with models."""
        return [worker for group in self._groups for worker in group.workers] + self.pool.handles()

    async def shutdown(self) -> None:
        """End all processes. Errors are only logged, so that they do not hide why the run ended.

        Processes that survive this end with Ray.
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
            # The trainer was killed, so it has not deleted its last published weights.
            clear_weight_folder(self._run)

    def _claim_transport(self, corrupted_versions: frozenset[int]) -> TransportSpec:
        update = self._config.weight_update
        return TransportSpec(
            name=derived.weight_transport(self._config),
            buffers=2 if derived.has_two_buffers(self._config) else 1,
            # Also deletes the weights of earlier processes.
            directory=claim_weight_folder(self._run, update.checkpoint_dir, self._config.exp_name),
            bucket_bytes=derived.load_bucket_bytes(self._config),
            timeout_seconds=update.timeout_seconds,
            content=update.content,
            full_every=update.full_every,
            corrupted_versions=corrupted_versions,
        )

    def _build_pool(self, on_event: Callable[[str], None]) -> InferencePool:
        config, role = self._config, self._config.actor_infer
        engines = split_devices(parse_device_mapping(role.device_mapping), role.num_gpus_per_engine)
        settings = PoolSettings(
            in_flight=config.weight_update.in_flight,
            max_restarts=role.max_replica_restarts,
            start_timeout_seconds=config.cluster.worker_start_timeout_seconds,
            request_timeout_seconds=role.request_timeout_seconds,
            publish_timeout_seconds=config.weight_update.timeout_seconds,
            load_bucket_bytes=derived.load_bucket_bytes(config),
            dual_buffer=derived.has_two_buffers(config),
            silence_timeout_seconds=role.silence_timeout_seconds,
            max_unavailable=config.weight_update.max_unavailable,
            pinned_replicas=derived.pinned_replicas(config),
            pull_after_seconds=derived.pull_after_seconds(config),
        )
        start = partial(self._start_worker, "actor_infer", InferWorker, engines)
        spec = engine_spec(config, self._transport.name)
        return InferencePool("actor_infer", len(engines), start, spec, settings, on_event)

    async def _start_pool(self) -> None:
        with part("actor_infer"):
            async with self.locks["actor_infer"].hold("actor_infer"):
                await self.pool.start()
                self.locks["actor_infer"].register("actor_infer", self.pool)

    async def _start_trainer(self, role: str) -> TrainerGroup:
        setup, checkpoint = trainer_setup(self._config, role), self._checkpoint
        state = None if checkpoint is None or setup.forward_only else checkpoint.role(role)
        ranks = [[device] for device in parse_device_mapping(setup.config.device_mapping)]
        with part(role):
            trainer = await trainer_processes(
                self._config, partial(self._start_worker, role, TrainWorker, ranks), len(ranks)
            )
            self._groups.append(trainer.workers)
            async with self.locks[role].hold(role):
                await trainer.start(TrainerSpec(setup, self._transport, state))
                self.locks[role].register(role, trainer)
            return trainer

    def _start_worker(
        self, role: str, default: type[Worker], devices: Sequence[Sequence[int]], rank: int
    ) -> WorkerHandle:
        """Start one process of a role. ``devices``: the devices of each rank."""
        return start_worker(
            self._prepared.worker_classes.get(role, default),
            self._placement,
            role=role,
            rank=rank,
            world_size=len(devices),
            devices=devices[rank],
            log_dir=str(self._run.logs.absolute()),
        )


async def trainer_processes(config: RunConfig, start: Callable[[int], WorkerHandle], ranks: int) -> TrainerGroup:
    """Start the processes of a trainer; models are loaded later. ``start`` starts the process of a rank."""
    timeout = config.cluster.worker_start_timeout_seconds
    group = await start_group(start, ranks, timeout)
    return TrainerGroup(group, start_timeout_seconds=timeout, call_timeout_seconds=config.stall_timeout_seconds)


def role_locks(config: PipelineConfig) -> dict[str, DeviceLock]:
    """Return the device lock of each role, including reward models."""
    mappings = derived.device_mappings(config)
    return build_device_locks({role: parse_device_mapping(mapping) for role, mapping in mappings.items()})


def build_side(
    prepared: Prepared,
    placement: Placement,
    locks: Mapping[str, DeviceLock],
    run: RunDirectory,
    on_event: Callable[[str], None],
) -> RolloutSide:
    """Build the rollout side of the pipeline. Starts no process."""
    plan = prepared.rollouts
    if isinstance(plan, AgenticPlan):
        return AgenticSide(prepared, plan, str(run.logs.absolute()), on_event)
    kind = RLVRSide if derived.picture_sampling(prepared.config) is None else ImageSide
    return kind(prepared, plan, build_rewards(prepared, plan.config, placement, locks, run, on_event), on_event)


def trainer_setup(config: RunConfig, role: str) -> TrainerSetup:
    """Return the setup that all ranks of a trainer or forward-only role have in common."""
    section = derived.present_roles(config)[role]
    record = strategy_of(role, section)
    if section.use_sequence_packing == "auto" and isinstance(record, Trainer) and not record.packs:
        logger.info("%s: padded rows, because %s packs none", role, section.strategy_args.strategy_name)
        section = replace(section, use_sequence_packing=False)
    return TrainerSetup(
        section,
        model_path=derived.model_path(config, section),
        total_optimizer_steps=derived.total_optimizer_steps(config, section),
        seed=config.seed,
        kind="value" if role == "critic" else "policy",
        forward_only=role in FORWARD_ROLES,
        pictures=derived.picture_sampling(config),
        replays_routing=role in ("actor_train", "actor_logp") and derived.replays_routing(config),
    )


def engine_spec(config: PipelineConfig, transport: str) -> EngineSpec:
    """Return the specification from which an engine process builds its engine."""
    role = config.actor_infer
    return EngineSpec(
        strategy_name=role.strategy_args.strategy_name,
        strategy_config=role.strategy_args.strategy_config,
        model_path=derived.model_path(config, role),
        dtype=role.model_args.dtype,
        attn_implementation=role.model_args.attn_implementation,
        trust_remote_code=role.model_args.trust_remote_code,
        max_length=derived.sequence_length(config),
        devices_per_engine=role.num_gpus_per_engine,
        shares_devices=derived.shares_devices(config, "actor_infer"),
        transport=transport,
        adapter_rank=derived.adapter_rank(config),
        records_routing=derived.replays_routing(config),
        strategy_cls=role.strategy_args.strategy_cls,
    )

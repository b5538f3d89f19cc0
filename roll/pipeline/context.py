"""The services and settings that the stages of a run share, and how they are connected.

One service is the log-probability parity check: the trainer scores fixed token sequences right after its weights are
gathered, and the engines score them after loading these weights (`InferencePool.publish`), so both use the same
version.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np

from roll.algorithms.correction import Correction
from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.algorithms.routing import RoutingShape
from roll.configs import derived
from roll.configs.errors import count
from roll.configs.roles import COMPARED_ROLES
from roll.configs.run import PipelineConfig
from roll.data.records import Group, PictureStep, SampleBatch
from roll.engines.pool import InferencePool
from roll.pipeline.algorithm import AdvantageSettings, replayed_routing
from roll.pipeline.chaos import Chaos
from roll.pipeline.checkpoints import Checkpointer
from roll.pipeline.distillation import teacher_prompts
from roll.pipeline.image import ImageSide
from roll.pipeline.journal import ANSWERS, JournalKeeper, finished_again, other_settings
from roll.pipeline.logp import LogProbRole
from roll.pipeline.preflight import Prepared
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.records import StepRecords
from roll.pipeline.resume import ResumePoint, rollout_settings
from roll.pipeline.roles import Roles
from roll.pipeline.rollouts import (
    EngineGate,
    RolloutSide,
    ValidationGenerator,
    Validator,
    has_score_variance,
)
from roll.pipeline.stage import StepCounter
from roll.pipeline.streaming import PartsOfBatch, StreamedStep, least_groups
from roll.rollout.journal import Recovered, read_journal, recover
from roll.rollout.scheduler import GroupRequest, RolloutScheduler, SchedulePlan
from roll.runtime.locks import DeviceLock
from roll.runtime.pool import Pace
from roll.tracking.waits import CRITIC, GROUP, LOGP, PUBLISHER, WaitBoard, acting
from roll.trainers.worker import BaseOfTrainer, TrainerGroup
from roll.weights.publisher import Publication, WeightsDiffer
from roll.weights.verify import CanaryScores, canary_sequences

MOST_KEYS_NAMED = 5
SAMPLES_A_TURN = 256
"""Maximum number of samples whose rollouts begin, or end, in one turn of the event loop, unless a single group has
more. Either takes about 0.1 ms."""


class RunContext:
    """All services and settings that a stage may use."""

    config: PipelineConfig
    scheduler: RolloutScheduler[Any, Group]
    trainer: TrainerGroup
    compared: Mapping[str, TrainerGroup | BaseOfTrainer]
    """Reference and teacher, by role. A role may be served by the trainer, or by the trainer without its adapters."""
    teacher_prompts: Mapping[str, np.ndarray]
    """Prompts of the teacher, by prompt id; empty if the teacher sees the policy's prompts."""
    logp: LogProbRole | None
    """The role `actor_logp`; None if the trainer computes the log-probabilities itself."""
    critic: TrainerGroup | None
    pool: InferencePool
    gate: EngineGate
    side: RolloutSide
    validator: Validator | None
    locks: Mapping[str, DeviceLock]
    """Device lock of each role."""
    recorder: RunRecorder
    objective: PolicyObjective
    value_objective: ValueObjective
    advantages: AdvantageSettings
    correction: Correction | None
    routing: RoutingShape | None
    """Sizes of the policy's routing with router replay, otherwise None."""
    needs_proximal: bool
    """True if the run needs log-probabilities from before the first update on a batch."""
    streams: bool
    """True if the trainer trains on groups as they finish."""
    least_groups: int
    """Minimum number of groups that pass through the stages together: a batch, or a part of one."""
    parts: PartsOfBatch
    """Parts of the next batch, which the stage `advantage` is collecting."""
    streamed: StreamedStep
    """What the trainer has already done of a streamed training step."""
    parity_check: ParityCheck
    max_staleness: int
    train_temperature: float
    """Temperature at which the trainer computes log-probabilities; equal to that of the rollouts."""
    checkpoints: Checkpointer
    records: StepRecords
    chaos: Chaos
    first_step: int
    """Number of training steps completed before this process started."""
    steps: StepCounter
    """Counts completed training steps. A step counts after its checkpoint has been taken."""
    critic_steps: StepCounter
    """Counts the training steps that the critic has completed."""
    published: StepCounter
    """Counts the training steps whose weights, if they are published at all, have reached the engines."""

    def __init__(
        self,
        prepared: Prepared,
        side: RolloutSide,
        roles: Roles,
        recorder: RunRecorder,
        journal: JournalKeeper | None,
        point: ResumePoint | None,
        chaos: Chaos,
    ) -> None:
        """Connect services and settings. Admission stays paused until the first version is published."""
        self.config = config = prepared.config
        self.side, self.recorder, self.chaos = side, recorder, chaos
        self.locks, self.pool, self.trainer, self.critic = roles.locks, roles.pool, roles.trainer, roles.critic
        base = BaseOfTrainer(roles.trainer)
        self.compared = {
            **roles.compared,
            **{role: base for role in COMPARED_ROLES if derived.is_base(config, role)},
            **{role: roles.trainer for role in COMPARED_ROLES if derived.is_policy(config, role)},
        }
        self.teacher_prompts = teacher_prompts(prepared)
        self.objective, self.value_objective = prepared.objective, prepared.value_objective
        # A copy, because its state is reset when trainers restart from a checkpoint.
        self.advantages, self.correction = deepcopy(prepared.advantages), prepared.correction
        self.routing = replayed_routing(config)
        self.needs_proximal = self.correction is not None or "proximal_logprobs" in self.objective.token_fields
        self.streams = prepared.streams
        self.least_groups = least_groups(config, prepared.streams)
        self.parts, self.streamed = PartsOfBatch(), StreamedStep()
        if prepared.not_streamed is not None:
            recorder.event(f"stream_groups: auto waits for whole batches: {prepared.not_streamed}")
        self.max_staleness = derived.resolved_max_staleness(config)
        self.train_temperature = config.actor_infer.generating_args.temperature
        self.logp = None if roles.logp is None else self._log_prob_role(roles.logp)
        self.gate = EngineGate(roles.pool, roles.locks["actor_infer"], "actor_infer")
        self.validator = side.validator(ValidationGenerator(self.gate))
        self.parity_check = parity_check_of(config, side)
        rollout = paced(side.rollout(self.gate), derived.group_size(config), recorder.waits)
        kept = journal if config.save_steps else None
        self.scheduler = build_scheduler(config, side, rollout, kept, recorder.filtered)
        self.scheduler.pause_admission()
        self.pool.on_oldest = self.scheduler.weights_published
        settings = rollout_settings(config)
        if prepared.answers is not None:
            settings[ANSWERS] = prepared.answers
        if point is not None:
            recorder.made_again(
                resume_rollouts(point, self.scheduler, self.advantages, journal, settings, recorder.event)
            )
        if journal is not None:
            journal.made_with(settings)
        self.first_step = 0 if point is None else point.step
        self.steps = StepCounter(self.first_step)
        self.critic_steps = StepCounter(self.first_step, CRITIC)
        self.published = StepCounter(self.first_step, PUBLISHER)
        self.checkpoints = Checkpointer(
            recorder.run.checkpoints,
            roles.trained(),
            save_steps=config.save_steps,
            max_steps=config.max_steps,
            keep=config.max_ckpt_to_keep,
            source=prepared.source,
            on_oldest=lambda oldest: journal.prune(oldest) if journal is not None else None,
        )
        self.records = StepRecords(recorder, self.checkpoints, self.pool, self.validator)

    def _log_prob_role(self, group: TrainerGroup) -> LogProbRole:
        async def send(version: int) -> Publication:
            await self.chaos.publication(version)
            return await self.trainer.send(version)

        roles = derived.present_roles(self.config)
        ranks = max(derived.data_parallel_ranks(roles[name]) for name in ("actor_train", LOGP))
        return LogProbRole(group, send, self.pool.buffers, self.recorder, self.train_temperature, ranks)

    def require_critic(self) -> TrainerGroup:
        """Return the critic. Raises `RuntimeError` if the run has none."""
        if self.critic is None:
            raise RuntimeError("a stage of the critic is wired without the role")
        return self.critic

    def holder(self, role: str) -> str:
        """Return the role whose devices ``role`` uses: `actor_train` if the trainer serves the role."""
        return "actor_train" if derived.is_trainer(self.config, role) else role

    def hold(self, role: str) -> Callable[[], object]:
        """Return a function whose result is a context manager that holds the devices of ``role``."""
        holder = self.holder(role)
        return lambda: self.locks[holder].hold(holder)


def paced(
    make_group: Callable[[GroupRequest[Any]], Awaitable[Group]], group_size: int, board: WaitBoard
) -> Callable[[GroupRequest[Any]], Awaitable[Group]]:
    """Wrap ``make_group`` so that groups start and end at a limited rate (`Pace`), each as an actor on the wait board,
    and have their times."""
    starts, ends = (Pace(max(1, SAMPLES_A_TURN // group_size)) for _ in range(2))

    async def rollout(request: GroupRequest[Any]) -> Group:
        issued = time.time()
        with acting(f"{GROUP}{request.group_id}", board):
            await starts.turn()
            group = await make_group(request)
            group.times |= {"issued": issued, "judged": time.time()}
            await ends.turn()
        return group

    return rollout


def resume_rollouts(
    point: ResumePoint,
    scheduler: RolloutScheduler[Any, Group],
    advantages: AdvantageSettings,
    journal: JournalKeeper | None,
    settings: Mapping[str, Any],
    on_event: Callable[[str], None],
) -> Recovered:
    """Restore the state of the driver from ``point``. Returns what is known of groups that were issued before.

    Groups in flight are generated again, as are finished groups that were made with other ``settings``
    (`rollout_settings`).
    """
    progress = point.state.progress
    recovered = recover(read_journal(point.run.journal), progress)
    ended = len(recovered.finished) + len(recovered.dropped)
    changed = other_settings(point.run.journal, settings) if ended else []
    if changed:
        keys = ", ".join(changed[:MOST_KEYS_NAMED]) + (", ..." if len(changed) > MOST_KEYS_NAMED else "")
        on_event(f"{count(ended, 'group')} of after step {point.step} are made again, for these have changed: {keys}")
        recovered = recover((), progress)
    scheduler.resume(progress, recovered, finished_again)
    advantages.load_state_dict(point.state.advantage_state)
    if journal is not None:
        journal.went_back(point.step)
    return recovered


def build_scheduler(
    config: PipelineConfig,
    side: RolloutSide,
    rollout: Callable[[GroupRequest[Any]], Awaitable[Group]],
    journal: JournalKeeper | None = None,
    filtered: Callable[[Group], None] = lambda group: None,
) -> RolloutScheduler[Any, Group]:
    """Build the scheduler for the prompts or environment tasks of the rollout side. ``filtered`` is called with each
    group that the filter drops."""

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
        plan, side.source(), rollout, group_filter=group_filter, on_filtered=filtered, observer=journal
    )


def parity_check_of(config: PipelineConfig, side: RolloutSide) -> ParityCheck:
    """Return the parity check of a run."""
    if not isinstance(side, ImageSide):
        return ParityCheck(config, side.canary_prompts())
    return ParityCheck(config, [], side.canary_steps() if config.weight_update.canary_interval else [])


class ParityCheck:
    """Log-probability parity check of trainer and engines on canary sequences, at some of the weight updates.

    The difference that rounding alone causes depends on the model. In low precision, the first weight update measures
    it, since trainer and engines have then just loaded the same files.
    """

    def __init__(
        self, config: PipelineConfig, prompts: Sequence[np.ndarray], steps: Sequence[PictureStep] | None = None
    ) -> None:
        """Build the canary sequences from ``prompts`` (int32 ``[prompt]`` each), or take ``steps`` for pictures."""
        self._interval = config.weight_update.canary_interval
        self._tolerance, self._limit = derived.canary_tolerances(config)
        self._calibrated = False
        self._warned = False
        number, length = config.weight_update.canary_prompts, derived.canary_length(config)
        self._steps = steps
        self._sequences: list[np.ndarray] = []
        if steps is not None:
            self._sequences = [np.array([0, each.step], np.int32) for each in steps]
        elif self._interval > 0:
            self._sequences = canary_sequences(prompts, count=number, length=length, seed=config.seed)
        self._publications = 0

    async def score(self, trainer: TrainerGroup, version: int) -> CanaryScores | None:
        """Return the trainer's log-probabilities of the canary sequences, or None if this weight update is not checked.

        Call it once per weight update, while the trainer holds the weights of ``version``. The first update is always
        checked, and so is the update after a warning.
        """
        due = self._interval > 0 and (self._warned or self._publications % self._interval == 0)
        self._publications += 1
        if not due:
            return None
        token_ids = np.concatenate(self._sequences)
        batch = SampleBatch(
            lengths=np.array([len(tokens) for tokens in self._sequences], dtype=np.int64),
            tokens={"token_ids": token_ids, "response_mask": np.ones(len(token_ids), dtype=bool)},
            per_sample={}
            if self._steps is None
            else {
                "latents": np.stack([each.latents for each in self._steps]),
                "prompts": np.array([each.prompt for each in self._steps]),
            },
        )
        logprobs = np.split(await trainer.log_probs(batch, 1.0), batch.offsets[1:-1])
        return CanaryScores(version, self._sequences, logprobs, self._limit, self._steps)

    def judge(self, version: int, differences: Sequence[np.ndarray]) -> str | None:
        """Compare the log-probability differences of each replica (from `compare_canaries`) with the tolerance.

        Returns a warning, or None. Raises `WeightsDiffer` if two checks in a row exceed the tolerance.
        """
        found = max(float(np.abs(each).mean()) for each in differences)
        if not self._calibrated:
            self._calibrated = True
            usual, self._tolerance = self._tolerance, max(self._tolerance, min(2 * found, self._limit))
            if found <= usual:
                return None
            return (
                f"version {version}: the engine's log-probabilities of the canary sequences differ from the trainer's "
                f"by {found:.3g} nats per token on average, more than is usual ({usual:g}). Up to "
                f"{self._tolerance:.3g} is taken as rounding from now on; `weight_update.canary_tolerance` sets it"
            )
        if found <= self._tolerance:
            self._warned = False
            return None
        message = (
            f"version {version}: the engine's log-probabilities of the canary sequences differ from the trainer's by "
            f"{found:.3g} nats per token on average (at most {self._tolerance:.3g} as it began, or by "
            "`weight_update.canary_tolerance`)"
        )
        if self._warned:
            raise WeightsDiffer(f"{message}, as in the comparison before")
        self._warned = True
        return f"{message}. If the next comparison shows the same, the run stops"

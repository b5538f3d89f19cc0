"""The services and settings that the stages of a run share, wired once in the pipeline module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from roll.algorithms.correction import Correction
from roll.algorithms.objective import PolicyObjective, ValueObjective
from roll.configs.run import PipelineConfig
from roll.data.records import Group
from roll.engines.pool import InferencePool
from roll.pipeline.algorithm import AdvantageSettings
from roll.pipeline.canaries import Canaries, MismatchAlarm
from roll.pipeline.checkpoints import Checkpointer
from roll.pipeline.faults import Chaos
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.rollout_side import RolloutSide, Validator
from roll.pipeline.stage import StepCounter
from roll.rollout.scheduler import RolloutScheduler
from roll.runtime.locks import DeviceLock
from roll.trainers.group import BaseOfTrainer, TrainerGroup


@dataclass
class RunContext:
    """Everything a stage may need."""

    config: PipelineConfig
    scheduler: RolloutScheduler[Any, Group]
    trainer: TrainerGroup
    reference: TrainerGroup | BaseOfTrainer | None
    critic: TrainerGroup | None
    pool: InferencePool
    side: RolloutSide
    validator: Validator | None
    locks: dict[str, DeviceLock]
    recorder: RunRecorder
    objective: PolicyObjective
    value_objective: ValueObjective
    steps: StepCounter
    """Counter of the training steps that are over. The checkpoint of a step is taken before the step counts."""
    advantages: AdvantageSettings
    correction: Correction | None
    canaries: Canaries | None
    """The log-probability parity check; None: trainer and engines are never compared."""
    mismatch_alarm: MismatchAlarm | None
    max_staleness: int
    train_temperature: float
    checkpoints: Checkpointer
    chaos: Chaos
    first_step: int
    """Number of training steps that were done when this process began."""

    @property
    def needs_proximal(self) -> bool:
        """True if the trainer computes log-probabilities before its first update on a batch."""
        return self.correction is not None or "proximal_logprobs" in self.objective.token_fields

    def require_critic(self) -> TrainerGroup:
        """Return the critic, in stages that exist only with one. Raises `RuntimeError` if there is none."""
        if self.critic is None:
            raise RuntimeError("a stage of the critic is wired without the role")
        return self.critic

    def hold(self, role: str) -> Callable[[], object]:
        """Return the function with which a stage holds the devices of a role."""
        return lambda: self.locks[role].hold(role)

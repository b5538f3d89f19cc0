"""The stages of a training step, in the order a batch passes through them.

    rollout -> reference -> value -> advantage -> critic -> train -> param_update

Each stage is a few lines; the scheduler, the workers and the algorithms do the work. The first stage waits for the
scheduler's groups. The last one publishes the new weights, which lets the scheduler start more groups.
"""

from __future__ import annotations

import asyncio
from typing import Any

from roll.configs import derived
from roll.data.records import Group
from roll.pipeline.algorithm import TrainingBatch, add_advantages, add_correction
from roll.pipeline.context import RunContext
from roll.pipeline.stage import Channel, ChannelClosed, Stage, register_stage
from roll.rollout.buffer import FinishedGroup
from roll.tracking.waits import waiting
from roll.trainers.worker import TrainPlan
from roll.weights.verify import CanaryScores

STAGE_ORDER = ("rollout", "reference", "value", "advantage", "critic", "train", "param_update")
NEEDED_ROLES = {"reference": "reference", "value": "critic", "critic": "critic"}
"""The role that a stage needs; without it the stage is left out."""


@register_stage("rollout")
class RolloutStage(Stage):
    """Source of batches from the scheduler, checked against the staleness bound and the ledger."""

    def __init__(self, context: RunContext, inbox: Channel[Any] | None, outbox: Channel[Any] | None) -> None:
        super().__init__("rollout", context.recorder.timeline, inbox=inbox, outbox=outbox)
        self.context = context
        self._next_step = context.first_step

    async def take_input(self) -> list[FinishedGroup[Any, Group]]:
        if self._next_step == self.context.config.max_steps:
            raise ChannelClosed("all training steps have their batch")
        with waiting("scheduler", f"the batch of step {self._next_step + 1}"):
            return await self.context.scheduler.next_batch()

    async def process(self, finished: list[FinishedGroup[Any, Group]]) -> TrainingBatch:
        batch = TrainingBatch.from_groups(self._next_step, [group.result for group in finished])
        self._next_step += 1
        batch.check_staleness(self.context.max_staleness)
        self.context.scheduler.ledger.check()
        batch.describe_rollouts(self.context.side.sample_metrics)
        batch.metrics.update(self.context.side.metrics())
        return batch


@register_stage("reference")
class ReferenceStage(Stage):
    """Log-probabilities under the frozen reference policy, for a KL term.

    If the reference is the trainer without its adapters, the stage waits until the previous training step is over. Any
    earlier, it could only delay that step's new weights.
    """

    def __init__(self, context: RunContext, inbox: Channel[Any] | None, outbox: Channel[Any] | None) -> None:
        self._is_trainer = derived.reference_is_base(context.config)
        hold = context.hold("actor_train" if self._is_trainer else "reference")
        super().__init__("reference", context.recorder.timeline, inbox=inbox, outbox=outbox, hold=hold)
        self.context = context

    async def before_devices(self, batch: TrainingBatch) -> None:
        if self._is_trainer:
            await self.context.steps.reached(batch.step)

    async def process(self, batch: TrainingBatch) -> TrainingBatch:
        reference = self.context.reference
        if reference is None:
            raise RuntimeError("the reference stage is wired without a reference role")
        with self.context.recorder.busy("reference"):
            logprobs = await reference.log_probs(batch.data, self.context.train_temperature)
        batch.data.tokens["reference_logprobs"] = logprobs
        self.context.recorder.count_tokens("reference", int(batch.data.lengths.sum()))
        return batch


@register_stage("value")
class ValueStage(Stage):
    """The critic's values, for advantages.

    Its weights must have learned from every earlier batch, so the stage waits until the previous training step is over.
    """

    def __init__(self, context: RunContext, inbox: Channel[Any] | None, outbox: Channel[Any] | None) -> None:
        super().__init__("value", context.recorder.timeline, inbox=inbox, outbox=outbox, hold=context.hold("critic"))
        self.context = context

    async def before_devices(self, batch: TrainingBatch) -> None:
        await self.context.steps.reached(batch.step)

    async def process(self, batch: TrainingBatch) -> TrainingBatch:
        with self.context.recorder.busy("critic"):
            batch.data.tokens["values"] = await self.context.require_critic().values(batch.data)
        return batch


@register_stage("advantage")
class AdvantageStage(Stage):
    """Conversion of rewards (and the KL penalty, if any) to advantages."""

    def __init__(self, context: RunContext, inbox: Channel[Any] | None, outbox: Channel[Any] | None) -> None:
        super().__init__("advantage", context.recorder.timeline, inbox=inbox, outbox=outbox)
        self.context = context

    async def process(self, batch: TrainingBatch) -> TrainingBatch:
        # In a thread: long responses take a good part of a second, and rollouts continue meanwhile.
        batch.metrics.update(await asyncio.to_thread(add_advantages, batch, self.context.advantages))
        batch.memory = self.context.advantages.memory()
        return batch


@register_stage("critic")
class CriticStage(Stage):
    """The optimizer steps of the critic, on the returns of this batch."""

    def __init__(self, context: RunContext, inbox: Channel[Any] | None, outbox: Channel[Any] | None) -> None:
        super().__init__("critic", context.recorder.timeline, inbox=inbox, outbox=outbox, hold=context.hold("critic"))
        self.context = context

    async def process(self, batch: TrainingBatch) -> TrainingBatch:
        context, config = self.context, self.context.config
        if config.critic is None:
            raise RuntimeError("the critic's stage is wired without the role")
        with context.recorder.busy("critic"):
            size = derived.optimizer_batch_size(config, config.critic, len(batch.data))
            plan = TrainPlan(batch.step, config.ppo_epochs, size, context.train_temperature)
            metrics = await context.require_critic().train(batch.data, context.value_objective, plan)
            if context.checkpoints.due(batch.step + 1):
                await context.checkpoints.copy_state(batch.step + 1, "critic")
        batch.metrics.update({f"critic/{name}": value for name, value in metrics.items()})
        context.recorder.count_tokens("critic", int(batch.data.lengths.sum()) * config.ppo_epochs)
        return batch


@register_stage("train")
class TrainStage(Stage):
    """The optimizer steps of one training step; then the new weights are set aside for the weight update."""

    def __init__(self, context: RunContext, inbox: Channel[Any] | None, outbox: Channel[Any] | None) -> None:
        super().__init__(
            "train", context.recorder.timeline, inbox=inbox, outbox=outbox, hold=context.hold("actor_train")
        )
        self.context = context

    async def before_devices(self, batch: TrainingBatch) -> None:
        """In a colocated run, wait for a free weight buffer before taking the devices.

        There the engine needs the same devices to release older weights. In other runs training need not wait, since
        `gather` does.
        """
        context, version = self.context, batch.step + 1
        if context.locks["actor_train"] is context.locks["actor_infer"] and publication_due(context, version):
            await context.pool.buffers.acquire(version)

    async def process(self, batch: TrainingBatch) -> TrainingBatch:
        context, config = self.context, self.context.config
        version = batch.step + 1
        with context.recorder.busy("actor_train"):
            metrics: dict[str, float] = {}
            if version > config.critic_warmup:
                await self._correct(batch)
                size = derived.optimizer_batch_size(config, config.actor_train, len(batch.data))
                plan = TrainPlan(batch.step, config.ppo_epochs, size, context.train_temperature)
                metrics = await context.trainer.train(batch.data, context.objective, plan)
                context.recorder.count_tokens("actor_train", int(batch.data.lengths.sum()) * config.ppo_epochs)
            if publication_due(context, version):
                batch.canaries = await gather(context, version)
                batch.gathered = True
            context.scheduler.training_step_done(version)
            if context.checkpoints.due(version):
                await context.checkpoints.take(version, context.scheduler.progress(), batch.memory)
        context.steps.advance(version)
        batch.metrics.update(
            {name if name.startswith("mismatch/") else f"actor/{name}": value for name, value in metrics.items()}
        )
        if context.mismatch_alarm is not None:
            context.mismatch_alarm.check(version, batch.metrics)
        return batch

    async def _correct(self, batch: TrainingBatch) -> None:
        """Compute the log-probabilities before the first update, if the loss or a correction needs them.

        Only at this point does the trainer have exactly the weights of this step.
        """
        context = self.context
        if not context.needs_proximal:
            return
        batch.data.tokens["proximal_logprobs"] = await context.trainer.log_probs(batch.data, context.train_temperature)
        if context.correction is not None:
            objective = context.objective
            metrics = await asyncio.to_thread(
                add_correction,
                batch,
                context.correction,
                max_lag=objective.max_lag,
                lags_capped=objective.lags_capped,
            )
            batch.metrics.update({f"correction/{name}": value for name, value in metrics.items()})


@register_stage("param_update")
class ParamUpdateStage(Stage):
    """The weight update: send the weights, load them into every replica, validate when due, and record the step."""

    def __init__(self, context: RunContext, inbox: Channel[Any] | None, outbox: Channel[Any] | None) -> None:
        super().__init__("param_update", context.recorder.timeline, inbox=inbox, outbox=outbox)
        self.context = context

    async def process(self, batch: TrainingBatch) -> TrainingBatch:
        version = batch.step + 1
        if batch.gathered:
            batch.metrics.update(await publish(self.context, version, batch.canaries))
            batch.metrics.update(await announce(self.context, version))
        return batch

    async def deliver(self, batch: TrainingBatch) -> None:
        """Record the step, with the time of this stage. Then its checkpoint may be completed."""
        context, step = self.context, batch.step + 1
        await context.recorder.step(batch, context.scheduler, context.pool, context.side.workers)
        if context.checkpoints.due(step):
            await context.recorder.sync()
            await context.checkpoints.step_recorded(step)


def validation_due(context: RunContext, version: int) -> bool:
    """Return True if this version is validated: every `eval_steps` versions, and the first and last one.

    With `eval_steps: 0` none is.
    """
    eval_steps = context.config.eval_steps
    return eval_steps > 0 and (version % eval_steps == 0 or version == context.config.max_steps)


def publication_due(context: RunContext, version: int) -> bool:
    """Return True if this version goes to the engine: every `interval_steps`, the last one, and all validated ones."""
    interval = context.config.weight_update.interval_steps
    return version % interval == 0 or version == context.config.max_steps or validation_due(context, version)


async def gather(context: RunContext, version: int) -> CanaryScores | None:
    """Copy the trainer's weights into a weight buffer, as soon as one is free.

    Returns the trainer's scores of the canary sequences, if this weight update is checked.
    """
    half = await context.pool.buffers.acquire(version)
    bucket_bytes = derived.gather_bucket_bytes(context.config)
    await context.trainer.gather(version, half, context.pool.dtype, bucket_bytes)
    return await context.canaries.score(context.trainer, version) if context.canaries is not None else None


async def publish(context: RunContext, version: int, canaries: CanaryScores | None) -> dict[str, float]:
    """Load the gathered weights into every replica.

    Returns the seconds of each part and, if checked, the log-probability differences of the canary sequences.
    """
    await context.chaos.publication(version)
    publication = await context.trainer.send(version)
    async with context.locks["actor_infer"].hold("actor_infer"):
        loaded = await context.pool.publish(publication, canaries)
    seconds = {**publication.seconds, **loaded.seconds}
    metrics = {f"weights/{name}_seconds": value for name, value in seconds.items()}
    return metrics if loaded.canaries is None else {**metrics, **loaded.canaries.metrics()}


async def announce(context: RunContext, version: int) -> dict[str, float]:
    """Report a published version to the scheduler, and validate it when due. Returns the metrics of the validation.

    With `validation.mode: pause` no training group starts until the validation has ended.
    """
    if context.validator is None or not validation_due(context, version):
        context.scheduler.weights_published(version)
        return {}
    settings = derived.validation_settings(context.config)
    pause = settings is not None and settings.mode == "pause"
    if pause:
        context.scheduler.pause_admission()
    else:
        context.scheduler.weights_published(version)
    with context.recorder.validating(version):
        result = await context.validator.run(version)
    if pause:
        context.scheduler.weights_published(version)
        context.scheduler.resume_admission()
    await context.recorder.validation(result)
    return result.metrics

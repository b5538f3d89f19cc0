"""Supervised fine-tuning: start the trainer, and train on batches of examples to the last step.

A step is one optimizer step on the next `train_batch_size` examples of an endless stream. The stream is a pure function
of examples and seed. So a checkpoint needs only its step number, and a resumed run learns the same examples in the same
order. Trainer, checkpoints, records and watchers are those of reinforcement learning; there are no engines and no
weight updates. Validation is the mean cross-entropy on held-out examples, measured between two steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import numpy as np

from roll.configs.devices import parse_device_mapping
from roll.configs.errors import count
from roll.configs.loader import dump_config
from roll.configs.run import SFTConfig
from roll.data.examples import Example, Examples, batch_of
from roll.data.prompts import PromptStream
from roll.pipeline.checkpoints import Checkpointer
from roll.pipeline.preflight import PreparedSFT
from roll.pipeline.recorder import RunRecorder
from roll.pipeline.resume import ResumePoint
from roll.pipeline.roles import trainer_processes, trainer_setup
from roll.pipeline.status import StatusKeeper, watch_for_stall
from roll.rollout.journal import RolloutProgress
from roll.runtime.placement import Placement
from roll.runtime.process import collect_rarely
from roll.runtime.workers import WorkerHandle, start_worker
from roll.tracking.status import StatusFile
from roll.tracking.waits import START, TRAIN, acting
from roll.trainers.worker import TrainerGroup, TrainerSpec, TrainPlan, TrainWorker

logger = logging.getLogger(__name__)

ROLE = "actor_train"
Background = dict[str, Callable[[], Awaitable[None]]]
"""Tasks that run beside the training loop, by name."""


async def run_sft(
    prepared: PreparedSFT, recorder: RunRecorder, status_file: StatusFile, point: ResumePoint | None = None
) -> None:
    """Train until the last step, starting at step 0 or resuming at ``point``. Raises the first failure."""
    config, first_step = prepared.config, 0 if point is None else point.step
    _tell_arithmetic(prepared, recorder)
    placement = Placement(config.cluster)
    await placement.reserve()
    handles: list[WorkerHandle] = []
    status = StatusKeeper(config, recorder, lambda: handles)
    try:
        async with status.kept(status_file):
            with acting(START, recorder.waits):
                trainer = await _start_trainer(prepared, placement, recorder, point, handles)
            recorder.run.write_config(dump_config(config))
            run = SupervisedRun(prepared, recorder, trainer, first_step)
            status.supervised(run.moved)
            background: Background = {
                "stall": partial(watch_for_stall, status, config.stall_timeout_seconds),
                "checkpoints": run.checkpoints.run,
                "garbage": collect_rarely,
                "watch": trainer.watch,
            }
            await _first_failure(run.learn, background, recorder)
    finally:
        _end(handles, placement)


def _end(handles: Sequence[WorkerHandle], placement: Placement) -> None:
    """End all processes. Errors are only logged, so that they do not hide why the run ended."""
    try:
        for handle in handles:
            handle.kill()
        placement.release()
    except Exception as failure:
        logger.error("processes could not be ended in order; they end with Ray", exc_info=failure)


class SupervisedRun:
    """The training loop of supervised fine-tuning."""

    def __init__(self, prepared: PreparedSFT, recorder: RunRecorder, trainer: TrainerGroup, first_step: int) -> None:
        """Connect the parts. ``first_step``: number of steps that are already done."""
        self._prepared, self._config = prepared, prepared.config
        self._recorder, self._trainer = recorder, trainer
        self._first_step = self._done = first_step
        self._validated = 0
        self.checkpoints = Checkpointer(
            recorder.run.checkpoints,
            {ROLE: trainer},
            save_steps=self._config.save_steps,
            max_steps=self._config.max_steps,
            keep=self._config.max_ckpt_to_keep,
            source=prepared.source,
            on_oldest=lambda oldest: None,
        )

    def moved(self) -> tuple[int, *tuple[object, ...]]:
        """Return the number of completed steps, and other values that change whenever the run makes progress."""
        return self._done, self._validated, self.checkpoints.progress()

    async def learn(self) -> None:
        """Take all remaining steps, and wait for the last checkpoint."""
        config, recorder = self._config, self._recorder
        # In a thread: skipping the examples of earlier steps may take long.
        stream = await asyncio.to_thread(stream_from, config, self._prepared.examples, self._first_step)
        if self._first_step == 0 and config.eval_steps:
            metrics = await self._validation(0)
            recorder.show(metrics, 0)
            recorder.log(metrics, 0)
        recorder.start_clock()
        for step in range(self._first_step + 1, config.max_steps + 1):
            recorder.timeline.transition(TRAIN, "running", step=step)
            metrics = await self._train(step, list(islice(stream, config.train_batch_size)))
            due = self.checkpoints.due(step)
            if due:
                progress = RolloutProgress(step, step * config.train_batch_size, {}, ())
                await self.checkpoints.take(step, progress, {})
            if config.eval_steps and (step % config.eval_steps == 0 or step == config.max_steps):
                metrics |= await self._validation(step)
            self._done = step
            recorder.supervised_step(metrics, step, await self._trainer.usage())
            if due:
                await recorder.sync()
                await self.checkpoints.step_recorded(step)

    async def _train(self, step: int, examples: Sequence[Example]) -> dict[str, float]:
        batch, size = batch_of(examples), len(examples)
        plan = TrainPlan(step - 1, epochs=1, optimizer_batch_size=size, temperature=1.0)
        with self._recorder.busy(ROLE):
            metrics = await self._trainer.train(batch, self._prepared.objective, plan)
        self._recorder.count_tokens(ROLE, int(batch.lengths.sum()))
        return {
            **{f"actor/{name}": value for name, value in metrics.items()},
            "data/epoch": step * size / len(self._prepared.examples.examples),
            "data/overlong": float(self._prepared.examples.overlong),
        }

    async def _validation(self, step: int) -> dict[str, float]:
        """Return the mean cross-entropy of the validation examples (nats per target token), in total and by domain."""
        held_out = self._prepared.validation
        if held_out is None:
            raise RuntimeError("this run has no validation examples")
        sums, tokens = defaultdict[str, float](float), defaultdict[str, int](int)
        size = self._config.train_batch_size
        with self._recorder.validating(step), self._recorder.busy(ROLE):
            for start in range(0, len(held_out.examples), size):
                examples = held_out.examples[start : start + size]
                batch = batch_of(examples)
                logprobs = await self._trainer.log_probs(batch, 1.0)
                self._validated += len(examples)
                losses = np.where(batch.tokens["response_mask"], -logprobs.astype(np.float64), 0.0)
                for example, loss in zip(examples, np.add.reduceat(losses, batch.offsets[:-1]), strict=True):
                    sums[example.domain] += float(loss)
                    tokens[example.domain] += int(example.response_mask.sum())
        by_domain = {f"val/{domain}/loss": sums[domain] / tokens[domain] for domain in sums}
        return {"val/loss": sum(sums.values()) / sum(tokens.values()), **by_domain}


def stream_from(config: SFTConfig, examples: Examples, steps: int) -> Iterator[Example]:
    """Return the stream of examples in training order, without those of the first ``steps`` training steps."""
    data_args = config.actor_train.data_args
    stream = PromptStream(
        examples.examples,
        seed=config.seed,
        shuffle=data_args.shuffle,
        domain_interleave_probs=data_args.domain_interleave_probs,
    )
    for _ in range(steps * config.train_batch_size):
        next(stream)
    return iter(stream)


async def _start_trainer(
    prepared: PreparedSFT,
    placement: Placement,
    recorder: RunRecorder,
    point: ResumePoint | None,
    handles: list[WorkerHandle],
) -> TrainerGroup:
    """Start the trainer and load the model or a checkpoint. Appends each process to ``handles`` at once."""
    config = prepared.config
    devices = parse_device_mapping(config.actor_train.device_mapping)

    def start(rank: int) -> WorkerHandle:
        handles.append(
            start_worker(
                prepared.worker_classes.get(ROLE, TrainWorker),
                placement,
                role=ROLE,
                rank=rank,
                world_size=len(devices),
                devices=[devices[rank]],
                log_dir=str(recorder.run.logs.absolute()),
            )
        )
        return handles[-1]

    trainer = await trainer_processes(config, start, len(devices))
    checkpoint = None if point is None else point.checkpoint
    state = None if checkpoint is None else checkpoint.role(ROLE)
    # Exported with the model, so that engines stop at the end token of the examples.
    setup = replace(trainer_setup(config, ROLE), end_tokens=(prepared.examples.end,))
    await trainer.start(TrainerSpec(setup, None, state))
    return trainer


async def _first_failure(learn: Callable[[], Awaitable[None]], background: Background, recorder: RunRecorder) -> None:
    """Run ``learn`` beside the ``background`` tasks, then cancel these.

    Raises the first failure itself, not an exception group.
    """

    async def act(name: str, work: Callable[[], Awaitable[None]]) -> None:
        with acting(name, recorder.waits):
            await work()

    failure: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            helpers = [group.create_task(act(name, work), name=name) for name, work in background.items()]
            await group.create_task(act(TRAIN, learn), name=TRAIN)
            for helper in helpers:
                helper.cancel()
    except BaseExceptionGroup as failures:
        failure = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
    if failure is not None:
        raise failure


def _tell_arithmetic(prepared: PreparedSFT, recorder: RunRecorder) -> None:
    """Print how many passes over the data the run takes."""
    config, known, overlong = prepared.config, len(prepared.examples.examples), prepared.examples.overlong
    overlong += 0 if prepared.validation is None else prepared.validation.overlong
    passes = config.max_steps * config.train_batch_size / known
    left_out = f"; {count(overlong, 'row')} left out as too long" if overlong else ""
    words = f"{count(config.max_steps, 'step')} of {count(config.train_batch_size, 'example')}"
    recorder.event(f"{words} are {passes:.3g} passes over {count(known, 'example')}{left_out}")

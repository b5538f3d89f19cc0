"""Parts of a user's own, named in the configurations of tests as `custom_parts:Name`."""

import asyncio
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from roll.algorithms.advantages.base import AdvantageRequirements, advantage_estimator
from roll.engines.hf.strategy import HFInferStrategy
from roll.pipeline import stages
from roll.pipeline.algorithm import StalenessViolation
from roll.pipeline.checkpoints import saved_steps
from roll.trainers.fsdp2 import Fsdp2TrainStrategy
from roll.trainers.worker import TrainWorker


def centred(inputs):
    """Rewards minus their mean over the batch."""
    rewards = inputs.token_rewards.sum(-1)
    return (rewards - rewards.mean())[:, None].expand(inputs.response_mask.shape)


@advantage_estimator(requirements=AdvantageRequirements(by_group=True))
def said_to_look_at_one_group(inputs):
    """The same, with a wrong claim."""
    return centred(inputs)


def doubled(inputs, *, factor: float):
    """`vanilla` times a factor."""
    return -factor * inputs.ratio() * inputs.advantages, {"doubled": torch.full_like(inputs.logprobs, factor)}


class Diary:
    """A tracker that writes the numbers of the steps."""

    package = None
    install = ""
    where = "diary.txt"

    @dataclass
    class Options:
        title: str = "none"

    def __init__(self, run, options):
        self._file = Path(run.folder, "diary.txt")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(options.title + "\n")

    @staticmethod
    def secret(options):
        return None

    @staticmethod
    def mode(options):
        return "a file"

    def log(self, metrics, step):
        with self._file.open("a") as file:
            print(step, file=file)

    def finish(self, ending):
        pass


async def halved_advantages(run, batch):
    """Advantages half as large as the built-in ones."""
    batch = await stages.advantage(run, batch)
    batch.data.tokens["advantages"] *= 0.5
    batch.metrics["advantage/halved"] = 1.0
    return batch


async def every_other_group(run, batch):
    """Leaves the second, fourth, ... group of each batch out of the training."""
    samples = [len(group.samples) for group in batch.groups]
    kept = np.repeat(np.repeat(np.arange(len(samples)) % 2 == 0, samples), batch.data.lengths)
    batch.leave_out(kept)
    batch.metrics["half/tokens"] = float((kept & batch.data.tokens["response_mask"]).sum())
    return batch


async def count_trained(run, batch):
    """Counts the tokens that are trained on, as the trainer sees them."""
    batch.metrics["half/trained_tokens"] = float(batch.data.tokens["loss_mask"].sum())
    batch.metrics["half/has_advantages"] = float("advantages" in batch.data.tokens)
    return batch


class CountingTrainer(TrainWorker):
    """A trainer that also says how many samples it saw."""

    async def train(self, batch, objective, plan):
        return {**await super().train(batch, objective, plan), "samples_seen": float(len(batch))}


class OwnTrainer(Fsdp2TrainStrategy):
    """Says so in its metrics."""

    def train_step(self, batch, objective, temperature):
        return {**super().train_step(batch, objective, temperature), "own_strategy": 1.0}


class OwnReference(Fsdp2TrainStrategy):
    """Finds every token less likely than it is by one nat."""

    def log_probs(self, batch, temperature):
        return super().log_probs(batch, temperature) - 1.0


class OwnEngine(HFInferStrategy):
    """Stops after two tokens, whatever is asked for."""

    async def generate(self, request):
        return await super().generate(replace(request, sampling=replace(request.sampling, max_new_tokens=2)))


async def closes_folder(run, batch):
    """Lets nobody write into a folder that the environment names, once the checkpoint of the fourth step is whole."""
    folder = os.environ.get("CLOSED_FOLDER")
    if folder is not None and batch.step == 5:
        await whole_checkpoint(run, 4)
        os.chmod(folder, 0o555)
    return await stages.advantage(run, batch)


async def whole_checkpoint(run, step):
    """Return when the checkpoint of this step is whole."""
    while step not in saved_steps(run.recorder.run.checkpoints):
        await asyncio.sleep(0.05)


class NotAStage:
    """Cannot stand in for a stage."""


def not_async(run, batch):
    """Cannot either: nothing could wait for it."""
    return batch


async def forgetful(run, batch):
    """Does not return its batch."""


graspers = []


async def grasping_advantages(run, batch):
    """Keeps the devices that it shares with the trainer until the trainer has done what it needs them for."""
    held = asyncio.Event()

    async def grasp():
        async with run.locks["actor_infer"].hold("actor_infer"):
            held.set()
            await run.steps.reached(batch.step + 1)

    graspers.append(asyncio.create_task(grasp()))
    await held.wait()
    return await stages.advantage(run, batch)


async def fails_always(run, batch):
    """Never gets beyond the third training step; fails when the checkpoint of the second one is whole."""
    if batch.step == 3:
        await whole_checkpoint(run, 2)
        raise RuntimeError("the fourth step is one too many")
    return await stages.advantage(run, batch)


async def fails_ahead(run, batch):
    """The same where anything is generated ahead, and nowhere else."""
    return await (fails_always if run.config.async_generation_ratio > 0 else stages.advantage)(run, batch)


async def blocking_advantages(run, batch):
    """Computes for a long time where nothing may take long: on the event loop."""
    time.sleep(600)


async def waits_for_checkpoints(run, batch):
    """Begins no step before the checkpoint of the steps before it, one at every second step, is whole."""
    if batch.step >= 2:
        await whole_checkpoint(run, batch.step // 2 * 2)
    return await stages.advantage(run, batch)


def first_time(run, what):
    """True once in the life of a run."""
    mark = run.recorder.run.root / f"{what}.mark"
    if mark.exists():
        return False
    mark.touch()
    return True


async def fails_once(run, batch):
    """Raises in the fourth step, the first time."""
    if batch.step == 3 and first_time(run, "failed"):
        raise RuntimeError("once")
    return await stages.advantage(run, batch)


async def too_old_once(run, batch):
    """The same with an error that says that what was sampled cannot be trusted."""
    if batch.step == 3 and first_time(run, "failed"):
        raise StalenessViolation("a token is too old")
    return await stages.advantage(run, batch)


async def kept(run, batch):
    """Write the tokens of a batch, as they come to this stage, beside the run's other files."""
    np.savez(run.recorder.run.root / f"batch-{batch.step}.npz", lengths=batch.data.lengths, **batch.data.tokens)
    return batch

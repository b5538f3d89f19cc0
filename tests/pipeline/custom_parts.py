"""Parts of a user's own, named in the configurations of tests as `custom_parts:Name`."""

import resource
import time

from roll.distributed.train_worker import TrainWorker
from roll.pipeline.stages import AdvantageStage


class HalvedAdvantages(AdvantageStage):
    """Advantages half as large as the built-in ones."""

    async def process(self, batch):
        batch = await super().process(batch)
        batch.data.tokens["advantages"] *= 0.5
        batch.metrics["advantage/halved"] = 1.0
        return batch


class CountingTrainer(TrainWorker):
    """A trainer that also says how many samples it saw."""

    async def train(self, batch, objective, plan):
        return {**await super().train(batch, objective, plan), "samples_seen": float(len(batch))}


class TightTrainWorker(TrainWorker):
    """A trainer that may write no large files, as if the disk were full."""

    async def snapshot(self, folder):
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
        await super().snapshot(folder)


class NotAStage:
    """Cannot stand in for a stage."""


class GraspingAdvantages(AdvantageStage):
    """Keeps the devices that it shares with the trainer until the trainer has done what it needs them for."""

    async def deliver(self, batch):
        async with self.context.locks["actor_infer"].hold("actor_infer"):
            await super().deliver(batch)
            await self.context.steps.reached(batch.step + 1)


class BlockingAdvantages(AdvantageStage):
    """Computes for a long time where nothing may take long: on the event loop."""

    async def process(self, batch):
        time.sleep(600)
